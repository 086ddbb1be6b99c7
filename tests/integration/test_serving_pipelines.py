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
from harness.zygote import forking

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 200
NEEDS = ServingNeeds(context_tokens=256, sessions=2, cache_tokens=2 * 256, pass_tokens=64)
MOST_TEXTS = 40
"""Texts after which each of two pipelines must have one, however slow one of them was measured."""


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(CEILING_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class _Answer:
    """A greedy answer that is read as it comes. `pipelines`: those that gave it, in order."""

    def __init__(self, served: Served, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self._stream = served.engine.submit(Generation(prompt=(5, 9, 7, 20 + number), max_tokens=TOKENS))
        self.pipelines = [self._stream.pipeline]
        self.read = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            if self.pipelines[-1] != self._stream.pipeline:
                self.pipelines.append(self._stream.pipeline)
            match event:
                case Emitted(index=index, token=token):
                    assert index == len(self.tokens)
                    self.tokens.append(token)
                case Finished(reason=reason, detail=detail):
                    assert reason == "length", detail
                case _:
                    pass


async def _alone(served: Served, number: int) -> list[int]:
    answer = _Answer(served, number)
    await answer.read
    return answer.tokens


def _texts_in_both(served: Served) -> list[_Answer]:
    """Ask until each pipeline has a text. Nothing is read meanwhile, so the slower one has its turn at some point."""
    answers: list[_Answer] = []
    while {answer.pipelines[0] for answer in answers} != {1, 2}:
        assert len(answers) < MOST_TEXTS
        answers.append(_Answer(served, len(answers)))
    return answers


def test_a_killed_machine_moves_its_texts_and_a_new_one_makes_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each of the two machines is a pipeline of its own, without standbys."""
    monkeypatch.setattr("fusionai.client.serving.pipelines.FREE_S", 1.0)
    monkeypatch.setattr("fusionai.client.serving.pipelines.DISSOLVE_S", 2.0)
    events: list[ServeEvent] = []
    request = ServeRequest(
        model=str(saved_model(tmp_path / "tiny")),
        needs=lambda _longest, _packed: NEEDS,
        home=tmp_path / "home",
        local=2,
        local_spares=0,
        goal="throughput",
    )

    async def story() -> list[_Answer]:
        async with serving(request, on_event=events.append) as served:
            before = await _alone(served, 0)
            await _until(lambda: any(isinstance(event, PipelineOpened) for event in events))
            answers = _texts_in_both(served)
            moving = next(answer for answer in answers if answer.pipelines == [2])
            await _until(lambda: len(moving.tokens) > TOKENS // 10)
            assert served.pool is not None
            victim = next(
                stage.name for stage in served.engine.status.stages if stage.pipeline == 2 and stage.stage == 1
            )
            await served.pool.kill(victim)
            await asyncio.gather(*(answer.read for answer in answers))
            assert moving.pipelines == [2, 1]
            # Its pipeline is dissolved; the machine that returns makes another one.
            await _until(lambda: len(served.engine.open) == 1)
            await served.pool.start_again(victim)
            await _until(lambda: 3 in served.engine.open)
            assert served.engine.status.faults
            for answer in answers:
                assert answer.tokens == await _alone(served, answer.number)
            assert answers[0].tokens == before
            return answers

    with forking():
        answers = asyncio.run(story())
    assert any(answer.pipelines == [1] for answer in answers)
    assert any(isinstance(event, Noted) and "pipeline 2 is dissolved" in event.text for event in events)
