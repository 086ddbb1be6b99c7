"""Records of arrays from Parquet or JSONL columns, for models that don't read text. Decides dtypes and shapes.

Whole numbers become int64, other numbers float32, true/false bool; nested lists become dimensions, which must be equal
in all records. All records are kept in memory as arrays. Neighbours: `text` reads the files, `order` selects records,
`source` has the interface.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fusionai.corpus.files import find_files
from fusionai.corpus.order import SampledSource, Split
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.strict import kind_of, nearest
from fusionai.corpus.tables import FileData, HubData, TensorData
from fusionai.corpus.text import open_dataset, records_of_files
from fusionai.primitives.errors import DataError
from fusionai.primitives.tensors import HostTensor, host_tensor

_Arrays = dict[str, npt.NDArray[np.generic]]


class TensorSource(SampledSource):
    """Microbatches of the columns named in a recipe, under the model inputs that they are named for."""

    def __init__(self, recipe: Recipe, data: TensorData) -> None:
        """Read all data. Raises `DataError` with file, line or row, and column."""
        self._train, self._evaluation = _read(data, Split(data.evaluation_fraction, recipe.job.seed))
        samples, evaluation_samples = _length(self._train), _length(self._evaluation)
        if samples == 0:
            raise DataError("the training part of the data has no records.")
        super().__init__(
            recipe, samples=samples, evaluation_samples=evaluation_samples, shuffle=data.shuffle, unit="records"
        )

    @property
    def fingerprint(self) -> str:
        whole = hashlib.sha256()
        for part in (self._train, self._evaluation):
            for name, array in sorted(part.items()):
                whole.update(f"{name}:{array.dtype}:{array.shape}:".encode())
                whole.update(array.tobytes())
        return whole.hexdigest()

    def microbatch(self, step: int, microbatch: int) -> dict[str, HostTensor]:
        return _take(self._train, self._order.microbatch(self._deal.step(step), microbatch))

    def evaluation(self, index: int) -> dict[str, HostTensor]:
        return _take(self._evaluation, self._evaluation_of(index))

    def describe(self) -> str:
        inputs = ", ".join(f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in self._train.items())
        return f"{self._samples} training records, {self._evaluation_samples} evaluation records of {inputs}"


def _read(data: TensorData, split: Split) -> tuple[_Arrays, _Arrays]:
    """Return (training, evaluation), each model input -> array [records, ...]."""
    columns = tuple(data.columns.values())
    parts: tuple[dict[str, list[npt.NDArray[np.generic]]], ...] = tuple(
        {name: [] for name in data.columns} for _ in range(2)
    )
    first: dict[str, tuple[npt.NDArray[np.generic], str]] = {}
    for index, (where, record) in enumerate(_records(data.source, columns)):
        part = parts[int(split.is_evaluation(index))]
        for name, column in data.columns.items():
            if column not in record:
                raise DataError(f"{where}: no column {column!r}; {nearest(column, record)}")
            array = _array(record[column], f"{where}, column {column!r}")
            model, seen_at = first.setdefault(name, (array, where))
            if array.shape != model.shape:
                raise DataError(
                    f"{where}, column {column!r}: expected shape {list(model.shape)} as in {seen_at}, got "
                    f"{list(array.shape)}."
                )
            part[name].append(array)
    train, evaluation = ({name: _stacked(part[name], name, parts) for name in part} for part in parts)
    return train, evaluation


def _records(source: FileData | HubData, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, object]]]:
    match source:
        case FileData():
            yield from records_of_files(find_files(source), columns)
        case HubData():
            for number, record in enumerate(open_dataset(source)):
                yield f"data set {source.dataset}, record {number}", record


def _array(value: object, where: str) -> npt.NDArray[np.generic]:
    """Convert a number, true/false, or a nested list of them."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise DataError(f"{where}: expected lists of equal length.") from None
    match array.dtype.kind:
        case "b":
            return array
        case "i" | "u":
            return array.astype("<i8")
        case "f":
            return array.astype("<f4")
        case _:
            raise DataError(f"{where}: expected a number or nested lists of numbers, got {kind_of(value)}.")


def _stacked(
    arrays: list[npt.NDArray[np.generic]], name: str, parts: tuple[dict[str, list[npt.NDArray[np.generic]]], ...]
) -> npt.NDArray[np.generic]:
    """Stack into one array. If whole numbers occur among fractions (JSON writes 1.0 as 1), both parts become
    float32."""
    kinds = {array.dtype for part in parts for array in part[name]}
    if len(kinds) > 1:
        if np.dtype(bool) in kinds:
            raise DataError(f"input {name!r}: its column mixes numbers with true/false.")
        kinds = {np.dtype("<f4")}
    dtype = next(iter(kinds), np.dtype("<f4"))
    return np.stack(arrays).astype(dtype) if arrays else np.zeros(0, dtype=dtype)


def _length(arrays: _Arrays) -> int:
    return len(next(iter(arrays.values())))


def _take(arrays: _Arrays, samples: list[int]) -> dict[str, HostTensor]:
    batch: dict[str, HostTensor] = {}
    for name, array in arrays.items():
        rows = np.ascontiguousarray(array[samples])
        batch[name] = host_tensor(array.dtype.name, rows.shape, rows.data)
    return batch
