"""A peer's stays in the pool: lending pauses, work is handed over first, and it goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from fusionai.peer import lending
from fusionai.peer.daemon import _lent, _stay
from fusionai.peer.device import stay
from fusionai.peer.lending import BUSY_AFTER_S, QUIET_AFTER_S, Lending, OthersLoad, parse_schedule
from fusionai.primitives.errors import RefusedError
from harness.patience import CEILING_S
from harness.virtual_clock import VirtualClock


class Door:
    """Jobs as told."""

    def __init__(self, *jobs: str) -> None:
        self.jobs: tuple[str, ...] = jobs
        self.closing = True
        self.idle = asyncio.Event()
        if not jobs:
            self.idle.set()

    def finish(self) -> None:
        self.jobs = ()
        self.idle.set()

    def clear(self) -> None:
        self.finish()


class Pool:
    """A registration that notes what the broker is told."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.told: list[str] = []
        self.fails = fails
        self.leave_notice: Callable[[bool], None] = lambda _: None

    def entered(self, on_leave: Callable[[bool], None]) -> Any:
        self.leave_notice = on_leave
        self.told.append("registered")
        return self

    async def run(self) -> None:
        if self.fails is not None:
            raise self.fails
        await asyncio.Event().wait()

    async def leave(self, *, drain: bool = False) -> None:
        self.told.append("drain" if drain else "leave")


class Device:
    """One device of the box, whose job acceptor and registration are the two above."""

    def __init__(self, door: Door, pool: Pool) -> None:
        self.acceptor = door
        self.pool = pool

    async def stay(self, _announce: object, stop: asyncio.Event, pausing: asyncio.Future[str]) -> bool:
        return await stay(self.acceptor, self.pool.entered, stop, pausing)  # pyright: ignore


def staying(devices: list[Device], times: object, stop: asyncio.Event, said: Callable[[str], None]) -> Any:
    return _stay(devices, lambda _: None, times, stop, said)  # pyright: ignore


class Times:
    """Lent until told otherwise."""

    always = False

    def __init__(self) -> None:
        self.kept = asyncio.Event()

    async def until(self, *, lent: bool) -> str | None:
        assert not lent
        await self.kept.wait()
        return "other programs use it"


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(CEILING_S):
            await body()

    asyncio.run(bounded())


def test_who_stops_leaves_for_good() -> None:
    async def body() -> None:
        door, pool, stop = Door(), Pool(), asyncio.Event()
        stay = asyncio.create_task(staying([Device(door, pool)], Times(), stop, pytest.fail))
        await turns()
        assert not door.closing
        stop.set()
        assert not await stay
        assert pool.told == ["registered", "leave"]

    run(body)


def test_a_pause_hands_the_work_over_first_and_ends_the_stay_only() -> None:
    async def body() -> None:
        door, pool, times, said = Door("a job"), Pool(), Times(), list[str]()
        stay = asyncio.create_task(staying([Device(door, pool)], times, asyncio.Event(), said.append))
        await turns()
        times.kept.set()
        await turns()
        assert pool.told == ["registered", "drain"]
        assert said == ["Lending pauses: other programs use it. Handing its work over."]
        assert door.closing
        assert not stay.done(), "its job has not gone on elsewhere yet"
        door.finish()
        assert await stay
        assert pool.told == ["registered", "drain", "leave"]

    run(body)


def test_a_stop_does_not_wait_for_a_pause() -> None:
    async def body() -> None:
        door, pool, times, stop = Door("a job"), Pool(), Times(), asyncio.Event()
        stay = asyncio.create_task(staying([Device(door, pool)], times, stop, lambda _: None))
        times.kept.set()
        await turns()
        stop.set()
        assert not await stay
        assert pool.told == ["registered", "drain", "leave"]

    run(body)


def test_who_is_asked_to_leave_does_not_come_back() -> None:
    async def body() -> None:
        door, pool = Door("a job"), Pool()
        stay = asyncio.create_task(staying([Device(door, pool)], Times(), asyncio.Event(), pytest.fail))
        await turns()
        pool.leave_notice(True)
        await turns()
        assert not stay.done()
        door.finish()
        assert not await stay

    run(body)


def test_a_refusal_by_the_broker_is_raised() -> None:
    async def body() -> None:
        pool = Pool(RefusedError("no.", code="not_authorised"))
        with pytest.raises(RefusedError):
            await staying([Device(Door(), pool)], Times(), asyncio.Event(), pytest.fail)
        await turns()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody watches for a stay that is over"

    run(body)


def test_it_waits_for_its_schedule_and_says_until_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LOOK_EVERY_S", 0.0)

    async def body() -> None:
        local = [datetime(2024, 1, 1, 12, 0)]
        times = Lending(
            parse_schedule(["22:00-07:00"]), pause_when_busy=False, clock=VirtualClock(), local=lambda: local[0]
        )
        said: list[str] = []
        waiting = asyncio.create_task(_lent(times, asyncio.Event(), said.append))
        await turns()
        assert not waiting.done()
        assert said == ["Not lent now: its schedule keeps it until Mon 22:00."]
        local[0] = datetime(2024, 1, 1, 22, 0)
        assert await waiting
        kept = asyncio.create_task(times.until(lent=False))
        await turns()
        assert not kept.done()
        local[0] = datetime(2024, 1, 2, 7, 0)
        assert await kept == "its schedule keeps it until Tue 22:00"

    run(body)


def test_a_stop_ends_the_waiting() -> None:
    async def body() -> None:
        times = Lending(
            parse_schedule(["22:00-07:00"]),
            pause_when_busy=False,
            clock=VirtualClock(),
            local=lambda: datetime(2024, 1, 1, 12, 0),
        )
        stop = asyncio.Event()
        waiting = asyncio.create_task(_lent(times, stop, lambda _: None))
        await turns()
        stop.set()
        assert not await waiting

    run(body)


def test_other_programs_pause_it_and_their_end_resumes_it() -> None:
    clock, load = VirtualClock(), [0.9]
    times = Lending(None, pause_when_busy=True, clock=clock, load=lambda _: load[0])
    assert times.why_not() is None
    clock.advance(BUSY_AFTER_S)
    assert times.why_not() == "other programs use it"
    load[0] = 0.0
    assert times.why_not() == "other programs use it"
    clock.advance(QUIET_AFTER_S)
    assert times.why_not() is None


def test_without_limits_there_is_nothing_to_watch() -> None:
    assert Lending(None, pause_when_busy=False, clock=VirtualClock()).always
    assert not Lending(None, pause_when_busy=True, clock=VirtualClock()).always


def test_own_work_and_that_of_workers_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, user: float, *workers: Process) -> None:
            self.user, self.system, self.workers = user, 0.0, list(workers)

        def cpu_times(self) -> Process:
            return self

        def children(self) -> list[Process]:
            return self.workers

    class Ended(Process):
        def cpu_times(self) -> Process:
            raise lending.psutil.NoSuchProcess(1)

    worker, total = Process(6.0), [100.0]
    own = Process(4.0, worker, Ended(0.0))

    class Total(tuple[float, ...]):
        idle, iowait = 900.0, 50.0

    monkeypatch.setattr(lending.psutil, "cpu_times", lambda: Total((total[0], 900.0, 50.0)))
    monkeypatch.setattr(lending.os, "cpu_count", lambda: 4)
    load = OthersLoad(_process=own)  # pyright: ignore
    assert load.measured(0.0) == 0.0, "nothing is known yet"
    own.user, worker.user, total[0] = 5.0, 9.0, 106.0
    assert load.measured(2.0) == pytest.approx(2.0 / 8.0), "6 s of 8, of which 1 is its own and 3 its worker's"
    assert load.measured(2.0) == 0.0, "no time has passed"
    own.user, total[0] = 24.0, 108.0
    assert load.measured(4.0) == 0.0, "never below none"
