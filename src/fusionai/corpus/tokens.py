"""The token file: all documents, tokenised, one after the other, in two memory-mapped parts. Decides its cache key and
layout.

    tokens/tokenizer-<key>/   the trained tokenizer
    tokens/<key>/             train.bin, evaluation.bin (little-endian uint32), manifest.json

A key covers the data's content and every setting that changes the tokens, so a stale file is never read. Each document
ends with the end-of-text token, in each part that has some of it. Neighbours: `text` reads pieces, `tokenizer` encodes,
`source` cuts rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.corpus.files import find_files, fingerprint
from fusionai.corpus.split import Split
from fusionai.corpus.tables import FileData, HubData, HubTokenizer, LocalTokenizer, TextData, TrainTokenizer
from fusionai.corpus.text import Piece, open_dataset, pieces_of_dataset, pieces_of_files
from fusionai.corpus.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from fusionai.primitives.errors import DataError, StorageError
from fusionai.storage.atomic import storage_errors, whole_directory, write_atomic

Progress = Callable[[str, int], None]
"""Called with (current work: `tokenizer` or `tokens`, number of pieces so far)."""

_LAYOUT: Final = 1
_KEY_CHARACTERS: Final = 16
_BATCH_PIECES: Final = 64
_BATCH_CHARACTERS: Final = 2**22
_PARTS: Final = ("train", "evaluation")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of a token file. `fingerprint`: SHA-256 over both parts."""

    layout: int
    documents: int
    train_tokens: int
    evaluation_tokens: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Both parts as read-only memory-mapped arrays, their manifest, and the tokenizer that made them."""

    train: npt.NDArray[np.uint32]
    evaluation: npt.NDArray[np.uint32]
    manifest: Manifest
    tokenizer: Tokenizer


def open_tokens(data: TextData, directory: Path, seed: int, progress: Progress | None = None) -> TokenFile:
    """Find the token file of `data` in the cache at `directory`, or make it.

    Raises `DataError` if the data is empty or can't be read, `StorageError` if the cache fails.
    """
    pieces, content = _opened(data)
    split = Split(data.evaluation_fraction, seed)
    made_by = [str(_LAYOUT), content, data.field, repr(data.evaluation_fraction)]
    if data.evaluation_fraction > 0:
        made_by.append(str(seed))
    match data.tokenizer:
        case TrainTokenizer(vocabulary=vocabulary):
            key = _key([*made_by, str(vocabulary), str(data.mask_fraction is not None)])
            tokenizer = _trained(directory / f"tokenizer-{key}", data, vocabulary, pieces, split, progress)
        case LocalTokenizer() | HubTokenizer():
            tokenizer = load_tokenizer(data.tokenizer)
    place = directory / _key([*made_by, tokenizer.content_hash])
    if not place.is_dir():
        _write(place, pieces(), tokenizer, split, progress)
    manifest = _read_manifest(place)
    return TokenFile(
        train=_mapped(place / "train.bin", manifest.train_tokens),
        evaluation=_mapped(place / "evaluation.bin", manifest.evaluation_tokens),
        manifest=manifest,
        tokenizer=tokenizer,
    )


def _opened(data: TextData) -> tuple[Callable[[], Iterator[Piece]], str]:
    """Return (function that opens a new stream of pieces, fingerprint of the content)."""
    source = data.source
    match source:
        case FileData():
            files = find_files(source)
            return lambda: pieces_of_files(files, data.field), fingerprint(files)
        case HubData():
            identity = [source.dataset, source.subset or "", source.split, str(open_dataset(source)._fingerprint)]
            return lambda: pieces_of_dataset(source, data.field), "\n".join(identity)


def _key(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_CHARACTERS]


def _trained(
    place: Path,
    data: TextData,
    vocabulary: int,
    pieces: Callable[[], Iterator[Piece]],
    split: Split,
    progress: Progress | None,
) -> Tokenizer:
    """The cached tokenizer; if there is none, train it on the training part alone."""
    if not (place / "tokenizer.json").is_file():
        texts = (
            piece.text
            for index, piece in enumerate(_counted(pieces(), "tokenizer", progress))
            if not split.is_evaluation(index)
        )
        # Saved in this order because tokenizer.json, which marks the directory as complete, must come last.
        trained = train_tokenizer(texts, vocabulary, masked=data.mask_fraction is not None)
        for name, content in sorted(trained.files.items(), reverse=True):
            write_atomic(place / name, content)
    return load_tokenizer(LocalTokenizer(path=str(place)))


def _write(place: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, split: Split, progress: Progress | None) -> None:
    """Write all pieces into `place`, which appears as a whole or not at all."""
    with whole_directory(place) as partial:
        with storage_errors(partial), _Writer(partial, tokenizer, split) as writer:
            for batch in _batches(_counted(pieces, "tokens", progress)):
                writer.add(batch)
            manifest = writer.close()
        write_atomic(partial / "manifest.json", msgspec.json.encode(manifest))


class _Writer:
    """Appends encoded pieces to the part that the split assigns."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, split: Split) -> None:
        self._tokenizer = tokenizer
        self._split = split
        self._end = np.array([tokenizer.end_id], dtype="<u4").tobytes()
        self._files: tuple[BinaryIO, ...] = tuple((directory / f"{part}.bin").open("wb") for part in _PARTS)
        self._hashes = tuple(hashlib.sha256() for _ in _PARTS)
        self._tokens = [0, 0]
        self._unended = [False, False]
        self._pieces = 0
        self._documents = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, pieces: list[Piece]) -> None:
        for piece, ids in zip(pieces, self._tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            part = int(self._split.is_evaluation(self._pieces))
            self._pieces += 1
            if ids:
                self._append(part, np.asarray(ids, dtype="<u4").tobytes())
                self._unended[part] = True
            if piece.ends_document:
                self._documents += 1
                for other in (0, 1):
                    if self._unended[other]:
                        self._append(other, self._end)
                        self._unended[other] = False

    def close(self) -> Manifest:
        """Flush to disk and return the manifest."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return Manifest(
            layout=_LAYOUT,
            documents=self._documents,
            train_tokens=self._tokens[0],
            evaluation_tokens=self._tokens[1],
            fingerprint=hashlib.sha256(b"".join(part.digest() for part in self._hashes)).hexdigest(),
        )

    def _append(self, part: int, content: bytes) -> None:
        self._files[part].write(content)
        self._hashes[part].update(content)
        self._tokens[part] += len(content) // 4


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Batches large enough to keep all cores busy, small enough for memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) >= _BATCH_PIECES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _counted(pieces: Iterator[Piece], what: str, progress: Progress | None) -> Iterator[Piece]:
    for number, piece in enumerate(pieces, start=1):
        yield piece
        if progress is not None:
            progress(what, number)


def _read_manifest(place: Path) -> Manifest:
    path = place / "manifest.json"
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as problem:
        raise StorageError(
            f"{path} is damaged: {problem}.", hint=f"Delete {place}; the next run makes it again."
        ) from None


def _mapped(path: Path, tokens: int) -> npt.NDArray[np.uint32]:
    """The array in the file. Raises `StorageError` if its size is not what the manifest says."""
    with storage_errors(path, "read"):
        size = path.stat().st_size
    if size != tokens * 4:
        raise StorageError(
            f"{path} is damaged: expected {tokens * 4} bytes, got {size}.",
            hint=f"Delete {path.parent}; the next run makes it again.",
        )
    if tokens == 0:
        return np.zeros(0, dtype="<u4")
    return np.memmap(path, dtype="<u4", mode="r")


def require_rows(rows: int, needed: int, part: str, tokens: int, length: int) -> None:
    """Raise `DataError` if a part has fewer than `needed` rows of `length` tokens."""
    if rows < needed:
        raise DataError(
            f"the {part} part has {tokens} tokens, enough for {rows} rows of {length}; at least {needed} are needed.",
            hint="Give more data, or lower sequence_length."
            if part == "training"
            else "Raise evaluation_fraction, or give more documents (a text file counts as one).",
        )
