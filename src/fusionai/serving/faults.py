"""The story of a serving job's faults: what happened when, and how long until tokens flowed again. Decides words.

Neighbours: `serving.driver` tells what its machine says; `serving.engine` gives the notes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from fusionai.coordination.serving_commands import TellFault, TellRebuilding
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId, short
from fusionai.serving.interface import FaultNote

REMEMBERED: Final = 200


class FaultLog:
    """`names`: what machines are called, by peer id; may grow."""

    def __init__(self, names: Mapping[str, str], clock: Clock, on_note: Callable[[FaultNote], None]) -> None:
        self._names = names
        self._clock = clock
        self._on_note = on_note
        self._notes: deque[FaultNote] = deque(maxlen=REMEMBERED)
        self._open: FaultNote | None = None
        """The first that tokens have not flowed since, and when it was, on the monotonic clock."""
        self._open_at_s = 0.0
        self._asked_at_s = 0.0
        """Since when somebody has been waiting for tokens without a break, on the monotonic clock."""

    @property
    def notes(self) -> tuple[FaultNote, ...]:
        return tuple(self._notes)

    def name(self, peer: str) -> str:
        return self._names.get(peer) or (short(PeerId(peer)) if peer else "nobody")

    def named(self, text: str) -> str:
        """People know machines by name."""
        for peer, name in self._names.items():
            text = text.replace(f"peer {short(PeerId(peer))}", name).replace(peer, name)
        return text

    def seen(self, fault: TellFault) -> None:
        who = self.name(fault.peer) if fault.peer else "the pipeline"
        what = {
            "peer": f"{who} is gone",
            "guard": f"{who}, which stood by, is gone",
            "link": f"a link to {who} is gone",
            "stage": f"a stage of {who} failed",
            "probe": f"{who} computes something else",
            "late": f"{who} is too late",
            "leaving": f"{who} leaves",
            "liar": f"{who} gave wrong results and is left out from now on",
        }[fault.kind]
        heirs = [f"{self.name(peer)} takes over stage {stage}" for stage, peer in sorted(fault.heirs.items())]
        reason = self.named(fault.reason).rstrip(".")
        note = FaultNote(self._clock.wall_s(), "; ".join([f"{what}: {reason}", *heirs]))
        # Whoever only stood by, or went to a guard that was ready, held nobody up.
        self._add(note, holds=bool(fault.stages) or fault.kind == "late")

    def rebuilding(self, told: TellRebuilding) -> None:
        stages = ", ".join(str(stage) for stage in told.stages)
        whose = f"stage {stages} gets its cache" if len(told.stages) == 1 else f"stages {stages} get their caches"
        generations = "1 generation" if told.sessions == 1 else f"{told.sessions} generations"
        text = f"{whose} again: {told.positions} positions of {generations}"
        self._add(FaultNote(self._clock.wall_s(), text), holds=False)

    def _add(self, note: FaultNote, *, holds: bool) -> None:
        self._notes.append(note)
        if holds and self._open is None:
            self._open, self._open_at_s = note, self._clock.now_s()
        self._on_note(note)

    def asked(self) -> None:
        """A generation begins, and no other is under way: before it, nobody waited for tokens."""
        self._asked_at_s = self._clock.now_s()

    def recovered_unnoticed(self) -> None:
        """The job is ready again and no generation is under way: no tokens stood still."""
        self._open = None

    def flowed(self) -> None:
        """A token was given out. The gap counts from when tokens were both wanted and not given."""
        if self._open is None:
            return
        since_s = max(self._open_at_s, self._asked_at_s)
        note = FaultNote(self._open.at_s, self._open.text, self._clock.now_s() - since_s)
        self._notes = deque((note if one is self._open else one for one in self._notes), maxlen=REMEMBERED)
        self._open = None
        self._on_note(note)
