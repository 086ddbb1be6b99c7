"""Tokenizers, and the cached file of a text corpus's tokens: trains or loads the one, makes the other.

    tokens/tokenizer-<key>/   the trained tokenizer
    tokens/<key>/             train.bin, evaluation.bin (uint32), manifest.json

A key covers the data's content and every setting that changes the result, so a stale directory is never read.
`corpus.text` reads documents, `corpus.source` cuts rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fusionai.corpus.files import find_files, fingerprint
from fusionai.corpus.order import Split
from fusionai.corpus.tables import FileData, HubData, HubTokenizer, LocalTokenizer, TextData, TrainTokenizer
from fusionai.corpus.text import TextPiece, open_dataset, pieces_of
from fusionai.primitives.errors import DataError, StorageError
from fusionai.storage.atomic import storage_errors, whole_directory, write_atomic

TOKENIZER_FILE: Final = "tokenizer.json"
END_OF_TEXT: Final = "<|endoftext|>"
MASK: Final = "<|mask|>"
_FILES: Final = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
_PAD_TO_NOTHING: Final = 10**30
"""The `model_max_length` that transformers writes for a tokenizer without a limit."""


class CorpusTokenizer:
    """Encodes text as plain text: a special token's name in the data never becomes that token."""

    def __init__(self, files: dict[str, bytes], where: str) -> None:
        """`files`: name -> content, with `tokenizer.json` among them. Raises `DataError` if they can't be read."""
        try:
            self._engine = Engine.from_str(files[TOKENIZER_FILE].decode())
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
        # `tokenizers` raises a bare Exception for a file it can't parse.
        except Exception as problem:
            raise DataError(f"{where}: not a readable tokenizer: {problem}") from problem
        self._engine.encode_special_tokens = True
        self._engine.no_padding()
        self._engine.no_truncation()
        self._files = dict(files)
        special = json.loads(files.get("special_tokens_map.json", b"{}"))
        self._end_id = self._special_id("eos", config, special)
        if self._end_id is None:
            # BERT-type tokenizers end a document with their separator.
            self._end_id = self._special_id("sep", config, special)
        self._mask_id = self._special_id("mask", config, special)
        self._where = where

    @property
    def files(self) -> dict[str, bytes]:
        """Name -> content of all files that belong next to a model."""
        return dict(self._files)

    @property
    def content_hash(self) -> str:
        """SHA-256 of `tokenizer.json` and the special tokens, hex."""
        text = self._files[TOKENIZER_FILE] + f"{self._end_id}:{self._mask_id}".encode()
        return hashlib.sha256(text).hexdigest()

    @property
    def vocabulary(self) -> int:
        """The largest token id plus 1, the least `vocab_size` that a model needs."""
        return max(self._engine.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_id(self) -> int:
        """The token that ends a document. Raises `DataError` if there is none."""
        if self._end_id is None:
            raise DataError(f"{self._where}: no end-of-text token.", hint="Set eos_token in tokenizer_config.json.")
        return self._end_id

    @property
    def mask_id(self) -> int:
        """The mask token. Raises `DataError` if there is none."""
        if self._mask_id is None:
            raise DataError(f"{self._where}: no mask token.", hint="Masked language models need a mask_token.")
        return self._mask_id

    def encode(self, text: str) -> list[int]:
        """Token ids, without added special tokens."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for several texts, on all cores."""
        return [encoding.ids for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, without special tokens."""
        return self._engine.decode(list(tokens), skip_special_tokens=True)

    def spell(self, tokens: Iterable[int]) -> str:
        """Text of tokens, with the names of special tokens."""
        return self._engine.decode(list(tokens), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files to a directory. Raises `StorageError`."""
        for name, content in self._files.items():
            write_atomic(directory / name, content)

    def _special_id(self, name: str, config: dict[str, Any], special: dict[str, Any]) -> int | None:
        for source in (config, special):
            token = source.get(f"{name}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return self._engine.token_to_id(text)
        return None


def train_tokenizer(texts: Iterator[str], vocabulary: int, *, masked: bool = False) -> CorpusTokenizer:
    """Train a byte-level BPE: every text round-trips and nothing is unknown. The same texts give the same tokenizer.
    `vocabulary`: the most entries it may have; a small corpus gives fewer. `masked` adds a mask token."""
    special = [END_OF_TEXT, MASK] if masked else [END_OF_TEXT]
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer=trainer)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": _PAD_TO_NOTHING,
        "clean_up_tokenization_spaces": False,
    }
    if masked:
        config["mask_token"] = MASK
    files = {
        TOKENIZER_FILE: engine.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
    return CorpusTokenizer(files, "the trained tokenizer")


def load_tokenizer(source: LocalTokenizer | HubTokenizer) -> CorpusTokenizer:
    """Load a tokenizer from a directory or the hub. Raises `DataError` with what is missing."""
    match source:
        case LocalTokenizer(path=path):
            directory = Path(path)
            if not directory.is_dir():
                raise DataError(f"no tokenizer directory at {directory}.")
            files = _files_in(directory)
            if TOKENIZER_FILE not in files:
                hint = (
                    "Write one with transformers: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)."
                )
                raise DataError(f"{directory}: no tokenizer.json.", hint=hint)
            return CorpusTokenizer(files, str(directory))
        case HubTokenizer(hub=hub):
            files = _download(hub)
            if TOKENIZER_FILE not in files:
                raise DataError(f"{hub}: has no tokenizer.json on the hub.")
            return CorpusTokenizer(files, hub)


def _files_in(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}


def _download(hub: str) -> dict[str, bytes]:
    try:
        # In one request: without a network, one request per file would take half a minute to fail.
        return _files_in(Path(snapshot_download(hub, allow_patterns=list(_FILES))))
    except LocalEntryNotFoundError as problem:
        raise DataError(
            f"tokenizer of {hub}: not in the local cache, and the hub can't be reached.",
            hint="Check the network, or give a local directory with path.",
        ) from problem
    # The hub client raises HTTP, validation and OS errors, none with a common base.
    except Exception as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise DataError(f"tokenizer of {hub}: can't be downloaded: {reason}") from problem


_LAYOUT: Final = 1
_BATCH_PIECES: Final = 64
_PARTS: Final = ("train", "evaluation")


class TokenManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    manifest: TokenManifest
    tokenizer: CorpusTokenizer


def open_tokens(data: TextData, directory: Path, seed: int, progress: Progress | None = None) -> TokenFile:
    """Find the token file of `data` in the cache at `directory`, or make it. Raises `DataError` if the data is empty or
    can't be read, `StorageError` if the cache fails."""
    content = content_of(data.source)
    split = Split(data.evaluation_fraction, seed)
    made_by = [str(_LAYOUT), content, data.field, repr(data.evaluation_fraction)]
    if data.evaluation_fraction > 0:
        made_by.append(str(seed))
    match data.tokenizer:
        case TrainTokenizer(vocabulary=vocabulary):
            masked = data.mask_fraction is not None
            key = cache_key([*made_by, str(vocabulary), str(masked)])
            texts = (
                piece.text
                for index, piece in enumerate(_counted(pieces_of(data.source, data.field), "tokenizer", progress))
                if not split.is_evaluation(index)
            )
            tokenizer = cached_tokenizer(directory / f"tokenizer-{key}", texts, vocabulary, masked=masked)
        case LocalTokenizer() | HubTokenizer():
            tokenizer = load_tokenizer(data.tokenizer)
    place = directory / cache_key([*made_by, tokenizer.content_hash])
    if not place.is_dir():
        _write(place, pieces_of(data.source, data.field), tokenizer, split, progress)
    manifest = read_manifest(place, TokenManifest)
    return TokenFile(
        train=mapped(place / "train.bin", np.dtype("<u4"), manifest.train_tokens),
        evaluation=mapped(place / "evaluation.bin", np.dtype("<u4"), manifest.evaluation_tokens),
        manifest=manifest,
        tokenizer=tokenizer,
    )


def cached_tokenizer(place: Path, texts: Iterator[str], vocabulary: int, *, masked: bool = False) -> CorpusTokenizer:
    """The tokenizer cached at `place`; if there is none, train it on `texts` and cache it."""
    if not (place / TOKENIZER_FILE).is_file():
        # Saved in this order because tokenizer.json, which marks the directory as complete, must come last.
        for name, content in sorted(train_tokenizer(texts, vocabulary, masked=masked).files.items(), reverse=True):
            write_atomic(place / name, content)
    return load_tokenizer(LocalTokenizer(path=str(place)))


def _write(
    place: Path, pieces: Iterator[TextPiece], tokenizer: CorpusTokenizer, split: Split, progress: Progress | None
) -> None:
    """Write all pieces into `place`, which appears as a whole or not at all."""
    end = np.array([tokenizer.end_id], dtype="<u4")
    tokens, unended = [0, 0], [False, False]
    read = documents = 0
    with whole_directory(place) as partial:
        with storage_errors(partial), HashedFiles(*(partial / f"{part}.bin" for part in _PARTS)) as files:

            def append(part: int, ids: npt.NDArray[np.uint32], *, ends: bool) -> None:
                files.append(part, ids.tobytes())
                tokens[part] += len(ids)
                unended[part] = not ends

            for batch in batched(_counted(pieces, "tokens", progress), _BATCH_PIECES, lambda piece: len(piece.text)):
                for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                    if ids:
                        append(int(split.is_evaluation(read)), np.asarray(ids, dtype="<u4"), ends=False)
                    read += 1
                    if piece.ends_document:
                        documents += 1
                        for part in (0, 1):
                            if unended[part]:
                                append(part, end, ends=True)
            manifest = TokenManifest(
                layout=_LAYOUT,
                documents=documents,
                train_tokens=tokens[0],
                evaluation_tokens=tokens[1],
                fingerprint=files.fingerprint(),
            )
        write_manifest(partial, manifest)


class HashedFiles:
    """New files, by number, that are hashed as they are written."""

    def __init__(self, *paths: Path) -> None:
        self._files = [path.open("wb") for path in paths]
        self._hashes = [hashlib.sha256() for _ in paths]

    def __enter__(self) -> HashedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def append(self, number: int, content: bytes) -> None:
        self._files[number].write(content)
        self._hashes[number].update(content)

    def fingerprint(self) -> str:
        """Flush all files to disk, and return a SHA-256 over them, hex."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(b"".join(digest.digest() for digest in self._hashes)).hexdigest()


def _counted(pieces: Iterator[TextPiece], what: str, progress: Progress | None) -> Iterator[TextPiece]:
    for number, piece in enumerate(pieces, start=1):
        yield piece
        if progress is not None:
            progress(what, number)


def require_rows(rows: int, needed: int, part: str, tokens: int, length: int) -> None:
    """Raise `DataError` if a part has fewer than `needed` rows of `length` tokens."""
    if rows < needed:
        raise DataError(
            f"the {part} part has {tokens} tokens, enough for {rows} rows of {length}; at least {needed} are needed.",
            hint="Give more data, or lower sequence_length."
            if part == "training"
            else "Raise evaluation_fraction, or give more documents (a text file counts as one).",
        )


MANIFEST_FILE: Final = "manifest.json"
_KEY_CHARACTERS: Final = 16
_BATCH_CHARACTERS: Final = 2**22

Progress = Callable[[str, int], None]
"""Called with (current work: `tokenizer` or `tokens`, number of pieces so far)."""

_Item = TypeVar("_Item")
_Manifest = TypeVar("_Manifest", bound=msgspec.Struct)
_Number = TypeVar("_Number", np.uint32, np.uint8, np.int64)


def content_of(source: FileData | HubData) -> str:
    """Identify the content of files by its hash, that of a hub data set by the hub's fingerprint."""
    match source:
        case FileData():
            return fingerprint(find_files(source))
        case HubData():
            found = str(open_dataset(source)._fingerprint)
            return "\n".join([source.dataset, source.subset or "", source.split, found])


def cache_key(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_CHARACTERS]


def batched(items: Iterator[_Item], most: int, characters_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield batches of at most `most` items, large enough to keep all cores busy, small enough for memory."""
    batch: list[_Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += characters_of(item)
        if len(batch) >= most or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_manifest(place: Path, manifest: msgspec.Struct) -> None:
    write_atomic(place / MANIFEST_FILE, msgspec.json.encode(manifest))


def read_manifest(place: Path, kind: type[_Manifest]) -> _Manifest:
    """Return the manifest of a cached directory. Raises `StorageError` if it is missing or damaged."""
    path = place / MANIFEST_FILE
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as problem:
        raise _damaged(path, str(problem)) from None


def mapped(path: Path, dtype: np.dtype[_Number], entries: int) -> npt.NDArray[_Number]:
    """Map an array read-only. Raises `StorageError` if the file does not have exactly `entries` entries."""
    expected = entries * dtype.itemsize
    with storage_errors(path, "read"):
        size = path.stat().st_size
    if size != expected:
        raise _damaged(path, f"expected {expected} bytes, got {size}")
    return np.memmap(path, dtype=dtype, mode="r") if entries else np.zeros(0, dtype=dtype)


def _damaged(path: Path, what: str) -> StorageError:
    return StorageError(f"{path} is damaged: {what}.", hint=f"Delete {path.parent}; the next run makes it again.")
