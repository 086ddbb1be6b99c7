"""The decided rounds of an exchange between the machines of replicas, on disk.

    outer/rounds.json    the rounds that may be needed again; replaced atomically

Used by `training.joint_exchange`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.coordination.training.joint_rounds import JointRound, RoundBook
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic

ROUNDS: Final = "rounds.json"
"""Name of the file."""


class Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the file: the fields of `RoundBook` that outlast a process."""

    last: Annotated[int, Meta(ge=0)]
    last_step: Annotated[int, Meta(ge=-1)]
    rounds: tuple[JointRound, ...]
    whole: Annotated[int, Meta(ge=0)]


class JointFiles:
    """Stores the decided rounds in a directory. Blocking. Only one process may use it at a time."""

    def __init__(self, directory: Path) -> None:
        """Open the directory, creating it if necessary. Raises `StorageError`."""
        self._path = directory / ROUNDS
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> RoundBook:
        """Return the book as it was saved last; an empty one if nothing was saved. Raises `StorageError`."""
        with storage_errors(self._path, "read"):
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return RoundBook()
        try:
            known = msgspec.json.decode(content, type=Decided)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise StorageError(
                f"{self._path} does not fit its schema: {problem}.", hint="It may have been written by a newer version."
            ) from problem
        rounds = {one.number: one for one in known.rounds}
        return RoundBook(rounds=rounds, last=known.last, last_step=known.last_step, whole=known.whole)

    def save(self, decided: Decided) -> None:
        """Save durably before returning."""
        write_atomic(self._path, msgspec.json.encode(decided))
