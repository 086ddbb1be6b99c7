"""Directories of a job and of its replicas: whether a recipe, a model and data may continue the job in one.

Also writes telemetry and TensorBoard curves. A recipe is bound to a directory from the first committed step on; until
then errors in it can be corrected. A job of several replicas has in its directory

    outer/              what the replicas agreed on (`training.joint_exchange`)
    replica-0/ ...      a job directory each (`storage.rundir`), with
        replica.json    the number of the job's steps that were over when the replica started

`client.training.train` and `client.training.replicas` call this, `storage` keeps the files.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.client.pool.replanning import adopted_plan
from fusionai.client.training.preparation import PreparedJob
from fusionai.client.training.recorder import Recorder, TensorBoardCurves
from fusionai.coordination.training.exchanges import Exchanges
from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import RecipeError, StorageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import CheckpointReader, complete_checkpoints, forget_after, latest, step_of
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress

_FREE: Final = (
    "path",
    "directory",
    "job.directory",
    "job.checkpoint_every",
    "job.keep_checkpoints",
    "data.bad_rows",
    "evaluation.every",
    "evaluation.patience",
    "evaluation.minimum_improvement",
    "evaluation.keep_best",
    "placement",
    "privacy",
    "faults",
    "replicas.deadline_s",
    "output",
)
"""Settings that do not change any number in training."""


def encode_recipe(recipe: Recipe) -> bytes:
    """The recipe as it is stored in the job's directory. Storing it binds the directory to it once a step is
    committed."""
    return msgspec.json.format(msgspec.json.encode(recipe), indent=1)


def check_resumable(kept: bytes, now: Recipe) -> None:
    """Raise `RecipeError` with the changed settings if they must not change. `kept`: the result of `encode_recipe` when
    the job started. The number of steps may change if no schedule depends on it."""
    try:
        before = msgspec.json.decode(kept, type=Recipe)
    except msgspec.DecodeError as problem:
        raise RecipeError(
            f"the recipe stored in {now.directory} can't be read ({problem}).",
            hint="Give the job a new directory.",
        ) from None
    # If exchanges overlap with steps, only the job's last one does not, so the number of steps affects the results.
    waits_at_the_end = now.replicas is not None and now.replicas.overlap > 0
    free = (*_FREE, "job.steps") if now.train.schedule == "constant" and not waits_at_the_end else _FREE
    changed = [
        name
        for name in _differences(msgspec.to_builtins(before), msgspec.to_builtins(now), "")
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in free)
    ]
    if changed:
        raise RecipeError(
            f"{Path(now.path).name}: changed since the job in {now.directory} began: {', '.join(changed)}.",
            hint="Undo the changes, or give the job another name or directory.",
        )


def _differences(before: object, now: object, name: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif before != now:
        yield name


def has_directory(recipe: Recipe) -> bool:
    """Return whether the path of the job's directory exists."""
    return Path(recipe.directory).exists()


def open_directory(recipe: Recipe) -> RunDirectory:
    """Open or create the job's directory. Raises `RecipeError` if the path can't be used, `StorageError` if the disk is
    full."""
    try:
        return RunDirectory(Path(recipe.directory))
    except StorageError as problem:
        cause = problem.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RecipeError(
            f"{Path(recipe.path).name}: the job's directory: {problem.message}",
            hint="Set [job] directory to a directory that you may write to.",
        ) from problem


def check_recipe(recipe: Recipe, directory: RunDirectory, journal: CommitJournal) -> None:
    """Raise `RecipeError` if the directory has steps of a different recipe."""
    kept = directory.kept_recipe()
    if kept is not None and (journal.committed or latest(directory.checkpoints) is not None):
        check_resumable(kept, recipe)


def check_checkpoint(prepared: PreparedJob, reader: CheckpointReader) -> None:
    """Raise `RecipeError` if the model's code or the data changed since `reader`'s checkpoint although the recipe did
    not: continuing would be a different training under the same name."""
    manifest = reader.manifest
    if manifest.graph_hash != prepared.graph_hash:
        raise RecipeError(
            f"the model differs from that of {reader.directory}: its code, its files or the version of a library "
            "changed since.",
            hint="Undo the change, or give the job another name or directory.",
        )
    for name, digest in manifest.base.items():
        if prepared.base.get(name) != digest:
            raise RecipeError(
                f"the base model's {name} is not what {reader.directory} was trained on: it changed since.",
                hint="Restore it, or give the job another name or directory.",
            )
    if manifest.data_fingerprint != prepared.source.fingerprint:
        raise RecipeError(
            f"the data is not what {reader.directory} was trained on: a file changed since.",
            hint="Restore the file, or give the job another name or directory.",
        )


def job_id(recipe: Recipe, owner: PeerId, directory: RunDirectory) -> JobId:
    """Return the job's id, which is the same for every run of one owner in one directory."""
    digest = hashlib.sha256(f"{owner}\n{directory.root.resolve()}".encode()).hexdigest()
    return JobId(f"{recipe.job.name}-{digest[:8]}")


class JobRecords:
    """Telemetry and curves of one job. `warn` receives, once, what can't be written."""

    def __init__(
        self,
        directory: RunDirectory,
        job: JobId,
        peer: PeerId,
        plan_version: int,
        *,
        tensorboard: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._warned = False
        self._recorder = Recorder(directory.telemetry, job=job, peer=peer, plan_version=plan_version)
        self._curves: TensorBoardCurves | None = None
        if tensorboard:
            try:
                self._curves = TensorBoardCurves(directory.tensorboard)
            except OSError as error:
                warn(f"no TensorBoard output: {directory.tensorboard} can't be written ({error.strerror or error})")

    def see(self, event: progress.Progress) -> None:
        match event:
            case progress.StepDone():
                self._step(event)
            case progress.Evaluated(step=step, loss=loss):
                self._recorder.record_metric("eval.loss", loss, step=step)
                if self._curves is not None:
                    self._curves.evaluation(step, loss)
            case progress.PlanChanged(plan=plan):
                self._recorder.use_plan(plan.version)
            case _:
                return
        if self._recorder.failure is not None and not self._warned:
            self._warned = True
            self._warn(f"telemetry stopped: {self._recorder.failure}")

    def _step(self, event: progress.StepDone) -> None:
        record = event.record
        self._recorder.record_step(
            record.step,
            {
                "train.loss": record.loss,
                "train.learning_rate": record.learning_rate,
                "train.grad_norm": record.total_norm,
                "train.tokens_per_s": event.tokens_per_s,
                "train.step_s": event.step_s,
            },
            event.spans,
        )
        if self._curves is not None:
            self._curves.step(
                record.step,
                loss=record.loss,
                learning_rate=record.learning_rate,
                grad_norm=record.total_norm,
                tokens_per_s=event.tokens_per_s,
            )

    def close(self) -> None:
        self._recorder.close()
        if self._curves is not None:
            self._curves.close()


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
            plan = adopted_plan(journal)
            placed = (
                () if plan is None else (one.peer for one in (*plan.stages, *plan.standbys) if one.peer != plan.feed)
            )
            peers = tuple(dict.fromkeys(placed))
            return Past(begun.first_step, journal.committed, peers, latest(directory.checkpoints) is not None)

    def go_back(self, exchanges: Exchanges, most: int) -> dict[int, int]:
        """Let the replicas begin between the same two exchanges. Return number -> steps of those that go back. See
        `go_back`."""
        begun = {number: self._begun(Path(self.recipe_of(number, 0).directory)) for number in range(most)}
        places = {
            number: (RunDirectory(Path(self.recipe_of(number, 0).directory)).checkpoints, one.first_step)
            for number, one in begun.items()
            if one is not None
        }
        return go_back(places, exchanges)

    def begin(self, number: int, first_step: int) -> None:
        place = Path(self.recipe_of(number, 0).directory)
        write_atomic(place / "replica.json", msgspec.json.encode(_Begun(first_step)))

    def forget(self, number: int) -> None:
        """Remove a replica's directory: it begins anew."""
        place = Path(self.recipe_of(number, 0).directory)
        with storage_errors(place, "removed"):
            shutil.rmtree(place)

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


def go_back(places: Mapping[int, tuple[Path, int]], exchanges: Exchanges) -> dict[int, int]:
    """Let replicas begin between the same two exchanges: where newest checkpoints lie on both sides of an exchange and
    all machines were lost, those with the newer ones could not repeat it, and the others need what they sent in it. The
    newer checkpoints are removed; the journals have the records of their steps. `places`: replica -> (its checkpoints,
    steps of the whole run that were over when it began). Return replica -> own steps of the checkpoint that it goes
    back to. Nothing is done if they have no such checkpoints."""
    saved: dict[int, dict[int, int]] = {}
    for number, (root, first_step) in places.items():
        steps = {step for path in complete_checkpoints(root) if (step := step_of(path)) is not None}
        saved[number] = {step: exchanges.adopted(first_step + step) for step in (steps if first_step else steps | {0})}
    newest = {number: max(after.values(), default=-1) for number, after in saved.items()}
    common = set.intersection(*(set(after.values()) for after in saved.values())) if saved else set[int]()
    if len(set(newest.values())) < 2 or not common:
        return {}
    target = max(common)
    back = {
        number: max(step for step, adopted in after.items() if adopted == target)
        for number, after in saved.items()
        if newest[number] > target
    }
    for number, step in back.items():
        forget_after(places[number][0], step)
    return back
