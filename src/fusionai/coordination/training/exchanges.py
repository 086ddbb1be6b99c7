"""Schedule of local updates: at which steps jobs that train one model exchange, and when a stage adopts the agreement.

After every `every` steps a stage sends how far its parameters have changed. It adopts the agreement of all jobs at that
same step or, with a `lag`, that many steps later. In between it trains on, so that the exchange costs time only if it
takes longer than those steps (A. Douillard et al. 2025, "Streaming DiLoCo", arXiv 2501.18512, section 2.2; there per
fragment, here for the whole model). After the job's last step there is nothing to train on, so the stage waits.

Replicas of a model trained from scratch change fastest, and diverge most, right after the warm-up. Rounds may be
shorter there (`Early`). DiLoCo's authors start from a model that was trained with synchronisation at every step; short
early rounds are a cheaper substitute.

Steps count from 0; `applied` is the number of finished steps. Neighbours: `stage` asks, `execution.training.exchange`
has the arithmetic, `client.training.replicas` decides from which step a late replica begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.wire.messages import StageOptions


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

    def round_steps(self, step: int) -> int:
        """Return the number of steps in the round that ends with this step."""
        whole = self.begun + step + 1
        return whole - self.over(whole - 1)

    def tells(self, step: int) -> bool:
        """Return whether the difference is taken at the end of this step."""
        whole = self.begun + step + 1
        return self.every > 0 and self.over(whole) == whole

    def taken_over_after(self, told: int) -> int:
        """Return the step at which the agreement of step `told` is adopted."""
        return told if told + 1 == self.steps else told + self.lag

    def adopts(self, step: int) -> int | None:
        """Return the step whose agreement must be adopted before this step counts, or None."""
        for told in {step, step - self.lag}:
            if told >= 0 and self.tells(told) and self.taken_over_after(told) == step:
                return told
        return None

    def outstanding(self, applied: int) -> int | None:
        """Return the step whose difference was taken and whose agreement is not yet adopted after `applied` steps, or
        None."""
        told = self.over(self.begun + applied) - self.begun - 1
        return told if 0 <= told <= applied <= self.taken_over_after(told) else None

    def may_adopt(self, told: int, applied: int) -> bool:
        """Return whether the agreement of step `told` can still be adopted after `applied` steps."""
        return self.tells(told) and self.taken_over_after(told) >= applied


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
