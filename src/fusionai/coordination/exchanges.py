"""When jobs that train one model apart exchange, and when a stage takes over what they agreed on. Decides steps only.

After `every` steps a stage tells how far it has come. What all agree on it takes over after that very step, or, with a
`lag`, so many steps later: meanwhile it trains on, so that the exchange costs no time unless it takes longer than
those steps (A. Douillard et al. 2025, "Streaming DiLoCo", arXiv 2501.18512, section 2.2; there per fragment, here of
the whole model). After the job's last step nothing is left to do meanwhile: it waits.

Where a job begins from nothing, replicas move fastest, and farthest apart, right after the warm-up: there rounds may be
shorter (`Early`). DiLoCo's authors begin with a model that was trained at every step; this is the cheap form of it.

Steps count from 0; `applied` is the number of steps that are done. Neighbours: `stage` asks, `execution.exchange` has
the arithmetic, `client.replicas` says from which step a replica begins that comes late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True)
class Early:
    """From step `first` until step `until` of the whole job rounds have `every` steps; 0: there are none such. Both are
    multiples of `every`, and so are the usual rounds."""

    first: int = 0
    until: int = 0
    every: int = 0


NOT_EARLY: Final = Early()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """`every`: 0 when there are none. `lag`: below it, and below that of early rounds. `steps`: of this job, which
    began when `begun` steps of the whole one were over."""

    every: int = 0
    lag: int = 0
    steps: int = 0
    begun: int = 0
    early: Early = NOT_EARLY

    def over(self, steps: int) -> int:
        """Of so many steps of the whole job those whose rounds are over."""
        if self.every == 0:
            return 0
        usual, early = steps - steps % self.every, self.early
        if early.every == 0 or steps < early.first:
            return usual
        shorter = min(steps, early.until)
        return max(usual, shorter - shorter % early.every)

    def round_steps(self, step: int) -> int:
        """How many steps the round has that ends with this one."""
        whole = self.begun + step + 1
        return whole - self.over(whole - 1)

    def tells(self, step: int) -> bool:
        """Whether this step's end is where the difference is taken."""
        whole = self.begun + step + 1
        return self.every > 0 and self.over(whole) == whole

    def taken_over_after(self, told: int) -> int:
        """The step that counts once the agreement of step `told` is adopted."""
        return told if told + 1 == self.steps else told + self.lag

    def adopts(self, step: int) -> int | None:
        """The step whose agreement must be adopted before this one counts."""
        for told in {step, step - self.lag}:
            if told >= 0 and self.tells(told) and self.taken_over_after(told) == step:
                return told
        return None

    def outstanding(self, applied: int) -> int | None:
        """The step whose difference was taken and whose agreement is still to be adopted, after so many steps."""
        told = self.over(self.begun + applied) - self.begun - 1
        return told if 0 <= told <= applied <= self.taken_over_after(told) else None

    def may_adopt(self, told: int, applied: int) -> bool:
        """Whether this agreement is of use after so many steps."""
        return self.tells(told) and self.taken_over_after(told) >= applied


NO_EXCHANGES: Final = Exchanges()


def exchanges_of(options: StageOptions) -> Exchanges:
    """Of a stage that trains something."""
    return Exchanges(
        every=options.sync_every,
        lag=options.sync_lag,
        steps=options.sync_steps,
        begun=options.sync_begun,
        early=Early(*options.sync_early),
    )
