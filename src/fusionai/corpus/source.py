"""Training input: microbatches as host tensors, as a pure function of (seed, step, microbatch). Decides rows, labels,
dtypes.

Random access, so that a replay after a fault gets the same bytes without reading earlier data. Records of arrays (for
models that do not read text) are kept in memory: whole numbers become int64, other numbers float32, true/false bool;
nested lists become dimensions, which must be equal in all records. `corpus.order` selects samples, `corpus.tokens`
stores tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fusionai.corpus.chat_file import open_chat
from fusionai.corpus.chat_source import ChatSource
from fusionai.corpus.order import IGNORED, SampledSource, Split, derived_key, mask_rows
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.strict import kind_of
from fusionai.corpus.tables import ChatData, TensorData, TextData
from fusionai.corpus.text import records_of
from fusionai.corpus.tokens import CorpusTokenizer, Progress, TokenFile, open_tokens, require_rows
from fusionai.primitives.errors import DataError, nearest
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.atomic import directory_lock


def open_source(
    recipe: Recipe, directory: Path, progress: Progress | None = None
) -> TokenSource | TensorSource | ChatSource:
    """Open the data of a recipe. Derived files are cached in `directory`, by one process at a time. Raises `DataError`
    if the data can't be read or is too small, `StorageError` for the cache."""
    match recipe.data:
        case TextData():
            with directory_lock(directory):
                tokens = open_tokens(recipe.data, directory, recipe.job.seed, progress)
            return TokenSource(recipe, recipe.data, tokens)
        case TensorData():
            return TensorSource(recipe, recipe.data)
        case ChatData():
            with directory_lock(directory):
                chat = open_chat(recipe.data, directory, recipe.job.seed, progress)
            return ChatSource(recipe, recipe.data, chat)


class TokenSource(SampledSource):
    """Rows of `sequence_length` tokens. Inputs `input_ids`, `position_ids`, `labels`, all int64 [rows, length]. Causal:
    `labels[i] = input_ids[i + 1]`, the last one -100. Masked: see `mask_rows`. An incomplete last row is left out."""

    def __init__(self, recipe: Recipe, data: TextData, tokens: TokenFile) -> None:
        length = data.sequence_length
        self._data = data
        self._tokens = tokens
        self._length = length
        rows, evaluation_rows = len(tokens.train) // length, len(tokens.evaluation) // length
        require_rows(rows, 1, "training", len(tokens.train), length)
        if recipe.evaluation is not None:
            size = recipe.train.microbatch_size
            require_rows(evaluation_rows, size, "evaluation", len(tokens.evaluation), length)
        super().__init__(recipe, samples=rows, evaluation_samples=evaluation_rows, shuffle=data.shuffle)

    @property
    def tokenizer(self) -> CorpusTokenizer:
        return self._tokens.tokenizer

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the data itself, hex: another one on resume means that the data has changed."""
        return self._tokens.manifest.fingerprint

    def microbatch(self, step: int, microbatch: int) -> dict[str, HostTensor]:
        """Model input -> tensor, first dimension the rows of the microbatch. The same bytes in any order, anywhere."""
        step = self._deal.step(step)
        rows = _rows(self._tokens.train, self._order.microbatch(step, microbatch), self._length)
        return self._batch(rows, derived_key(self._seed, "mask", step, microbatch))

    def evaluation(self, index: int) -> dict[str, HostTensor]:
        """Like `microbatch`, from the evaluation part, the same at each evaluation."""
        rows = _rows(self._tokens.evaluation, self._evaluation_of(index), self._length)
        return self._batch(rows, derived_key(self._seed, "mask evaluation", index))

    def describe(self) -> str:
        """One line for logs: sizes, never text of the data."""
        manifest = self._tokens.manifest
        return (
            f"{manifest.documents} documents, {manifest.train_tokens} training tokens in {self._samples} rows of "
            f"{self._length}, {manifest.evaluation_tokens} evaluation tokens, vocabulary {self.tokenizer.vocabulary}"
        )

    def _batch(self, rows: npt.NDArray[np.int64], mask_key: int) -> dict[str, HostTensor]:
        if self._data.mask_fraction is None:
            inputs, labels = rows, shifted(rows)
        else:
            inputs, labels = mask_rows(
                rows,
                key=mask_key,
                fraction=self._data.mask_fraction,
                mask_id=self.tokenizer.mask_id,
                end_id=self.tokenizer.end_id,
                vocabulary=self.tokenizer.vocabulary,
            )
        positions = np.broadcast_to(np.arange(self._length, dtype=np.int64), rows.shape)
        return {"input_ids": _int64(inputs), "position_ids": _int64(positions), "labels": _int64(labels)}


def shifted(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Labels of a causal language model: the next token, -100 at the end of a row."""
    labels = np.full_like(rows, IGNORED)
    labels[:, :-1] = rows[:, 1:]
    return labels


def _rows(tokens: npt.NDArray[np.uint32], samples: list[int], length: int) -> npt.NDArray[np.int64]:
    return np.stack([tokens[sample * length : (sample + 1) * length] for sample in samples]).astype(np.int64)


def _int64(array: npt.NDArray[np.int64]) -> HostTensor:
    contiguous = np.ascontiguousarray(array, dtype="<i8")
    return host_tensor("int64", contiguous.shape, contiguous.data)


@dataclass(frozen=True, slots=True)
class RowPreview:
    """`pieces`: (text, whether its tokens are labels), in order, without padding. `tokens`, `labels`: their numbers."""

    pieces: tuple[tuple[str, bool], ...]
    tokens: int
    labels: int


def preview(recipe: Recipe, source: TokenSource | ChatSource, rows: int) -> list[RowPreview]:
    """Return the first `rows` rows, from the first steps."""
    masked = isinstance(recipe.data, TextData) and recipe.data.mask_fraction is not None
    shown: list[RowPreview] = []
    for number in range(rows):
        step, microbatch = divmod(number, recipe.train.microbatches)
        batch = source.microbatch(step, microbatch)
        ids, labels = (
            np.frombuffer(batch[name].data, "<i8").reshape(batch[name].shape) for name in ("input_ids", "labels")
        )
        lengths = [ids.shape[1]] * len(ids) if isinstance(source, TokenSource) else source.row_tokens(step, microbatch)
        for row, label, length in islice(zip(ids, labels, lengths, strict=True), rows - len(shown)):
            # In a causal model the label of a position is the token after it.
            tokens, labelled = (np.where(label == IGNORED, row, label), label) if masked else (row, _after(label))
            shown.append(_row(source.tokenizer, tokens[:length], labelled[:length] != IGNORED))
        if len(shown) == rows:
            break
    return shown


def _after(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    moved = np.full_like(labels, IGNORED)
    moved[1:] = labels[:-1]
    return moved


def _row(tokenizer: CorpusTokenizer, tokens: npt.NDArray[np.int64], is_label: npt.NDArray[np.bool_]) -> RowPreview:
    marked = zip(tokens.tolist(), is_label.tolist(), strict=True)
    pieces = tuple(
        (tokenizer.spell([token for token, _ in run]), trained)
        for trained, run in groupby(marked, key=lambda one: one[1])
    )
    return RowPreview(pieces, len(tokens), int(is_label.sum()))


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
    for index, (where, record) in enumerate(records_of(data.source, columns)):
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
    """Stack into one array. Whole numbers among fractions (JSON writes 1.0 as 1) become float32."""
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
