"""What a training job has come to: its result, and whether anything is left to do.

Read from the run directory alone: the journal of committed steps and the checkpoints. `client.training.train` runs the
job, `cli.training.run` shows the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fusionai.client.pool.faults import FaultRecord
from fusionai.client.pool.replanning import adopted_plan
from fusionai.coordination.training.evaluations import Evaluation, standing
from fusionai.corpus.recipe import Recipe
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import TolerantTakeover
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import best_checkpoint, latest, step_of
from fusionai.storage.rundir import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    job: JobId
    steps: int
    stopped: str | None
    checkpoint: Path | None
    directory: Path
    losses: tuple[float, ...] = field(default=())
    """Mean loss per committed step, from step 0, as in the journal."""
    faults: tuple[FaultRecord, ...] = ()
    """Faults of this start of the driver, oldest first."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Takeovers by machines with other numerics, of all starts of the job."""
    best: Evaluation | None = None
    best_checkpoint: Path | None = None
    """Checkpoint with the lowest evaluation loss."""
    early: str | None = None
    """Why the job ended before its last step, None if it did not."""


def already_over(recipe: Recipe, directory: RunDirectory, journal: CommitJournal) -> str | None:
    """Return why there is nothing left to do, None if the job is not done."""
    newest = latest(directory.checkpoints)
    if newest is None:
        return None
    evaluation, steps = recipe.evaluation, journal.committed
    if steps < recipe.job.steps:
        early = _early(recipe, journal)
        ended = early is not None and step_of(newest) == steps
        return f"the job has already ended early, after {steps} steps: {early}" if ended else None
    if evaluation is not None and evaluation.keeps_best and evaluation.every and steps % evaluation.every == 0:
        evaluated = journal.evaluations[-1].step if journal.evaluations else 0
        if evaluated < steps:
            return None
    return f"all {recipe.job.steps} steps are already done"


def result_of(
    recipe: Recipe,
    directory: RunDirectory,
    journal: CommitJournal,
    job: JobId,
    stopped: str | None,
    faults: tuple[FaultRecord, ...] = (),
) -> TrainingResult:
    best, adopted = None, adopted_plan(journal)
    if recipe.evaluation is not None and recipe.evaluation.keeps_best:
        best = standing(journal.evaluations).best
    return TrainingResult(
        tolerant_takeovers=() if adopted is None else adopted.tolerant_takeovers,
        best=best,
        best_checkpoint=best_checkpoint(directory.checkpoints, best),
        early=_early(recipe, journal) if stopped is None else None,
        job=job,
        steps=journal.committed,
        stopped=stopped,
        checkpoint=latest(directory.checkpoints),
        directory=directory.root,
        losses=tuple(record.loss for record in journal.records()),
        faults=faults,
    )


def _early(recipe: Recipe, journal: CommitJournal) -> str | None:
    """Return why the journalled evaluations end the job before its last step, None if they don't."""
    evaluation, found = recipe.evaluation, journal.evaluations
    if evaluation is None or not found or found[-1].step < journal.committed or journal.committed >= recipe.job.steps:
        return None
    return standing(found, evaluation.minimum_improvement).enough(evaluation.patience)
