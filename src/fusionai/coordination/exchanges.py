"""When jobs that train one model apart exchange, and when a stage takes over what they agreed on. Decides steps only.

After `every` steps a stage tells how far it has come. What all agree on it takes over after that very step, or, with a
`lag`, so many steps later: meanwhile it trains on, so that the exchange costs no time unless it takes longer than
those steps (A. Douillard et al. 2025, "Streaming DiLoCo", arXiv 2501.18512, section 2.2; there per fragment, here of
the whole model). After the job's last step nothing is left to do meanwhile: it waits.

Steps count from 0; `applied` is the number of steps that are done. Neighbours: `stage` asks, `execution.exchange` has
the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """`every`: 0 when there are none. `lag`: below `every`. `steps`: of the job."""

    every: int = 0
    lag: int = 0
    steps: int = 0

    def tells(self, step: int) -> bool:
        """Whether this step's end is where the difference is taken."""
        return self.every > 0 and (step + 1) % self.every == 0

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
        if self.every == 0 or applied < self.every:
            return None
        told = applied // self.every * self.every - 1
        return told if self.taken_over_after(told) >= applied else None

    def may_adopt(self, told: int, applied: int) -> bool:
        """Whether this agreement is of use after so many steps."""
        return self.tells(told) and self.taken_over_after(told) >= applied


NO_EXCHANGES: Final = Exchanges()


def exchanges_of(options: StageOptions) -> Exchanges:
    """Of a stage that trains something."""
    return Exchanges(every=options.sync_every, lag=options.sync_lag, steps=options.sync_steps)
