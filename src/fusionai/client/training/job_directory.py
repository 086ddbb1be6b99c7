"""Opens the directory of a job and checks whether the recipe, model and data may continue the job in it.

Also checks that a changed recipe may resume a job, and writes telemetry and TensorBoard curves.

A recipe is bound to a directory from the first committed step on; until then errors in it can be corrected.
`client.training.train` calls this, `client.training.job_directory` compares recipes, `storage` keeps the files.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from fusionai.client.training.preparation import PreparedJob
from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import RecipeError, StorageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import CheckpointReader, latest
from fusionai.storage.rundir import RunDirectory
from fusionai.telemetry.recorder import Recorder, TensorBoardCurves
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

_encoder: Final = msgspec.json.Encoder()


def encode_recipe(recipe: Recipe) -> bytes:
    """The recipe as it is stored in the job's directory."""
    return msgspec.json.format(_encoder.encode(recipe), indent=1)


def differences(before: Recipe, now: Recipe) -> tuple[str, ...]:
    """Dotted names of settings that differ, in the recipe's order."""
    return tuple(_differences(msgspec.to_builtins(before), msgspec.to_builtins(now), ""))


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
        for name in differences(before, now)
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


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


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
        if isinstance(cause, OSError) and cause.errno in _FULL:
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


def keep_recipe(recipe: Recipe, directory: RunDirectory) -> None:
    """Store the recipe, which binds the directory to it once a step is committed. Raises `StorageError`."""
    directory.keep_recipe(encode_recipe(recipe))


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
