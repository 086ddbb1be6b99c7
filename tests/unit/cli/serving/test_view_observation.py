"""An engine that keeps the times of its answers: which count, and what was predicted for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from fusionai.cli.serving.view import ServingObservation, ServingRow, show_serving
from fusionai.ir.serving import Purpose
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, ServingNeeds
from fusionai.scheduling.serving.prediction import first_token_s
from fusionai.serving.interface import (
    Emitted,
    EngineStatus,
    Finished,
    Generation,
    GenerationPaused,
    PromptRead,
    StreamEvent,
    TextPair,
    TokenStream,
)


def problem() -> Problem:
    """An embedding, four layers, a head; two of the layers fit a peer."""
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=0.005)
    base = PeerProfile(peer="", flops_per_s=1e10, memory_bytes=300_000_000, uplink=link, downlink=link)
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e7,
            backward_flops=0.0,
            parameter_bytes=100_000_000,
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=1000,
            gradient_bytes=0,
        )
        for number in range(6)
    )
    owner = msgspec.structs.replace(base, peer="o", roles=("owner",))
    return Problem(
        task="serve",
        graph_hash="g",
        blocks=blocks,
        peers=tuple(msgspec.structs.replace(base, peer=name) for name in "ab"),
        owner=owner,
        microbatches=1,
        microbatch_tokens=1,
        takeover="tolerant",
        serving=ServingNeeds(context_tokens=256, sessions=4, result_bytes=100_000),
    )


PROBLEM = problem()
PLAN = plan(PROBLEM)
TRIP_S = PLAN.step_time_s


class Stream:
    """Gives what it is told, when the clock of `engine` has come so far."""

    def __init__(self, engine: FakeEngine, events: Sequence[tuple[float, StreamEvent]]) -> None:
        self._engine = engine
        self._events = list(events)
        self.closed = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamEvent:
        if not self._events:
            raise StopAsyncIteration
        self._engine.at_s, event = self._events.pop(0)
        return event

    async def aclose(self) -> None:
        self.closed = True


class FakeEngine:
    purpose: Purpose = "generate"
    vocabulary = 7
    context_tokens = 256
    stop_tokens = frozenset({3})

    def __init__(self) -> None:
        self.at_s = 100.0
        self.plan = PLAN
        self.streams: list[Stream] = []
        self.script: list[tuple[float, StreamEvent]] = []

    def submit(self, generation: Generation) -> TokenStream:
        self.streams.append(Stream(self, self.script))
        return self.streams[-1]

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        return [[float(len(prompt))] for prompt in prompts]

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        return [[float(pair.second_from)] for pair in pairs]

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(state="ready", emitted_tokens=5)


ASK = Generation(prompt=(1, 2), max_tokens=9)


def events(began_s: float, *tokens_s: float, prompt: int = 10, cached: int = 0) -> list[tuple[float, StreamEvent]]:
    tokens = [(began_s + at_s, Emitted(index, 1)) for index, at_s in enumerate(tokens_s)]
    return [(began_s + tokens_s[0], PromptRead(prompt, cached)), *tokens, (began_s + tokens_s[-1], Finished("stop"))]


class Watching:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.seen = ServingObservation(
            self.engine, lambda _stream: (1, self.engine.plan), now_s=lambda: self.engine.at_s
        )

    def begin(self, script: list[tuple[float, StreamEvent]], generation: Generation = ASK) -> TokenStream:
        self.engine.script = script
        self.engine.at_s = script[0][0] // 100 * 100  # where every test begins its answers
        return self.seen.submit(generation)

    def answer(self, script: list[tuple[float, StreamEvent]], generation: Generation = ASK) -> None:
        async def read() -> None:
            async for _ in (stream := self.begin(script, generation)):
                pass
            await stream.aclose()

        asyncio.run(read())

    def rows(self, chunk_tokens: int = 256) -> tuple[ServingRow, ...]:
        return self.seen.rows(PROBLEM, chunk_tokens)


@pytest.fixture
def watching() -> Watching:
    return Watching()


def test_an_answer_alone_is_held_against_a_trip_for_each_token(watching: Watching) -> None:
    watching.answer(events(100.0, 2.0, 2.5, 3.0))
    watching.answer(events(200.0, 1.0))  # of one token nothing is known but the first
    (row,) = watching.rows()
    assert (row.version, row.at_once, row.answers) == (PLAN.version, 1.0, 2)
    assert row.measured_first_token_s == 1.5
    assert row.measured_tokens_per_s == pytest.approx(2.0)
    assert row.predicted_tokens_per_s == pytest.approx(1 / TRIP_S)
    assert row.predicted_first_token_s == pytest.approx(first_token_s(PLAN.stages, StageCosts(PROBLEM), 10, 256))


def test_what_was_in_a_cache_is_not_predicted_to_be_read(watching: Watching) -> None:
    watching.answer(events(100.0, 1.0, prompt=200, cached=199))
    (row,) = watching.rows()
    assert row.predicted_first_token_s == pytest.approx(TRIP_S)


def test_answers_at_once_share_what_the_plan_says(watching: Watching) -> None:
    async def two() -> None:
        one = watching.begin(events(100.0, 1.0, 5.0))
        other = watching.begin(events(100.0, 1.0, 5.0))
        for stream in (one, other, one, other):  # both have their first token at 101
            await anext(aiter(stream))
        for stream in (one, other):
            await anext(aiter(stream))
        for stream in (one, other):
            await stream.aclose()

    asyncio.run(two())
    watching.answer(events(200.0, 1.0, 5.0))
    alone, both = watching.rows()
    assert (alone.at_once, alone.answers, both.answers) == (1.0, 1, 2)
    assert both.at_once == pytest.approx(2.0)
    assert alone.predicted_tokens_per_s is not None
    assert both.predicted_tokens_per_s is not None
    assert both.measured_tokens_per_s == alone.measured_tokens_per_s == 0.25
    assert both.predicted_tokens_per_s <= alone.predicted_tokens_per_s
    busiest = max(StageCosts(PROBLEM).decode_s(stage, stage.peer, 1) for stage in PLAN.stages)
    assert both.predicted_tokens_per_s == pytest.approx(1 / max(TRIP_S, 2 * busiest))


def test_a_fault_or_another_plan_in_between_leaves_an_answer_out(watching: Watching) -> None:
    held = events(100.0, 1.0, 2.0)
    held.insert(2, (101.5, GenerationPaused("recovering", "bob is gone")))
    watching.answer(held)
    assert (watching.rows(), watching.seen.left_out) == ((), 1)

    async def changes() -> None:
        stream = watching.begin(events(200.0, 1.0, 2.0))
        await anext(aiter(stream))
        await anext(aiter(stream))
        watching.engine.plan = msgspec.structs.replace(PLAN, version=PLAN.version + 1)
        await stream.aclose()

    asyncio.run(changes())
    assert (watching.rows(), watching.seen.left_out) == ((), 2)
    watching.answer(events(300.0, 1.0, 2.0))
    assert [(row.version, row.answers) for row in watching.rows()] == [(PLAN.version + 1, 1)]


def test_an_answer_without_a_token_is_none(watching: Watching) -> None:
    async def leaves() -> None:
        stream = watching.begin(events(100.0, 1.0))
        await stream.aclose()
        await stream.aclose()
        assert watching.engine.streams[0].closed

    asyncio.run(leaves())
    watching.answer(events(200.0, 1.0, 2.0))
    (row,) = watching.rows()
    assert (row.answers, row.at_once, watching.seen.left_out) == (1, 1.0, 0)


def test_scores_of_a_whole_prompt_are_in_no_plan(watching: Watching) -> None:
    watching.answer(events(100.0, 1.0, 2.0), Generation(prompt=(1, 2), max_tokens=9, prompt_logprobs=True))
    assert (watching.rows(), watching.seen.left_out) == ((), 1)


def test_it_is_the_engine_otherwise(watching: Watching) -> None:
    seen = watching.seen
    assert (seen.vocabulary, seen.context_tokens, seen.stop_tokens) == (7, 256, frozenset({3}))
    assert seen.status.emitted_tokens == 5
    assert asyncio.run(seen.embed([[1, 2]], "")) == [[2.0]]
    assert asyncio.run(seen.score([TextPair((1, 2), 1)], "")) == [[1.0]]


ROW = ServingRow(
    version=2,
    at_once=1.0,
    answers=3,
    predicted_first_token_s=0.25,
    measured_first_token_s=0.5,
    predicted_tokens_per_s=20.0,
    measured_tokens_per_s=None,
)


def test_rows_are_shown_with_what_limits_them(capsys: pytest.CaptureFixture[str]) -> None:
    show_serving((ROW,), left_out=1, guessed=1500.0, shared="a and b share.")
    told = capsys.readouterr().out.splitlines()
    assert told[2].split() == ["2", "1", "3", "250", "ms", "500", "ms", "20", "-"]
    assert told[3:] == [
        "1 answer is left out: a fault or a change of plan occurred meanwhile.",
        "1,500 speculative tokens were accepted; the plan predicts without speculation.",
        "a and b share.",
    ]


def test_of_no_answer_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_serving((), left_out=0, guessed=5.0, shared="a and b share.")
    assert capsys.readouterr().out == ""


def test_a_prompt_takes_a_trip_of_its_rows_with_one_row_for_the_head() -> None:
    costs = StageCosts(PROBLEM)
    row_s, link_s, wait_s = 1e7 / 1e10, 1000 / 1e6, 0.01
    held = [stage.blocks[1] - stage.blocks[0] for stage in PLAN.stages]
    assert held == [1, 2, 2, 1]  # embedding, layers, head
    hops = len(held)  # three between them, and the way of an empty message to the embedding beside it
    rows_s = 5 * 10 * row_s + (hops - 2) * 10 * link_s + link_s + row_s + 3 * wait_s
    assert first_token_s(PLAN.stages, costs, 10, 256) == pytest.approx(rows_s)
    # Two whole chunks before the last tokens: each holds up what follows for as long as the busiest takes for it.
    chunk_s = max(2 * 4 * row_s, 4 * link_s)
    last_s = 5 * 2 * row_s + (hops - 2) * 2 * link_s + link_s + row_s + 3 * wait_s
    assert first_token_s(PLAN.stages, costs, 10, 4) == pytest.approx(2 * chunk_s + last_s)


def test_later_chunks_of_a_prompt_look_at_what_is_before_them() -> None:
    layers = [msgspec.structs.replace(block, attended_flops=1e5) for block in PROBLEM.blocks[1:5]]
    costs = StageCosts(msgspec.structs.replace(PROBLEM, blocks=(PROBLEM.blocks[0], *layers, PROBLEM.blocks[5])))
    look_s = 1e5 / 1e10
    # Each machine has two layers; positions 0 to 7 are computed side by side, 8 and 9 by one machine after the other.
    pairs = 2 * (sum(range(8))) + 4 * (8 + 9)
    longer_s = first_token_s(PLAN.stages, costs, 10, 4) - first_token_s(PLAN.stages, StageCosts(PROBLEM), 10, 4)
    assert longer_s == pytest.approx(pairs * look_s)


def test_a_head_in_the_pool_computes_one_row_too() -> None:
    whole = msgspec.structs.replace(PLAN.stages[1], blocks=(1, 6), roles=("stage", "loss"))
    costs = StageCosts(PROBLEM)
    one, ten = (first_token_s((PLAN.stages[0], whole), costs, rows, 256) for rows in (1, 10))
    assert ten - one == pytest.approx(9 * 5 * 1e-3 + 9 * 1e-3)
