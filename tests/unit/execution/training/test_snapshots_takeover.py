"""A standby takes a stage over, on the shipped backend and doors: the state comes out with the undisturbed one's bits.

Stage 0 runs at one shipped peer, another stands by for it; the test plays driver and neighbour and keeps what both
would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from fusionai.backends.state import state_entries
from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.program import TorchStageProgram
from fusionai.execution.training.snapshots import FAILURES_TOLD
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.standby.assignment import ARRIVING
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import CommitRecord, Fence, SnapshotAt
from harness.pool import OWNER, peer_id, tensor
from harness.stand import (
    FENCE,
    MICROBATCHES,
    NEIGHBOUR,
    Running,
    Stand,
    backward,
    commit,
    forward,
    receive,
    rows,
    signed,
    until,
)

EVERY = 2
State = dict[str, bytes]


def with_stand(body: Callable[[Stand], Awaitable[None]], *, standbys: int = 1) -> None:
    async def run() -> None:
        async with Stand(standbys=standbys, backend=partial(TorchBackend, device="cpu", threads=1)) as stand:
            await body(stand)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()], "a task is left"

    asyncio.run(run())


def values(step: int, microbatch: int, kind: int) -> HostTensor:
    """Inputs (0) and gradients (1) that differ everywhere and are the same each time."""
    return tensor(np.random.default_rng((step, microbatch, kind)).standard_normal((2, 4)).astype(np.float32))


def sent_forward(step: int, microbatch: int, fence: Fence) -> tuple[wire.Forward, dict[str, HostTensor]]:
    return forward(step=step, microbatch=microbatch, fence=fence, values={"x": values(step, microbatch, 0)})


def sent_backward(step: int, microbatch: int, fence: Fence) -> tuple[wire.Backward, dict[str, HostTensor]]:
    return backward(step=step, microbatch=microbatch, fence=fence, values={"y0": values(step, microbatch, 1)})


def record(step: int) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=0.1 / (step + 1),
        total_norm=1.0,
        norms_hash="",
        fence=FENCE,
        loss=1.0,
    )


class Course:
    """What happened: norms per step, and every activation the neighbour got."""

    def __init__(self) -> None:
        self.norms: dict[int, Mapping[str, float]] = {}
        self.activations: dict[tuple[int, int], bytes] = {}


async def run_step(running: Running, step: int, course: Course, *, fence: Fence = FENCE, line: int = 0) -> None:
    for microbatch in range(MICROBATCHES):
        message, carried = sent_forward(step, microbatch, fence)
        await running.feed.send(message, tuple(carried.values()))
        envelope = await receive(running.neighbour)
        course.activations[step, microbatch] = bytes(envelope.tensors["y0"].data)
        returned, gradients = sent_backward(step, microbatch, fence)
        await running.neighbour.send(returned, tuple(gradients.values()))
    prepared = (await receive(running.control)).message
    assert isinstance(prepared, wire.Prepared), prepared
    course.norms[step] = prepared.norms
    await running.control.send(commit(step, fence=fence, record=record(step), watermark=line))
    assert isinstance((await receive(running.control)).message, wire.Applied)


async def guard_of(stand: Stand, number: int = 1, *, fence: Fence = FENCE) -> Channel:
    """The control connection of a standby that keeps stage 0's snapshots."""
    control, answer = await stand.open(to=number, fence=fence)
    assert isinstance(answer, wire.Done), answer
    ticket = stand.pool.ticket(stand.pool.hosts[number].peer, version=fence.plan_version)
    enlisted = await stand.enlisted(control, standbys=(0,), ticket=ticket, fence=fence)
    assert enlisted.snapshots == ()
    return control


async def has_standby(stand: Stand, **changes: object) -> tuple[Running, Channel]:
    """Stage 0 at work and its standby."""
    standby = await guard_of(stand)
    peer = stand.pool.hosts[1].peer
    running = await stand.running(
        **{
            "retain": True,
            "standby": peer,
            "standby_ticket": stand.pool.contact(peer),
            "snapshot_every": EVERY,
            **changes,
        }
    )
    return running, standby


async def kept(standby: Channel) -> tuple[int, int]:
    message = (await receive(standby)).message
    assert isinstance(message, wire.SnapshotKept), message
    return message.stage, message.step


async def exported(control: Channel, state: Channel, step: int, fence: Fence) -> State:
    await control.send(wire.Export(fence=fence, stage=0, step=step))
    entries: State = {}
    while True:
        envelope = await receive(state)
        assert isinstance(envelope.message, wire.StateChunk)
        entries |= {name: bytes(value.data) for name, value in envelope.tensors.items()}
        if envelope.message.last:
            return entries


@pytest.mark.parametrize("ready", [False, True])
def test_a_standby_takes_over_from_its_snapshot_and_what_neighbours_retained_to_the_same_bits(
    ready: bool, monkeypatch: pytest.MonkeyPatch
):
    loads = count_loads(monkeypatch)

    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        if ready:
            await made_ready(stand, standby)
            assert len(loads) == 2
        course = Course()
        for step in range(5):
            await run_step(running, step, course)
        assert [await kept(standby), await kept(standby)] == [(0, 2), (0, 4)]
        undisturbed = await exported(running.control, running.state, 5, FENCE)

        later = Fence(2, 1, 0)
        places = stand.neighbours(at=1)
        ticket = stand.pool.ticket(stand.pool.hosts[1].peer, version=2)
        enlisted = await stand.enlisted(standby, fence=later, neighbours=places, ticket=ticket)
        assert enlisted.snapshots == (SnapshotAt(0, 2), SnapshotAt(0, 4))
        status = await stand.attach_on(standby, fence=later, retain=True)
        assert isinstance(status, wire.Status)
        assert status.applied == -1
        feed, _ = await stand.open("tensors", to=1, fence=later)
        state, _ = await stand.open("state", to=1, fence=later)
        neighbour = await stand.from_peer.get()
        records = tuple(record(step) for step in range(2, 5))
        resume = wire.Resume(
            fence=later, stage=0, committed=5, source="snapshot", base=2, records=records, replaying=(0,)
        )
        await standby.send(resume)
        assert (await receive(standby)).message == wire.Ready(fence=later, stage=0, applied=2)
        for step in (4, 3, 2):  # gradients of all steps come at once, on another connection than the inputs
            for microbatch in range(MICROBATCHES):
                message, carried = sent_backward(step, microbatch, later)
                await neighbour.send(message, tuple(carried.values()))
        for step in (2, 3, 4):
            for microbatch in range(MICROBATCHES):
                message, carried = sent_forward(step, microbatch, later)
                await feed.send(message, tuple(carried.values()))
        for step in (2, 3, 4):
            prepared = (await receive(standby)).message
            assert isinstance(prepared, wire.Prepared), prepared
            assert (prepared.step, prepared.norms) == (step, course.norms[step])
        assert (await receive(standby)).message == wire.Ready(fence=later, stage=0, applied=5)
        assert await exported(standby, state, 5, later) == undisturbed
        assert len(loads) == 2, "what is ready is not loaded again"

        # What it sent during the replay it retained, and a neighbour that is lost now can have it.
        sent = Running(stand, standby, feed, state, neighbour)
        last = Fence(2, 1, 1)
        status = await again(stand, standby, last, ticket)
        assert (status.applied, status.retained_from) == (5, 2)
        await standby.send(wire.Resume(fence=last, stage=0, committed=5, source="keep", base=3, replaying=(1,)))
        assert (await receive(standby)).message == wire.Ready(fence=last, stage=0, applied=5)
        for step, microbatch in ((3, 0), (3, 1), (4, 0), (4, 1)):
            envelope = await receive(sent.neighbour)
            assert isinstance(envelope.message, wire.Forward), "in the order of the steps"
            described = (envelope.message.step, envelope.message.microbatch, envelope.message.fence)
            assert described == (step, microbatch, last)
            assert bytes(envelope.tensors["y0"].data) == course.activations[step, microbatch]

    with_stand(body)


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The memory limit of every load to come, of all machines."""
    loads: list[int | None] = []
    load = TorchBackend.load

    def counted(*args: Any, **named: Any) -> TorchStageProgram:
        loads.append(named["memory_limit_bytes"])
        return load(*args, **named)

    monkeypatch.setattr(TorchBackend, "load", counted)
    return loads


async def made_ready(stand: Stand, standby: Channel, number: int = 1, **changes: Any) -> None:
    message, carried = stand.prepare(**changes)
    await standby.send(message, tuple(carried.values()))
    await until(lambda: 0 in stand.member_of(number)._stages.ahead)


def test_a_round_that_takes_the_stage_from_its_standby_leaves_nothing_ready():
    async def body(stand: Stand) -> None:
        standby = await guard_of(stand)
        await made_ready(stand, standby)
        stages = stand.member_of(1)._stages
        ticket = stand.pool.ticket(stand.pool.hosts[1].peer, version=2)
        await stand.enlisted(standby, standbys=(0,), fence=Fence(2, 1, 0), ticket=ticket)
        assert stages.ahead.keys() == {0}, "with a standby as before"
        await stand.enlisted(standby, standbys=(), fence=Fence(2, 1, 1), ticket=ticket)
        assert stages.ahead.keys() == frozenset()

    with_stand(body)


def test_what_was_made_ready_for_other_options_is_loaded_anew(monkeypatch: pytest.MonkeyPatch):
    loads = count_loads(monkeypatch)

    async def body(stand: Stand) -> None:
        standby = await guard_of(stand)
        await made_ready(stand, standby)
        await made_ready(stand, standby)
        assert len(loads) == 1, "told again"
        options = wire.StageOptions(microbatches=MICROBATCHES, in_flight=1, optimizer=wire.OptimizerSpec())
        later = Fence(2, 1, 0)
        ticket = stand.pool.ticket(stand.pool.hosts[1].peer, version=2)
        await stand.enlisted(standby, fence=later, neighbours=stand.neighbours(at=1), ticket=ticket)
        assert isinstance(await stand.attach_on(standby, fence=later, options=options), wire.Status)
        assert len(loads) == 2
        assert stand.member_of(1)._stages.ahead.keys() == frozenset()

    with_stand(body)


@pytest.mark.parametrize(
    ("changes", "dropped", "said"),
    [
        ({"fence": Fence(1, 1, 7)}, 1, ""),
        ({"stage": 1}, 1, ""),
        ({"graph_hash": "another"}, 0, "announced hash"),
        ({"boundary": msgspec.Raw(b"\xc0")}, 0, "does not fit its schema"),
    ],
)
def test_a_wrong_order_to_have_a_stage_ready_harms_nobody(
    changes: dict[str, object], dropped: int, said: str, caplog: pytest.LogCaptureFixture
):
    async def body(stand: Stand) -> None:
        standby = await guard_of(stand)
        member = stand.member_of(1)
        message, carried = stand.prepare(**changes)
        await standby.send(message, tuple(carried.values()))
        await until(lambda: member.stale_dropped == dropped and said in caplog.text)
        assert member._stages.ahead.keys() == frozenset()
        await made_ready(stand, standby)  # it goes on

    with_stand(body)


@pytest.mark.parametrize("fits", [True, False])
def test_a_stage_is_made_ready_only_where_there_is_room_beside_its_snapshots(
    fits: bool, monkeypatch: pytest.MonkeyPatch
):
    loads = count_loads(monkeypatch)

    async def body(stand: Stand) -> None:
        standby = await guard_of(stand)
        member = stand.member_of(1)
        entries = state_entries(stand.partition.stages[0].graph, wire.OptimizerSpec()).values()
        lent = (ARRIVING + 2) * sum(entry.nbytes for entry in entries) - (not fits)
        member._host.memory.limit_bytes = lent
        message, carried = stand.prepare()
        await standby.send(message, tuple(carried.values()))
        await until(lambda: len(loads) == 1 and not member._attaching.locked())
        assert loads == [lent]
        assert member._stages.ahead.keys() == (frozenset({0}) if fits else frozenset())

    with_stand(body)


async def again(stand: Stand, control: Channel, fence: Fence, ticket: bytes) -> wire.Status:
    await stand.enlisted(control, fence=fence, neighbours=stand.neighbours(at=1), ticket=ticket)
    status = await stand.attach_on(control, fence=fence, retain=True)
    assert isinstance(status, wire.Status), status
    return status


def test_a_snapshot_is_handed_on_to_a_machine_that_has_none():
    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        course = Course()
        for step in range(2):
            await run_step(running, step, course)
        assert await kept(standby) == (0, 2)
        undisturbed = await exported(running.control, running.state, 2, FENCE)

        later = Fence(2, 1, 0)
        newcomer = stand.pool.hosts[2].peer
        places = stand.neighbours(at=2)
        holder = stand.pool.hosts[1].peer
        placement = signed(places, later, standbys=[(0, holder)])
        ticket = stand.pool.ticket(holder, version=2)
        await stand.enlisted(standby, fence=later, neighbours=places, ticket=ticket, standbys=(0,), placement=placement)
        control, _ = await stand.open(to=2, fence=later)
        ticket = stand.pool.ticket(newcomer, version=2)
        enlisted = await stand.enlisted(control, fence=later, neighbours=places, ticket=ticket, placement=placement)
        assert enlisted.snapshots == ()
        assert isinstance(await stand.attach_on(control, fence=later), wire.Status)
        await stand.open("tensors", to=2, fence=later)
        state, _ = await stand.open("state", to=2, fence=later)
        await control.send(wire.Resume(fence=later, stage=0, committed=2, source="snapshot", base=2))
        await standby.send(
            wire.PassSnapshot(fence=later, stage=0, step=2, peer=newcomer, ticket=stand.pool.contact(newcomer))
        )
        assert (await receive(control)).message == wire.Ready(fence=later, stage=0, applied=2)
        assert await exported(control, state, 2, later) == undisturbed

    with_stand(body, standbys=2)


def test_a_snapshot_nobody_has_or_nobody_takes_is_reported():
    async def body(stand: Stand) -> None:
        standby = await guard_of(stand)
        order = wire.PassSnapshot(fence=FENCE, stage=0, step=2, peer=NEIGHBOUR)
        await standby.send(order)
        message = (await receive(standby)).message
        assert isinstance(message, wire.StageFailed)
        assert "no snapshot of step 2" in message.reason

    with_stand(body)


def test_the_state_sent_is_that_of_its_step_however_slow_the_standby_is(monkeypatch: pytest.MonkeyPatch):
    """Copy on apply: the standby takes nothing until the stage is four steps further."""
    slow = asyncio.Event()

    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        keeper = stand.member.kept
        send = keeper.send

        async def later(*args: object) -> None:
            await slow.wait()
            await send(*args)  # pyright: ignore

        monkeypatch.setattr(keeper, "send", later)
        course, states = Course(), dict[int, State]()
        for step in range(5):
            await run_step(running, step, course)
            states[step + 1] = await exported(running.control, running.state, step + 1, FENCE)
        slow.set()
        assert [await kept(standby), await kept(standby)] == [(0, 2), (0, 4)]
        store = stand.member_of(1).kept.store
        for step in (2, 4):
            entries = store.whole(0, step)
            assert entries is not None
            assert {name: bytes(value.data) for name, value in entries.items()} == states[step]
        assert states[2] != states[4]

    with_stand(body)


def test_a_third_snapshot_takes_the_place_of_the_one_not_begun(monkeypatch: pytest.MonkeyPatch):
    slow = asyncio.Event()

    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        keeper = stand.member.kept
        send = keeper.send

        async def later(*args: object) -> None:
            await slow.wait()
            await send(*args)  # pyright: ignore

        monkeypatch.setattr(keeper, "send", later)
        for step in range(6):
            await run_step(running, step, Course())
        slow.set()
        assert [await kept(standby), await kept(standby)] == [(0, 2), (0, 6)]

    with_stand(body)


def test_a_standby_that_is_gone_fails_no_stage_and_is_told_of_when_the_line_stands():
    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        stand.pool.network.disconnect(stand.pool.hosts[1].peer)
        await standby.close()
        for step in range(EVERY * FAILURES_TOLD):
            await run_step(running, step, Course())
        lost = (await receive(running.control)).message
        assert isinstance(lost, wire.LinkLost)
        assert (lost.peer, lost.fence) == (stand.pool.hosts[1].peer, FENCE)
        assert await running.alive()

    with_stand(body)


def test_a_recovered_stage_gives_its_standby_a_snapshot_at_once():
    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        await run_step(running, 0, Course())
        later = Fence(1, 1, 1)
        ticket = stand.pool.ticket(stand.pool.hosts[1].peer)
        await stand.enlisted(standby, standbys=(0,), ticket=ticket, fence=later)
        peer = stand.pool.hosts[1].peer
        await stand.round(
            running.control,
            later,
            retain=True,
            standby=peer,
            standby_ticket=stand.pool.contact(peer),
            snapshot_every=EVERY,
        )
        await running.control.send(wire.Resume(fence=later, stage=0, committed=1, source="keep", base=1, snapshot=True))
        assert (await receive(running.control)).message == wire.Ready(fence=later, stage=0, applied=1)
        assert await kept(standby) == (0, 1)

    with_stand(body)


def test_a_standby_without_room_says_so_and_does_not_acknowledge(monkeypatch: pytest.MonkeyPatch):
    async def body(stand: Stand) -> None:
        running, standby = await has_standby(stand)
        monkeypatch.setattr(stand.member_of(1).kept.store, "_make_room", lambda _: 10)
        for step in range(EVERY):
            await run_step(running, step, Course())
        message = (await receive(standby)).message
        assert isinstance(message, wire.StageFailed), message
        assert (message.stage, message.code) == (0, "out_of_memory")
        assert stand.member_of(1).snapshots == ()
        assert await running.alive()

    with_stand(body)


@pytest.mark.parametrize("stranger", ["another stage's peer", "the driver's feed"])
def test_nobody_else_gives_a_standby_snapshots(stranger: str):
    async def body(stand: Stand) -> None:
        standby = await guard_of(stand)
        member = stand.member_of(1)
        peer = NEIGHBOUR if stranger == "another stage's peer" else OWNER
        channel, answer = await stand.open("state", as_peer=peer, to=1)
        assert isinstance(answer, wire.Done)
        entries = {"model/layer0.weight": rows()}
        message = wire.Snapshot(fence=FENCE, stage=0, step=2, part=0, watermark=0, last=True, tensors=headers(entries))
        await channel.send(message, tuple(entries.values()))
        await until(lambda: channel.closed)
        assert member.snapshots == ()
        await standby.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await receive(standby)).message, wire.Pong)

    with_stand(body)


def test_who_is_in_the_placement_no_more_gives_no_snapshots_over_a_connection_it_still_has():
    async def body(stand: Stand) -> None:
        running = await stand.running()
        channel, answer = await stand.open("state", as_peer=NEIGHBOUR)
        assert isinstance(answer, wire.Done)
        later = Fence(2, 1, 0)
        places = tuple(
            wire.Neighbour(stage=one.stage, peer=peer_id(5) if one.peer == NEIGHBOUR else one.peer)
            for one in stand.neighbours()
        )
        await stand.enlisted(running.control, fence=later, neighbours=places)
        entries = {"model/layer0.weight": rows()}
        message = wire.Snapshot(fence=later, stage=0, step=2, part=0, watermark=0, last=True, tensors=headers(entries))
        await channel.send(message, tuple(entries.values()))
        await until(lambda: channel.closed)
        assert stand.member.snapshots == ()

    with_stand(body)


def test_a_snapshot_that_does_not_fit_its_stage_is_reported():
    async def body(stand: Stand) -> None:
        control, status = await stand.attached()
        assert isinstance(status, wire.Status)
        await stand.open("tensors")
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=2, source="snapshot", base=2))
        channel, _ = await stand.open("state", as_peer=NEIGHBOUR)
        entries = {"model/layer0.weight": rows(batch=4)}
        message = wire.Snapshot(fence=FENCE, stage=0, step=2, part=0, watermark=0, last=True, tensors=headers(entries))
        await channel.send(message, tuple(entries.values()))
        failed = (await receive(control)).message
        assert isinstance(failed, wire.StageFailed)
        assert "does not fit stage 0" in failed.reason
        status = await stand.round(control, Fence(1, 1, 1))
        assert status.applied == -1

    with_stand(body, standbys=0)


# ------------------------------------------------------------------------------------------------- changing places


async def changed_places(stand: Stand, running: Running, fence: Fence, **changes: object) -> wire.Enlisted:
    """The next round as stage 0's peer sees it: the standby runs the stage, it stands by for it."""
    ticket = stand.pool.ticket(stand.peer, version=fence.plan_version)
    fields = {"standbys": (0,), "neighbours": stand.neighbours(at=1), "ticket": ticket, "fence": fence, **changes}
    return await stand.enlisted(running.control, **fields)


def test_a_stage_that_moves_to_its_standby_stays_at_hand_until_there_is_a_snapshot_of_it():
    async def body(stand: Stand) -> None:
        running, _ = await has_standby(stand)
        course = Course()
        for step in range(3):
            await run_step(running, step, course)
        undisturbed = await exported(running.control, running.state, 3, FENCE)
        await changed_places(stand, running, Fence(2, 1, 0))
        assert stand.member.stages == (0,)

        # The standby dies before it could give a snapshot: its former peer has the stage back as it was.
        last = Fence(3, 1, 0)
        await stand.enlisted(running.control, fence=last, ticket=stand.pool.ticket(stand.peer, version=3))
        status = await stand.attach_on(running.control, fence=last, retain=True)
        assert isinstance(status, wire.Status)
        assert status.applied == 3
        await running.control.send(wire.Resume(fence=last, stage=0, committed=3, source="keep", base=3))
        state, _ = await stand.open("state", fence=last)
        assert await exported(running.control, state, 3, last) == undisturbed

    with_stand(body)


def test_with_a_snapshot_of_it_the_former_peer_forgets_the_stage():
    async def body(stand: Stand) -> None:
        running, _ = await has_standby(stand)
        await run_step(running, 0, Course())
        later = Fence(2, 1, 0)
        await changed_places(stand, running, later)
        tensors = {"model/weight": tensor(np.zeros(3, dtype=np.float32))}
        stand.member.kept.take(
            stand.pool.hosts[1].peer,
            wire.Snapshot(fence=later, stage=0, step=1, part=0, watermark=1, last=True, tensors=headers(tensors)),
            tensors,
        )
        assert await kept(running.control) == (0, 1)
        assert stand.member.stages == ()
        assert stand.member.snapshots == (SnapshotAt(0, 1),)

    with_stand(body)


@pytest.mark.parametrize("changes", [{"standbys": ()}, {"partition": "another cut"}])
def test_a_stage_that_moves_otherwise_is_forgotten_at_once(changes: dict[str, object]):
    async def body(stand: Stand) -> None:
        running, _ = await has_standby(stand)
        await run_step(running, 0, Course())
        await changed_places(stand, running, Fence(2, 1, 0), **changes)
        assert stand.member.stages == ()

    with_stand(body)


@pytest.mark.parametrize(
    ("here", "limited"),
    [(0, True), (7, True), (7, False)],
    ids=["the stage's own", "another stage's", "without a limit"],
)
def test_a_stage_that_runs_here_gets_the_memory_of_other_stages_snapshots(here: int, limited: bool):
    async def body(stand: Stand) -> None:
        control, answer = await stand.open()
        assert isinstance(answer, wire.Done)
        await stand.enlisted(control)
        store, memory = stand.member.kept.store, stand.member._host.memory
        entries = {"model/x": host_tensor("uint8", (10_000,), bytes(10_000))}
        snapshot = wire.Snapshot(
            fence=FENCE, stage=here, step=0, part=0, last=True, watermark=0, tensors=headers(entries)
        )
        assert store.take(stand.peer, snapshot, entries)
        memory.limit_bytes = store.nbytes + 100 if limited else None
        message = await stand.attach_on(control)
        if not limited:
            assert isinstance(message, wire.Status)
            assert store.nbytes == 10_000
            return
        assert isinstance(message, wire.StageFailed)
        if here == 0:
            assert (message.code, store.nbytes) == ("failed", 10_000), "it may be what the stage starts from"
            return
        assert (message.stage, message.code) == (7, "out_of_memory")
        assert isinstance((await receive(control)).message, wire.Status)
        assert store.nbytes == 0

    with_stand(body)
