"""The token file: all documents, tokenised, one after the other, in two memory-mapped parts. Decides its cache key and
layout.

Also loads and trains the tokenizer.

    tokens/tokenizer-<key>/   the trained tokenizer
    tokens/<key>/             train.bin, evaluation.bin (little-endian uint32), manifest.json

Each document ends with the end-of-text token, in each part that has some of it. `text` reads pieces, `cache` has keys
and manifests, `source` cuts rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fusionai.corpus.cache import Progress, batched, cache_key, content_of, mapped, read_manifest, write_manifest
from fusionai.corpus.files import find_files
from fusionai.corpus.order import Split
from fusionai.corpus.tables import FileData, HubData, HubTokenizer, LocalTokenizer, TextData, TrainTokenizer
from fusionai.corpus.text import TextPiece, pieces_of_dataset, pieces_of_files
from fusionai.primitives.errors import DataError
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
        """`files`: name -> content, with `tokenizer.json` and `tokenizer_config.json` among them. Raises `DataError` if
        they can't be read."""
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
            return _load_directory(Path(path))
        case HubTokenizer(hub=hub):
            return CorpusTokenizer(_download(hub), hub)


def _load_directory(directory: Path) -> CorpusTokenizer:
    if not directory.is_dir():
        raise DataError(f"no tokenizer directory at {directory}.")
    files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    if TOKENIZER_FILE not in files:
        raise DataError(
            f"{directory}: no tokenizer.json.",
            hint="Write one with transformers: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY).",
        )
    return CorpusTokenizer(files, str(directory))


def _download(hub: str) -> dict[str, bytes]:
    try:
        # In one request: without a network, one request per file would take half a minute to fail.
        directory = Path(snapshot_download(hub, allow_patterns=list(_FILES)))
        files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    except LocalEntryNotFoundError as problem:
        raise DataError(
            f"tokenizer of {hub}: not in the local cache, and the hub can't be reached.",
            hint="Check the network, or give a local directory with path.",
        ) from problem
    # The hub client raises HTTP, validation and OS errors, none with a common base.
    except Exception as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise DataError(f"tokenizer of {hub}: can't be downloaded: {reason}") from problem
    if TOKENIZER_FILE not in files:
        raise DataError(f"{hub}: has no tokenizer.json on the hub.")
    return files


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
                for index, piece in enumerate(_counted(_pieces(data), "tokenizer", progress))
                if not split.is_evaluation(index)
            )
            tokenizer = cached_tokenizer(directory / f"tokenizer-{key}", texts, vocabulary, masked=masked)
        case LocalTokenizer() | HubTokenizer():
            tokenizer = load_tokenizer(data.tokenizer)
    place = directory / cache_key([*made_by, tokenizer.content_hash])
    if not place.is_dir():
        _write(place, _pieces(data), tokenizer, split, progress)
    manifest = read_manifest(place, TokenManifest)
    return TokenFile(
        train=mapped(place / "train.bin", np.dtype("<u4"), manifest.train_tokens),
        evaluation=mapped(place / "evaluation.bin", np.dtype("<u4"), manifest.evaluation_tokens),
        manifest=manifest,
        tokenizer=tokenizer,
    )


def _pieces(data: TextData) -> Iterator[TextPiece]:
    match data.source:
        case FileData():
            return pieces_of_files(find_files(data.source), data.field)
        case HubData():
            return pieces_of_dataset(data.source, data.field)


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
    with whole_directory(place) as partial:
        with storage_errors(partial), _Writer(partial, tokenizer, split) as writer:
            for batch in batched(_counted(pieces, "tokens", progress), _BATCH_PIECES, lambda piece: len(piece.text)):
                writer.add(batch)
            manifest = writer.close()
        write_manifest(partial, manifest)


class _Writer:
    """Appends encoded pieces to the part that the split assigns."""

    def __init__(self, directory: Path, tokenizer: CorpusTokenizer, split: Split) -> None:
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

    def add(self, pieces: list[TextPiece]) -> None:
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

    def close(self) -> TokenManifest:
        """Flush to disk and return the manifest."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return TokenManifest(
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
