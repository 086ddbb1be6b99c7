"""Records a job's faults: a line for the broker as each one proceeds, and a record in a file when it is over.

`client.pool.fault_report` words the lines, `client.training.reporting` sends them, `client.training.train` returns the
records in its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from fusionai.client.pool.fault_report import Episode, FaultStory, Kind
from fusionai.primitives.clock import Clock
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `step`: the step under way, counted from 1. `peer` and `stages` are empty for the broker's faults."""

    kind: Kind
    step: int
    stages: tuple[int, ...]
    peer: str
    name: str
    reason: str
    at_s: float
    """Time of detection, in seconds since 1970."""
    detected_s: float
    """Time of detection, in seconds since the start of the run."""
    recovered_s: float | None = None
    """Seconds from detection to the next committed step; None if no stage was interrupted or no step followed."""
    waited_s: float = 0.0
    """Seconds of these spent waiting for a machine or for the broker."""
    takeover: dict[int, str] = {}
    """Maps each stage to the peer that has it afterwards."""
    numerics: Literal["exact", "tolerant"] | None = None
    """Whether these peers compute the same bits; None if no peer took over."""
    tolerance: float | None = None
    """Largest relative difference of losses from then on; None if the bits stay the same."""
    recut: bool = False
    """Whether the model was cut anew, over the machines in `takeover`."""
    base: int | None = None
    """Number of steps in the state from which the job continued; None if no state was lost."""
    rollback: bool = False
    """Whether all stages went back to a checkpoint."""
    committed: int | None = None
    """First step committed afterwards, counted from 1."""


class FaultRecords:
    """Records faults from a job's events. `names`: names of the peers, which may grow. `say` receives each line; `warn`
    receives, once, why the file can't be written."""

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
        """Maps the index of an episode to its seconds without a plan."""
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
        """Write the faults that are not over, and return the records of all."""
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
