"""What a report is drawn from. Decides fields; draws nothing. Whoever ran the job fills it.

Everything a run may lack (a reference run, a timed step, faults, a completion) is optional: its part of the report then
says so or is left out. Neighbours: `report` draws it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fusionai.scheduling.types import PeerProfile, Plan
from fusionai.wire.messages import Span


class StepSpans(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step as it ran, for the Gantt chart; all times on one clock."""

    step: int
    spans: dict[int, tuple[Span, ...]]
    """Stage number of the plan -> its work."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something went wrong, and what became of it."""

    step: int
    """The step under way, from 1."""
    at_s: float
    """Since the start of the run."""
    who: str
    """In a few words: `laptop, stage 2`, `the broker`."""
    peer: str = ""
    """Whose row of the time line has the mark; empty for the broker's."""
    what: str
    """In a few words: `killed`, `connection lost`."""
    outcome: str
    """In a few words: `spare xyz took over from its snapshot of step 11, exact`."""
    over_s: float | None = None
    """When the job was past it, since the start of the run; None: never."""
    recovery_s: float | None = None
    """How long the job stood still; None where nothing did, or it never went on."""


class Tenure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a peer did from one moment to another, since the start of the run. The broker's peer is empty."""

    peer: str
    part: Literal["stage", "guard", "away"]
    """`guard`: keeps snapshots of the stage. `away`: not in the pool."""
    stage: int | None = None
    from_s: float
    to_s: float


class StageObservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Forward and backward of one microbatch, as planned and as its stage took."""

    stage: int
    peer: str
    predicted_compute_s: float
    measured_compute_s: float | None
    """Median over steps of the mean over microbatches; None where the stage told no times."""


class PlanObservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan said of its steps, and their medians."""

    version: int
    steps: int
    """That became official under it."""
    predicted_step_s: float
    measured_step_s: float
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    bottleneck: str
    """As predicted."""
    busiest: str
    """The peer whose stages computed most; empty where none told its times."""
    busy: float
    """Of a step, the part in which that peer computed."""
    stages: tuple[StageObservation, ...]


class ReportData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A training job that has ended, or was stopped."""

    title: str
    job: str
    created: str
    """When, as the reader should see it."""
    model: str
    model_params: int
    steps: int
    losses: tuple[float, ...]
    """Of each step, the first is step 1."""
    tokens_per_s: float
    wall_s: float | None = None
    plan: Plan
    pool: tuple[PeerProfile, ...]
    """Every peer of the pool, and the job owner."""
    losses_reference: tuple[float, ...] | None = None
    """The same steps in one process with plain PyTorch and transformers; None where it was not run."""
    tokens_per_s_reference: float | None = None
    checkpoint: str | None = None
    """Directory of the exported model."""
    checkpoint_loss_diff: float | None = None
    """Loss of the exported model in plain transformers, less the pool's."""
    generation_equal: bool | None = None
    """Whether the completion across the pool's stages is that of the exported model."""
    generation_prompt: str = ""
    generation_text: str = ""
    evaluations: tuple[tuple[int, float], ...] = ()
    """(step, loss on the evaluation split)."""
    best: tuple[int, float, str] | None = None
    """(step, its evaluation loss, directory) of the best state, where it is kept."""
    ended_early: str | None = None
    """Why the job ended before its last step."""
    timed_step: StepSpans | None = None
    observed: tuple[PlanObservation, ...] = ()
    """One per plan that had steps, in their order."""
    shared_cores: str = ""
    """A sentence, where machines of the plan are processes of one."""
    faults: tuple[Fault, ...] = ()
    commits: tuple[tuple[float, int], ...] = ()
    """(seconds since the start of the run, step from 1), in order; for the time line."""
    tenures: tuple[Tenure, ...] = ()
    lost_steps: int | None = None
    """Committed steps missing or different after the faults; None where nobody compared."""
    configuration: dict[str, str] = {}
    """What was asked for, name -> value, in the order to show."""
    status: Literal["done", "stopped", "failed"] = "done"
