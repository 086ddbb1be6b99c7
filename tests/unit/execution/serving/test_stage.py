"""A stage of a serving job: what a pass may say, what goes on, what is kept, and what of older rounds is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from fusionai.backends.state import ProgramSize
from fusionai.execution.host import ComputeThread
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.serving.boundary import RowSpec, ServingBoundary
from fusionai.execution.serving.stage import ServingStage, StageIdentity
from fusionai.ir.schema import Graph, Node, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, Segment, ServeOptions
from harness.pool import array, tensor

T = TypeVar("T")
FENCE = Fence(1, 1, 0)
OPTIONS = ServeOptions(page_tokens=2, pages=8, sessions=4, pass_tokens=6)
HIDDEN = RowSpec("h", "float32", (1,))
ALONG = RowSpec("ids", "int64")
GRAPH = Graph(
    inputs=("h_in",),
    outputs={"h": "h"},
    values={"h_in": ValueSpec((1, "s", 1), "float32"), "h": ValueSpec((1, "s", 1), "float32")},
    nodes=(Node(id=0, op="fusion.attention", outputs=("h",)),),
)
BOUNDARY = ServingBoundary(
    stage=1, receives=(RowSpec("h_in", "float32", (1,)), ALONG), sends=(HIDDEN, ALONG), outputs=()
)


KEPT_BYTES, IN_USE_BYTES = 100, 20


class Program:
    """Adds a hundred."""

    def __init__(self) -> None:
        self.ran: list[tuple[tuple[Segment, ...], Sequence[int] | None]] = []
        self.forgotten: list[int] = []
        self.problem: Exception | None = None
        self.cached: dict[int, int] = {}

    resident_bytes = 100
    size = ProgramSize(KEPT_BYTES, IN_USE_BYTES)
    missing: tuple[str, ...] = ()

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None: ...

    def allocate(self) -> None: ...

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        if self.problem is not None:
            raise self.problem
        self.ran.append((tuple(segments), rows))
        value = array(inputs["h_in"]) + 100
        chosen = value if rows is None else value[:, list(rows)]
        return {name: tensor(chosen.astype(np.float32)) for name in wanted}

    def forget(self, sessions: Iterable[int]) -> None:
        self.forgotten += sessions

    def forget_all(self) -> None:
        self.cached.clear()


class Postman:
    """Notes what leaves."""

    def __init__(self) -> None:
        self.present = FENCE
        self.sent: list[tuple[int, wire.Message, tuple[HostTensor, ...]]] = []
        self.of_positions: list[wire.Message] = []
        self.results: list[wire.PassResult] = []
        self.failures: list[str] = []

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        self.sent.append((stage, message, tuple(tensors)))

    def to_driver(self, message: wire.Message) -> None:
        self.of_positions.append(message)

    def result(self, message: wire.PassResult, tensors: Sequence[HostTensor]) -> None:
        self.results.append(message)

    def failed(self, stage: int, fence: Fence, code: wire.RefusalCode, reason: str) -> None:
        self.failures.append(f"{code}: {reason}")


class Bench:
    """A stage with its program and postman. `settle` waits until all that was taken has been computed."""

    def __init__(self, **identity: bool) -> None:
        self.program, self.postman, self.compute = Program(), Postman(), ComputeThread()
        self.memory = MemoryBudget(1000)
        described = StageIdentity(
            graph_hash="",
            boundary=b"",
            options=OPTIONS,
            select=identity.get("select", False),
            last=identity.get("last", False),
            weights=(),
        )
        self.stage = ServingStage(
            identity=described,
            boundary=BOUNDARY,
            graph=GRAPH,
            program=self.program,
            compute=self.compute,
            memory=self.memory,
            member=self.postman,
        )
        self.stage.allocated = True

    async def settle(self) -> None:
        await self.compute.run(lambda: None)
        for _ in range(4):
            await asyncio.sleep(0)


def pass_of(*segments: Segment, values: Sequence[float], **fields: object) -> tuple[wire.Pass, dict[str, HostTensor]]:
    tensors = {
        "h_in": tensor(np.array([[[value] for value in values]], np.float32)),
        "ids": tensor(np.arange(len(values), dtype=np.int64)[None]),
    }
    message = wire.Pass(fence=FENCE, number=3, producer=0, consumer=1, segments=segments, tensors=headers(tensors))
    return msgspec.structs.replace(message, **fields), tensors


def on_a_bench(work: Callable[[Bench], Awaitable[T]], **identity: bool) -> T:
    async def story() -> T:
        bench = Bench(**identity)
        try:
            return await work(bench)
        finally:
            bench.compute.close()

    return asyncio.run(story())


TWO = (Segment(1, 0, 3, 0, (0, 1)), Segment(2, 0, 1, 0, (2,)))


def test_a_pass_goes_on_with_what_travels_along_and_how_long_it_took():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4], wanted=(2, 3), forget=(9,)))
        await bench.settle()
        ((stage, message, (hidden, ids)),) = bench.postman.sent
        assert isinstance(message, wire.Pass)
        assert (stage, message.producer, message.consumer, message.wanted) == (2, 1, 2, (2, 3))
        assert array(hidden).ravel().tolist() == [101, 102, 103, 104]
        assert array(ids).ravel().tolist() == [0, 1, 2, 3]
        assert [hop.stage for hop in message.hops] == [1]
        assert bench.program.forgotten == [9]

    on_a_bench(work)


def test_only_wanted_rows_go_on_where_nothing_after_has_attention():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4], wanted=(2, 3)))
        await bench.settle()
        ((_, _, (hidden, ids)),) = bench.postman.sent
        assert array(hidden).ravel().tolist() == [103, 104]
        assert array(ids).ravel().tolist() == [2, 3]

    on_a_bench(work, select=True)


def test_rows_whose_states_are_wanted_go_on_too():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4], wanted=(3,), state_rows=(0, 1)))
        await bench.settle()
        ((_, _, (hidden, ids)),) = bench.postman.sent
        assert array(hidden).ravel().tolist() == [101, 102, 104]
        assert array(ids).ravel().tolist() == [0, 1, 3]

    on_a_bench(work, select=True)


@pytest.mark.parametrize("rows", [(1, 0), (4,)])
def test_rows_whose_states_are_wanted_must_be_rows_of_the_pass(rows: tuple[int, ...]):
    async def work(bench: Bench) -> None:
        with pytest.raises(ExecutionError, match="wanted rows in ascending order and below 4"):
            bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4], wanted=(3,), state_rows=rows))

    on_a_bench(work)


def test_a_pass_that_nobody_wants_to_see_ends_where_rows_are_selected_and_fills_the_cache():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4]))
        await bench.settle()
        assert bench.postman.sent == []
        assert [result.tensors for result in bench.postman.results] == [()]
        assert len(bench.program.ran) == 1

    on_a_bench(work, select=True)


def test_what_was_sent_on_is_sent_again_for_a_rebuild():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4]))
        await bench.settle()
        bench.postman.sent.clear()
        order = wire.Rebuild(fence=FENCE, stage=1, through=3, number=8, segments=(Segment(1, 0, 3, 0, (0, 1)),))
        bench.stage.rebuild(order)
        ((stage, message, (hidden, ids)),) = bench.postman.sent
        assert isinstance(message, wire.Pass)
        assert (stage, message.number, message.rebuild, message.segments[0].pages) == (2, 8, 3, (0, 1))
        assert array(hidden).ravel().tolist() == [101, 102, 103]
        assert array(ids).ravel().tolist() == [0, 1, 2]

    on_a_bench(work)


def test_rows_that_are_not_here_any_more_fail_the_rebuild_not_the_stage():
    async def work(bench: Bench) -> None:
        order = wire.Rebuild(fence=FENCE, stage=1, through=2, number=8, segments=(Segment(1, 0, 3, 0, (0, 1)),))
        bench.stage.rebuild(order)
        (failed,) = bench.postman.of_positions
        assert isinstance(failed, wire.PassFailed)
        assert failed.number == 8
        assert bench.postman.failures == []

    on_a_bench(work)


def test_sessions_are_sent_again_together_within_the_limit_of_a_pass():
    """Of six positions: the first of seven is cut as it would be alone, the others go with what is left of it."""
    first, second, third = Segment(1, 0, 7, 0, (0, 1, 2, 3)), Segment(2, 0, 3, 0, (4, 5)), Segment(3, 0, 3, 0, (6, 7))

    async def work(bench: Bench) -> None:
        for segment, positions in ((first, (6, 1)), (second, (3,)), (third, (3,))):
            done = 0
            for length in positions:
                pages = segment.pages if done == 0 else ()
                part = Segment(segment.session, done, length, 0 if done == 0 else len(segment.pages), pages)
                values = [segment.session * 10 + done + place for place in range(length)]
                bench.stage.take(*pass_of(part, values=values))
                done += length
        await bench.settle()
        bench.postman.sent.clear()
        bench.stage.rebuild(wire.Rebuild(fence=FENCE, stage=1, through=2, number=8, segments=(first, second, third)))
        passes = [(message, sent[0]) for _, message, sent in bench.postman.sent if isinstance(message, wire.Pass)]
        assert [[(one.session, one.start, one.length) for one in message.segments] for message, _ in passes] == [
            [(1, 0, 6)],
            [(1, 6, 1), (2, 0, 3)],
            [(3, 0, 3)],
        ]
        assert array(passes[1][1]).ravel().tolist() == [116, 120, 121, 122]
        assert [one.pages for one in passes[1][0].segments] == [(), (4, 5)]

    on_a_bench(work)


def test_all_sessions_of_a_rebuilt_pass_are_told():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4], rebuild=1))
        await bench.settle()
        told = [(one.session, one.length) for one in bench.postman.of_positions if isinstance(one, wire.Rebuilt)]
        assert told == [(1, 3), (2, 1)]

    on_a_bench(work)


@pytest.mark.parametrize("fresh", [True, False])
def test_who_begins_fresh_has_nothing_that_was_cached_or_sent(fresh: bool):
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4]))
        await bench.settle()
        bench.stage.allocated, bench.program.cached = False, {2: 1, 1: 3}
        assert await bench.stage.begin(fresh=fresh) == (() if fresh else ((1, 3), (2, 1)))
        assert bench.stage.allocated
        bench.stage.rebuild(wire.Rebuild(fence=FENCE, stage=1, through=2, number=8, segments=TWO[1:]))
        assert any(isinstance(one, wire.PassFailed) for one in bench.postman.of_positions) == fresh

    on_a_bench(work)


def test_the_last_stage_of_a_rebuild_answers_and_keeps_what_it_would_have_sent():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(Segment(1, 0, 3, 0, (0, 1)), values=[1, 2, 3], rebuild=1))
        await bench.settle()
        (rebuilt,) = bench.postman.of_positions
        assert isinstance(rebuilt, wire.Rebuilt)
        assert (rebuilt.number, rebuilt.session, rebuilt.length) == (3, 1, 3)
        assert bench.postman.sent == []
        bench.stage.rebuild(
            wire.Rebuild(fence=FENCE, stage=1, through=2, number=9, segments=(Segment(1, 0, 3, 0, (0, 1)),))
        )
        assert array(bench.postman.sent[0][2][0]).ravel().tolist() == [101, 102, 103]

    on_a_bench(work)


def test_a_pass_of_a_round_that_ended_while_it_waited_is_not_computed():
    async def work(bench: Bench) -> None:
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4]))
        bench.postman.present = Fence(1, 1, 1)
        await bench.settle()
        assert bench.postman.sent == []

    on_a_bench(work)


@pytest.mark.parametrize(("problem", "is_pass"), [(ExecutionError("too many"), True), (RuntimeError("oops"), False)])
def test_a_pass_fails_alone_unless_the_stage_is_broken(problem: Exception, is_pass: bool):
    async def work(bench: Bench) -> None:
        bench.program.problem = problem
        bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4]))
        await bench.settle()
        assert len(bench.postman.of_positions) == is_pass
        assert len(bench.postman.failures) == (not is_pass)

    on_a_bench(work)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pass_of(Segment(1, 0, 7, 0, (0, 1, 2, 3)), values=[0] * 7), "1 to 6 positions, got 7"),
        (pass_of(Segment(1, 0, 1, 0, (0,)), Segment(1, 1, 1, 1), values=[1, 2]), "it contains a session twice"),
        (pass_of(*TWO, values=[1, 2, 3, 4], wanted=(3, 2)), "wanted rows in ascending order"),
        (pass_of(*TWO, values=[1, 2, 3, 4], wanted=(4,)), "wanted rows in ascending order and below 4"),
        (pass_of(*TWO, values=[1, 2, 3, 4], rebuild=2, wanted=(3,)), "want no rows"),
        (pass_of(Segment(1, 0, 1, 0, (0,)), values=[1], rebuild=0), "stage 1 or later"),
        (pass_of(*TWO, values=[1, 2, 3]), "expected 4 rows, got 3"),
    ],
)
def test_what_breaks_the_protocol_is_refused(message: tuple[wire.Pass, dict[str, HostTensor]], reason: str):
    async def work(bench: Bench) -> None:
        with pytest.raises(ExecutionError, match=reason):
            bench.stage.take(*message)
        assert bench.program.ran == []

    on_a_bench(work)


def test_waiting_passes_count_against_what_all_stages_of_the_machine_may_hold():
    async def work(bench: Bench) -> None:
        bench.memory.limit_bytes = 100
        message = pass_of(*TWO, values=[1, 2, 3, 4])
        bench.stage.take(*message)
        assert bench.stage.nbytes == bench.memory.stores_bytes == 4 * 4 + 4 * 8
        bench.stage.take(*message)
        with pytest.raises(ExecutionError, match=r"stage 1 would make this machine hold 44 bytes more than it lends"):
            bench.stage.take(*message)
        await bench.settle()
        assert bench.memory.stores_bytes == bench.stage.nbytes == 4 * 3, "the page tables"
        bench.stage.take(*message)
        await bench.settle()
        assert len(bench.postman.sent) == 3

    on_a_bench(work)


def test_tensors_must_be_those_of_the_boundary():
    async def work(bench: Bench) -> None:
        message, tensors = pass_of(*TWO, values=[1, 2, 3, 4])
        with pytest.raises(ExecutionError, match="not this stage's inputs"):
            bench.stage.take(message, {"h_in": tensors["h_in"]})
        with pytest.raises(ExecutionError, match="expected ids as int64"):
            bench.stage.take(message, {**tensors, "ids": tensor(np.zeros((1, 4), np.int32))})

    on_a_bench(work)


def test_a_standby_reserves_caches_and_retained_rows_when_it_takes_over():
    """If it reserved them before, a spare that stands by for several stages would refuse the last one."""

    async def work(bench: Bench) -> None:
        bench.memory.limit_bytes = KEPT_BYTES + IN_USE_BYTES
        bench.memory.add(bench.program)
        assert bench.memory.programs_bytes == KEPT_BYTES
        with pytest.raises(ExecutionError, match="a stage that begins to take part in its job would make"):
            await bench.stage.begin(fresh=True)
        assert bench.memory.programs_bytes == KEPT_BYTES
        bench.memory.limit_bytes = 10 * (KEPT_BYTES + IN_USE_BYTES)
        await bench.stage.begin(fresh=True)
        assert bench.memory.programs_bytes > KEPT_BYTES + IN_USE_BYTES, "rows are retained beside the caches"

    on_a_bench(work)


def test_a_standby_computes_nothing():
    async def work(bench: Bench) -> None:
        bench.stage.allocated = False
        with pytest.raises(ExecutionError, match="is only a standby of the stage"):
            bench.stage.take(*pass_of(*TWO, values=[1, 2, 3, 4]))

    on_a_bench(work)
