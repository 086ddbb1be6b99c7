"""The stage host's small parts: the provider's share, ordered sending, links, sums of gradients, chunks of state."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from fusionai.backends.interface import WorksIn
from fusionai.execution import host as compute
from fusionai.execution.connections import LocalChannel
from fusionai.execution.host import ComputeThread
from fusionai.execution.links import Links, Outbox, dials
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.tensors import CHUNK_BYTES, chunks
from fusionai.primitives.errors import ChannelClosed, ExecutionError, TransportError, WireError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.interface import Envelope
from fusionai.wire import messages as wire
from harness.memory_transport import MemoryNetwork
from harness.pool import peer_id
from harness.virtual_clock import VirtualClock

ME, OTHER, OWNER = peer_id(0), peer_id(1), peer_id(2)


# ------------------------------------------------------------------------------------------------------------ share


@pytest.mark.parametrize(("share", "rest_s"), [(1.0, 0.0), (0.5, 3.0), (0.75, 1.0), (0.1, 27.0)])
def test_a_provider_that_lends_a_part_rests_for_the_rest(share: float, rest_s: float, monkeypatch: pytest.MonkeyPatch):
    class Clock:
        now_s = 100.0
        slept_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        thread_time = process_time = monotonic

        def sleep(self, seconds: float) -> None:
            self.slept_s += seconds
            self.now_s += seconds

    clock = Clock()
    monkeypatch.setattr(compute, "time", clock)

    def work() -> str:
        clock.now_s += 3.0
        return "done"

    async def run() -> None:
        thread = ComputeThread(share)
        result, timed = await thread.run(work)
        assert result == "done"
        assert timed.busy_s == 3.0
        assert (timed.start_s, timed.end_s) == (100.0, pytest.approx(103.0 + rest_s))
        assert clock.now_s == 103.0, "what was made goes out before the rest"
        _, timed = await thread.run(work)
        assert timed.start_s == pytest.approx(103.0 + rest_s)
        assert clock.slept_s == pytest.approx(rest_s)
        clock.now_s += 2 * rest_s  # nothing to do: that was a rest
        _, timed = await thread.run(work)
        assert timed.start_s == pytest.approx(106.0 + 3 * rest_s)
        # Loading a stage happens once, and a job waits for it.
        before_s = clock.now_s = clock.now_s + rest_s
        _, timed = await thread.run(work, rests=False)
        assert (timed.start_s, timed.end_s) == (pytest.approx(before_s), pytest.approx(before_s + 3.0))
        _, timed = await thread.run(work)
        assert timed.start_s == pytest.approx(before_s + 3.0)
        thread.close()

    asyncio.run(run())
    assert clock.slept_s == pytest.approx(rest_s)


@pytest.mark.parametrize(
    ("where", "rest_s"), [("caller", 1.0), ("threads", 2.0), ("device", 3.0)], ids=lambda value: str(value)
)
@pytest.mark.skipif(sys.platform == "win32", reason="counts a processor's time too coarsely")
def test_for_what_other_programs_took_meanwhile_nobody_rests(
    where: WorksIn, rest_s: float, monkeypatch: pytest.MonkeyPatch
):
    class Clock:
        at_s = 0.0

        def monotonic(self) -> float:
            return 3 * self.at_s

        def process_time(self) -> float:
            return 2 * self.at_s

        def thread_time(self) -> float:
            return self.at_s

    clock = Clock()
    monkeypatch.setattr(compute, "time", clock)

    def work() -> None:
        clock.at_s += 1.0

    async def run() -> None:
        thread = ComputeThread(0.5)
        thread.works_in(where)
        _, timed = await thread.run(work)
        thread.close()
        assert timed.busy_s == 3.0
        assert timed.end_s == pytest.approx(3.0 + rest_s)

    asyncio.run(run())


def test_work_that_fails_is_followed_by_a_rest_too(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise ExecutionError("no.")

    async def run() -> None:
        thread = ComputeThread(1e-9)
        with pytest.raises(ExecutionError):
            await thread.run(fail)
        rests: list[float] = []
        monkeypatch.setattr(time, "sleep", rests.append)
        await thread.run(lambda: None)
        thread.close()
        assert len(rests) == 1
        assert rests[0] > 0

    asyncio.run(run())


def test_pieces_of_work_run_one_after_the_other_in_order():
    async def run() -> list[int]:
        thread, order, at_work = ComputeThread(), list[int](), list[int]()

        def piece(number: int) -> None:
            assert not at_work
            at_work.append(number)
            time.sleep(0)
            order.append(at_work.pop())

        await asyncio.gather(*(thread.run(lambda n=n: piece(n)) for n in range(20)))
        thread.close()
        return order

    assert asyncio.run(run()) == list(range(20))


def test_whoever_submits_work_is_told_on_the_loop_what_came_of_it():
    async def run() -> None:
        thread = ComputeThread()
        told: asyncio.Queue[object] = asyncio.Queue()

        def fail() -> None:
            raise ExecutionError("no.")

        def done(outcome: object) -> None:
            assert threading.current_thread() is threading.main_thread()
            told.put_nowait(outcome)

        thread.submit(lambda: "made", done)
        thread.submit(fail, done)
        made = await told.get()
        assert isinstance(made, tuple)
        assert made[0] == "made"
        assert isinstance(await told.get(), ExecutionError)
        thread.close()

    asyncio.run(run())


def test_work_that_ends_after_the_loop_is_nobodys():
    thread, at_work, go_on = ComputeThread(), threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        go_on.wait()

    async def run() -> None:
        thread.submit(work, lambda _: pytest.fail("nobody is there to be told"))
        at_work.wait()

    asyncio.run(run())
    go_on.set()
    thread.close()


# ---------------------------------------------------------------------------------------------------------- sending


class Channel(LocalChannel):
    """Notes what is sent; fails where told to."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(OTHER, "control")
        self.sent: list[wire.Message] = []
        self.error = error

    async def send(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)


def ping(number: int) -> wire.Ping:
    return wire.Ping(sequence=number, sent_at_s=0.0)


def test_an_outbox_keeps_the_order_and_sends_what_is_queued_before_it_closes():
    async def run() -> None:
        channel = Channel()
        outbox = Outbox(channel, pytest.fail)
        for number in range(5):
            outbox.post(ping(number))
        assert outbox.waiting == 5
        await outbox.close()
        assert channel.sent == [ping(number) for number in range(5)]
        assert channel.closed

    asyncio.run(run())


class Prompt(Channel):
    """Takes what it can at once, as long as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(error)
        self.ready = True

    def send_at_once(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> bool:
        if self.error is not None:
            raise self.error
        if self.ready:
            self.sent.append(message)
        return self.ready


def test_an_outbox_passes_by_its_queue_only_where_nothing_waits():
    async def run() -> None:
        channel = Prompt()
        outbox = Outbox(channel, pytest.fail)
        outbox.post(ping(0))
        assert channel.sent == [ping(0)], "sent before anything else happens"
        channel.ready = False
        outbox.post(ping(1))
        channel.ready = True
        outbox.post(ping(2))
        assert channel.sent == [ping(0)], "the second waits, so does the third"
        await outbox.flush()
        outbox.post(ping(3))
        assert channel.sent == [ping(number) for number in range(4)]
        await outbox.close()
        outbox.post(ping(4))
        assert channel.sent == [ping(number) for number in range(4)]

    asyncio.run(run())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [ChannelClosed("gone."), WireError("too large a frame.")], ids=["lost", "too large"])
def test_what_can_not_be_sent_is_reported_once_and_ends_the_channel(error: Exception, at_once: bool):
    async def run() -> None:
        lost: list[str] = []
        channel = Prompt(error) if at_once else Channel(error)
        outbox = Outbox(channel, lost.append)
        outbox.post(ping(0))
        outbox.post(ping(1))
        await outbox.flush()
        assert lost == [str(error)]
        assert channel.closed, "the other side must not wait for what will never come"
        assert outbox.ended
        outbox.post(ping(2))
        await outbox.close()
        assert lost == [str(error)]

    asyncio.run(run())


def test_exactly_one_side_dials():
    for one, other in ((ME, OTHER), (ME, OWNER), (OTHER, OWNER)):
        assert dials(one, other, OWNER) != dials(other, one, OWNER)
    assert dials(OWNER, ME, OWNER), "the owner's machine may listen to nobody"


def test_a_link_whose_reader_has_a_bug_is_lost_and_can_be_dialled_again():
    async def run() -> None:
        network = MemoryNetwork()
        lost: list[str] = []
        opened = asyncio.Queue[object]()
        over = asyncio.Event()

        async def accept(channel: LocalChannel) -> None:
            await channel.receive()
            await channel.send(wire.Done())
            opened.put_nowait(channel)
            await over.wait()

        async def broken(peer: str, envelope: Envelope) -> None:
            raise ZeroDivisionError("a bug")

        listener = await network.transport(OTHER).listen(accept, host="there", port=0)  # pyright: ignore
        links = Links(
            network.transport(ME),
            memory=MemoryBudget(None),
            on_message=broken,
            on_lost=lambda peer, reason: lost.append(reason),
            now_s=VirtualClock().now_s,
        )
        opening = wire.OpenJob(job="job-1", fence=wire.Fence(1, 1, 0), ticket=b"")
        with pytest.raises(TransportError, match="no link"):
            links.post(OTHER, ping(0), ())
        links.dial(OTHER, listener.addresses, opening)
        links.dial(OTHER, listener.addresses, opening)
        channel = await opened.get()
        await channel.send(wire.Done())  # pyright: ignore
        with pytest.raises(ChannelClosed):
            await channel.receive()  # pyright: ignore
        assert lost == ["ZeroDivisionError: a bug"]
        links.dial(OTHER, listener.addresses, opening)
        assert await opened.get() is not channel
        assert opened.empty(), "each time one link"
        await links.close()
        over.set()
        await listener.close()

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------ state


def test_chunks_are_bounded_complete_and_in_order():
    sizes = [10, CHUNK_BYTES - 20, 11, CHUNK_BYTES + 5, 3]
    entries = [(f"e{i}", host_tensor("uint8", (size,), bytes(size))) for i, size in enumerate(sizes)]
    made = list(chunks(entries))
    assert [[name for name, _ in chunk] for chunk in made] == [["e0", "e1"], ["e2"], ["e3"], ["e4"]]
    assert list(chunks([])) == []
