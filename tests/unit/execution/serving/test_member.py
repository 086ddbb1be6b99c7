"""A machine's part in a serving job: what a round asks of it first, and what of an older one it lets be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest

from fusionai.execution.connections import LocalChannel
from fusionai.execution.host import Host
from fusionai.execution.links import Links
from fusionai.execution.serving import member as serving_member
from fusionai.execution.serving.loading import OwnWeights, identity_of
from fusionai.execution.serving.member import ServingMember
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.ids import PeerId
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Load, Neighbour, ServeOptions
from harness.pool import OWNER
from harness.stand import signed

ME = PeerId("m" * 52)
OPTIONS = ServeOptions(page_tokens=2, pages=8, sessions=4, pass_tokens=6)


class Stage:
    """At hand once it was prepared."""

    resident_bytes = reserved_bytes = 1

    def __init__(self, load: Load) -> None:
        self.identity = identity_of(load)
        self.allocated = False

    async def begin(self, *, fresh: bool) -> tuple[tuple[int, int], ...]:
        del fresh
        self.allocated = True
        return ()

    def mark(self, secret: bytes, *, gives: bool) -> None: ...


class Program:
    missing: tuple[str, ...] = ()


class AtOnce:
    """A compute thread whose work is done in the same turn of the loop."""

    async def run(self, work: Callable[[], object]) -> tuple[object, None]:
        return work(), None


class Bench:
    """A member whose stages are prepared one after the other, each when `go` lets it. `made`: the order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.go = asyncio.Semaphore(0)

        async def prepare(_host: Host, load: Load, _tensors: object, **_: object) -> tuple[Stage, Program]:
            self.made.append(load.stage)
            await self.go.acquire()
            return Stage(load), Program()

        monkeypatch.setattr(serving_member, "prepare_stage", prepare)
        monkeypatch.setattr(Links, "up", _linked)
        monkeypatch.setattr(Links, "dial", lambda *_: None)
        monkeypatch.setattr(Host, "addresses_of", lambda *_: ())
        host = Host(
            peer=ME,
            backend=cast("Any", None),
            compute=cast("Any", AtOnce()),
            transport=cast("Any", None),
            fingerprint="f",
            clock=SystemClock(),
        )
        self.member = ServingMember(host, "job", OWNER, Fence(1, 1, 0), OwnWeights(cast("Any", None)))
        self.driver, channel = LocalChannel.pair(OWNER, "control")
        self.serving = asyncio.create_task(self.member.serve_control(channel))
        self.answers: list[wire.Message] = []

    async def enlist(self, attempt: int, *, runs: tuple[int, ...] = (), standbys: tuple[int, ...] = ()) -> None:
        places = {stage: ME if stage in runs else OWNER for stage in range(4)}
        neighbours = tuple(Neighbour(stage=stage, peer=peer) for stage, peer in places.items())
        fence = Fence(1, 1, attempt)
        placement = signed(neighbours, fence, job="job", standbys=[(stage, ME) for stage in standbys])
        await self.driver.send(
            wire.Enlist(
                fence=fence, job="job", neighbours=neighbours, standbys=standbys, ticket=b"", placement=placement
            )
        )

    async def load(self, attempt: int, stage: int, *, standby: bool) -> None:
        load = Load(
            fence=Fence(1, 1, attempt),
            job="job",
            stage=stage,
            stages=4,
            graph_hash=f"g{stage}",
            boundary=msgspec.Raw(b"\xc0"),
            options=OPTIONS,
            standby=standby,
        )
        await self.driver.send(load)

    async def loaded(self) -> list[int]:
        """Stages of which the driver hears, until nothing more comes."""
        for _ in range(20):
            await asyncio.sleep(0)
        while not self.driver._inbox.empty():
            self.answers.append((await self.driver.receive()).message)
        return [answer.stage for answer in self.answers if isinstance(answer, wire.Loaded)]

    async def let(self, count: int) -> list[int]:
        for _ in range(count):
            self.go.release()
            await self.loaded()
        return await self.loaded()

    async def close(self) -> None:
        self.driver.abort()
        await self.serving
        await self.member.close()


async def _linked(_links: Links, _peer: PeerId) -> None: ...


def run(story: Callable[[Bench], Coroutine[None, None, None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        bench = Bench(monkeypatch)
        try:
            await story(bench)
        finally:
            await bench.close()

    asyncio.run(body())


def test_a_stage_that_is_taken_over_waits_for_no_other_that_was_to_be_with_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(bench: Bench) -> None:
        await bench.enlist(1, standbys=(1, 2, 3))
        for stage in (1, 2, 3):
            await bench.load(1, stage, standby=True)
        await bench.loaded()
        assert bench.made == [1]
        await bench.enlist(2, runs=(3,), standbys=(1, 2))
        await bench.load(2, 3, standby=False)
        assert await bench.let(2) == [3]
        assert bench.made == [1, 3]

    run(story, monkeypatch)


def test_what_is_with_standby_in_the_present_round_loads_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        await bench.enlist(1, standbys=(1, 2, 3))
        for stage in (1, 2, 3):
            await bench.load(1, stage, standby=True)
        assert await bench.let(3) == [1, 2, 3]
        assert bench.member.stages == (1, 2, 3)

    run(story, monkeypatch)


def test_a_stage_that_loads_when_the_next_round_begins_is_at_hand_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        await bench.enlist(1, standbys=(1,))
        await bench.load(1, 1, standby=True)
        await bench.loaded()
        await bench.enlist(2, runs=(1,))
        await bench.load(2, 1, standby=False)
        assert await bench.let(1) == [1]
        assert bench.made == [1]

    run(story, monkeypatch)


def test_a_stage_that_ran_here_is_loaded_anew_where_it_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would keep its caches and answer every check with "stage 1 runs here". Where it stays what it was,
    nothing is loaded again."""

    async def story(bench: Bench) -> None:
        await bench.enlist(1, runs=(1,))
        await bench.load(1, 1, standby=False)
        assert await bench.let(1) == [1]
        await bench.enlist(2, runs=(1,))
        await bench.load(2, 1, standby=False)
        assert await bench.loaded() == [1, 1]
        assert bench.made == [1]
        for attempt in (3, 4):
            await bench.enlist(attempt, standbys=(1,))
            await bench.load(attempt, 1, standby=True)
            await bench.let(1)
            assert bench.made == [1, 1]
        await bench.enlist(5, runs=(1,))
        await bench.load(5, 1, standby=False)
        assert await bench.loaded() == [1] * 5
        assert bench.made == [1, 1], "it takes over with the weights that it has"

    run(story, monkeypatch)


def test_what_a_check_asks_of_a_stage_that_is_not_here_fails_the_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        await bench.enlist(1, standbys=(1,))
        fence, number = Fence(1, 1, 1), 5
        asked = (
            wire.RequestSketches(fence=fence, stage=1, number=number, session=1, start=0, length=4),
            wire.ReadAgain(
                fence=fence, stage=1, number=number, session=1, length=4, keys=(b"k" * 32, b"l" * 32), reply=fence
            ),
            wire.ShowRows(
                fence=fence, stage=0, number=number, segment=wire.Segment(1, 0, 4, 0, (0,)), peer=OWNER, reply=fence
            ),
        )
        for order in asked:
            await bench.driver.send(order)
        await bench.loaded()
        failed = [answer for answer in bench.answers if isinstance(answer, wire.CheckFailed)]
        assert [(one.stage, one.number) for one in failed] == [(1, 5), (1, 5), (0, 5)]
        assert not bench.serving.done()
        assert not [answer for answer in bench.answers if isinstance(answer, wire.StageFailed)]

    run(story, monkeypatch)
