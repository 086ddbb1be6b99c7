"""Tracks from when to when each peer ran a stage, was a warm standby, or was away: the rows of the report's time line.

A tenure ends with a plan that lacks it, or with the loss of the peer. `cli.run_report` feeds it;
`dashboard.fault_chart` draws the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fusionai.dashboard.report_data import Tenure
from fusionai.scheduling.problem.types import Plan

_Part = Literal["stage", "guard", "away"]
BROKER = ""


@dataclass(slots=True)
class Tenures:
    """The tenures of a run. All times are seconds since its start, and calls must be in chronological order."""

    _open: dict[tuple[str, _Part, int | None], float] = field(default_factory=dict)
    _ended: list[Tenure] = field(default_factory=list)

    def plan(self, plan: Plan, at_s: float) -> None:
        """Start the tenures of a plan and end those that it lacks. The job owner's part (the loss) has no row."""
        wanted: set[tuple[str, _Part, int | None]] = {
            (stage.peer, "stage", stage.stage) for stage in plan.stages if "stage" in stage.roles
        }
        wanted |= {(guard.peer, "guard", guard.stage) for guard in plan.guards}
        for key in [key for key in self._open if key[1] != "away" and key[0] != BROKER and key not in wanted]:
            self._end(key, at_s)
        for key in wanted:
            self.back(key[0], at_s)
            self._open.setdefault(key, at_s)

    def broker(self, at_s: float) -> None:
        """The broker is available from now on."""
        self._open.setdefault((BROKER, "stage", None), at_s)

    def lost(self, peer: str, at_s: float) -> None:
        """End the peer's tenures. It is away until `back` or a plan that contains it."""
        for key in [key for key in self._open if key[0] == peer and key[1] != "away"]:
            self._end(key, at_s)
        self._open.setdefault((peer, "away", None), at_s)

    def back(self, peer: str, at_s: float) -> None:
        if (peer, "away", None) in self._open:
            self._end((peer, "away", None), at_s)

    def until(self, end_s: float) -> tuple[Tenure, ...]:
        """Return all tenures, cut off at `end_s`, in order of their starts."""
        going = [self._tenure(key, since_s, end_s) for key, since_s in self._open.items()]
        ended = [msgspec.structs.replace(one, to_s=min(one.to_s, end_s)) for one in self._ended]
        shown = (one for one in (*ended, *going) if one.from_s < end_s)
        return tuple(sorted(shown, key=lambda one: (one.from_s, one.peer, one.part, one.stage or 0)))

    def _end(self, key: tuple[str, _Part, int | None], at_s: float) -> None:
        self._ended.append(self._tenure(key, self._open.pop(key), at_s))

    @staticmethod
    def _tenure(key: tuple[str, _Part, int | None], from_s: float, to_s: float) -> Tenure:
        peer, part, stage = key
        return Tenure(peer=peer, part=part, stage=stage, from_s=from_s, to_s=max(from_s, to_s))
