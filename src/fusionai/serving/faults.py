"""The log of a serving job's faults: what happened when, and how long until tokens flowed again.

Neighbours: `serving.driver` reports the state machine's faults; `serving.engine` hands out the entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from fusionai.coordination.round.interface import ReportFault
from fusionai.coordination.serving.interface import ReportRebuilding
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId, short
from fusionai.serving.interface import FaultNote

REMEMBERED: Final = 200
"""Number of entries kept (chosen)."""


class ServingFaultLog:
    """`names`: machine names by peer id; may grow."""

    def __init__(self, names: Mapping[str, str], clock: Clock, on_note: Callable[[FaultNote], None]) -> None:
        self._names = names
        self._clock = clock
        self._on_note = on_note
        self._notes: deque[FaultNote] = deque(maxlen=REMEMBERED)
        self._open: FaultNote | None = None
        """The first fault since which no token has flowed; `_open_at_s` is its time on the monotonic clock."""
        self._open_at_s = 0.0
        self._asked_at_s = 0.0
        """Time since which a client has been waiting for tokens without a break, on the monotonic clock."""

    @property
    def notes(self) -> tuple[FaultNote, ...]:
        return tuple(self._notes)

    def name(self, peer: str) -> str:
        return self._names.get(peer) or (short(PeerId(peer)) if peer else "nobody")

    def named(self, text: str) -> str:
        """Replace peer ids in a text by machine names."""
        for peer, name in self._names.items():
            text = text.replace(f"peer {short(PeerId(peer))}", name).replace(peer, name)
        return text

    def seen(self, fault: ReportFault) -> None:
        who = self.name(fault.peer) if fault.peer else "the pipeline"
        what = {
            "peer": f"{who} is gone",
            "standby": f"the spare {who} is gone",
            "link": f"a link to {who} is gone",
            "stage": f"a stage of {who} failed",
            "probe": f"{who} computes different numbers",
            "late": f"{who} timed out",
            "leaving": f"{who} leaves",
            "faulty": f"{who} gave wrong results and gets no more work",
        }[fault.kind]
        successors = [f"{self.name(peer)} takes over stage {stage}" for stage, peer in sorted(fault.successors.items())]
        reason = self.named(fault.reason).rstrip(".")
        note = FaultNote(self._clock.wall_s(), "; ".join([f"{what}: {reason}", *successors]))
        # The loss of a spare, or of a machine whose spare was ready, delays no tokens.
        self._add(note, holds=bool(fault.stages) or fault.kind == "late")

    def rebuilding(self, report: ReportRebuilding) -> None:
        stages = ", ".join(str(stage) for stage in report.stages)
        whose = (
            f"stage {stages} recomputes its cache"
            if len(report.stages) == 1
            else f"stages {stages} recompute their caches"
        )
        generations = "1 generation" if report.sessions == 1 else f"{report.sessions} generations"
        text = f"{whose}: {report.positions} positions of {generations}"
        self._add(FaultNote(self._clock.wall_s(), text), holds=False)

    def _add(self, note: FaultNote, *, holds: bool) -> None:
        self._notes.append(note)
        if holds and self._open is None:
            self._open, self._open_at_s = note, self._clock.now_s()
        self._on_note(note)

    def asked(self) -> None:
        """Note that a generation begins while no other is in progress, so that until now nothing waited for tokens."""
        self._asked_at_s = self._clock.now_s()

    def recovered_unnoticed(self) -> None:
        """Close the open fault: the job is ready again with no generation in progress, so no token was delayed."""
        self._open = None

    def flowed(self) -> None:
        """A token was emitted: close the open fault. Its gap counts from when tokens were both wanted and missing."""
        if self._open is None:
            return
        since_s = max(self._open_at_s, self._asked_at_s)
        note = FaultNote(self._open.at_s, self._open.text, self._clock.now_s() - since_s)
        self._notes = deque((note if one is self._open else one for one in self._notes), maxlen=REMEMBERED)
        self._open = None
        self._on_note(note)
