"""Whatever a driver or a neighbour sends: a refusal or a report to the driver, never a crash and never silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.execution import member as driven_part
from fusionai.execution.training.boundary import GradientPort, Port, boundaries
from fusionai.ir import schema
from fusionai.ir.partition import SharedParam, cut_blocks
from fusionai.ir.schema import Graph, Node, Ref
from fusionai.primitives.errors import TransportError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.security.signed import Ticket, sign_ticket
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, OptimizerSpec, StageOptions
from harness.pool import JOB, OWNER, tensor
from harness.stand import (
    FENCE,
    NEIGHBOUR,
    PATIENCE_S,
    Running,
    Stand,
    backward,
    commit,
    forward,
    layers,
    receive,
    rows,
    until,
)

STALE = Fence(1, 0, 0)


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


# -------------------------------------------------------------------------------------------------- hostile attaches


def encoded(graph: Graph) -> dict[str, HostTensor]:
    data = schema.encode(graph)
    return {"graph": host_tensor("uint8", (len(data),), data)}


def stage_graph(graph: Graph | None = None) -> Graph:
    return cut_blocks(graph or layers(), ((0, 2), (2, 3), (3, 4))).stages[0].graph


def hashed(graph: Graph) -> dict[str, Any]:
    return {"tensors": encoded(graph), "graph_hash": schema.content_hash(graph)}


def with_boundary(**changes: Any) -> Callable[[Stand], dict[str, Any]]:
    def make(stand: Stand) -> dict[str, Any]:
        boundary = msgspec.structs.replace(stand.boundaries[0], **changes)
        return {"boundary": msgspec.Raw(msgspec.msgpack.encode(boundary))}

    return make


def with_options(**changes: Any) -> Callable[[Stand], dict[str, Any]]:
    fields = {"microbatches": 2, "in_flight": 2, "optimizer": OptimizerSpec(), **changes}
    return lambda stand: {"options": StageOptions(**fields)}


def unknown_operator(stand: Stand) -> dict[str, Any]:
    graph = stage_graph()
    node = msgspec.structs.replace(graph.nodes[0], op="os.system")
    return hashed(msgspec.structs.replace(graph, nodes=(node,)))


def memory_bomb(width: int) -> Callable[[Stand], dict[str, Any]]:
    """A kilobyte of graph whose parameters take far more than the machine lends."""
    return lambda stand: hashed(stage_graph(layers(width=width)))


def a_cycle(stand: Stand) -> dict[str, Any]:
    graph = stage_graph()
    node = Node(id=0, op="aten.linear.default", args=(Ref("y0"), Ref("w0")), outputs=("y0",), block=1)
    return hashed(msgspec.structs.replace(graph, nodes=(node,)))


ATTACHES: dict[str, tuple[Callable[[Stand], dict[str, Any]], wire.RefusalCode, str]] = {
    "no graph": (lambda s: {"tensors": {}}, "bad_graph", "carries no graph"),
    "not JSON": (lambda s: {"tensors": {"graph": host_tensor("uint8", (3,), b"}}}")}}, "bad_graph", ""),
    "deep JSON": (lambda s: {"tensors": {"graph": host_tensor("uint8", (90_000,), b"[" * 90_000)}}, "bad_graph", ""),
    "wrong hash": (lambda s: {"graph_hash": "0" * 64}, "bad_graph", "does not have the announced hash"),
    "unknown operator": (unknown_operator, "bad_graph", "os.system"),
    "cycle": (a_cycle, "bad_graph", ""),
    "memory bomb": (memory_bomb(2**20), "bad_graph", "may take"),
    "little more than is lent": (memory_bomb(2**12), "failed", ""),
    "boundary of nonsense": (lambda s: {"boundary": msgspec.Raw(b"\xc3")}, "bad_graph", "does not fit its schema"),
    "boundary of another stage": (with_boundary(stage=1), "bad_graph", "boundary of stage 1"),
    "unknown input": (with_boundary(receives=(Port(-1, ("x", "y")),)), "bad_graph", "inputs"),
    "unknown output": (with_boundary(sends=(Port(1, ("y0", "w0")),)), "bad_graph", "outputs"),
    "unknown gradient": (with_boundary(returns=(GradientPort(1, ("zz",)),)), "bad_graph", "gradients of inputs"),
    "gradient of what is not here": (
        with_boundary(returned=(GradientPort(1, ("zz",)),)),
        "bad_graph",
        "gradients of outputs",
    ),
    "a gradient twice": (
        with_boundary(returned=(GradientPort(1, ("y0",)), GradientPort(2, ("y0",)))),
        "bad_graph",
        "a gradient twice",
    ),
    "an alias of nothing": (with_boundary(aliases={"x": "zz"}), "bad_graph", "inputs repeat"),
    "a join that is no output": (with_boundary(joins=("zz",)), "bad_graph", "outputs"),
    "two ports to the same stage": (
        with_boundary(sends=(Port(1, ("y0",)), Port(1, ("y0",)))),
        "bad_graph",
        "two ports",
    ),
    "one input from two": (with_boundary(receives=(Port(-1, ("x",)), Port(1, ("x",)))), "bad_graph", "two stages"),
    "a gradient of what is not sent": (
        with_boundary(sends=(Port(1, ("y0",), ("x",)),)),
        "bad_graph",
        "lacks ones of inference",
    ),
    "a stage outside the plan": (with_boundary(sends=(Port(7, ("y0",)),)), "bad_graph", "not in its plan"),
    "a foreign shared weight": (
        with_boundary(shared=(SharedParam(key="layer1.weight", stages=(0, 1)),)),
        "bad_graph",
        "shared parameters",
    ),
    "a weight shared by others": (
        with_boundary(shared=(SharedParam(key="layer0.weight", stages=(1, 2)),)),
        "bad_graph",
        "share",
    ),
    "another job": (lambda s: {"job": "job-2"}, "failed", "is for job-2"),
    "a stage that is not here": (lambda s: {"stage": 1, **with_boundary(stage=1)(s)}, "failed", "does not place"),
    "no microbatch": (with_options(microbatches=0), "failed", "microbatch"),
    "no credit": (with_options(in_flight=0), "failed", "credit"),
    "older fence": (lambda s: {"fence": STALE}, "stale_fence", ""),
}


@pytest.mark.parametrize("name", ATTACHES)
def test_a_hostile_attach_is_refused_and_the_next_good_one_works(name: str):
    changes, code, text = ATTACHES[name]

    async def body(stand: Stand) -> None:
        control, answer = await stand.attached(**changes(stand))
        assert isinstance(answer, wire.StageFailed), answer
        assert answer.code == code, answer.reason
        assert text in answer.reason
        assert stand.member.stages == ()
        message, carried = stand.attach()
        await control.send(message, tuple(carried.values()))
        assert isinstance((await receive(control)).message, wire.Status)

    with_stand(body, memory_limit_bytes=64 * 2**20)


def test_stages_of_one_member_share_what_its_machine_lends():
    big = layers(width=512)

    async def body(stand: Stand) -> None:
        control, _ = await stand.open()
        places = tuple(wire.Neighbour(stage=stage, peer=stand.peer) for stage in (0, 1, 2))
        await stand.enlisted(control, neighbours=places)
        answer = await stand.attach_on(control)
        assert isinstance(answer, wire.Status), answer
        graph = stand.partition.stages[1].graph
        message, carried = stand.attach(
            stage=1,
            boundary=msgspec.Raw(msgspec.msgpack.encode(stand.boundaries[1])),
            **hashed(graph),
        )
        await control.send(message, tuple(carried.values()))
        answer = (await receive(control)).message
        assert isinstance(answer, wire.StageFailed), "alone it would fit"
        assert answer.stage == 1

    with_stand(body, graph=big, memory_limit_bytes=6 * 2**20)


def test_another_stage_under_the_same_number_is_loaded_anew():
    async def body(running: Running) -> None:
        stand, fence = running.stand, Fence(2, 1, 0)
        other = stage_graph(layers(width=8))
        status = await stand.round(running.control, fence, **hashed(other))
        assert (status.fence, status.applied) == (fence, -1), "no state of the former stage"
        assert stand.member._stages.runtimes[0].identity[0] == schema.content_hash(other)

    with_running(body)


def test_the_same_stage_keeps_its_state_over_an_attach():
    async def body(running: Running) -> None:
        fence = Fence(1, 2, 0)
        await running.prepared()
        status = await running.stand.round(running.control, fence)
        assert (status.applied, status.prepared) == (0, 0)

    with_running(body)


def test_messages_before_an_attach_are_dropped_and_counted():
    async def body(stand: Stand) -> None:
        control, _ = await stand.open()
        link, _ = await stand.open("tensors")
        for message in (wire.Resume(fence=FENCE, stage=0, committed=0, source="keep"), commit(0)):
            await control.send(message)
        message, carried = forward()
        await link.send(message, tuple(carried.values()))
        await control.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await receive(control)).message, wire.Pong)
        assert stand.member.stale_dropped >= 2

    with_stand(body)


# ------------------------------------------------------------------------------------------------ hostile neighbours

Sent = tuple[wire.Message, dict[str, HostTensor]]

FORWARDS: dict[str, tuple[Sent, str]] = {
    "unknown name": (forward(values={"zz": rows()}), "expected ['x']"),
    "no tensor": (forward(values={}), "expected ['x']"),
    "one too many": (forward(values={"x": rows(), "y": rows()}), "expected ['x']"),
    "wrong dtype": (forward(values={"x": rows(dtype="int64")}), "as float32"),
    "doubles": (forward(values={"x": rows(dtype="float64")}), "as float32"),
    "wrong width": (forward(values={"x": rows(width=3)}), "size 3"),
    "wrong rank": (forward(values={"x": tensor(np.zeros(8, np.float32))}), "shape"),
    "too large a batch": (forward(values={"x": rows(batch=9)}), "at most"),
    "huge": (forward(values={"x": rows(batch=100_000)}), "at most"),
    "another replica": (forward(replica=3), "belongs to replica 0, got microbatch 0 of replica 3"),
}
RETURNS: dict[str, tuple[Sent, str]] = {
    "unknown name": (backward(values={"zz": rows()}), "expected gradients of ['y0']"),
    "a parameter's name": (backward(values={"w0": rows()}), "expected gradients of ['y0']"),
    "integers": (backward(values={"y0": rows(dtype="int64")}), "a float gradient"),
    "wrong shape": (backward(values={"y0": rows(width=3)}), "y0"),
    "huge": (backward(values={"y0": rows(batch=100_000)}), "at most"),
    "another replica": (backward(replica=1), "belongs to replica 0"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_does_not_fit_fails_the_stage_with_the_reason(name: str):
    (message, carried), text = FORWARDS[name]

    async def body(running: Running) -> None:
        await running.feed.send(message, tuple(carried.values()))
        assert text in (await running.failure()).reason
        assert await running.alive()

    with_running(body)


@pytest.mark.parametrize("name", RETURNS)
def test_a_gradient_that_does_not_fit_fails_the_stage_with_the_reason(name: str):
    (message, carried), text = RETURNS[name]

    async def body(running: Running) -> None:
        await running.feed_microbatch(0)
        await running.neighbour.send(message, tuple(carried.values()))
        assert text in (await running.failure()).reason
        assert await running.alive()

    with_running(body)


UNWANTED: dict[str, tuple[bool, Sent]] = {
    "a microbatch beyond the step": (True, forward(microbatch=2)),
    "a microbatch far beyond": (True, forward(microbatch=2**40)),
    "a step far beyond": (True, forward(step=2**40)),
    "evaluation of a step far beyond": (True, forward(mode="eval", step=2**40)),
    "a microbatch done already": (True, forward(microbatch=0)),
    "a gradient of what was not sent": (False, backward(microbatch=1)),
    "a gradient of a step to come": (False, backward(step=1)),
    "a gradient of a microbatch that is none": (False, backward(microbatch=2**40)),
}


@pytest.mark.parametrize("name", UNWANTED)
def test_what_no_work_can_use_takes_no_memory(name: str):
    from_feed, (message, carried) = UNWANTED[name]

    async def body(running: Running) -> None:
        await running.feed_microbatch(0)
        channel = running.feed if from_feed else running.neighbour
        for _ in range(20):
            await channel.send(message, tuple(carried.values()))
        await running.feed_microbatch(1)
        await running.return_gradient(0)
        await running.return_gradient(1)
        assert isinstance((await receive(running.control)).message, wire.Prepared)
        runtime = running.stand.member._stages.runtimes[0]
        assert runtime._machine.dropped == 20
        assert runtime.held.nbytes == 0
        assert runtime.held.microbatches == 0

    with_running(body)


def test_tensors_of_a_stale_fence_are_dropped_and_counted():
    async def body(running: Running) -> None:
        before = running.stand.member.stale_dropped
        for fence in (STALE, Fence(1, 1, 1), Fence(2, 0, 0)):
            message, carried = forward(fence=fence)
            await running.feed.send(message, tuple(carried.values()))
        await running.feed_microbatch(0)
        assert running.stand.member.stale_dropped == before + 3
        assert await running.alive()

    with_running(body)


def test_duplicates_are_summed_once():
    async def body(running: Running) -> None:
        message, carried = forward()
        for _ in range(3):
            await running.feed.send(message, tuple(carried.values()))
        assert (await receive(running.neighbour)).message == wire.Forward(
            fence=FENCE,
            mode="train",
            step=0,
            replica=0,
            microbatch=0,
            producer=0,
            consumer=1,
            tensors=headers({"y0": rows()}),
        )
        for _ in range(3):
            await running.return_gradient(0)
        await running.feed_microbatch(1)
        await running.return_gradient(1)
        assert isinstance((await receive(running.control)).message, wire.Prepared)
        assert running.stand.member._stages.runtimes[0]._machine.dropped == 4

    with_running(body)


DRIVERS_ONLY: list[wire.Message] = [
    commit(0),
    wire.Resume(fence=FENCE, stage=0, committed=0, source="initialise"),
    wire.Export(fence=FENCE, stage=0, step=0),
    wire.Detach(fence=FENCE),
    wire.Enlist(fence=Fence(9, 9, 9), job="job-1", neighbours=(), ticket=b"", placement=b""),
    wire.PassSnapshot(fence=FENCE, stage=0, step=0, peer=NEIGHBOUR),
    wire.Snapshot(fence=FENCE, stage=0, step=0, part=0, watermark=0, last=True),
    wire.Done(),
    wire.Hello(),
    wire.PoolQuery(),
    wire.Status(fence=FENCE, stage=0, applied=0, prepared=0, retained_from=0, fingerprint="", clock_s=0.0),
    wire.StageFailed(fence=FENCE, stage=0, code="failed", reason=""),
]


@pytest.mark.parametrize("message", DRIVERS_ONLY, ids=lambda message: type(message).__name__)
def test_a_neighbour_that_plays_the_driver_loses_its_link_and_the_driver_hears_of_it(message: wire.Message):
    async def body(running: Running) -> None:
        await running.neighbour.send(message)
        lost = await running.link_lost()
        assert (lost.fence, lost.peer) == (FENCE, NEIGHBOUR)
        assert "only the driver may" in lost.reason
        assert running.stand.member._stages.runtimes[0]._machine.applied == 0, "nothing was obeyed"
        assert await running.alive()

    with_running(body)


IMPOSTORS: list[Sent] = [
    forward(producer=-1),
    forward(producer=2),
    forward(producer=9),
    backward(consumer=0),
    backward(consumer=2),
    (
        wire.SharedGradient(
            fence=FENCE, step=0, sender=2, receiver=0, phase="partial", tensors=headers({"layer0.weight": rows()})
        ),
        {"layer0.weight": rows()},
    ),
    (
        wire.Output(
            fence=FENCE, mode="train", step=0, replica=0, microbatch=0, stage=2, tensors=headers({"loss": rows()})
        ),
        {"loss": rows()},
    ),
]


@pytest.mark.parametrize("sent", IMPOSTORS, ids=lambda sent: type(sent[0]).__name__)
def test_whoever_sends_as_another_stage_loses_its_link(sent: Sent):
    message, carried = sent

    async def body(running: Running) -> None:
        await running.neighbour.send(message, tuple(carried.values()))
        lost = await running.link_lost()
        assert "not its own" in lost.reason or "has no stage" in lost.reason
        assert await running.alive()

    with_running(body)


def test_an_output_where_no_driver_is_ends_the_link():
    async def body(running: Running) -> None:
        message = wire.Output(
            fence=FENCE, mode="train", step=0, replica=0, microbatch=0, stage=1, tensors=headers({"loss": rows()})
        )
        await running.neighbour.send(message, (rows(),))
        assert "a member without a driver" in (await running.link_lost()).reason

    with_running(body)


def test_a_neighbour_without_shared_weights_can_add_to_no_gradient():
    async def body(running: Running) -> None:
        values = {"layer0.weight": tensor(np.ones((4, 4), np.float32))}
        message = wire.SharedGradient(
            fence=FENCE, step=0, sender=1, receiver=0, phase="partial", tensors=headers(values)
        )
        await running.neighbour.send(message, tuple(values.values()))
        assert "shared gradients of []" in (await running.failure()).reason

    with_running(body)


def test_a_flood_of_nonsense_is_reported_once():
    async def body(running: Running) -> None:
        message, carried = forward(values={"zz": rows()})
        for _ in range(200):
            await running.feed.send(message, tuple(carried.values()))
        await running.failure()
        await running.feed.send(wire.Done())
        assert (await running.link_lost()).peer == OWNER
        assert await running.alive(), "no second report of either stands before the answer"

    with_running(body)


def test_a_lost_link_in_the_middle_of_a_step_is_reported_once_and_fails_no_stage():
    async def body(running: Running) -> None:
        await running.feed_microbatch(0)
        await running.neighbour.close()
        lost = await running.link_lost()
        assert (lost.peer, lost.fence) == (NEIGHBOUR, FENCE)
        message, carried = forward(microbatch=1)
        await running.feed.send(message, tuple(carried.values()))
        await until(lambda: running.stand.member._stages.runtimes[0]._machine.microbatches.in_flight == 2)
        assert await running.alive(), "what can't be sent is no second report"

    with_running(body)


def test_a_peer_has_one_link_and_opening_another_ends_the_former_with_a_report():
    async def body(running: Running) -> None:
        await running.feed_microbatch(0)
        second, answer = await running.stand.open("tensors", as_peer=NEIGHBOUR)
        assert isinstance(answer, wire.Done)
        lost = await running.link_lost()
        assert (lost.peer, "took its place" in lost.reason) == (NEIGHBOUR, True)
        with pytest.raises(TransportError):
            await receive(running.neighbour)
        assert not second.closed
        assert await running.alive()

    with_running(body)


def test_a_link_opened_anew_before_anything_was_sent_on_the_former_is_no_loss():
    async def body(running: Running) -> None:
        second, answer = await running.stand.open("tensors", as_peer=NEIGHBOUR)
        assert isinstance(answer, wire.Done)
        with pytest.raises(TransportError):
            await receive(running.neighbour)
        message, carried = forward()
        await running.feed.send(message, tuple(carried.values()))
        assert isinstance((await receive(second)).message, wire.Forward)
        assert await running.alive()

    with_running(body)


def test_a_neighbour_that_refuses_the_link_is_reported_at_once():
    async def body(stand: Stand) -> None:
        await stand.listener.close()
        control, _ = await stand.attached()
        message = (await receive(control)).message
        assert isinstance(message, wire.LinkLost)
        assert message.reason == f"peer {NEIGHBOUR[:8]} could not be reached from there.", "nothing about the network"

    with_stand(body)


def test_what_waits_for_later_work_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch):
    async def body(running: Running) -> None:
        memory = running.stand.member._host.memory
        monkeypatch.setattr(memory, "limit_bytes", memory.programs_bytes + 3 * rows().nbytes)
        for index in range(4):
            message, carried = forward(mode="eval", step=1, microbatch=index)
            await running.feed.send(message, tuple(carried.values()))
        assert "tensors kept for later work" in (await running.failure()).reason
        assert running.stand.member._stages.runtimes[0].held.microbatches == 3

    with_running(body)


# --------------------------------------------------------------------------------------------------- hostile drivers


def test_a_commit_sent_again_is_applied_once():
    async def body(running: Running) -> None:
        await running.prepared()
        for _ in range(3):
            await running.commit()
        assert (await receive(running.control)).message == wire.Applied(fence=FENCE, stage=0, step=0)
        assert await running.alive()
        assert running.stand.member._stages.runtimes[0]._machine.applied == 1

    with_running(body)


@pytest.mark.parametrize(
    "message",
    [
        commit(0),
        commit(5),
        wire.Resume(fence=FENCE, stage=0, committed=0, source="initialise"),
        wire.Export(fence=FENCE, stage=0, step=3),
    ],
    ids=lambda message: f"{type(message).__name__} {getattr(message, 'step', '')}",
)
def test_an_order_at_the_wrong_moment_is_refused_to_the_driver(message: wire.Message):
    async def body(running: Running) -> None:
        await running.control.send(message)
        assert (await running.failure()).code == "bad_message"
        assert running.stand.member._stages.runtimes[0]._machine.applied == 0
        assert await running.alive()

    with_running(body)


@pytest.mark.parametrize(
    "message",
    [
        forward()[0],
        wire.Done(),
        wire.Hello(),
        wire.Prepared(fence=FENCE, stage=0, step=0, norms={}),
        wire.OpenJob(job="job-1", fence=FENCE, ticket=b""),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_has_no_place_on_a_control_connection_ends_it_with_a_reason(message: wire.Message):
    async def body(running: Running) -> None:
        carried = forward()[1] if isinstance(message, wire.Forward) else {}
        await running.control.send(message, tuple(carried.values()))
        assert "control connection" in (await running.failure()).reason
        with pytest.raises(TransportError):
            await receive(running.control)
        await asyncio.wait_for(running.stand.pool.doors[0].idle.wait(), PATIENCE_S)

    with_running(body)


def test_a_driver_that_never_reads_is_shown_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driven_part, "MAX_UNREAD", 50)

    async def body(stand: Stand) -> None:
        stalled = asyncio.Event()
        control, _ = await stand.open()

        async def delay(sender: Any, receiver: Any, size: int) -> None:
            if sender.peer == stand.peer:
                await stalled.wait()

        stand.pool.network.delay = delay
        monkeypatch.setattr("harness.memory_transport.HIGH_WATER_BYTES", 100)
        monkeypatch.setattr("fusionai.execution.links.FLUSH_TIMEOUT_S", 0.05)

        async def flood() -> None:
            for sequence in range(1000):
                await control.send(wire.Ping(sequence=sequence, sent_at_s=0.0))

        flooding = asyncio.create_task(flood())
        await asyncio.wait_for(stand.pool.doors[0].idle.wait(), PATIENCE_S)
        flooding.cancel()
        stalled.set()
        await asyncio.wait({flooding})

    with_stand(body)


def test_a_driver_that_goes_for_good_while_its_state_is_awaited_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.peer.acceptor.ORPHANED_S", 0.05)

    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        state, _ = await stand.open("state")
        await stand.open("tensors")
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=8, source="import", base=8))
        chunk = {"model/layer0.weight": tensor(np.ones((4, 4), np.float32))}
        message = wire.StateChunk(fence=FENCE, stage=0, step=8, last=False, tensors=headers(chunk))
        await state.send(message, tuple(chunk.values()))
        await control.close()
        await asyncio.wait_for(stand.pool.doors[0].idle.wait(), PATIENCE_S)

    with_stand(body)


# ------------------------------------------------------------------------------------------------------------- state


def full_state() -> dict[str, HostTensor]:
    matrix = tensor(np.ones((4, 4), np.float32))
    slots = {f"optimizer/layer0.weight/{slot}": matrix for slot in ("exp_avg", "exp_avg_sq")}
    return {"model/layer0.weight": matrix, **slots, "optimizer/layer0.weight/step": tensor(np.float32(8))}


def without(name: str) -> dict[str, HostTensor]:
    return {key: value for key, value in full_state().items() if key != name}


STATES: dict[str, tuple[dict[str, HostTensor], dict[str, Any], str]] = {
    "unknown entry": ({**full_state(), "model/zz": rows()}, {}, "unknown state entry"),
    "an entry of another stage": ({**full_state(), "model/layer1.weight": rows()}, {}, "unknown state entry"),
    "wrong shape": ({**full_state(), "model/layer0.weight": rows()}, {}, "expected model/layer0.weight"),
    "an entry missing": (without("optimizer/layer0.weight/exp_avg"), {}, "without optimizer/layer0.weight/exp_avg"),
    "another step": (full_state(), {"step": 7}, "expected the state of step 8"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_not_the_stages_own_is_refused(name: str):
    entries, changes, text = STATES[name]

    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        state, _ = await stand.open("state")
        await stand.open("tensors")
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=8, source="import", base=8))
        fields: dict[str, Any] = {"fence": FENCE, "stage": 0, "step": 8, "last": True, **changes}
        await state.send(wire.StateChunk(**fields, tensors=headers(entries)), tuple(entries.values()))
        message = (await receive(control)).message
        assert isinstance(message, wire.StageFailed), message
        assert text in message.reason

    with_stand(body)


def test_a_state_may_overtake_the_resume_that_asks_for_it():
    async def body(stand: Stand) -> None:
        control, _ = await stand.attached()
        state, _ = await stand.open("state")
        await stand.open("tensors")
        entries = full_state()
        message = wire.StateChunk(fence=FENCE, stage=0, step=8, last=True, tensors=headers(entries))
        await state.send(message, tuple(entries.values()))
        await control.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await receive(control)).message, wire.Pong)
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=8, source="import", base=8))
        assert (await receive(control)).message == wire.Ready(fence=FENCE, stage=0, applied=8)

    with_stand(body)


def test_nobody_overwrites_the_state_of_a_running_stage():
    async def body(running: Running) -> None:
        entries = {"model/layer0.weight": tensor(np.full((4, 4), 9.0, np.float32))}
        message = wire.StateChunk(fence=FENCE, stage=0, step=0, last=True, tensors=headers(entries))
        await running.state.send(message, tuple(entries.values()))
        await running.feed_microbatch(0)
        await running.return_gradient(0)
        program: Any = running.stand.member._stages.runtimes[0].program
        assert not program._imported
        assert await running.alive()

    with_running(body)


def test_other_messages_on_a_state_connection_are_reported():
    async def body(running: Running) -> None:
        await running.state.send(commit(0))
        assert "expected a StateChunk" in (await running.failure()).reason
        assert await running.alive()

    with_running(body)


# -------------------------------------------------------------------------------------------------------- own faults


def test_a_backends_bug_reaches_the_driver_as_a_report(monkeypatch: pytest.MonkeyPatch):
    async def body(running: Running) -> None:
        def broken(*args: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(type(running.stand.member._stages.runtimes[0].program), "forward", broken)
        message, carried = forward()
        await running.feed.send(message, tuple(carried.values()))
        assert (await running.failure()).reason == "ZeroDivisionError: a bug"
        assert await running.alive()

    with_running(body)


def test_a_backend_that_can_not_load_reaches_the_driver_as_a_report(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("harness.null_backend.NullStageProgram", broken)

    async def body(stand: Stand) -> None:
        _, answer = await stand.attached()
        assert isinstance(answer, wire.StageFailed)
        assert answer.code == "out_of_memory"
        assert "MemoryError" in answer.reason

    with_stand(body)


def test_the_boundaries_of_a_cut_pass_the_check_of_what_is_received():
    partition = cut_blocks(layers(), ((0, 2), (2, 3), (3, 4)))
    for stage, boundary in zip(partition.stages, boundaries(partition), strict=True):
        boundary.check(stage.graph)


CONTACTS: dict[str, Callable[[Stand], bytes]] = {
    "nothing": lambda _stand: b"",
    "the owner's own words": lambda stand: sign_ticket(_contact(stand), Ed25519PrivateKey.generate()),
    "a ticket of another peer": lambda stand: stand.pool.ticket(stand.peer),
    "a ticket for another job": lambda stand: stand.pool.ticket(NEIGHBOUR, job="job-2"),
    "an expired ticket": lambda stand: stand.pool.ticket(NEIGHBOUR, lifetime_s=-1.0),
}


def _contact(stand: Stand) -> Ticket:
    return Ticket(JOB, NEIGHBOUR, 1, 1, "stage", 1e12, stand.listener.addresses)


@pytest.mark.parametrize("contact", CONTACTS)
def test_an_owner_can_choose_no_address_for_a_peer_to_dial(contact: str):
    """Only what the broker signed for the neighbour and this job says where the neighbour listens."""

    async def body(stand: Stand) -> None:
        neighbours = [
            msgspec.structs.replace(one, ticket=CONTACTS[contact](stand)) if one.peer == NEIGHBOUR else one
            for one in stand.neighbours()
        ]
        control, _ = await stand.open()
        await stand.enlisted(control, neighbours=tuple(neighbours))
        message, carried = stand.attach()
        await control.send(message, tuple(carried.values()))
        while not isinstance(message := (await receive(control)).message, wire.LinkLost):
            pass
        assert message.peer == NEIGHBOUR
        assert stand.from_peer.empty()

    with_stand(body)
