"""How long a stage may work on a pass before it counts as stuck. Decides deadlines; begins nothing.

Progress is what arrives: results, and stages that say what they work on. A stage that works within its limit is waited
for, however slow it is. The limit follows what passes of this work take at this stage (`stage_times`), with a wide
margin and never below a floor; it doubles each time nothing came back in time, as TCP's does, until something has.

Neighbours: `stage_times` estimates; `serving` asks and begins rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fusionai.coordination.serving.stage_times import StageTimes, Work

MARGIN: Final = 4.0
"""Times what a pass hardly ever takes longer than: a machine that gets busy is slower by the number of its programs."""
IDLE_MARGIN: Final = 4.0
"""Times the limit that a pass may wait at a stage whose machine computes something else meanwhile."""
ATTEMPTS: Final = 5
"""So often nothing may come back in time, one after the other; by then limits have grown 32-fold."""


@dataclass(slots=True)
class Patience:
    """`floor_s`: no limit is shorter."""

    times: StageTimes
    floor_s: float
    stalls: int = 0
    """How often nothing came back in time since something did."""

    def grown_s(self, limit_s: float) -> float:
        """What a limit without a sign of progress is by now."""
        return limit_s * 2.0**self.stalls

    def silence_s(self, works: Iterable[Work]) -> float:
        """For which these passes may be under way without a sign, where stages say nothing: what was measured counts,
        predictions don't."""
        times = self.times
        longest_s = max((times.known_s(stage, work) for work in works for stage in times.stages), default=0.0)
        return self.grown_s(max(self.floor_s, MARGIN * longest_s))

    def limit_s(self, stage: int, work: Work) -> float:
        """For which a stage may compute this."""
        usual_s = self.times.nearly_always_s(stage, work)
        return self.grown_s(max(self.floor_s, MARGIN * (usual_s or 0.0)))

    def whole_s(self, works: Iterable[Work]) -> float:
        """After which even the first of these passes must be back, which went one behind the other."""
        stages = self.times.stages
        usual_s = sum(self.times.nearly_always_s(stage, work) or 0.0 for work in works for stage in stages)
        return self.grown_s(MARGIN * (self.floor_s + usual_s))
