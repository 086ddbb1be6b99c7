"""Attack programs against a live pool: a member with genuine tickets for a job of its own attacks the machine it was
given. The daemon and its worker live on, send back nothing but results, dial nobody that the owner names, and take no
more memory than they lend, which the kernel holds from outside.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from fusionai.execution.links import dials
from fusionai.ir.schema import Arg, Graph, Node, Ref, ValueSpec
from fusionai.primitives.errors import ChannelClosed
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.transport.enrolment import load_membership
from fusionai.transport.interface import Channel, Envelope
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.signed import Ticket, sign_ticket
from fusionai.wire import messages as wire
from fusionai.wire.frame import encode_header, headers
from harness.hostile_owner import JOB, HostileOwner
from harness.in_a_loop import in_a_loop
from harness.patience import CEILING_S
from harness.victim import LENT_BYTES, MIB, Victim, victim_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory groups and confined workers are Linux's"),
]

log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim_of(tmp_path_factory.mktemp("attacked"), "train", an_honest_round_works) as opened:
        yield opened


def tensor(*shape: int, dtype: str = "float32") -> HostTensor:
    return host_tensor(dtype, shape, np.ones(shape, dtype).tobytes())


def graph_of(
    op: str, operands: dict[str, tuple[int, ...]], made: dict[str, tuple[int, ...]], *rest: Arg | dict[str, Arg]
) -> Graph:
    """A node with these operands, then `rest` as they are; keyword arguments in a dict at the end."""
    options = rest[-1] if rest and isinstance(rest[-1], dict) else {}
    args = (*(Ref(name) for name in operands), *(one for one in rest if not isinstance(one, dict)))
    return Graph(
        name="attack",
        symbols={},
        inputs=tuple(operands),
        outputs={name: name for name in made},
        values={name: ValueSpec(shape, "float32") for name, shape in (operands | made).items()},
        params={},
        nodes=(Node(id=0, op=op, args=args, kwargs=options, outputs=tuple(made)),),
    )


HONEST = graph_of("aten.relu.default", {"x": (2, 3)}, {"y": (2, 3)})


async def an_honest_round_works(owner: HostileOwner) -> None:
    """The end of a connection of the attack may be reported in this round; a driver begins another one then."""
    async with asyncio.timeout(CEILING_S):
        await owner.enlist()
        while isinstance(answer := await outcome(owner, HONEST), wire.LinkLost):
            await owner.enlist()
    assert isinstance(answer, dict), answer
    assert bytes(answer["y"].data) == np.ones((2, 3), np.float32).tobytes()


async def results(feed: Channel) -> dict[str, HostTensor]:
    while isinstance((envelope := await feed.receive()).message, wire.Ping):
        pass
    return dict(envelope.tensors)


async def outcome(owner: HostileOwner, graph: Graph, n: int = 1) -> wire.Message | dict[str, HostTensor]:
    """What the victim makes of a graph: its results, or why the stage failed. `n`: the size of symbols."""
    answer = await owner.attach(graph)
    if not isinstance(answer, wire.Status):
        return answer
    feed = await owner.dial("tensors")
    await owner.dial("state")
    ready = await owner.resume()
    if not isinstance(ready, wire.Ready):
        return ready
    shapes = {name: graph.values[name].shape for name in graph.inputs}
    values = {name: tensor(*(n if isinstance(dim, str) else dim for dim in shape)) for name, shape in shapes.items()}
    await feed.send(owner.forward(values), tuple(values.values()))
    failed = asyncio.ensure_future(owner.answer())
    made = asyncio.ensure_future(results(feed))
    done, _ = await asyncio.wait((failed, made), return_when=asyncio.FIRST_COMPLETED)
    failed.cancel()
    made.cancel()
    return failed.result() if failed in done else made.result()


CHANNELS = 4096
DISAGREEING = {
    "a mean for one of 4,096 channels": graph_of(
        "aten._native_batch_norm_legit_functional.default",
        {"x": (1, CHANNELS, 2, 2), "w": (CHANNELS,), "b": (CHANNELS,), "mean": (1,), "var": (1,)},
        {"y": (1, CHANNELS, 2, 2), "m": (CHANNELS,), "v": (CHANNELS,), "new_mean": (1,), "new_var": (1,)},
        True,
        0.1,
        1e-5,
    ),
    "a weight for one of 4,096 channels": graph_of(
        "aten._native_batch_norm_legit_no_training.default",
        {"x": (1, CHANNELS, 2, 2), "w": (1,), "b": (CHANNELS,), "mean": (CHANNELS,), "var": (CHANNELS,)},
        {"y": (1, CHANNELS, 2, 2), "m": (0,), "v": (0,)},
        0.1,
        1e-5,
    ),
    "4,096 values for one key": graph_of(
        "fusion.attention",
        {"q": (1, 1, 1, 8), "k": (1, 1, 1, 8), "v": (1, 1, CHANNELS, 8)},
        {"y": (1, 1, 1, 8)},
        {"scale": 1.0, "causal": False},
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
@in_a_loop
async def test_operands_that_disagree_reach_no_kernel(victim: Victim, name: str):
    async with victim.attacked() as owner:
        await owner.enlist()
        answer = await outcome(owner, DISAGREEING[name])
        assert isinstance(answer, wire.StageFailed), "nothing came back"
        assert "expected" in answer.reason
        log.info("%s", answer.reason)


ROWS, EACH = (4, CHANNELS), (CHANNELS,)
STATISTICS = {"x": ROWS, **dict.fromkeys(("w", "b", "mean", "var"), EACH)}
NORMS = {
    "aten._native_batch_norm_legit_functional.default": (STATISTICS, ("m", "v", "new_mean", "new_var"), (True,)),
    "aten._native_batch_norm_legit_no_training.default": (STATISTICS, ("m", "v"), ()),
    "aten._native_batch_norm_legit.no_stats": ({"x": ROWS, "w": EACH, "b": EACH}, ("m", "v"), (True,)),
}
AGREEING = {
    **{
        op: graph_of(op, operands, {"y": ROWS, **dict.fromkeys(saved, EACH)}, *flags, 0.1, 1e-5)
        for op, (operands, saved, flags) in NORMS.items()
    },
    "fusion.attention": graph_of(
        "fusion.attention",
        {"q": (1, 1, 4, 8), "k": (1, 1, CHANNELS, 8), "v": (1, 1, CHANNELS, 8)},
        {"y": (1, 1, 4, 8)},
        {"scale": 1.0, "causal": False},
    ),
}


@pytest.mark.parametrize(
    ("op", "operand"), [(op, name) for op, graph in AGREEING.items() for name in graph.inputs if name not in "xqb"]
)
@in_a_loop
async def test_operands_that_agree_at_their_largest_only_reach_no_kernel(victim: Victim, op: str, operand: str):
    """The size of one operand is a symbol: the graph can be loaded, and is right for the largest size."""
    graph = AGREEING[op]
    shape = tuple("n" if size == CHANNELS else size for size in graph.values[operand].shape)
    values = {**graph.values, operand: ValueSpec(shape, "float32")}
    graph = msgspec.structs.replace(graph, symbols={"n": (1, CHANNELS)}, values=values)
    async with victim.attacked() as owner:
        await owner.enlist()
        assert isinstance(answer := await outcome(owner, graph, CHANNELS), dict), answer
        await owner.enlist()
        answer = await outcome(owner, graph, 1)
        assert isinstance(answer, wire.StageFailed), "nothing came back"
        assert "expected" in answer.reason
        log.info("%s", answer.reason)


LONG, WIDE = 4096, 512
HUNGRY = {
    "scores of soft-capped attention": graph_of(
        "fusion.attention",
        dict.fromkeys(("q", "k", "v"), (1, 8, LONG, 4)),
        {"y": (1, 8, LONG, 4)},
        {"scale": 1.0, "causal": True, "softcap": 5.0},
    ),
    "operands of a product that are repeated": graph_of(
        "aten.matmul.default",
        {"a": (WIDE, 1, 8, 64), "b": (1, WIDE, 64, 1)},
        {"y": (WIDE, WIDE, 8, 1)},
    ),
    "a value that is larger than what is lent": graph_of(
        "aten.mul.Tensor", {"a": (2**14, 1), "b": (1, 2**14)}, {"y": (2**14, 2**14)}
    ),
}


@pytest.mark.parametrize("name", HUNGRY)
@in_a_loop
async def test_small_inputs_take_no_more_memory_than_is_lent(victim: Victim, name: str):
    """The first two take 512 MiB inside a kernel if it is allowed to."""
    async with victim.attacked() as owner:
        await owner.enlist()
        answer = await outcome(owner, HUNGRY[name])
        if isinstance(answer, wire.StageFailed):
            log.info("%s", answer.reason)
            assert "the limit is" in answer.reason or "memory" in answer.reason
        else:
            assert isinstance(answer, dict), "or it was computed piece by piece"


STAGES, PART = 4, 8 * MIB


@in_a_loop
async def test_tensors_for_later_work_at_many_stages_take_no_more_than_is_lent(victim: Victim):
    """Each stage would hold all that is lent, were the limit its own."""
    shape = (PART // 4 // 1024, 1024)
    waiting = graph_of("aten.add.Tensor", {"x": shape, "z": shape}, {"y": shape})
    async with victim.attacked() as owner:
        places = owner.places(STAGES)
        await owner.enlist(places)
        for stage in range(STAGES):
            answer = await owner.attach(waiting, stage, STAGES, later=("z",), microbatches=1000)
            assert isinstance(answer, wire.Status), answer
        feed = await owner.dial("tensors")
        await owner.dial("state")
        for stage in range(STAGES):
            assert isinstance(answer := await owner.resume(stage), wire.Ready), answer
        part = {"x": tensor(*shape)}
        refused = asyncio.ensure_future(owner.answer())
        sent = 0
        while not refused.done() and sent < 4 * LENT_BYTES:
            # The other operand never comes, so that everything waits.
            for stage in range(STAGES):
                message = owner.forward(part, stage=stage, microbatch=sent // (STAGES * PART))
                await asyncio.wait(
                    (asyncio.ensure_future(feed.send(message, tuple(part.values()))), refused),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                sent += PART
        answer = await refused
        assert isinstance(answer, wire.StageFailed), answer
        log.info("after %d MiB: %s", sent // MIB, answer.reason)
        assert "more than it lends to all jobs together" in answer.reason


async def until_refused(owner: HostileOwner, first: int) -> str:
    """Why the victim refused a snapshot of a stage from `first` on."""
    while True:
        answer = await owner.answer()
        if isinstance(answer, wire.StageFailed) and answer.stage >= first:
            return answer.reason


@in_a_loop
async def test_snapshots_of_many_stages_take_no_more_than_is_lent_beside_a_stage_that_holds_tensors(victim: Victim):
    """Half of what is lent is held by a stage, and snapshots of four times what is lent follow."""
    shape = (PART // 4 // 1024, 1024)
    waiting = graph_of("aten.add.Tensor", {"x": shape, "z": shape}, {"y": shape})
    async with victim.attacked() as owner:
        watched = range(1, 1 + 2 * LENT_BYTES // PART)
        own = tuple(wire.Neighbour(stage=stage, peer=owner.peer) for stage in watched)
        await owner.enlist((*owner.places()[:1], *own), watched)
        answer = await owner.attach(waiting, later=("z",), microbatches=1000)
        assert isinstance(answer, wire.Status), answer
        feed = await owner.dial("tensors")
        await owner.dial("state")
        assert isinstance(answer := await owner.resume(), wire.Ready), answer
        part = {"x": tensor(*shape)}
        for microbatch in range(LENT_BYTES // 2 // PART):
            await feed.send(owner.forward(part, microbatch=microbatch), [*part.values()])
        refused = asyncio.ensure_future(until_refused(owner, 1))
        state = await owner.dial("state", as_stage=True)
        sent = 0
        for step, stage in ((step, stage) for step in (1, 2) for stage in watched):
            message = wire.Snapshot(
                fence=owner.fence, stage=stage, step=step, part=0, watermark=0, last=True, tensors=headers(part)
            )
            if state.closed or refused.done():
                break
            with suppress(ChannelClosed):  # the victim may end the connection instead
                await state.send(message, tuple(part.values()))
                sent += PART
        ended = asyncio.ensure_future(state.receive())
        await asyncio.wait((refused, ended), return_when=asyncio.FIRST_COMPLETED)
        log.info("after %d MiB: %s", sent // MIB, refused.result() if refused.done() else "the connection was ended")
        await cancelled(refused, ended)
        assert sent < 4 * LENT_BYTES, "it takes them all"


@in_a_loop
async def test_results_that_the_owner_does_not_read_take_no_more_than_is_lent(victim: Victim):
    shape = (PART // 4 // 1024, 1024)
    async with victim.attacked() as owner:
        await owner.enlist()
        assert isinstance(await owner.attach(graph_of("aten.relu.default", {"x": shape}, {"y": shape})), wire.Status)
        feed = await owner.dial("tensors")
        await owner.dial("state")
        assert isinstance(await owner.resume(), wire.Ready)
        told = asyncio.ensure_future(owner.answer())
        part, sent = {"x": tensor(*shape)}, 0
        sending = asyncio.ensure_future(asyncio.sleep(0))
        while not told.done() and not feed.closed and sent < 4 * LENT_BYTES:
            sending = asyncio.ensure_future(feed.send(owner.forward(part, microbatch=sent // PART), [*part.values()]))
            await asyncio.wait((sending, told), return_when=asyncio.FIRST_COMPLETED)
            sent += PART
        answer = await told
        await cancelled(sending)
        log.info("after %d MiB: %s", sent // MIB, answer)
        assert isinstance(answer, wire.LinkLost | wire.StageFailed)


@in_a_loop
async def test_frames_that_arrive_on_many_connections_take_no_more_than_is_lent(victim: Victim):
    """Each announces a gigabyte and brings some of it."""
    async with victim.attacked() as owner:
        await owner.enlist()
        feeds = [await owner.dial("state") for _ in range(8)]
        header = wire.TensorHeader("model/x", "uint8", (64 * MIB,))
        message = wire.StateChunk(fence=owner.fence, stage=0, step=0, last=False, tensors=(header,))
        for feed in feeds:
            unfinished(feed, message, 64 * MIB, 48 * MIB)
        ends = [asyncio.ensure_future(feed.receive()) for feed in feeds]
        done: set[asyncio.Future[Any]] = set()
        async with asyncio.timeout(CEILING_S):
            while len(done) < len(feeds) - LENT_BYTES // (64 * MIB):
                done |= (await asyncio.wait({*ends} - done, return_when=asyncio.FIRST_COMPLETED))[0]
        assert all(isinstance(one.exception(), ChannelClosed) for one in done)
        ended = [feed for feed in feeds if feed.closed]
        log.info("%d of %d connections with unfinished frames were ended", len(ended), len(feeds))
        assert len(ended) >= len(feeds) - LENT_BYTES // (64 * MIB)
        await cancelled(*ends)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def unfinished(channel: Channel, message: wire.Message, body_bytes: int, sent_bytes: int) -> None:
    encoded = wire.encode(message)
    assert isinstance(channel, TcpChannel)
    channel._write(encode_header(len(encoded), body_bytes) + encoded + bytes(sent_bytes))


PROBES, PROBE_BYTES = 60, 4 * MIB


@in_a_loop
async def test_unfinished_probes_of_a_member_without_a_ticket_take_the_memory_of_a_few(victim: Victim):
    """60 of 4 MiB each are more than is lent."""
    transport = TcpTransport(load_membership(victim.pool.owner / "owner").credentials)
    probe = wire.Probe(sequence=1, sent_at_s=0.0, tensors=(wire.TensorHeader("probe", "uint8", (PROBE_BYTES,)),))
    async with victim.attacked() as owner:
        channels: list[Channel] = []
        ends: set[asyncio.Future[Envelope]] = set()
        try:
            for _ in range(PROBES):
                channels.append(await transport.dial(owner.addresses, expect=owner.victim, stream="tensors"))
                unfinished(channels[-1], probe, PROBE_BYTES, PROBE_BYTES - 1)
            ends = {asyncio.ensure_future(channel.receive()) for channel in channels}
            async with asyncio.timeout(CEILING_S):
                while len(ends) > 8:
                    done, ends = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    assert all(isinstance(one.exception(), ChannelClosed) for one in done)
            log.info("%d of %d connections with unfinished probes were ended", PROBES - len(ends), PROBES)
        finally:
            for channel in channels:
                channel.abort()
            await cancelled(*ends)


@pytest.mark.parametrize("signer", ["the owner", "nothing", "the broker, for another key"])
@in_a_loop
async def test_no_address_of_the_owners_choice_is_dialled(victim: Victim, signer: str):
    """The ticket for the neighbour names a port of the provider's own machine, or is not the neighbour's."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        async with victim.attacked() as owner:
            stranger = PeerId("z" * PEER_ID_LENGTH)  # the lower of two ids dials
            assert dials(owner.victim, stranger, owner.peer)
            ticket = sign_ticket(
                Ticket(
                    job=JOB,
                    peer=stranger,
                    stage=1,
                    plan_version=owner.version,
                    role="stage",
                    expires_at_s=time.time() + 600.0,
                    addresses=(f"tcp://127.0.0.1:{trap.getsockname()[1]}",),
                ),
                owner.membership.credentials.identity.key,
            )
            shown = {"the owner": ticket, "nothing": b""}.get(signer, owner.tickets[owner.victim])
            neighbour = wire.Neighbour(stage=1, peer=stranger, ticket=shown)
            await owner.enlist((*owner.places()[:1], neighbour))
            answer = await owner.attach(HONEST)
            while isinstance(answer, wire.Status):
                answer = await owner.answer()
            log.info("%s", answer)
            assert isinstance(answer, wire.LinkLost)
            assert answer.peer == stranger
        with pytest.raises(BlockingIOError):
            trap.accept()
