"""A job's faults for the files and for the broker: a line each as they are told, a record each when they are over.

Decides what a record holds. Neighbours: `client.fault_story` tells what happened, `client.reporting` passes the lines
on, `client.train` puts the records into its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from fusionai.client.fault_story import Episode, FaultStory, Kind
from fusionai.primitives.clock import Clock
from fusionai.scheduling.types import Plan
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `step` counts from 1: the step under way. Of the broker `peer` and `stages` are empty."""

    kind: Kind
    step: int
    stages: tuple[int, ...]
    peer: str
    name: str
    reason: str
    at_s: float
    """When it was noticed, seconds since 1970."""
    detected_s: float
    """The same since the run began."""
    recovered_s: float | None = None
    """From then to the next official step; None where nothing stood still or it never came to that."""
    waited_s: float = 0.0
    """Of these, waiting for a machine or for the broker."""
    takeover: dict[int, str] = {}
    """Stage -> peer that has it afterwards."""
    numerics: Literal["exact", "tolerant"] | None = None
    """Whether those compute the same bits; None where nobody took over."""
    tolerance: float | None = None
    """How far losses may be apart from then on, relative; None where bits are kept."""
    recut: bool = False
    """Whether the model was cut anew, over the machines in `takeover`."""
    base: int | None = None
    """It went on from the state after so many steps; None if no state was lost."""
    rollback: bool = False
    committed: int | None = None
    """The first step official afterwards, from 1."""


class FaultRecords:
    """`names`: what peers are called, as it is known by then. `say` hears each line; `warn`, once, why nothing can be
    written."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: Plan,
        names: Mapping[str, str],
        clock: Clock,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._path = directory.faults
        self._clock = clock
        self._say = say
        self._warn = warn
        self._warned = False
        self._story = FaultStory()
        self._names = names
        self._story.begin(plan, ())
        self._began_s = clock.now_s()
        self._waiting_since_s: float | None = None
        self._waited_s: dict[int, float] = {}
        """Number of the episode -> seconds without a plan."""
        self._written: set[int] = set()

    def see(self, event: progress.Progress) -> None:
        now_s = self._clock.now_s()
        self._story.know(self._names)
        match event:
            case progress.Waiting():
                self._waiting_since_s = self._waiting_since_s or now_s
            case progress.PlanChanged() if self._waiting_since_s is not None:
                self._count_waiting(now_s)
            case _:
                pass
        for line in self._story.see(event, now_s):
            self._say(line)
        for number, episode in enumerate(self._story.episodes):
            if episode.over_s is not None and number not in self._written:
                self._write(number, episode)

    def close(self) -> tuple[FaultRecord, ...]:
        """All of them; those that are not over are written now."""
        self._count_waiting(self._clock.now_s())
        for number, episode in enumerate(self._story.episodes):
            if number not in self._written:
                self._write(number, episode)
        return tuple(self._record(number, episode) for number, episode in enumerate(self._story.episodes))

    def _count_waiting(self, now_s: float) -> None:
        if self._waiting_since_s is None:
            return
        waited_s, self._waiting_since_s = now_s - self._waiting_since_s, None
        for number, episode in enumerate(self._story.episodes):
            if episode.over_s is None and episode.kind != "broker":
                self._waited_s[number] = self._waited_s.get(number, 0.0) + waited_s

    def _record(self, number: int, episode: Episode) -> FaultRecord:
        since_s = episode.seen_s - self._began_s
        ago_s = self._clock.now_s() - episode.seen_s
        return FaultRecord(
            kind=episode.kind,
            step=episode.step,
            stages=tuple(episode.stages),
            peer=episode.peer,
            name=self._story.name(episode.peer) if episode.peer else "broker",
            reason=episode.reason,
            at_s=self._clock.wall_s() - ago_s,
            detected_s=since_s,
            recovered_s=episode.recovered_s,
            waited_s=self._waited_s.get(number, 0.0),
            takeover=dict(episode.takeover),
            numerics=None if episode.exact is None else ("exact" if episode.exact else "tolerant"),
            tolerance=episode.tolerance,
            recut=bool(episode.recut),
            base=episode.base,
            rollback=episode.rollback,
            committed=episode.committed,
        )

    def _write(self, number: int, episode: Episode) -> None:
        self._written.add(number)
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(self._record(number, episode)) + b"\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{self._path} can't be written ({error.strerror or error})")
