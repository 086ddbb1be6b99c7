"""The file of tokenised conversations with their labels. Decides its cache key, and which of the data's rows it has.

    tokens/tokenizer-<key>/   the trained tokenizer
    tokens/<key>/             both parts (`chat_parts`), manifest.json
    tokens/bad_rows.jsonl     rows that were left out

`text` and `conversations` read rows, `chat_tokens` renders and encodes them, `cache` has keys and manifests,
`chat_source` cuts training rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.corpus.cache import Progress, batched, cache_key, content_of, mapped, read_manifest, write_manifest
from fusionai.corpus.chat_tokens import TEMPLATE_FILE, ChatEncoder, ChatTokens, ChatWriter, WrittenTokens, read_template
from fusionai.corpus.conversations import KEYS, conversation_of
from fusionai.corpus.files import BadRow, BadRows, RowError, check_bad_rows
from fusionai.corpus.order import Split
from fusionai.corpus.tables import ChatData, HubTokenizer, LocalTokenizer, TrainTokenizer
from fusionai.corpus.text import rows_of
from fusionai.corpus.tokens import CorpusTokenizer, cached_tokenizer, load_tokenizer
from fusionai.storage.atomic import storage_errors, whole_directory

_KINDS: Final = ("bin", "labels.bin", "ends.bin")


class PartCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Number of conversations in a part, of their tokens, and of the tokens that are trained."""

    conversations: int
    tokens: int
    labels: int


class ChatParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`truncated`: conversations cut at their end; `dropped`: left out because of their length; `unanswered`: left out
    because no label remained. `fingerprint`: SHA-256 over all files."""

    train: PartCounts
    evaluation: PartCounts
    truncated: int
    dropped: int
    unanswered: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ChatPart:
    """Read-only memory-mapped arrays: tokens [n], labels [n] (1: trained), end of each conversation [m]."""

    tokens: npt.NDArray[np.uint32]
    labels: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]


class PartWriters:
    """Appends conversations to the part that the split assigns."""

    def __init__(self, directory: Path, data: ChatData, split: Split) -> None:
        self._most = data.sequence_length
        self._drops = data.too_long == "drop"
        self._split = split
        self._files: tuple[dict[str, BinaryIO], ...] = tuple(
            {kind: (directory / f"{part}.{kind}").open("wb") for kind in _KINDS} for part in ("train", "evaluation")
        )
        self._hashes = [{kind: hashlib.sha256() for kind in _KINDS} for _ in self._files]
        self._counts = [[0, 0, 0], [0, 0, 0]]
        self._seen = self._truncated = self._dropped = self._unanswered = 0

    def __enter__(self) -> PartWriters:
        return self

    def __exit__(self, *_: object) -> None:
        for files in self._files:
            for file in files.values():
                file.close()

    def add(self, conversation: ChatTokens) -> None:
        part = int(self._split.is_evaluation(self._seen))
        self._seen += 1
        ids, trained = conversation.ids, conversation.trained
        if len(ids) > self._most:
            if self._drops:
                self._dropped += 1
                return
            self._truncated += 1
            ids, trained = ids[: self._most], trained[: self._most]
        if not trained.any():
            self._unanswered += 1
            return
        counts = self._counts[part]
        for index, more in enumerate((1, len(ids), int(trained.sum()))):
            counts[index] += more
        self._append(part, "bin", ids.tobytes())
        self._append(part, "labels.bin", trained.astype("u1").tobytes())
        self._append(part, "ends.bin", np.int64(counts[1]).astype("<i8").tobytes())

    def close(self) -> ChatParts:
        """Flush to disk and return the counts."""
        for files in self._files:
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        train, evaluation = (
            PartCounts(conversations=conversations, tokens=tokens, labels=labels)
            for conversations, tokens, labels in self._counts
        )
        digests = b"".join(digest.digest() for hashes in self._hashes for digest in hashes.values())
        return ChatParts(
            train=train,
            evaluation=evaluation,
            truncated=self._truncated,
            dropped=self._dropped,
            unanswered=self._unanswered,
            fingerprint=hashlib.sha256(digests).hexdigest(),
        )

    def _append(self, part: int, kind: str, content: bytes) -> None:
        self._files[part][kind].write(content)
        self._hashes[part][kind].update(content)


def open_part(stem: Path, counts: PartCounts) -> ChatPart:
    """Map the files that begin with `stem`. Raises `StorageError` if their sizes differ from `counts`."""
    return ChatPart(
        tokens=mapped(stem.with_name(f"{stem.name}.bin"), np.dtype("<u4"), counts.tokens),
        labels=mapped(stem.with_name(f"{stem.name}.labels.bin"), np.dtype("u1"), counts.tokens),
        ends=mapped(stem.with_name(f"{stem.name}.ends.bin"), np.dtype("<i8"), counts.conversations),
    )


BAD_ROWS_FILE: Final = "bad_rows.jsonl"
_LAYOUT: Final = 1
_BATCH: Final = 256


class ChatManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of a file of conversations, and counts of its making. `plain`: there was no chat template."""

    layout: int
    rows: int
    bad_rows: int
    first_bad: tuple[BadRow, ...]
    plain: bool
    written: ChatParts


@dataclass(frozen=True, slots=True)
class ChatFile:
    """Both parts and the tokenizer that made them; the tokenizer's files include the template."""

    train: ChatPart
    evaluation: ChatPart
    manifest: ChatManifest
    tokenizer: CorpusTokenizer
    bad_rows: Path


def open_chat(data: ChatData, directory: Path, seed: int, progress: Progress | None = None) -> ChatFile:
    """Find the file for `data` in the cache at `directory`, or make it. Raises `DataError` if the data can't be read or
    has too many invalid rows, `StorageError` for the cache."""
    template = read_template(data.template)
    split = Split(data.evaluation_fraction, seed)
    reading = _Reading(data, directory / BAD_ROWS_FILE, progress)
    made_by = [
        str(_LAYOUT),
        "chat",
        data.layout,
        content_of(data.source),
        repr(template),
        repr(data.evaluation_fraction),
    ]
    if data.evaluation_fraction > 0:
        made_by.append(str(seed))
    match data.tokenizer:
        case TrainTokenizer(vocabulary=vocabulary):
            place = directory / f"tokenizer-{cache_key([*made_by, str(vocabulary)])}"
            tokenizer = cached_tokenizer(place, _training_texts(reading, template, split), vocabulary)
        case LocalTokenizer() | HubTokenizer():
            tokenizer = load_tokenizer(data.tokenizer)
    if template is not None:
        tokenizer = CorpusTokenizer({**tokenizer.files, TEMPLATE_FILE: template.encode()}, str(data.template))
    writer = ChatWriter(tokenizer.files, None, data.loss_on)
    spoken = [tokenizer.files.get(name, b"").hex() for name in (TEMPLATE_FILE, "tokenizer_config.json")]
    settings = [str(data.sequence_length), data.loss_on, data.too_long]
    place = directory / cache_key([*made_by, tokenizer.content_hash, *spoken, *settings])
    if not place.is_dir():
        _write(place, reading, writer, tokenizer, data, split)
    manifest = read_manifest(place, ChatManifest)
    check_bad_rows(list(manifest.first_bad), manifest.bad_rows, manifest.rows, data.bad_rows, directory / BAD_ROWS_FILE)
    return ChatFile(
        train=open_part(place / "train", manifest.written.train),
        evaluation=open_part(place / "evaluation", manifest.written.evaluation),
        manifest=manifest,
        tokenizer=tokenizer,
        bad_rows=directory / BAD_ROWS_FILE,
    )


class _Reading:
    """Reads the data; may be used several times."""

    def __init__(self, data: ChatData, listing: Path, progress: Progress | None) -> None:
        self._data = data
        self._listing = listing
        self._progress = progress

    def bad_rows(self) -> BadRows:
        return BadRows(self._data.bad_rows, self._listing)

    def written(self, writer: ChatWriter, what: str, bad: BadRows) -> Iterator[WrittenTokens]:
        """Yield every conversation as text, without invalid rows. Raises `DataError` if there are too many of those."""
        for place, row in rows_of(self._data.source, KEYS[self._data.layout]):
            try:
                if isinstance(row, RowError):
                    raise row
                written = writer.write(conversation_of(row, self._data.layout))
            except RowError as problem:
                bad.bad(place, str(problem))
                continue
            bad.good()
            if self._progress is not None:
                self._progress(what, bad.rows)
            yield written
        bad.settle()


def _training_texts(reading: _Reading, template: str | None, split: Split) -> Iterator[str]:
    """Yield the conversations of the training part as text, for training a tokenizer."""
    with reading.bad_rows() as bad:
        for index, written in enumerate(reading.written(ChatWriter({}, template, "all"), "tokenizer", bad)):
            if not split.is_evaluation(index):
                yield written.text


def _characters(written: WrittenTokens) -> int:
    return sum(len(text) for text, _ in written.pieces)


def _write(
    place: Path, reading: _Reading, writer: ChatWriter, tokenizer: CorpusTokenizer, data: ChatData, split: Split
) -> None:
    """Write the directory as a whole or not at all: it gets its name when all files are on disk."""
    encoder = ChatEncoder(tokenizer)
    with whole_directory(place) as partial:
        with reading.bad_rows() as bad, storage_errors(partial), PartWriters(partial, data, split) as parts:
            for batch in batched(reading.written(writer, "tokens", bad), _BATCH, _characters):
                for conversation in encoder.encode(batch):
                    parts.add(conversation)
            written = parts.close()
        manifest = ChatManifest(
            layout=_LAYOUT,
            rows=bad.rows,
            bad_rows=bad.count,
            first_bad=tuple(bad.first),
            plain=writer.is_plain,
            written=written,
        )
        write_manifest(partial, manifest)
