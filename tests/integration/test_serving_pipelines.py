"""One model served by several pipelines of real processes: tokens stay the same when a pipeline's machine is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionai.client.pool.job_process import Noted
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.pipelines import PipelineOpened
from fusionai.client.serving.serve import Served, ServeEvent, serving
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.interface import Emitted, Finished, Generation
from harness.patience import CEILING_S
from harness.saved_model import saved_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 200
NEEDS = ServingNeeds(context_tokens=256, sessions=8, cache_tokens=8 * 256, pass_tokens=64)


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(CEILING_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _answer(served: Served, number: int, seen: list[int], pipelines: list[int]) -> list[int]:
    """The tokens of a greedy answer. `pipelines`: those that gave it, in order."""
    tokens: list[int] = []
    stream = served.engine.submit(Generation(prompt=(5, 9, 7, 20 + number), max_tokens=TOKENS))
    async for event in stream:
        if not pipelines or pipelines[-1] != stream.pipeline:
            pipelines.append(stream.pipeline)
        match event:
            case Emitted(index=index, token=token):
                assert index == len(tokens)
                tokens.append(token)
                seen.append(token)
            case Finished(reason=reason, detail=detail):
                assert reason == "length", detail
            case _:
                pass
    return tokens


def test_a_killed_machine_moves_its_texts_and_a_new_one_makes_a_pipeline(tmp_path: Path):
    """Each of the two machines is a pipeline of its own, without standbys."""
    events: list[ServeEvent] = []
    request = ServeRequest(
        model=str(saved_model(tmp_path / "tiny")),
        needs=lambda _longest, _packed: NEEDS,
        home=tmp_path / "home",
        local=2,
        local_spares=0,
        goal="throughput",
    )

    async def story() -> tuple[list[list[int]], list[list[int]], list[list[int]], tuple[str, ...]]:
        async with serving(request, on_event=events.append) as served:
            alone = [await _answer(served, number, [], []) for number in range(4)]
            await _until(lambda: any(isinstance(event, PipelineOpened) for event in events))
            seen: list[int] = []
            ways: list[list[int]] = [[] for _ in alone]
            streams = [asyncio.create_task(_answer(served, number, seen, ways[number])) for number in range(4)]
            await _until(lambda: len(seen) > TOKENS)
            assert served.pool is not None
            assert {way[0] for way in ways} == {1, 2}
            victim = next(
                stage.name for stage in served.engine.status.stages if stage.pipeline == 2 and stage.stage == 1
            )
            await served.pool.kill(victim)
            together = await asyncio.gather(*streams)
            # Its pipeline is dissolved; the machine that returns makes another one.
            await _until(lambda: len(served.engine.open) == 1)
            await served.pool.start_again(victim)
            await _until(lambda: 3 in served.engine.open)
            faults = tuple(note.text for note in served.engine.status.faults)
            third = [await _answer(served, 0, [], []), await _answer(served, 1, [], [])]
            assert third == alone[:2]
            return alone, together, ways, faults

    alone, together, ways, faults = asyncio.run(story())
    assert together == alone
    assert any(len(way) > 1 for way in ways), ways
    assert any(way == [1] for way in ways), ways
    assert any(isinstance(event, Noted) and "pipeline 2 is dissolved" in event.text for event in events)
    assert faults
