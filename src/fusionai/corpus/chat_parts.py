"""Tokenised conversations on disk, in a training part and an evaluation part. Decides the file layout, and what happens
to a conversation that is longer than a row.

Per part: `.bin` (tokens, little-endian uint32), `.labels.bin` (a byte per token, 1: trained), `.ends.bin` (where each
conversation ends, little-endian int64). Neighbours: `chat_file` provides the conversations, `chat_source` reads them.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.corpus.chat_tokens import ChatTokens
from fusionai.corpus.split import Split
from fusionai.corpus.tables import ChatData
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors

_Number = TypeVar("_Number", np.uint32, np.uint8, np.int64)
_KINDS: Final = ("bin", "labels.bin", "ends.bin")


class PartCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Number of conversations in a part, of their tokens, and of the tokens that are trained."""

    conversations: int
    tokens: int
    labels: int


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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

    def close(self) -> Parts:
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
        return Parts(
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
        tokens=_mapped(stem, "bin", np.dtype("<u4"), counts.tokens),
        labels=_mapped(stem, "labels.bin", np.dtype("u1"), counts.tokens),
        ends=_mapped(stem, "ends.bin", np.dtype("<i8"), counts.conversations),
    )


def _mapped(stem: Path, kind: str, dtype: np.dtype[_Number], entries: int) -> npt.NDArray[_Number]:
    path = stem.with_name(f"{stem.name}.{kind}")
    expected = entries * dtype.itemsize
    with storage_errors(path, "read"):
        size = path.stat().st_size
    if size != expected:
        raise StorageError(
            f"{path} is damaged: expected {expected} bytes, got {size}.",
            hint=f"Delete {path.parent}; the next run makes it again.",
        )
    return np.memmap(path, dtype=dtype, mode="r") if entries else np.zeros(0, dtype=dtype)
