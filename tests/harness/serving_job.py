"""A serving machine with what it commanded last: its unit tests tell it what its members would.

Neighbours: `coordination.serving.driver` is what is told; `harness.virtual_serving` has members, a network and time
instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fusionai.coordination.round.interface import DriverEvent, MemberEnlisted, PeerLost
from fusionai.coordination.round.verification import Inspector
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.admission import BatchLimits
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.checks import TextChecks
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.state import ServingPhase
from fusionai.wire.base import Fence

PLACES = {0: "me", 1: "a", 2: "b", 3: "c", 4: "me"}
LIMITS = BatchLimits(pages=40, page_tokens=4, sessions=4, pass_tokens=16, in_flight=2, chunk_tokens=8, queue=8)
C = TypeVar("C", bound=interface.ServingCommand)


def roles(version: int = 1, standbys: Mapping[int, str] | None = None, **places: str) -> ServingRoles:
    return ServingRoles(
        version=version,
        owner="me",
        places=PLACES | {int(stage[1:]): peer for stage, peer in places.items()},
        standbys={2: "g"} if standbys is None else standbys,
        caching=frozenset({1, 2, 3}),
        checkable=frozenset({0, 1, 2, 3}),
    )


class Job:
    """A machine with what it commanded last."""

    def __init__(self, given: ServingRoles, *, retain: bool = True, checks: bool = False) -> None:
        self.batcher = Batcher(LIMITS, holds=checks)
        inspecting = TextChecks(Inspector(b"s" * 32, "me", 1)) if checks else None
        self.machine = ServingMachine(
            self.batcher, (1, 2, 3), roles=given, incarnation=7, retain=retain, checks=inspecting
        )
        self.given = self.machine.start()

    def tell(self, *told: DriverEvent) -> list[interface.ServingCommand]:
        self.given = [command for event in told for command in self.machine.handle(event)]
        return self.given

    def of(self, kind: type[C]) -> list[C]:
        return [command for command in self.given if isinstance(command, kind)]

    @property
    def fence(self) -> Fence:
        return self.machine.fence

    @property
    def phase(self) -> ServingPhase:
        return self.machine.phase

    def enlist(self) -> list[interface.ServingCommand]:
        return self.tell(*(MemberEnlisted(peer, fence=self.fence) for peer in sorted(self.machine.roles.members)))

    def load(self, cached: Mapping[int, tuple[tuple[int, int], ...]] | None = None) -> list[interface.ServingCommand]:
        cached = cached or {}
        places = self.machine.roles.places
        return self.tell(
            *(
                interface.StageLoaded(peer, stage, cached.get(stage, ()), fence=self.fence)
                for stage, peer in places.items()
            )
        )

    def probe(self, *digests: str, distance: float = 0.0) -> list[interface.ServingCommand]:
        numbers = sorted(self.machine.rounds.probes)
        return self.tell(
            *(
                interface.ProbeReturned(number, digest, distance, 0.1, fence=self.fence)
                for number, digest in zip(numbers, digests, strict=True)
            )
        )

    def rebuild(self) -> list[interface.ServingCommand]:
        waiting = [(number, one) for number, (_, left) in self.machine.rounds.rebuilds.items() for one in left.items()]
        return self.tell(
            *(interface.CacheRebuilt(number, session, end, fence=self.fence) for number, (session, end) in waiting)
        )


def running(given: ServingRoles | None = None, *, retain: bool = True, warm: bool = True, checks: bool = False) -> Job:
    job = Job(given or roles(), retain=retain, checks=checks)
    job.enlist()
    job.load()
    job.probe("x", "x")
    assert job.phase is ServingPhase.RUNNING
    if warm:
        standbys = job.machine.roles.standbys
        job.tell(*(interface.StandbyLoaded(peer, stage, fence=job.fence) for stage, peer in standbys.items()))
    return job


def decoding(job: Job, number: int = 1) -> int:
    """A session that has read its prompt and emitted a token; gives the positions computed."""
    job.batcher.submit(SessionSpec(number=number, scope="", prompt=(5,) * 6, max_tokens=9), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert job.machine.returned(job.fence, plan.number, {number: (8,)}, (), 0.0) == {number}
    return 6


def rebuilding() -> Job:
    """Its probe is on its way behind what is rebuilt."""
    job = running(roles(standbys={2: "g"}))
    computed = decoding(job)
    job.tell(PeerLost("b", "x"))
    job.enlist()
    job.load({1: ((1, computed),), 3: ((1, computed),)})
    assert job.phase is ServingPhase.REBUILDING
    return job
