"""One engine of several pipelines: where texts go, when they move, and that no token is lost or given twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fusionai.coordination.serving.routing import Pace
from fusionai.primitives.errors import ExecutionError
from fusionai.serving.interface import (
    Emitted,
    EngineBusy,
    EngineStatus,
    FaultNote,
    Finished,
    Generation,
    GenerationPaused,
    PromptRead,
    PromptTooLong,
    StageStatus,
    StreamEvent,
    TextPair,
)
from fusionai.serving.pipelines import PipelinedEngine

ASK = Generation(prompt=(5, 6, 7), max_tokens=6)


@dataclass
class Clock:
    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


def token(place: int) -> int:
    """The token at a place of every answer to `ASK`, whichever engine computes it."""
    return 100 + place


class Stream:
    """Emits what its test says."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self.is_closed = False
        self.count = len(generation.answered)

    def read(self) -> None:
        self.events.put_nowait(PromptRead(len(self.generation.prompt), 0))

    def emit(self, count: int = 1) -> None:
        for _ in range(count):
            self.events.put_nowait(Emitted(self.count, token(self.count)))
            self.count += 1

    def say(self, event: StreamEvent) -> None:
        self.events.put_nowait(event)

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self._all()

    async def _all(self) -> AsyncIterator[StreamEvent]:
        while True:
            event = await self.events.get()
            yield event
            if isinstance(event, Finished):
                return

    async def aclose(self) -> None:
        self.is_closed = True


@dataclass
class Engine:
    """A pipeline as its test wants it."""

    state: str = "ready"
    busy: ExecutionError | EngineBusy | PromptTooLong | None = None
    purpose: str = "generate"
    vocabulary: int = 320
    context_tokens: int = 64
    stop_tokens: frozenset[int] = frozenset()
    adapters: dict[str, int] = field(default_factory=dict[str, int])
    free_adapters: tuple[int, ...] = (1, 2)
    streams: list[Stream] = field(default_factory=list[Stream])
    emitted: int = 0
    read: list[Sequence[Any]] = field(default_factory=list[Sequence[Any]])
    loads: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def submit(self, generation: Generation) -> Stream:
        if self.busy is not None:
            raise self.busy
        self.streams.append(Stream(generation))
        return self.streams[-1]

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        del scope, adapter
        self.read.append(prompts)
        if self.busy is not None:
            raise self.busy
        return [[1.0]] * len(prompts)

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        del scope
        self.read.append(pairs)
        return [[2.0]] * len(pairs)

    async def load_adapter(self, name: str, number: int) -> None:
        self.loads.append((name, number))
        if self.busy is not None:
            raise self.busy
        self.adapters[name] = number

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state,  # type: ignore[arg-type]
            model="tiny",
            stages=(StageStatus(stage=1, peer="p", name="n", blocks=(0, 4), state="running"),),
            running=len(self.streams),
            emitted_tokens=self.emitted,
            faults=(FaultNote(float(self.emitted), f"{self.emitted}"),),
            members=("a", f"m{self.emitted}"),
            extra={"pass_seconds": float(self.emitted), "accepted_tokens": float(self.emitted)},
        )


PACE = Pace(token_s=(0.01, 0.01), prompt_token_s=0.001, sessions=2)


def engines(*made: Engine) -> PipelinedEngine:
    together = PipelinedEngine(made[0], PACE, Clock())  # type: ignore[arg-type]
    for number, engine in enumerate(made[1:], 2):
        together.add(number, engine, PACE)  # type: ignore[arg-type]
    return together


class Reading:
    """A client that reads a stream as it comes."""

    def __init__(self, together: PipelinedEngine, generation: Generation = ASK) -> None:
        self.stream = together.submit(generation)
        self.events: list[StreamEvent] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Emitted)]

    @property
    def indices(self) -> list[int]:
        return [event.index for event in self.events if isinstance(event, Emitted)]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_text_of_a_pipeline_that_ends_goes_on_in_another_with_the_tokens_that_it_has():
    async def story() -> tuple[Reading, Engine, Engine]:
        one, two = Engine(), Engine()
        together = engines(one, two)
        reading = Reading(together)
        assert reading.stream.pipeline == 1
        one.streams[0].read()
        one.streams[0].emit(2)
        await settle()
        one.state = "stopped"
        one.streams[0].say(Finished("failed", "the engine stopped: a machine was lost"))
        await settle()
        assert reading.stream.pipeline == 2
        two.streams[0].read()
        two.streams[0].emit(4)
        two.streams[0].say(Finished("length"))
        await reading.task
        assert together.routing.texts == {1: 0, 2: 0}
        return reading, one, two

    reading, one, two = asyncio.run(story())
    assert reading.tokens == [token(place) for place in range(6)]
    assert reading.indices == list(range(6))
    assert sum(isinstance(event, PromptRead) for event in reading.events) == 1
    assert [event for event in reading.events if isinstance(event, Finished)] == [Finished("length")]
    assert two.streams[0].generation.answered == (token(0), token(1))
    assert two.streams[0].generation.max_tokens == ASK.max_tokens
    assert one.streams[0].is_closed


def test_a_text_whose_own_computation_fails_stays_failed():
    async def story() -> Reading:
        one, two = Engine(), Engine()
        reading = Reading(engines(one, two))
        one.streams[0].say(Finished("failed", "every token is forbidden"))
        await reading.task
        assert not two.streams
        return reading

    assert asyncio.run(story()).events == [Finished("failed", "every token is forbidden")]


@pytest.mark.parametrize("other", ["ready", "waiting"])
def test_a_text_leaves_a_pipeline_that_waits_for_a_machine_if_another_computes(other: str):
    async def story() -> None:
        one, two = Engine(), Engine()
        together = engines(one, two)
        reading = Reading(together)
        one.streams[0].read()
        one.streams[0].emit()
        await settle()
        one.state, two.state = "waiting", other
        one.streams[0].say(GenerationPaused("waiting", "a machine was lost"))
        await settle()
        assert [type(event) for event in reading.events[2:]] == [] if other == "ready" else [GenerationPaused]
        assert bool(two.streams) is (other == "ready")
        assert one.streams[0].is_closed is (other == "ready")
        await reading.stream.aclose()
        reading.task.cancel()

    asyncio.run(story())


def test_a_short_pause_moves_no_text():
    async def story() -> None:
        one, two = Engine(), Engine()
        reading = Reading(engines(one, two))
        one.state = "recovering"
        one.streams[0].say(GenerationPaused("recovering", "a spare takes over"))
        await settle()
        assert not two.streams
        assert len(reading.events) == 1
        reading.task.cancel()

    asyncio.run(story())


def test_a_text_waits_for_room_when_its_pipeline_has_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.serving.pipelines.RETRY_S", 0.0)

    async def story() -> None:
        one, two = Engine(), Engine()
        together = engines(one, two)
        reading = Reading(together)
        two.busy = EngineBusy("256 requests wait already.", 1.0)
        together.remove(1)
        one.streams[0].say(Finished("failed", "the engine stopped"))
        await settle()
        assert not reading.task.done()
        two.busy = None
        await settle()
        assert reading.stream.pipeline == 2
        two.streams[0].say(Finished("stop"))
        await reading.task

    asyncio.run(story())


def test_without_another_pipeline_the_client_gets_the_failure():
    async def story() -> Reading:
        one = Engine()
        together = engines(one)
        reading = Reading(together)
        together.remove(1, ExecutionError("the model can't go on."))
        one.streams[0].say(Finished("failed", "the engine stopped"))
        await reading.task
        with pytest.raises(ExecutionError, match=r"can't go on"):
            together.ended.result()
        with pytest.raises(ExecutionError, match=r"no pipeline of the model is open"):
            together.submit(ASK)
        return reading

    assert asyncio.run(story()).events == [Finished("failed", "the engine stopped")]


def test_when_all_is_closed_no_text_moves():
    async def story() -> Reading:
        one, two = Engine(), Engine()
        together = engines(one, two)
        reading = Reading(together)
        together.close()
        together.ended.result()
        one.streams[0].say(Finished("failed", "the engine stopped: the server is stopping"))
        await reading.task
        assert not two.streams
        return reading

    assert [type(event) for event in asyncio.run(story()).events] == [Finished]


def test_a_full_pipeline_passes_a_text_on_and_the_last_refusal_is_the_clients():
    async def story() -> None:
        full, free = Engine(busy=EngineBusy("full", 2.0)), Engine()
        together = engines(full, free)
        assert together.submit(ASK).pipeline == 2
        free.busy = PromptTooLong("never fits")
        # Waiting helps, so the client is asked to wait.
        with pytest.raises(EngineBusy, match=r"full"):
            together.submit(ASK)
        full.busy = PromptTooLong("never fits here either")
        with pytest.raises(PromptTooLong, match=r"never fits"):
            together.submit(ASK)

    asyncio.run(story())


def test_a_deadline_goes_on_counting():
    async def story() -> Generation:
        one, two = Engine(), Engine()
        together = engines(one, two)
        asked = Generation(prompt=(5,), max_tokens=6, deadline_s=10.0, prompt_logprobs=True)
        reading = Reading(together, asked)
        one.streams[0].read()
        await settle()
        together.clock.at_s = 4.0  # type: ignore[attr-defined]
        together.remove(1)
        one.streams[0].say(Finished("failed", "the engine stopped"))
        await settle()
        reading.task.cancel()
        return two.streams[0].generation

    moved = asyncio.run(story())
    assert moved.deadline_s == 6.0
    assert not moved.prompt_logprobs  # they came with the prompt


def test_vectors_and_scores_come_from_the_next_pipeline_if_one_has_no_room_or_ends():
    async def story() -> None:
        full, ended, good = Engine(busy=EngineBusy("full", 1.0)), Engine(busy=ExecutionError("stopped")), Engine()
        together = engines(full, ended, good)
        ended.state = "stopped"
        assert await together.embed([(1, 2), (3,)], "me") == [[1.0], [1.0]]
        assert full.read == [[(1, 2), (3,)]]
        ended.state = "ready"  # now the error is the text's own
        full.busy = ExecutionError("a token outside the vocabulary")
        with pytest.raises(ExecutionError, match=r"outside the vocabulary"):
            await together.embed([(1, 2)], "me")
        assert await together.score([TextPair((1, 2), 1)], "me") == [[2.0]]
        assert together.routing.texts == {1: 0, 2: 0, 3: 0}

    asyncio.run(story())


def test_adapters_are_the_same_in_all_pipelines():
    async def story() -> None:
        one, two, later = Engine(adapters={"law": 1}), Engine(free_adapters=(2,)), Engine()
        together = engines(one, two)
        assert two.adapters == {"law": 1}
        assert together.free_adapters == (2,)
        await together.load_adapter("poems", 2)
        assert one.loads == two.loads == [("poems", 2)]
        together.add(3, later, PACE)  # type: ignore[arg-type]
        assert later.adapters == {"law": 1, "poems": 2}
        together.drop_adapter("law")
        assert all("law" not in engine.adapters for engine in (one, two, later))
        one.busy = ExecutionError("the engine ended")
        await together.load_adapter("odes", 1)  # the others have it
        two.busy = later.busy = one.busy
        with pytest.raises(ExecutionError, match=r"the engine ended"):
            await together.load_adapter("songs", 1)

    asyncio.run(story())


def test_the_status_is_of_all_pipelines_and_remembers_closed_ones():
    async def story() -> None:
        one, two = Engine(emitted=3, state="waiting"), Engine(emitted=5)
        together = engines(one, two)
        status = together.status
        assert status.state == "ready"
        assert [(stage.pipeline, stage.stage) for stage in status.stages] == [(1, 1), (2, 1)]
        assert status.emitted_tokens == 8
        assert [note.text for note in status.faults] == ["3", "5"]
        assert status.members == ("a", "m3", "m5")
        assert status.extra == {"accepted_tokens": 8.0, "pass_seconds": 4.0, "pipelines": 2.0}
        together.remove(1)
        two.emitted = 7
        assert together.status.emitted_tokens == 10
        assert [stage.pipeline for stage in together.status.stages] == [2]
        together.close()
        assert together.status.state == "stopped"
        assert together.status.emitted_tokens == 10

    asyncio.run(story())


@dataclass
class Paced(Engine):
    """Emits a token every `token_s`; the tenth comes late."""

    token_s: float = 0.0
    clock: Clock = field(default_factory=Clock)
    fails: bool = False

    def submit(self, generation: Generation) -> Stream:
        engine, stream = self, super().submit(generation)

        class Ticking(Stream):
            async def _all(self) -> AsyncIterator[StreamEvent]:
                for place in range(generation.max_tokens):
                    engine.clock.at_s += 5.0 if place == 10 else engine.token_s
                    yield Emitted(place, token(place))
                    if engine.fails and place == 20:
                        yield Finished("failed", "stopped")
                        return
                yield Finished("length")

        stream.__class__ = Ticking
        return stream


def test_a_pipeline_is_tried_with_a_text_of_its_own():
    async def story() -> None:
        slow, fast = Paced(token_s=0.04), Paced(token_s=0.02)
        together = engines(slow, fast)
        slow.clock = fast.clock = together.clock  # type: ignore[assignment]
        assert together.submit(ASK).pipeline == 1
        assert not await together.try_out(1)  # it is busy
        assert len(slow.streams) == 1
        together.routing.ended(1)
        assert await together.try_out(1)
        assert await together.try_out(2)
        assert together.routing.slower(1) == pytest.approx(4.0)
        assert together.routing.slower(2) == pytest.approx(2.0)
        assert all(stream.is_closed for stream in (*slow.streams[1:], *fast.streams))
        assert slow.streams[1].generation.scope != ASK.scope
        assert together.submit(ASK).pipeline == 2
        together.routing.ended(2)

        # What can't be measured changes nothing.
        slow.fails = True
        assert not await together.try_out(1)
        slow.busy = EngineBusy("full", 1.0)
        assert not await together.try_out(1)
        slow.busy, slow.state = None, "waiting"
        assert not await together.try_out(1)
        assert not await together.try_out(7)
        assert together.routing.slower(1) == pytest.approx(4.0)

    asyncio.run(story())


def test_a_model_that_reads_only_is_not_tried():
    async def story() -> None:
        together = engines(Engine(purpose="embed"), Engine(purpose="embed"))
        assert not await together.try_out(1)

    asyncio.run(story())
