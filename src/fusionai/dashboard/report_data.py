"""Input of a report, filled by the process that ran the job.

Everything that a run may lack (a reference run, a timed step, faults, a completion) is optional; the report then says
so or leaves the part out. Neighbours: `report` draws it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.wire.messages import Span


class StepSpans(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step as it ran, for the Gantt chart; all times are on the same clock."""

    step: int
    spans: dict[int, tuple[Span, ...]]
    """Stage number in the plan -> spans of its work."""


class ReportedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault and its outcome."""

    step: int
    """The step in progress, from 1."""
    at_s: float
    """Time since the start of the run."""
    who: str
    """In a few words: `laptop, stage 2`, `the broker`."""
    peer: str = ""
    """Peer whose row in the timeline has the mark; empty for the broker's row."""
    what: str
    """In a few words: `killed`, `connection lost`."""
    outcome: str
    """In a few words: `spare xyz took over from its snapshot of step 11, exact`."""
    over_s: float | None = None
    """Time of recovery since the start of the run; None: never."""
    recovery_s: float | None = None
    """How long training paused; None if it did not pause or never continued."""


class Tenure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a peer did in a period, in seconds since the start of the run. The broker has an empty peer id."""

    peer: str
    part: Literal["stage", "standby", "away"]
    """`standby`: keeps snapshots of the stage. `away`: not in the pool."""
    stage: int | None = None
    from_s: float
    to_s: float


class StageObservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Forward and backward of one microbatch: predicted and measured time."""

    stage: int
    peer: str
    predicted_compute_s: float
    measured_compute_s: float | None
    """Median over steps of the mean over microbatches; None if the stage reported no times."""


class PlanObservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predictions of a plan for its steps, and the measured medians."""

    version: int
    steps: int
    """Number of steps committed under the plan."""
    predicted_step_s: float
    measured_step_s: float
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    bottleneck: str
    """The predicted bottleneck."""
    busiest: str
    """The peer whose stages computed most; empty if no stage reported its times."""
    busy: float
    """Fraction of a step in which that peer computed."""
    stages: tuple[StageObservation, ...]


class ReportData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Data of a training job that has ended or was stopped."""

    title: str
    job: str
    created: str
    """Date and time as shown to the reader."""
    model: str
    model_params: int
    steps: int
    losses: tuple[float, ...]
    """Loss of each step; the first is step 1."""
    tokens_per_s: float
    wall_s: float | None = None
    plan: Plan
    pool: tuple[PeerProfile, ...]
    """Every peer of the pool, and the job owner."""
    losses_reference: tuple[float, ...] | None = None
    """Losses of the same steps in one process with plain PyTorch and transformers; None if not run."""
    tokens_per_s_reference: float | None = None
    checkpoint: str | None = None
    """Directory of the exported model."""
    checkpoint_loss_diff: float | None = None
    """Loss of the exported model in plain transformers, minus the pool's."""
    generation_equal: bool | None = None
    """True if the completion across the pool's stages equals the exported model's."""
    generation_prompt: str = ""
    generation_text: str = ""
    evaluations: tuple[tuple[int, float], ...] = ()
    """(step, loss on the evaluation split)."""
    best: tuple[int, float, str] | None = None
    """(step, its evaluation loss, directory) of the best state, if it is kept."""
    ended_early: str | None = None
    """Why the job ended before its last step."""
    timed_step: StepSpans | None = None
    observed: tuple[PlanObservation, ...] = ()
    """One entry per plan with steps, in order."""
    shared_cores: str = ""
    """A sentence if several machines of the plan are processes on one computer."""
    faults: tuple[ReportedFault, ...] = ()
    commits: tuple[tuple[float, int], ...] = ()
    """(seconds since the start of the run, step from 1), in order; for the timeline."""
    tenures: tuple[Tenure, ...] = ()
    lost_steps: int | None = None
    """Committed steps that are missing or different after the faults; None if this was not checked."""
    configuration: dict[str, str] = {}
    """The job's settings, name -> value, in the order to show."""
