"""Where replicas keep their things, below the job's own directory. Decides names.

    outer/              what they agree on (`training.outer_disk`)
    replica-0/ ...      a job's directory each (`storage.rundir`), with
        replica.json    how many of the job's steps were over when it began

Neighbours: `client.replicas` uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import StorageError
from fusionai.scheduling.types import Plan
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import latest
from fusionai.storage.rundir import RunDirectory


class _Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first_step: Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Past:
    """What a replica has behind it. `peers`: of the plan it obeyed last."""

    first_step: int
    steps: int
    peers: tuple[str, ...]
    has_checkpoint: bool


@dataclass(frozen=True, slots=True)
class ReplicaDirectories:
    """Of all replicas of `recipe`. Every method blocks on the disk and raises `StorageError`."""

    recipe: Recipe

    @property
    def outer(self) -> Path:
        return Path(self.recipe.directory) / "outer"

    def recipe_of(self, number: int, first_step: int) -> Recipe:
        """The recipe of one replica's job: its directory, and the steps that are left for it."""
        name = f"replica-{number}"
        job = msgspec.structs.replace(self.recipe.job, steps=self.recipe.job.steps - first_step)
        return msgspec.structs.replace(self.recipe, directory=str(Path(self.recipe.directory) / name), job=job)

    def past(self, number: int) -> Past | None:
        """None if it never began."""
        place = Path(self.recipe_of(number, 0).directory)
        begun = self._begun(place)
        if begun is None:
            return None
        directory = RunDirectory(place)
        with CommitJournal(directory.journal) as journal:
            peers = () if journal.plan is None else _peers(journal.plan.plan)
            return Past(begun.first_step, journal.committed, peers, latest(directory.checkpoints) is not None)

    def begin(self, number: int, first_step: int) -> None:
        place = Path(self.recipe_of(number, 0).directory)
        write_atomic(place / "replica.json", msgspec.json.encode(_Begun(first_step)))

    def _begun(self, place: Path) -> _Begun | None:
        path = place / "replica.json"
        with storage_errors(path, "read"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return msgspec.json.decode(content, type=_Begun)
        except msgspec.DecodeError as problem:
            raise StorageError(f"{path} does not fit its schema: {problem}.") from problem


def _peers(plan: bytes) -> tuple[str, ...]:
    try:
        read = msgspec.json.decode(plan, type=Plan)
    except msgspec.DecodeError:
        return ()  # of another version of this program
    return tuple({one.peer: None for one in (*read.stages, *read.guards) if one.peer != read.feed})
