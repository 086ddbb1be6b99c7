"""Local updates: at which steps jobs that train one model exchange, and when a stage adopts the outer update.

After every `every` steps a stage sends its pseudo-gradient: how far its parameters have changed. It adopts the outer
update, on which all jobs agree, at that same step or, with a `lag`, that many steps later. In between it trains on, so
that the exchange costs time only if it takes longer than those steps (A. Douillard et al. 2025, "Streaming DiLoCo",
arXiv 2501.18512, section 2.2; there per fragment, here for the whole model). After the job's last step there is nothing
to train on, so the stage waits.

Replicas of a model trained from scratch change fastest, and diverge most, right after the warm-up. Rounds may be
shorter there (`Early`). DiLoCo's authors start from a model that was trained with synchronisation at every step; short
early rounds are a cheaper substitute.

Steps count from 0; `applied` is the number of finished steps. Neighbours: `step` has the rest of a stage's work,
`execution.training.exchange` has the arithmetic, `client.training.replicas` decides from which step a late replica
begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.training.stage_interface import StageWork
from fusionai.wire.messages import CommitRecord, StageOptions


@dataclass(frozen=True, slots=True)
class Early:
    """From step `first` until step `until` of the whole training run, rounds have `every` steps; 0: no such phase.
    `first` and `until` are multiples of `every`, and so is the length of the usual rounds."""

    first: int = 0
    until: int = 0
    every: int = 0


NOT_EARLY: Final = Early()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """`every`: steps per round, 0 without exchanges. `lag`: less than the steps of any round. `steps`: of this job,
    which began after `begun` steps of the whole run."""

    every: int = 0
    lag: int = 0
    steps: int = 0
    begun: int = 0
    early: Early = NOT_EARLY

    def over(self, steps: int) -> int:
        """Return how many of the first `steps` steps of the whole run belong to finished rounds."""
        if self.every == 0:
            return 0
        usual, early = steps - steps % self.every, self.early
        if early.every == 0 or steps < early.first:
            return usual
        shorter = min(steps, early.until)
        return max(usual, shorter - shorter % early.every)

    def next_end(self, steps: int) -> int:
        """Return the number of steps of the whole run, above `steps`, after which the next round ends."""
        end = steps + 1
        while self.over(end) != end:
            end += 1
        return end

    def round_steps(self, step: int) -> int:
        """Return the number of steps in the round that ends with this step."""
        whole = self.begun + step + 1
        return whole - self.over(whole - 1)

    def ends_round(self, step: int) -> bool:
        """Return whether the pseudo-gradient is taken at the end of this step."""
        whole = self.begun + step + 1
        return self.over(whole) == whole

    def adopted_at(self, taken: int) -> int:
        """Return the step at which the outer update of step `taken` is adopted."""
        return taken if taken + 1 == self.steps else taken + self.lag

    def adopts(self, step: int) -> int | None:
        """Return the step whose outer update must be adopted before this step counts, or None."""
        for taken in {step, step - self.lag}:
            if taken >= 0 and self.ends_round(taken) and self.adopted_at(taken) == step:
                return taken
        return None

    def outstanding(self, applied: int) -> int | None:
        """Return the step whose pseudo-gradient was taken and whose outer update is not yet adopted after `applied`
        steps, or None."""
        taken = self.over(self.begun + applied) - self.begun - 1
        return taken if taken >= 0 and applied <= self.adopted_at(taken) else None

    def adopted(self, applied: int) -> int:
        """Return the step whose outer update is the last one in a state after `applied` steps; below 0 if the state has
        none of this job's."""
        taken = self.over(self.begun + applied) - self.begun - 1
        outstanding = self.outstanding(applied) is not None
        return self.over(self.begun + taken) - self.begun - 1 if outstanding else taken

    def may_adopt(self, taken: int, applied: int) -> bool:
        """Return whether the outer update of step `taken` can still be adopted after `applied` steps."""
        return self.ends_round(taken) and self.adopted_at(taken) >= applied


NO_EXCHANGES: Final = Exchanges()


def exchanges_of(options: StageOptions) -> Exchanges:
    """Return the exchange schedule in the options of a training stage."""
    return Exchanges(
        every=options.sync_every,
        lag=options.sync_lag,
        steps=options.sync_steps,
        begun=options.sync_begun,
        early=Early(*options.sync_early),
    )


@dataclass(slots=True)
class OuterUpdates:
    """How far a stage is with the pseudo-gradients it sends and the outer updates it adopts."""

    exchanges: Exchanges
    arrived: set[int] = field(default_factory=set[int])
    """Steps whose outer update has arrived."""
    is_sent: bool = False
    """Whether the outstanding pseudo-gradient was sent under this fence."""
    is_awaited: bool = False
    """Whether the optimizer has run a step that counts only with an outer update, so that only the update is
    missing."""

    def wants(self, step: int, applied: int) -> bool:
        """Return whether the outer update may still be adopted."""
        return step not in self.arrived and self.exchanges.may_adopt(step, applied)

    def sending(self, applied: int) -> StageWork | None:
        """Return the work of sending the pseudo-gradient that is outstanding after `applied` steps."""
        taken = self.exchanges.outstanding(applied)
        if taken is None or self.is_sent or taken in self.arrived:
            return None
        return StageWork("difference", step=taken)

    def applying(self, commit: CommitRecord) -> StageWork | None:
        """Return the optimizer's step or, at the end of a round, then the exchange. Only then does the step count."""
        if not self.is_awaited:
            return StageWork("apply", step=commit.step, record=commit)
        taken = self.exchanges.adopts(commit.step)
        assert taken is not None, "other steps count as soon as they are applied"
        if taken in self.arrived:
            return StageWork("adopt", step=taken)
        return None if self.is_sent else StageWork("difference", step=taken)

    def forget_past(self, applied: int) -> None:
        self.arrived = {taken for taken in self.arrived if self.exchanges.may_adopt(taken, applied)}
