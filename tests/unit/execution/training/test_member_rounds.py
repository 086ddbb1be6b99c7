"""Rounds at a member: who is enlisted, what waits for work under way, what a lost or silent link means."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from fusionai.coordination.round.liveness import DEADLINE_S, PING_S, SHORTEST_S
from fusionai.execution.links import Links, StateConnections
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.training.boundary import boundaries
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import FusionError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel, Envelope, Remote
from fusionai.wire import messages as wire
from fusionai.wire.frame import STREAM_LIMITS, encode_frame_head, headers
from fusionai.wire.messages import Fence
from harness.memory_transport import MemoryNetwork
from harness.null_backend import NullBackend
from harness.pool import OWNER, peer_id, tensor
from harness.stand import FENCE, NEIGHBOUR, PATIENCE_S, Running, Stand, commit, forward, layers, receive, rows, until
from harness.virtual_clock import VirtualClock

LATER = Fence(1, 1, 1)


def with_stand(body: Callable[[Stand], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with Stand(**options) as stand:
            await body(stand)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()], "a task is left"

    asyncio.run(run())


def with_running(body: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def started(stand: Stand) -> None:
        await body(await stand.running())

    with_stand(started, **options)


# --------------------------------------------------------------------------------------------------------- enlisting


def test_an_attach_without_enlisting_is_refused():
    async def body(stand: Stand) -> None:
        control, _ = await stand.open()
        answer = await stand.attach_on(control)
        assert isinstance(answer, wire.StageFailed)
        assert "not enlisted" in answer.reason
        await stand.enlisted(control, fence=LATER)
        for fence in (FENCE, Fence(1, 1, 2)):
            answer = await stand.attach_on(control, fence=fence)
            assert isinstance(answer, wire.StageFailed)
            assert answer.fence == fence
        assert isinstance(await stand.attach_on(control, fence=LATER), wire.Status)

    with_stand(body)


class Unrepeated(NullBackend):
    """A card that has no deterministic kernels for its stages."""

    def load(self, *given: Any, **options: Any) -> Any:
        program = super().load(*given, **options)
        program.repeats = False
        return program


@pytest.mark.parametrize(("backend", "fingerprint"), [(NullBackend, "test"), (Unrepeated, "")])
def test_a_stage_that_does_not_repeat_its_bits_reports_no_fingerprint(backend: Any, fingerprint: str):
    async def body(stand: Stand) -> None:
        control, _ = await stand.open()
        await stand.enlisted(control)
        status = await stand.attach_on(control)
        assert isinstance(status, wire.Status)
        assert status.fingerprint == fingerprint

    with_stand(body, backend=backend)


@pytest.mark.parametrize("fence", [FENCE, Fence(1, 0, 7), Fence(0, 9, 9)])
def test_nobody_is_enlisted_under_a_fence_that_is_not_later(fence: Fence):
    async def body(running: Running) -> None:
        await running.control.send(running.stand.enlist(fence=fence))
        answer = (await receive(running.control)).message
        assert isinstance(answer, wire.Refused)
        assert answer.code == "stale_fence"
        await running.feed_microbatch(0)
        assert await running.alive()

    with_running(body)


def test_a_member_may_standby_and_run_nothing():
    async def body(stand: Stand) -> None:
        control, _ = await stand.open()
        enlisted = await stand.enlisted(control, neighbours=stand.neighbours(at=1), standbys=(0,))
        assert (enlisted.snapshots, enlisted.fingerprint) == ((), "test")
        assert stand.member.stages == ()
        assert stand.from_peer.empty()

    with_stand(body, standbys=1)


def test_a_stage_that_is_placed_elsewhere_is_forgotten_and_its_links_too():
    async def body(running: Running) -> None:
        stand = running.stand
        elsewhere = tuple(wire.Neighbour(stage=stage, peer=peer) for stage, peer in ((0, peer_id(7)), (1, peer_id(8))))
        await stand.enlisted(running.control, fence=Fence(2, 1, 0), neighbours=elsewhere)
        assert stand.member.stages == ()
        with pytest.raises(TransportError):
            await receive(running.neighbour)
        await running.control.send(wire.Ping(sequence=5, sent_at_s=0.0))
        assert isinstance((await receive(running.control)).message, wire.Pong), "closing it is no loss"

    with_running(body)


def test_who_only_standbys_drops_the_links_of_the_stage_it_had():
    async def body(running: Running) -> None:
        stand = running.stand
        places = ((0, peer_id(7)), (1, NEIGHBOUR), (2, OWNER))
        moved = tuple(wire.Neighbour(stage=stage, peer=peer) for stage, peer in places)
        await stand.enlisted(running.control, fence=Fence(2, 1, 0), neighbours=moved, standbys=(0,))
        for link in (running.neighbour, running.feed):
            with pytest.raises(TransportError):
                await receive(link)
        assert await running.alive(), "nor is it told that they are gone"

    with_running(body)


def test_a_broken_link_is_dialled_again_in_the_next_round_and_a_good_one_kept():
    async def body(running: Running) -> None:
        stand = running.stand
        await running.neighbour.close()
        assert (await running.link_lost()).peer == NEIGHBOUR
        await stand.round(running.control, LATER)
        neighbour = await asyncio.wait_for(stand.from_peer.get(), PATIENCE_S)
        await running.control.send(wire.Resume(fence=LATER, stage=0, committed=0, source="keep"))
        assert (await receive(running.control)).message == wire.Ready(fence=LATER, stage=0, applied=0)
        message, carried = forward(fence=LATER)
        await running.feed.send(message, tuple(carried.values()))
        assert isinstance((await receive(neighbour)).message, wire.Forward)
        await stand.round(running.control, Fence(1, 1, 2))
        await running.control.send(wire.Resume(fence=Fence(1, 1, 2), stage=0, committed=0, source="keep"))
        assert isinstance((await receive(running.control)).message, wire.Ready)
        assert stand.from_peer.empty()

    with_running(body)


def test_without_its_links_a_stage_is_not_ready_and_each_missing_one_is_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.execution.links.LINK_TIMEOUT_S", 0.05)

    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=0, source="initialise"))
        lost = (await receive(control)).message
        assert isinstance(lost, wire.LinkLost)
        assert (lost.peer, "no link to peer" in lost.reason) == (OWNER, True)
        await control.send(wire.Ping(sequence=5, sent_at_s=0.0))
        assert isinstance((await receive(control)).message, wire.Pong), "neither ready nor failed"

    with_stand(body)


def test_a_neighbour_that_never_answers_is_reported_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.execution.links.LINK_TIMEOUT_S", 0.05)

    async def body(stand: Stand) -> None:
        never = asyncio.Event()

        async def black_hole(sender: Remote, receiver: Remote, size: int) -> None:
            if NEIGHBOUR in (sender.peer, receiver.peer):
                await never.wait()

        stand.pool.network.delay = black_hole
        control, _ = await stand.attached()
        lost = (await receive(control)).message
        assert isinstance(lost, wire.LinkLost)
        assert lost.peer == NEIGHBOUR
        never.set()

    with_stand(body)


# ------------------------------------------------------------------------------------------- work under way at a round


class Gate:
    """Holds the compute thread inside a backend's call until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def hold(self, monkeypatch: pytest.MonkeyPatch, program: object, name: str) -> None:
        original = getattr(program, name)

        def held(*args: object, **kwargs: object) -> object:
            self.entered.set()
            assert self.opened.wait(PATIENCE_S)
            return original(*args, **kwargs)

        monkeypatch.setattr(program, name, held)


@pytest.mark.parametrize("call", ["forward", "apply"])
def test_an_attach_waits_for_the_work_under_way_while_the_connection_goes_on(
    call: str, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()

    async def body(running: Running) -> None:
        stand = running.stand
        gate.hold(monkeypatch, stand.member._stages.runtimes[0].program, call)
        if call == "apply":
            await running.prepared()
            await running.commit()
        else:
            message, carried = forward()
            await running.feed.send(message, tuple(carried.values()))
        await until(gate.entered.is_set)
        await stand.enlisted(running.control, fence=LATER)
        attach, carried = stand.attach(fence=LATER)
        await running.control.send(attach, tuple(carried.values()))
        await running.control.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await receive(running.control)).message, wire.Pong)
        gate.opened.set()
        status = (await receive(running.control)).message
        assert isinstance(status, wire.Status), status
        assert (status.fence, status.applied) == (LATER, int(call == "apply"))

    with_running(body)


def test_an_attach_does_not_wait_for_an_export_nobody_reads(monkeypatch: pytest.MonkeyPatch):
    async def body(running: Running) -> None:
        stand, member = running.stand, running.stand.member
        begun, never = asyncio.Event(), asyncio.Event()

        async def blocked(*args: object) -> None:
            begun.set()
            await never.wait()

        monkeypatch.setattr(member, "state", blocked)
        await running.control.send(wire.Export(fence=FENCE, stage=0, step=0))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        status = await stand.round(running.control, LATER)
        assert (status.fence, status.applied) == (LATER, 0)

    with_running(body)


def test_an_import_under_way_gives_way_to_the_next_round(monkeypatch: pytest.MonkeyPatch):
    gate = Gate()

    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        state, _ = await stand.open("state")
        await stand.open("tensors")
        runtime = stand.member._stages.runtimes[0]
        gate.hold(monkeypatch, runtime.program, "import_state")
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=8, source="import", base=8))
        chunk = {"model/layer0.weight": tensor(np.full((4, 4), 5.0, np.float32))}
        old = wire.StateChunk(fence=FENCE, stage=0, step=8, last=False, tensors=headers(chunk))
        await state.send(old, tuple(chunk.values()))
        await until(gate.entered.is_set)
        await stand.enlisted(control, fence=LATER)
        attach, carried = stand.attach(fence=LATER)
        await control.send(attach, tuple(carried.values()))
        status = (await receive(control)).message
        assert isinstance(status, wire.Status), "nobody waits for the chunk"
        gate.opened.set()
        await control.send(wire.Resume(fence=LATER, stage=0, committed=8, source="import", base=8))
        entries = {**chunk, **{f"optimizer/layer0.weight/{slot}": chunk["model/layer0.weight"] for slot in SLOTS}}
        entries["optimizer/layer0.weight/step"] = tensor(np.array(8, np.float32))
        new = wire.StateChunk(fence=LATER, stage=0, step=8, last=True, tensors=headers(entries))
        await state.send(new, tuple(entries.values()))
        assert (await receive(control)).message == wire.Ready(fence=LATER, stage=0, applied=8)

    with_stand(body)


SLOTS = ("exp_avg", "exp_avg_sq")


def test_a_state_that_waits_for_a_resume_is_dropped_with_its_fence():
    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        state, _ = await stand.open("state")
        chunk = {"model/layer0.weight": rows(batch=4)}
        for fence in (FENCE, LATER):
            message = wire.StateChunk(fence=fence, stage=0, step=8, last=False, tensors=headers(chunk))
            await state.send(message, tuple(chunk.values()))
        await stand.round(control, LATER)
        await control.send(wire.Resume(fence=LATER, stage=0, committed=8, source="import", base=8))
        last = wire.StateChunk(fence=LATER, stage=0, step=8, last=True)
        await state.send(last)
        failed = (await receive(control)).message
        assert isinstance(failed, wire.StageFailed), "the connection was not blocked by the former round's chunk"
        assert "without optimizer/" in failed.reason

    with_stand(body)


def test_work_that_failed_leaves_a_stage_that_can_be_attached_again(monkeypatch: pytest.MonkeyPatch):
    async def body(running: Running) -> None:
        program = running.stand.member._stages.runtimes[0].program
        original = program.forward
        failing = [True]

        def once(*args: object, **kwargs: object) -> object:
            if failing.pop() if failing else False:
                raise ZeroDivisionError("a bug")
            return original(*args, **kwargs)  # pyright: ignore

        monkeypatch.setattr(program, "forward", once)
        message, carried = forward()
        await running.feed.send(message, tuple(carried.values()))
        assert (await running.failure()).reason == "ZeroDivisionError: a bug"
        status = await running.stand.round(running.control, LATER)
        assert status.applied == 0, "a forward that failed left the state alone"
        await running.control.send(wire.Resume(fence=LATER, stage=0, committed=0, source="keep"))
        assert isinstance((await receive(running.control)).message, wire.Ready)
        message, carried = forward(fence=LATER)
        await running.feed.send(message, tuple(carried.values()))
        assert isinstance((await receive(running.neighbour)).message, wire.Forward)

    with_running(body)


def test_an_apply_that_failed_leaves_no_state(monkeypatch: pytest.MonkeyPatch):
    async def body(running: Running) -> None:
        def broken(**kwargs: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(running.stand.member._stages.runtimes[0].program, "apply", broken)
        await running.prepared()
        await running.commit()
        await running.failure()
        assert (await running.stand.round(running.control, LATER)).applied == -1

    with_running(body)


# ---------------------------------------------------------------------------------------- what initialise leaves open


def without_rule() -> Graph:
    graph = layers()
    spec = msgspec.structs.replace(graph.params["w0"], init=None)
    return msgspec.structs.replace(graph, params={**graph.params, "w0": spec})


def test_what_has_no_rule_comes_from_the_driver_and_nothing_else():
    async def body(stand: Stand) -> None:
        control, status = await stand.attached()
        assert isinstance(status, wire.Status), status
        state, _ = await stand.open("state")
        await stand.open("tensors")
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=0, source="initialise"))
        weight = {"model/layer0.weight": rows(batch=4)}
        message = wire.StateChunk(fence=FENCE, stage=0, step=0, last=True, tensors=headers(weight))
        await state.send(message, tuple(weight.values()))
        assert (await receive(control)).message == wire.Ready(fence=FENCE, stage=0, applied=0)
        await stand.round(control, LATER)
        await control.send(wire.Resume(fence=LATER, stage=0, committed=0, source="initialise"))
        more = {**weight, "optimizer/layer0.weight/exp_avg": rows(batch=4)}
        message = wire.StateChunk(fence=LATER, stage=0, step=0, last=True, tensors=headers(more))
        await state.send(message, tuple(more.values()))
        failed = (await receive(control)).message
        assert isinstance(failed, wire.StageFailed)
        assert "exp_avg, which it does not need" in failed.reason

    partition = cut_blocks(without_rule(), ((0, 2), (2, 3), (3, 4)))
    assert boundaries(partition)[0].stage == 0
    with_stand(body, graph=without_rule())


# ------------------------------------------------------------------------------------------------------ silent links


class Far:
    """The other end: accepts connections, and is as silent as the test wants."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.clock = VirtualClock(100.0)
        self.channels: list[Channel] = []
        self.over = asyncio.Event()
        self.lost: list[str] = []

    async def __aenter__(self) -> Far:
        self.listener = await self.network.transport(peer_id(1)).listen(self._accept, host="far", port=0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.over.set()
        await self.listener.close()

    async def _accept(self, channel: Channel) -> None:
        await channel.receive()
        await channel.send(wire.Done())
        self.channels.append(channel)
        await self.over.wait()

    async def links(self) -> Links:
        """With one link up."""

        async def nothing(peer: PeerId, envelope: Envelope) -> None: ...

        links = Links(
            self.network.transport(peer_id(0)),
            memory=MemoryBudget(None),
            on_message=nothing,
            on_lost=lambda peer, reason: self.lost.append(reason),
            now_s=self.clock.now_s,
        )
        links.dial(peer_id(1), self.listener.addresses, OPENING)
        await links.up(peer_id(1))
        return links


OPENING = wire.OpenJob(job="job-1", fence=FENCE, ticket=b"")


async def beats(far: Far, beat: Callable[[], None], seconds: float, *, speaks: bool = False) -> None:
    for _ in range(round(seconds / PING_S)):
        far.clock.advance(PING_S)
        if speaks:
            await far.channels[0].send(wire.Pong(sequence=0, sent_at_s=0.0))
        for _ in range(5):
            await asyncio.sleep(0)
        beat()


def test_a_link_that_is_silent_for_too_long_is_lost():
    async def run() -> None:
        async with Far() as far:
            links = await far.links()
            await beats(far, links.beat, 3 * DEADLINE_S, speaks=True)
            assert far.lost == []
            # This connection can't tell a starved process from a machine that is gone.
            await beats(far, links.beat, DEADLINE_S - PING_S)
            assert far.lost == []
            await beats(far, links.beat, PING_S)
            assert far.lost == [f"it has been silent for {DEADLINE_S:g} s"]
            with pytest.raises(TransportError):
                links.post(peer_id(1), wire.Done(), ())
            await beats(far, links.beat, DEADLINE_S)
            assert len(far.lost) == 1
            await links.close()

    asyncio.run(run())


def test_a_link_whose_other_machine_acknowledges_nothing_is_lost_sooner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.transport.channels.framed.FramedChannel.acknowledges", False)

    async def run() -> None:
        async with Far() as far:
            links = await far.links()
            await beats(far, links.beat, 3 * DEADLINE_S, speaks=True)
            await beats(far, links.beat, SHORTEST_S - PING_S)
            assert far.lost == []
            await beats(far, links.beat, PING_S)
            assert far.lost == [f"it has been silent for {SHORTEST_S:g} s"]
            await links.close()

    asyncio.run(run())


def test_the_watchers_own_standstill_suspects_nobody():
    async def run() -> None:
        async with Far() as far:
            links = await far.links()
            await beats(far, links.beat, 1.0, speaks=True)
            far.clock.advance(3600.0)
            links.beat()
            await beats(far, links.beat, 1.0, speaks=True)
            assert far.lost == []
            await links.close()

    asyncio.run(run())


def test_each_side_asks_the_other_and_answers():
    async def run() -> None:
        async with Far() as far:
            links = await far.links()
            links.beat()
            assert isinstance((await far.channels[0].receive()).message, wire.Ping)
            await far.channels[0].send(wire.Ping(sequence=7, sent_at_s=1.0))
            assert (await far.channels[0].receive()).message == wire.Pong(sequence=7, sent_at_s=1.0)
            await links.close()

    asyncio.run(run())


def test_half_a_frame_is_a_sign_of_life():
    async def run() -> None:
        async with Far() as far:
            links = await far.links()
            message, carried = forward(values={"x": rows(batch=64)})
            data = frame(message, tuple(carried.values()))
            sending: Any = far.channels[0]
            for start in range(0, len(data), 20):
                await sending.send_raw(data[start : start + 20])
                await beats(far, links.beat, PING_S)
            assert len(data) / 20 * PING_S > 2 * DEADLINE_S
            assert far.lost == []
            await links.close()

    asyncio.run(run())


def frame(message: wire.Message, tensors: Sequence[Any]) -> bytes:
    head = encode_frame_head(message, tensors, STREAM_LIMITS["tensors"])
    return b"".join([head, *(value.data for value in tensors)])


def test_a_snapshot_for_a_standby_that_falls_silent_fails_within_the_deadline():
    async def run() -> None:
        async with Far() as far:
            carrier = StateConnections(far.network.transport(peer_id(0)), now_s=far.clock.now_s)
            entries = {"x": rows()}
            first = wire.Snapshot(
                fence=FENCE, stage=0, step=2, part=0, watermark=0, last=False, tensors=headers(entries)
            )
            await carrier.send(peer_id(1), far.listener.addresses, OPENING, first, tuple(entries.values()))
            await beats(far, carrier.beat, DEADLINE_S + PING_S)
            second = msgspec.structs.replace(first, part=1)
            with pytest.raises(FusionError, match="within a snapshot"):
                await carrier.send(peer_id(1), far.listener.addresses, OPENING, second, tuple(entries.values()))
            await carrier.send(peer_id(1), far.listener.addresses, OPENING, first, tuple(entries.values()))
            assert len(far.channels) == 2, "the next snapshot gets a connection of its own"
            await carrier.close()

    asyncio.run(run())


def test_commits_move_the_line_of_snapshots_that_are_kept_here():
    async def body(running: Running) -> None:
        store = running.stand.member.kept.store
        entries = {"x": rows()}
        for stage, step in ((1, 0), (1, 5)):
            message = wire.Snapshot(
                fence=FENCE, stage=stage, step=step, part=0, watermark=0, last=True, tensors=headers(entries)
            )
            assert store.take(NEIGHBOUR, message, entries)
        await running.prepared()
        await running.control.send(commit(watermark=1))
        assert isinstance((await receive(running.control)).message, wire.Applied)
        assert store.held == (wire.SnapshotAt(1, 5),)

    with_running(body)


def test_detaching_forgets_snapshots_too():
    async def body(running: Running) -> None:
        member = running.stand.member
        entries = {"x": rows()}
        message = wire.Snapshot(fence=FENCE, stage=1, step=2, part=0, watermark=0, last=True, tensors=headers(entries))
        assert member.kept.store.take(NEIGHBOUR, message, entries)
        await running.control.send(wire.Detach(fence=FENCE))
        await asyncio.wait_for(running.stand.pool.doors[0].idle.wait(), PATIENCE_S)
        assert (member.stages, member.snapshots) == ((), ())

    with_running(body)
