"""The state that all parts of a training driver's machine share: official steps, roles, the round, what is retained.

Neighbours: `driver` is the machine with its table; `steps`, `rounds` and `plan_changes` are its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from fusionai.coordination.machine import FollowUp
from fusionai.coordination.round.driver import JobState
from fusionai.coordination.round.interface import AskPlan, EndJob
from fusionai.coordination.round.verification import CheckVerdict, Inspector
from fusionai.coordination.training.evaluations import Evaluation, Standing, standing
from fusionai.coordination.training.interface import DriverCommand, Rewind, Roles, WriteCheckpoint
from fusionai.coordination.training.restoring import RestoringRound
from fusionai.wire.messages import CommitRecord, Fence, NonFinite


class DriverPhase(StrEnum):
    ATTACHING = "attaching"
    LOADING = "loading"
    """Stages that lost their state load one. The other stages wait."""
    REPLAYING = "replaying"
    """Restored stages run official steps again. Their neighbours stream what they retained."""
    PROBING = "probing"
    """A microbatch crosses every stage twice in evaluation mode, before any work counts."""
    RUNNING = "running"
    SAVING = "saving"
    """A last checkpoint is written before the end."""
    WAITING = "waiting"
    """A stage has no peer to run it. The driver has asked for another plan."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """Parameters of a job that never change. `canonical_order`: parameter keys in `model.parameters()` order."""

    steps: int
    microbatches: int
    canonical_order: tuple[str, ...]
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    save_base: bool = False
    """Write a checkpoint of the state that the run starts from, before anything is fed."""
    evaluate_every: int = 0
    keep_best: bool = False
    """Save every state whose evaluation is the best so far."""
    patience: int | None = None
    """End the job after this many evaluations without an improvement of at least `minimum_improvement`."""
    minimum_improvement: float = 0.0
    takeover: Literal["exact", "any", "tolerant"] = "exact"
    """When different bits end the job. `exact`: in any replay. `any`: only in the probe, where the same machines
    compute both passes. `tolerant`: never, differences are only reported."""

    @property
    def is_choosing(self) -> bool:
        """Whether evaluations decide which state is best or when to end."""
        return self.evaluate_every > 0 and (self.keep_best or self.patience is not None)


@dataclass(slots=True)
class Votes:
    """Losses and votes until a step can be committed. A vote is the gradient norms of one stage for one step. It can't
    be changed."""

    losses: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    """Step -> microbatch -> loss."""
    norms: dict[int, dict[int, Mapping[str, float]]] = field(default_factory=dict[int, dict[int, Mapping[str, float]]])
    """Step -> stage -> norm by parameter."""
    nonfinite: dict[tuple[int, int], NonFinite] = field(default_factory=dict[tuple[int, int], NonFinite])
    """(step, stage) -> the pass in which the stage made values that are not finite from finite ones."""
    history: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """Gradient norms of official steps that may be replayed, to check the replay against."""
    deciding: bool = False
    """Whether the scale of the present step is being computed from the votes."""
    journalling: CommitRecord | None = None
    """Commit that is on its way to the journal."""

    def all_norms(self, step: int) -> dict[str, float]:
        return {key: norm for norms in self.norms[step].values() for key, norm in norms.items()}

    def step_losses(self, step: int) -> tuple[float, ...]:
        """Return the losses of a complete step in the order of its microbatches."""
        losses = self.losses[step]
        return tuple(losses[index] for index in range(len(losses)))

    def source_of_nonfinite(self, step: int) -> int | None:
        """Return the stage at which the numbers of a complete step stop being finite; None if all are finite.

        Values flow to higher stages and gradients to lower ones, so the first stage of a forward pass counts before the
        last stage of a backward pass. Without a report, the last stage with such a norm, or else the last of all, which
        computes the loss."""
        spoilt = [stage for stage, norms in self.norms[step].items() if not all(map(math.isfinite, norms.values()))]
        if not spoilt and all(map(math.isfinite, self.losses[step].values())):
            return None
        found = {stage: seen for (of, stage), seen in self.nonfinite.items() if of == step}
        forward = [stage for stage, seen in found.items() if seen == "forward"]
        return min(forward) if forward else max([*found] or spoilt or [*self.norms[step]])

    def discard(self) -> None:
        """Drop the votes of all steps except for a commit that is being journalled, because a round begins."""
        kept = set[int]() if self.journalling is None else {self.journalling.step}
        self.losses = {step: losses for step, losses in self.losses.items() if step in kept}
        self.norms = {step: norms for step, norms in self.norms.items() if step in kept}
        self.nonfinite.clear()
        self.deciding = False

    def make_official(self, step: int) -> None:
        """Keep the norms of a committed step for a replay, and drop its votes."""
        self.history[step] = self.all_norms(step)
        self.losses.pop(step, None)
        self.norms.pop(step, None)
        self.nonfinite = {(of, stage): seen for (of, stage), seen in self.nonfinite.items() if of > step}

    def take_back(self, step: int) -> None:
        """Drop all votes, and the norms of the steps from `step` on."""
        self.history = {of: norms for of, norms in self.history.items() if of < step}
        self.losses.clear()
        self.norms.clear()
        self.nonfinite.clear()
        self.deciding = False


@dataclass(slots=True)
class Saves:
    """Checkpoint and evaluation that are in progress."""

    saving: int | None = None
    """Step of the checkpoint that is being written."""
    asked: bool = False
    """Whether stages must be asked to export their state before they are fed."""
    evaluating: int | None = None
    """Step of the state that is being evaluated."""
    named: int = -1
    """Step of the best state that was last announced."""


@dataclass(slots=True)
class Verifying:
    """What is remembered between spot checks and their consequences."""

    sentence: CheckVerdict | None = None
    """Verdict against a peer that is expelled as soon as no commit is being journalled."""
    checkable: int = 0
    """First step from which work can be checked. Retained data of earlier steps may have been lost with the last
    round."""
    voided: bool = False
    """Whether steps were taken back. What runs again on the way to the present step is then not compared with the first
    run."""


@dataclass(slots=True)
class Retention:
    """Connected standbys, their newest snapshots, and the watermark that follows from these."""

    watermark: int = 0
    """Stages retain what they sent from this step on."""
    standbys: dict[int, str] = field(default_factory=dict[int, str])
    """Stage -> its standby, for standbys of the plan that are still connected."""
    acked: dict[int, int] = field(default_factory=dict[int, int])
    """Stage -> step of the newest snapshot that its standby holds."""

    def strike(self, peer: str) -> None:
        self.standbys = {stage: standby for stage, standby in self.standbys.items() if standby != peer}

    def take_back(self, step: int) -> None:
        self.watermark = min(self.watermark, step)
        self.acked = {stage: min(of, step) for stage, of in self.acked.items()}


class AllAnswered(FollowUp, frozen=True):
    """All members have reported, and no commit is being journalled."""


@dataclass(slots=True)
class DriverState(JobState[DriverPhase, DriverCommand, Roles]):
    shape: JobShape
    official: int = 0
    """Number of journalled commits."""
    records: dict[int, CommitRecord] = field(default_factory=dict[int, CommitRecord])
    """Commit record of every official step from the one before the newest checkpoint on."""
    saved: int = -1
    """Step of the newest complete checkpoint, -1 without any."""
    older: list[int] = field(default_factory=list[int])
    """Steps of all complete checkpoints. Except for the one in `saved`, some may have been deleted from the disk."""
    inspector: Inspector | None = None
    """Decides on spot checks; None: the job's work is not checked."""
    evaluations: tuple[Evaluation, ...] = ()
    """All journalled evaluations, in order."""
    phase: DriverPhase = field(default=DriverPhase.ATTACHING, kw_only=True)
    step: int = 0
    """Next step to be committed. It is less than `official` while all stages replay from a checkpoint."""
    round: RestoringRound = field(default_factory=RestoringRound)
    votes: Votes = field(default_factory=Votes)
    saves: Saves = field(default_factory=Saves)
    verifying: Verifying = field(default_factory=Verifying)
    retention: Retention = field(default_factory=Retention)
    stop: str | None = None
    """Why the job was asked to stop."""

    @property
    def fence(self) -> Fence:
        return self.next_fence()

    @property
    def watermark(self) -> int:
        return self.retention.watermark

    @property
    def standbys(self) -> Mapping[int, str]:
        """Stage -> its standby, for standbys that are still connected."""
        return self.retention.standbys

    @property
    def members(self) -> set[str]:
        """Peers of all stages, and connected standbys."""
        return {*self.roles.places.values(), *self.retention.standbys.values()}

    @property
    def checkpoint(self) -> int:
        """Return the step from which all stages can restart: the newest complete checkpoint, or the beginning."""
        return max(self.saved, 0)

    @property
    def warm_stages(self) -> frozenset[int]:
        """Return the stages whose standby could take over now. Its snapshot must be newer than the checkpoint, because
        a single stage that starts from the checkpoint's step would force all others back."""
        kept = self.retention
        return frozenset(stage for stage in kept.standbys if kept.acked.get(stage, -1) > self.checkpoint)

    def needs_links(self, peer: str) -> bool:
        """Return whether a broken link of this member matters. A standby exchanges no tensors; it needs links only to
        pass on a snapshot that a stage loads."""
        runs = bool(self.roles.stages_of(peer)) or peer == self.roles.owner
        return runs or self.phase is DriverPhase.LOADING

    def wants_snapshot(self, stage: int) -> bool:
        return stage in self.retention.standbys and self.retention.acked.get(stage, -1) < self.step

    def move_watermark(self) -> None:
        """Raise the watermark (rule 10) and drop records below the watermark and the newest checkpoint. A check needs
        retained tensors just as a replay does (25)."""
        kept = self.retention
        newest = [kept.acked.get(stage, kept.watermark) for stage in kept.standbys]
        hold = None if self.inspector is None else self.inspector.hold
        until = min(newest, default=self.step)
        kept.watermark = max(kept.watermark, until if hold is None else min(until, hold))
        below = min(kept.watermark, self.checkpoint)
        self.records = {step: record for step, record in self.records.items() if step >= below - 1}
        self.votes.history = {step: norms for step, norms in self.votes.history.items() if step >= kept.watermark}

    def take_back(self, step: int) -> list[DriverCommand]:
        """Take back the steps from `step` on and all states that include them."""
        self.official = self.step = step
        self.records = {of: record for of, record in self.records.items() if of < step}
        self.votes.take_back(step)
        self.retention.take_back(step)
        self.older = [of for of in {*self.older, self.saved} if 0 <= of <= step]
        self.saved = max(self.older, default=-1)
        self.saves = Saves()
        self.evaluations = tuple(found for found in self.evaluations if found.step <= step)
        if self.inspector is not None:
            self.inspector.went_back(step)
        return [Rewind(step)]

    def restore_if_all_answered(self) -> None:
        """First barrier: no stage gets an instruction before all stages have reported and the journal has answered
        (rule 7)."""
        answered = self.round.positions.keys() >= self.roles.places.keys() and self.round.snapshots.keys() >= (
            self.members
        )
        if answered and self.votes.journalling is None:
            self.follow_ups.append(AllAnswered())

    # ------------------------------------------------------------------------------------ checkpoints, evaluations, end

    @property
    def standing(self) -> Standing:
        """Return the result of all evaluations so far."""
        return standing(self.evaluations, self.shape.minimum_improvement)

    @property
    def enough(self) -> str | None:
        """Return why the job may end, or None. Answers only when the present state is the one that was evaluated
        last."""
        replaying = bool(self.evaluations) and self.step < self.evaluations[-1].step
        return None if replaying else self.standing.enough(self.shape.patience)

    @property
    def is_last(self) -> bool:
        return self.step >= self.shape.steps or self.stop is not None or self.enough is not None

    def is_save_owed(self, last: bool) -> bool:
        every = self.shape.checkpoint_every
        at_base = self.shape.save_base and self.saved < 0
        best = self.standing.best if self.shape.keep_best else None
        at_best = best is not None and best.step == self.step
        in_turn = every > 0 and self.step > 0 and self.step % every == 0
        return self.saved < self.step and (last or at_base or at_best or in_turn)

    def evaluate_if_due(self) -> bool:
        """Evaluate the state if it is due, once per state, even if steps are repeated."""
        every = self.shape.evaluate_every
        done = self.evaluations and self.evaluations[-1].step >= self.step
        if every and self.step > 0 and self.step % every == 0 and self.step >= self.official and not done:
            self.saves.evaluating = self.step
        return self.saves.evaluating is not None

    def ask_checkpoint(self) -> list[DriverCommand]:
        """Have all stages export the present state before they are fed."""
        self.saves.saving, self.saves.asked = self.step, True
        return [WriteCheckpoint(self.step, ask=True)]

    def ask_plan(self, reason: str) -> list[DriverCommand]:
        return [AskPlan(frozenset(self.lost), reason)]

    def fail(self, reason: str) -> list[DriverCommand]:
        self.phase = DriverPhase.ENDED
        return [EndJob(self.step, failed=reason)]
