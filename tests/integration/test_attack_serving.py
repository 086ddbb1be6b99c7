"""Attack programs against a machine that serves: the owner of a job sends orders that cost it little and would cost the
machine more memory than it lends. The daemon and its worker live on, and an honest job works afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from fusionai.execution.serving.boundary import RowSpec, ServingBoundary
from fusionai.ir.schema import Graph, Node, ParamSpec, Ref, ValueSpec
from fusionai.primitives.errors import ChannelClosed
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.serving import Segment, ServeOptions
from harness.hostile_owner import JOB, HostileOwner
from harness.in_a_loop import in_a_loop
from harness.patience import CEILING_S
from harness.victim import LENT_BYTES, MIB, Victim, victim_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory groups and confined workers are Linux's"),
]

log = logging.getLogger(__name__)

OPTIONS = ServeOptions(pages=16, page_tokens=4, sessions=8, pass_tokens=64)
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim_of(tmp_path_factory.mktemp("attacked"), "serve", an_honest_pass_works) as opened:
        yield opened


def relu(width: int, most: int = 64) -> Graph:
    """`most`: positions of a pass."""
    return Graph(
        name="attack",
        symbols={"s": (1, most)},
        inputs=("x",),
        outputs={"y": "y"},
        values={name: ValueSpec((1, "s", width), "float32") for name in "xy"},
        params={},
        nodes=(Node(id=0, op="aten.relu.default", args=(Ref("x"),), outputs=("y",)),),
    )


def boundary(width: int, stage: int = 0) -> ServingBoundary:
    return ServingBoundary(
        stage=stage, receives=(RowSpec("x", "float32", (width,)),), sends=(RowSpec("y", "float32", (width,)),)
    )


def rows(width: int, count: int = 1) -> dict[str, HostTensor]:
    return {"x": host_tensor("float32", (1, count, width), np.ones((1, count, width), np.float32).tobytes())}


def a_pass(owner: HostileOwner, number: int, segment: Segment, values: dict[str, HostTensor]) -> wire.Pass:
    return wire.Pass(
        fence=owner.fence, number=number, producer=-1, consumer=0, segments=(segment,), tensors=headers(values)
    )


async def an_honest_pass_works(owner: HostileOwner) -> None:
    async with asyncio.timeout(CEILING_S):
        await owner.enlist()
        feed = await owner.dial("tensors")
        answer = await owner.load(relu(3), boundary(3), OPTIONS, fresh=True)
        assert isinstance(answer, wire.Loaded), answer
        values = rows(3)
        await feed.send(a_pass(owner, 1, Segment(1, 0, 1, 0, (0,)), values), tuple(values.values()))
        while not isinstance((envelope := await feed.receive()).message, wire.Pass):
            pass
    assert bytes(envelope.tensors["y"].data) == np.ones(3, np.float32).tobytes()


async def refused(owner: HostileOwner) -> wire.StageFailed | wire.CheckFailed | wire.PassFailed | wire.LinkLost:
    """The victim's next refusal, in this round."""
    while True:
        answer = await owner.answer()
        if isinstance(answer, wire.StageFailed | wire.CheckFailed | wire.PassFailed | wire.LinkLost):
            log.info("%s", answer)
            return answer


@in_a_loop
async def test_rows_of_one_page_named_many_times_are_not_copied_many_times(victim: Victim):
    async with victim.attacked() as owner:
        await owner.enlist()
        feed = await owner.dial("tensors")
        assert isinstance(answer := await owner.load(relu(3), boundary(3), OPTIONS), wire.Loaded), answer
        values = rows(3, 4)
        await feed.send(a_pass(owner, 1, Segment(1, 0, 4, 0, (0,)), values), tuple(values.values()))
        while not isinstance((await feed.receive()).message, wire.Pass):
            pass
        again = Segment(1, 0, 16_384, 0, (0,) * 4096)
        await owner.control.send(wire.Rebuild(fence=owner.fence, stage=0, through=1, number=2, segments=(again,)))
        assert "16 pages" in (await refused(owner)).reason
        await owner.control.send(
            wire.ShowRows(fence=owner.fence, stage=0, number=3, segment=again, peer=owner.peer, reply=owner.fence)
        )
        assert "16 pages" in (await refused(owner)).reason


@in_a_loop
async def test_page_tables_of_sessions_that_never_were_take_no_memory(victim: Victim):
    options = ServeOptions(pages=65_536, page_tokens=1, sessions=8, pass_tokens=64)
    async with victim.attacked() as owner:
        await owner.enlist()
        await owner.dial("tensors")
        assert isinstance(answer := await owner.load(relu(1), boundary(1), options), wire.Loaded), answer
        ended = asyncio.ensure_future(refused(owner))
        sent = 0
        for number in range(4 * LENT_BYTES // (8 * 65_536)):
            segment = Segment(number, 0, 1, 0, tuple(range(65_536)))
            order = wire.Rebuild(fence=owner.fence, stage=0, through=1, number=number, segments=(segment,))
            with suppress(ChannelClosed):
                await owner.control.send(order)
            sent += 1
        await ended
        log.info("%d orders", sent)


@in_a_loop
async def test_sketches_of_wide_rows_take_no_more_than_is_lent(victim: Victim):
    """The signs of a text's projections take 64 bytes for each number of a row."""
    width, options = 2 * MIB, ServeOptions(pages=16, page_tokens=4, sessions=8, pass_tokens=1, retain=False)
    async with victim.attacked() as owner:
        await owner.enlist()
        feed = await owner.dial("tensors")
        answer = await owner.load(relu(width, 1), boundary(width), options, sketches=SECRET)
        assert isinstance(answer, wire.Loaded), answer
        values = rows(width)
        for session in range(1, 5):
            await feed.send(a_pass(owner, session, Segment(session, 0, 1, 0, (0,)), values), tuple(values.values()))
            while not isinstance((await feed.receive()).message, wire.Pass):
                pass
            await owner.control.send(
                wire.RequestSketches(fence=owner.fence, stage=0, number=session, session=session, start=0, length=1)
            )
            while not isinstance((envelope := await feed.receive()).message, wire.TextSketches):
                pass
            assert np.isnan(np.frombuffer(envelope.tensors["got"].data, np.float32)).all()


@in_a_loop
async def test_sketches_of_many_texts_take_no_more_than_is_lent(victim: Victim):
    """A stage without caches has pages for nothing, so that any number of texts may be sketched."""
    width, options = 4096, ServeOptions(pages=1_000_000, page_tokens=1024, sessions=8, pass_tokens=1024, retain=False)
    async with victim.attacked() as owner:
        await owner.enlist()
        feed = await owner.dial("tensors")
        answer = await owner.load(relu(width), boundary(width), options, sketches=SECRET)
        assert isinstance(answer, wire.Loaded), answer
        values = rows(width, 64)
        for number in range(24):
            segments = tuple(Segment(64 * number + one, 0, 1, 0, (0,)) for one in range(64))
            message = wire.Pass(
                fence=owner.fence, number=number, producer=-1, consumer=0, segments=segments, tensors=headers(values)
            )
            await feed.send(message, tuple(values.values()))
            while not isinstance((await feed.receive()).message, wire.Pass):
                pass


@in_a_loop
async def test_verifiers_that_get_no_rows_take_no_more_than_is_lent(victim: Victim):
    width, options = MIB, ServeOptions(pages=16, page_tokens=4, sessions=8, pass_tokens=1, retain=False)
    async with victim.attacked() as owner:
        await owner.enlist((*owner.places()[1:], wire.Neighbour(stage=0, peer=owner.peer)), standbys=(0,))
        await owner.dial("tensors")
        answer = await owner.load(relu(width, 1), boundary(width), options, standby=True)
        assert isinstance(answer, wire.Loaded), answer
        for number in range(8):
            await owner.control.send(
                wire.ReadAgain(
                    fence=owner.fence, stage=0, number=number, session=1, length=8, keys=(SECRET, SECRET),
                    reply=owner.fence,
                )
            )  # fmt: skip
        await refused(owner)


@in_a_loop
async def test_loads_that_wait_for_another_take_no_more_than_is_lent(victim: Victim):
    """The first one waits for a weight that never comes."""
    graph = Graph(
        name="attack",
        symbols={"s": (1, 64)},
        inputs=("x",),
        outputs={"y": "y"},
        values={"x": (row := ValueSpec((1, "s", 3), "float32")), "y": row, "w": ValueSpec((3,), "float32")},
        params={"w": ParamSpec(key="w", kind="parameter", shape=(3,), dtype="float32")},
        nodes=(Node(id=0, op="aten.add.Tensor", args=(Ref("x"), Ref("w")), outputs=("y",)),),
    )
    never = wire.WeightSpec("w", "float32", (3,), bytes(32), (bytes(32),))
    size = 16 * MIB
    async with victim.attacked() as owner:
        await owner.enlist()
        first = asyncio.ensure_future(
            owner.load(graph, boundary(3), OPTIONS, weights=(never,), sources=(wire.WeightSource(peer=owner.peer),))
        )
        await asyncio.sleep(0)
        carried = {"graph": host_tensor("uint8", (size,), bytes(size))}
        message = wire.Load(
            fence=owner.fence,
            job=JOB,
            stage=0,
            stages=2,
            graph_hash="none",
            boundary=msgspec.Raw(msgspec.msgpack.encode(boundary(3))),
            options=OPTIONS,
            tensors=headers(carried),
        )
        for _ in range(4 * LENT_BYTES // size):
            with suppress(ChannelClosed):
                await owner.control.send(message, tuple(carried.values()))
        with suppress(ChannelClosed):
            await first
        owner.control = await owner.dial("control")
