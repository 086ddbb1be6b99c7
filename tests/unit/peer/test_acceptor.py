"""Who is let in, and for what: every ticket that does not fit is refused, and the peer stays as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fusionai.primitives.errors import FusionError, TransportError
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence
from harness.pool import JOB, OWNER, peer_id
from harness.stand import FENCE, NEIGHBOUR, PATIENCE_S, Running, Stand, receive, until

OTHER = peer_id(5)


def with_stand(body: Callable[[Stand], Awaitable[None]], **options: object) -> None:
    async def run() -> None:
        async with Stand(**options) as stand:  # pyright: ignore[reportArgumentType]
            await body(stand)

    asyncio.run(run())


async def refused(answer: tuple[Channel, wire.Message]) -> wire.Refused:
    channel, message = answer
    assert isinstance(message, wire.Refused), message
    with pytest.raises(TransportError):
        await receive(channel)
    return message


BAD_TICKETS: dict[str, tuple[Callable[[Stand], dict[str, object]], str]] = {
    "no ticket": (lambda stand: {"ticket": b""}, "bad_ticket"),
    "garbage": (lambda stand: {"ticket": b"\x00" * 200}, "bad_ticket"),
    "a flipped bit": (lambda stand: {"ticket": _flipped(stand.pool.ticket(OWNER, driver=True))}, "bad_ticket"),
    "expired": (lambda stand: {"ticket": stand.pool.ticket(OWNER, driver=True, lifetime_s=-1.0)}, "expired_ticket"),
    "for another job": (lambda stand: {"ticket": stand.pool.ticket(OWNER, driver=True, job="job-2")}, "bad_ticket"),
    "of another peer": (lambda stand: {"ticket": stand.pool.ticket(NEIGHBOUR, driver=True)}, "bad_ticket"),
    "for another plan": (lambda stand: {"ticket": stand.pool.ticket(OWNER, driver=True, version=2)}, "bad_ticket"),
    "of a stage": (lambda stand: {"ticket": stand.pool.ticket(OWNER)}, "not_authorised"),
}


def _flipped(ticket: bytes) -> bytes:
    return bytes([ticket[0] ^ 1]) + ticket[1:]


@pytest.mark.parametrize("name", BAD_TICKETS)
def test_a_driver_whose_ticket_does_not_fit_is_refused(name: str):
    changes, code = BAD_TICKETS[name]

    async def body(stand: Stand) -> None:
        answer = await refused(await stand.open(**changes(stand)))  # pyright: ignore[reportArgumentType]
        assert answer.code == code
        assert stand.pool.doors[0].jobs == ()
        assert stand.pool.doors[0].idle.is_set()
        _, message = await stand.open()
        assert isinstance(message, wire.Done), "the right driver still comes in"

    with_stand(body)


def test_a_ticket_signed_by_another_pool_is_refused():
    async def body(stand: Stand) -> None:
        async with Stand() as elsewhere:
            ticket = elsewhere.pool.ticket(OWNER, driver=True)
        assert (await refused(await stand.open(ticket=ticket))).code == "bad_ticket"

    with_stand(body)


def test_a_stranger_reaches_nothing():
    async def body(stand: Stand) -> None:
        with pytest.raises(FusionError):
            await stand.dial("control", as_peer=None)

    with_stand(body)


@pytest.mark.parametrize("stream", ["tensors", "state"])
def test_without_a_job_there_is_nothing_to_join(stream: wire.Stream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.peer.acceptor.EARLY_S", 0.01)

    async def body(stand: Stand) -> None:
        assert (await refused(await stand.open(stream, as_peer=NEIGHBOUR))).code == "unknown_job"

    with_stand(body)


@pytest.mark.parametrize("stream", ["tensors", "state"])
def test_a_neighbour_that_is_here_before_the_driver_waits_for_it(stream: wire.Stream):
    async def body(stand: Stand) -> None:
        early = asyncio.create_task(stand.open(stream, as_peer=NEIGHBOUR))
        await until(lambda: len(stand.pool.doors[0]._changed._waiters) == 1)
        assert isinstance((await stand.open())[1], wire.Done)
        assert isinstance((await early)[1], wire.Done)

    with_stand(body)


def test_a_state_connection_is_for_the_jobs_own_driver_and_for_snapshots_of_its_members():
    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        other, answer = await stand.open("state", as_peer=NEIGHBOUR)
        assert isinstance(answer, wire.Done)
        await other.send(wire.StateChunk(fence=FENCE, stage=0, step=0, last=True))
        with pytest.raises(TransportError):
            await receive(other)
        await control.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await receive(control)).message, wire.Pong), "no stage fails for it"
        ticket = stand.pool.ticket(OTHER, driver=True)
        assert (await refused(await stand.open("state", as_peer=OTHER, ticket=ticket))).code == "not_authorised"

    with_stand(body)


def test_an_older_plan_and_an_older_driver_are_refused():
    async def body(stand: Stand) -> None:
        newer = Fence(2, 3, 0)
        control, message = await stand.open(fence=newer)
        assert isinstance(message, wire.Done)
        assert (await refused(await stand.open("tensors", as_peer=NEIGHBOUR, fence=FENCE))).code == "stale_fence"
        assert (await refused(await stand.open(fence=FENCE))).code == "stale_fence"
        assert (await refused(await stand.open(fence=Fence(2, 2, 9)))).code == "stale_fence"
        await control.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await receive(control)).message, wire.Pong), "the newer driver noticed nothing"

    with_stand(body)


def test_a_later_start_of_the_driver_takes_the_job_over():
    async def body(stand: Stand) -> None:
        old = await stand.running()
        control, message = await stand.open(fence=Fence(1, 2, 0))
        assert isinstance(message, wire.Done)
        with pytest.raises(TransportError):
            await receive(old.control)
        assert stand.member.stages == (0,), "what it runs is kept"
        status = await stand.round(control, Fence(1, 2, 0))
        assert (status.applied, status.prepared) == (0, -1)

    with_stand(body)


def test_drivers_that_come_at_once_leave_exactly_one_at_work():
    async def body(stand: Stand) -> None:
        await stand.running()
        opened = await asyncio.gather(*(stand.open(fence=Fence(1, n, 0)) for n in (2, 3, 4)))
        served = [channel for channel, message in opened if isinstance(message, wire.Done)]
        answering = 0
        for channel in served:
            try:
                await channel.send(wire.Ping(sequence=1, sent_at_s=0.0))
                answering += isinstance((await receive(channel)).message, wire.Pong)
            except TransportError:
                continue
        assert answering == 1
        assert len(stand.pool.doors[0].jobs) == 1

    with_stand(body)


def test_a_second_job_is_told_that_this_peer_is_busy():
    async def body(stand: Stand) -> None:
        await stand.open()
        ticket = stand.pool.ticket(OTHER, driver=True, job="job-2", version=2)
        later = Fence(2, 1, 0)
        answer = await refused(await stand.open(as_peer=OTHER, job="job-2", ticket=ticket, fence=later))
        assert (answer.code, JOB in answer.reason) == ("busy", True)

    with_stand(body)


def test_a_peer_that_leaves_takes_no_job():
    async def body(stand: Stand) -> None:
        await stand.pool.doors[0].close()
        assert (await refused(await stand.open())).code == "leaving"

    with_stand(body)


def test_a_connection_begins_with_opening_a_job_or_a_probe():
    async def body(stand: Stand) -> None:
        channel = await stand.dial("control")
        await channel.send(wire.Resume(fence=FENCE, stage=0, committed=0, source="keep"))
        message = (await receive(channel)).message
        assert isinstance(message, wire.Refused)
        assert message.code == "bad_message"
        channel = await stand.dial("control")
        await channel.send(wire.Ping(sequence=3, sent_at_s=1.0))
        assert (await receive(channel)).message == wire.Pong(sequence=3, sent_at_s=1.0)

    with_stand(body)


def test_whoever_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.peer.acceptor.OPENING_TIMEOUT_S", 0.05)

    async def body(stand: Stand) -> None:
        channel = await stand.dial("control")
        with pytest.raises(TransportError):
            await receive(channel)

    with_stand(body)


# ------------------------------------------------------------------------------------------------- orphans


async def orphaned(stand: Stand) -> Running:
    """The driver's connection ended, in the middle of a step, without a word."""
    running = await stand.running()
    member = stand.member
    await running.feed_microbatch(0)
    await running.control.close()
    await until(lambda: not member.driven)
    return running


def test_a_member_outlives_its_drivers_connection_and_the_next_one_finds_its_state():
    async def body(stand: Stand) -> None:
        await orphaned(stand)
        member = stand.member
        assert (stand.pool.doors[0].jobs, stand.pool.doors[0].idle.is_set()) == ((JOB,), False)
        control, answer = await stand.open(fence=Fence(1, 2, 0))
        assert isinstance(answer, wire.Done)
        status = await stand.round(control, Fence(1, 2, 0))
        assert (status.applied, stand.member) == (0, member)

    with_stand(body)


def test_only_its_own_driver_takes_a_job_over():
    async def body(stand: Stand) -> None:
        await orphaned(stand)
        ticket = stand.pool.ticket(OTHER, driver=True)
        answer = await refused(await stand.open(as_peer=OTHER, ticket=ticket, fence=Fence(1, 5, 0)))
        assert answer.code == "not_authorised"
        assert (await refused(await stand.open(fence=Fence(1, 0, 9)))).code == "stale_fence"
        assert stand.member.stages == (0,)

    with_stand(body)


def test_an_orphaned_job_ends_when_its_driver_stays_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.peer.acceptor.ORPHANED_S", 0.05)

    async def body(stand: Stand) -> None:
        await orphaned(stand)
        await asyncio.wait_for(stand.pool.doors[0].idle.wait(), PATIENCE_S)
        assert stand.pool.doors[0].jobs == ()
        _, message = await stand.open()
        assert isinstance(message, wire.Done)

    with_stand(body)


def test_a_driver_that_came_back_is_not_waited_for_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.peer.acceptor.ORPHANED_S", 0.05)

    async def body(stand: Stand) -> None:
        await orphaned(stand)
        control, _ = await stand.open(fence=Fence(1, 2, 0))
        await asyncio.sleep(0.1)
        assert (await stand.round(control, Fence(1, 2, 0))).applied == 0

    with_stand(body)


def test_an_orphaned_job_gives_way_to_another():
    async def body(stand: Stand) -> None:
        await orphaned(stand)
        later = Fence(2, 1, 0)
        ticket = stand.pool.ticket(OTHER, driver=True, job="job-2", version=2)
        _, message = await stand.open(as_peer=OTHER, job="job-2", ticket=ticket, fence=later)
        assert isinstance(message, wire.Done)
        assert stand.pool.doors[0].jobs == ("job-2",)

    with_stand(body)


def test_a_ticket_of_a_job_that_is_over_ends_no_other_job():
    """It is signed and has not expired, and the other job's driver is away for a moment."""

    async def body(stand: Stand) -> None:
        old = stand.pool.ticket(OTHER, driver=True, job="job-0")
        later = Fence(2, 1, 0)
        ticket = stand.pool.ticket(OWNER, driver=True, version=2)
        control, message = await stand.open(ticket=ticket, fence=later)
        assert isinstance(message, wire.Done)
        answer = await refused(await stand.open(as_peer=OTHER, job="job-0", ticket=old))
        assert (answer.code, "job-0 is over on this machine" in answer.reason) == ("expired_ticket", True)
        assert stand.pool.doors[0].jobs == (JOB,)
        await control.close()

    with_stand(body)


def test_tickets_end_with_their_job_as_soon_as_the_broker_says_so():
    async def body(stand: Stand) -> None:
        door = stand.pool.doors[0]
        door.placed("", 3)
        assert (await refused(await stand.open())).code == "expired_ticket"
        door.placed(JOB, 3)
        control, message = await stand.open()
        assert isinstance(message, wire.Done)
        await control.close()
        door.placed("", 0)
        other = stand.pool.ticket(OTHER, driver=True, job="job-2", version=2)
        _, message = await stand.open(as_peer=OTHER, job="job-2", ticket=other, fence=Fence(2, 1, 0))
        assert isinstance(message, wire.Done), "the broker was set back to an earlier state"

    with_stand(body)


def test_a_detached_peer_is_free_at_once():
    async def body(stand: Stand) -> None:
        running = await stand.running()
        await running.control.send(wire.Detach(fence=FENCE))
        await asyncio.wait_for(stand.pool.doors[0].idle.wait(), PATIENCE_S)
        assert stand.pool.doors[0].jobs == ()

    with_stand(body)


def test_a_late_detach_of_an_earlier_round_frees_nobody():
    async def body(stand: Stand) -> None:
        running = await stand.running()
        await stand.round(running.control, Fence(1, 1, 1))
        await running.control.send(wire.Detach(fence=FENCE))
        assert await running.alive()
        assert stand.member.stages == (0,)

    with_stand(body)


def test_a_peer_the_pool_went_on_without_forgets_everything_at_once():
    async def body(stand: Stand) -> None:
        running = await stand.running()
        door = stand.pool.doors[0]
        door.clear()
        assert (door.jobs, door.idle.is_set()) == ((), True)
        with pytest.raises(TransportError):
            await receive(running.control)
        control, _ = await stand.attached(fence=Fence(1, 1, 0))
        assert stand.member._stages.runtimes[0]._machine.applied == -1
        await control.close()

    with_stand(body)


def test_a_draining_peer_serves_its_job_on_and_takes_no_other():
    async def body(stand: Stand) -> None:
        await orphaned(stand)
        stand.pool.doors[0].closing = True
        ticket = stand.pool.ticket(OTHER, driver=True, job="job-2", version=2)
        answer = await refused(await stand.open(as_peer=OTHER, job="job-2", ticket=ticket, fence=Fence(2, 1, 0)))
        assert answer.code == "leaving"
        control, _ = await stand.open(fence=Fence(1, 2, 0))
        assert (await stand.round(control, Fence(1, 2, 0))).applied == 0

    with_stand(body)
