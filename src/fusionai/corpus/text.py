"""Reads documents from text, JSONL and Parquet files and Hugging Face data sets as a stream of pieces. Decides what a
document is and how a broken file is reported.

A text file is one document, read in pieces of about 64 kB cut at line ends, so that its size does not matter. A JSONL
line or a Parquet row is one document and one piece. Only one piece is in memory at a time."""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fusionai.corpus.files import RowError, SourceFile, find_files
from fusionai.corpus.strict import kind_of
from fusionai.corpus.tables import FileData, HubData
from fusionai.primitives.errors import DataError, nearest

PIECE_BYTES: Final = 65_536
"""Size of a piece of a text file, in bytes, to the next line end (chosen)."""
MAX_LINE_BYTES: Final = 64 * 2**20
"""Largest JSONL record in bytes (chosen); a longer line suggests that the file is not JSONL."""
_PARQUET_ROWS: Final = 1024
_BOM: Final = "\ufeff"
_OBJECT: Final = msgspec.json.Decoder(dict[str, object])


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a document's text; `ends_document` is set on its last piece."""

    text: str
    ends_document: bool


def pieces_of(data: FileData | HubData, field: str) -> Iterator[TextPiece]:
    """All documents in order. Raises `DataError` with file, line and column."""
    match data:
        case FileData():
            for file in find_files(data):
                if file.kind == "text":
                    yield from _text_pieces(file.path)
                else:
                    for place, row in _file_rows(file, (field,), all_needed=True):
                        yield TextPiece(_text_of(_valid(place, row), field, place), ends_document=True)
        case HubData():
            for place, record in records_of(data, (field,)):
                yield TextPiece(_text_of(record, field, place), ends_document=True)


def records_of(data: FileData | HubData, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, object]]]:
    """(place, record) for every JSONL line, Parquet row and record of a data set. Raises `DataError`."""
    for place, row in rows_of(data, columns, all_needed=True):
        yield place, _valid(place, row)


def rows_of(
    data: FileData | HubData, columns: tuple[str, ...], *, all_needed: bool = False
) -> Iterator[tuple[str, dict[str, object] | RowError]]:
    """(place, row or why it is invalid) for every JSONL line, Parquet row and record of a data set. `columns`: those to
    read from Parquet files; without `all_needed` a file may lack some. Raises `DataError` for an unreadable source."""
    match data:
        case HubData():
            for number, record in enumerate(open_dataset(data)):
                yield f"data set {data.dataset}, record {number}", record
        case FileData():
            for file in find_files(data):
                yield from _file_rows(file, columns, all_needed=all_needed)


def _file_rows(
    file: SourceFile, columns: tuple[str, ...], *, all_needed: bool
) -> Iterator[tuple[str, dict[str, object] | RowError]]:
    match file.kind:
        case "jsonl":
            yield from _jsonl_rows(file.path)
        case "parquet":
            yield from _parquet_rows(file.path, columns, all_needed)
        case "text":
            raise DataError(f"{file.path}: expected columns, got a text file.", hint="Give .jsonl or .parquet files.")


def _valid(place: str, row: dict[str, object] | RowError) -> dict[str, object]:
    if isinstance(row, RowError):
        raise DataError(f"{place}: {row}")
    return row


def open_dataset(data: HubData) -> Any:
    """The data set as an iterable of records, with its `_fingerprint`. Raises `DataError`."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"reading the data set {data.dataset!r} needs the package 'datasets', which is not installed.",
            hint="Run: pip install 'fusionai[hub]'",
        ) from None
    try:
        return datasets.load_dataset(data.dataset, data.subset, split=data.split)
    # The package raises its own, the hub client's, HTTP and OS errors, none with a common base.
    except Exception as problem:
        what = data.dataset if data.subset is None else f"{data.dataset} ({data.subset})"
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise DataError(f"data set {what}, split {data.split!r}: {reason}") from problem


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, object] | RowError]]:
    """Rows of all lines that are not blank. Keeps at most `MAX_LINE_BYTES` of a line in memory."""
    with _reading(path) as handle:
        number = 0
        while line := handle.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = handle.readline(PIECE_BYTES)
                yield f"{path}, line {number}", RowError(f"longer than {MAX_LINE_BYTES} bytes; is this a JSONL file?")
                continue
            body = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if body.strip():
                yield f"{path}, line {number}", _object_in(body)


def _object_in(line: bytes) -> dict[str, object] | RowError:
    try:
        return _OBJECT.decode(line)
    except msgspec.ValidationError:
        return RowError("expected a JSON object.")
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        return RowError(f"not valid JSON: {problem}.")
    except RecursionError:
        return RowError("not valid JSON: nested too deeply.")


def _parquet_rows(path: Path, columns: tuple[str, ...], all_needed: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Rows, numbered from 0. If not `all_needed`, missing columns are left out."""
    try:
        with pq.ParquetFile(path) as file:
            known = file.schema_arrow.names
            if not all_needed:
                columns = tuple(column for column in columns if column in known)
            for column in columns:
                if column not in known:
                    raise DataError(f"{path}: no column {column!r}; {nearest(column, known)}")
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(columns)):
                for record in batch.to_pylist():
                    yield f"{path}, row {row}", record
                    row += 1
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise DataError(f"{path}: not a readable Parquet file: {str(problem).splitlines()[0]}") from None
    except OSError as problem:
        raise DataError(f"{path}: can't be read ({problem.strerror or problem}).") from None


def _text_of(record: Mapping[str, object], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where}: no field {field!r}; {nearest(field, record)}", hint="Set field in [data].")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r}: expected a text, got {kind_of(text)}.")
    return text


def _text_pieces(path: Path) -> Iterator[TextPiece]:
    """Group lines into pieces; the last piece, possibly empty, ends the document. An empty file has no pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held: list[str] = []
    held_bytes, line_number, column, first = 0, 1, 1, True
    with _reading(path) as handle:
        while chunk := handle.readline(PIECE_BYTES):
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk)
            except UnicodeDecodeError as problem:
                raise _undecodable(path, line_number, column - pending + problem.start) from None
            if first:
                text, first = text.removeprefix(_BOM), False
            held.append(text)
            held_bytes += len(chunk)
            if chunk.endswith(b"\n"):
                line_number, column = line_number + 1, 1
            else:
                column += len(chunk)
            if held_bytes >= PIECE_BYTES:
                yield TextPiece("".join(held), ends_document=False)
                held, held_bytes = [], 0
        pending = len(decoder.getstate()[0])
        if pending:
            raise _undecodable(path, line_number, column - pending)
    if not first:
        yield TextPiece("".join(held), ends_document=True)


def _undecodable(path: Path, line: int, column: int) -> DataError:
    return DataError(
        f"{path}, line {line}, column {column}: not UTF-8 text.", hint="Convert the file to UTF-8 or leave it out."
    )


def _reading(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as problem:
        raise DataError(f"{path}: can't be read ({problem.strerror}).") from None
