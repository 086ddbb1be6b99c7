"""Directories of a job's replicas, inside the job's directory. `client.training.replicas` uses them.

outer/              state that the replicas agree on (`training.outer_disk`)
replica-0/ ...      a job directory each (`storage.rundir`), with
    replica.json    the number of the job's steps that were over when the replica started
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fusionai.backends.state import ANCHOR, OUTER_MOMENTUM, as_stored, state_entries
from fusionai.client.training.preparation import PreparedJob, checkpoint_header
from fusionai.corpus.recipe import Recipe
from fusionai.ir.weights import initialise
from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.checkpoint import CheckpointWriter
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import latest
from fusionai.storage.rundir import RunDirectory


class _Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first_step: Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Past:
    """Progress of a replica from earlier starts. `peers`: those of its last plan."""

    first_step: int
    steps: int
    peers: tuple[str, ...]
    has_checkpoint: bool


@dataclass(frozen=True, slots=True)
class ReplicaDirectories:
    """Directories of all replicas of `recipe`. Every method blocks on the disk and raises `StorageError`."""

    recipe: Recipe

    @property
    def outer(self) -> Path:
        return Path(self.recipe.directory) / "outer"

    def recipe_of(self, number: int, first_step: int) -> Recipe:
        """Return the recipe of one replica's job, with its directory and the steps that are left for it."""
        name = f"replica-{number}"
        job = msgspec.structs.replace(self.recipe.job, steps=self.recipe.job.steps - first_step)
        return msgspec.structs.replace(self.recipe, directory=str(Path(self.recipe.directory) / name), job=job)

    def past(self, number: int) -> Past | None:
        """Return the replica's earlier progress, None if it never started."""
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
        return ()  # written by another version of this program
    return tuple({one.peer: None for one in (*read.stages, *read.standbys) if one.peer != read.feed})


def begin_with(
    agreed: Mapping[str, HostTensor], recipe: Recipe, prepared: PreparedJob, directory: RunDirectory
) -> None:
    """Write the checkpoint of step 0 with the parameters `agreed`. Raises `StorageError`."""
    with storage_errors(directory.checkpoints, "removed"):
        shutil.rmtree(directory.checkpoints)  # left by an interrupted start, which took no step
    header = checkpoint_header(recipe, prepared)
    with CheckpointWriter(directory.checkpoints, 0, header, files=prepared.files) as writer:
        for name, tensor in _entries(agreed, recipe, prepared):
            writer.add(name, tensor)
        writer.finish()


def _entries(
    agreed: Mapping[str, HostTensor], recipe: Recipe, prepared: PreparedJob
) -> Iterator[tuple[str, HostTensor]]:
    """Yield the checkpoint's entries. Values that are neither trained nor initialised by a rule are not in checkpoints:
    the job owner sends them at every start."""
    graph = prepared.captured.graph
    specs = {spec.key: spec for spec in graph.params.values()}
    for name, entry in state_entries(graph, recipe.optimizer).items():
        spec = specs[entry.key]
        if entry.slot in (ANCHOR, OUTER_MOMENTUM) or (not entry.slot and spec.trainable):
            yield name, agreed[f"{entry.slot or ANCHOR}/{entry.key}"]
        elif entry.slot:
            yield name, host_tensor(entry.dtype, entry.shape, bytes(entry.nbytes))
        elif spec.init is not None and recipe.adapter is None:
            made = np.asarray(initialise(spec.key, spec.shape, spec.dtype, spec.init, recipe.job.seed))
            yield name, as_stored(spec, host_tensor(spec.dtype, spec.shape, made.tobytes()))
