"""A broker whose journal's engine goes away and comes back: what is refused, what waits, what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from fusionai.broker.engines import watch
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.interface import JournalInDoubt, JournalTaken
from fusionai.broker.engines.watch import EngineWatch
from fusionai.coordination.broker.events import JobNoted
from fusionai.primitives.ids import PeerId
from harness.memory_engine import MemoryEngine
from harness.patience import CEILING_S, until


class PlayedBroker:
    def __init__(self) -> None:
        self.resumed: list[bool | None] = []
        self.ended: list[JournalTaken] = []

    def resume(self, written: bool | None) -> None:
        self.resumed.append(written)

    def superseded(self, error: JournalTaken) -> None:
        self.ended.append(error)


class Scene:
    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.journal = EngineJournal.open(self.engine, "home", PeerId("one"), lambda _: b"k")
        self.broker = PlayedBroker()
        self.said: list[str] = []


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Scene], Coroutine[None, None, None]]], None]:
    monkeypatch.setattr(watch, "RENEW_S", 0.01)
    monkeypatch.setattr(watch, "RETRY_S", 0.01)

    def run(scene: Callable[[Scene], Coroutine[None, None, None]]) -> None:
        async def main() -> None:
            played = Scene()
            watching = asyncio.create_task(EngineWatch(played.journal, played.broker, played.said.append).run())
            try:
                async with asyncio.timeout(CEILING_S):
                    await scene(played)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

        asyncio.run(main())

    return run


def test_an_outage_is_noticed_by_a_renewal_and_ends_by_itself(play):
    async def scene(played: Scene) -> None:
        played.engine.down = True
        await until(lambda: played.said)
        assert "The pool's journal can't be used: memory" in played.said[0]
        played.engine.down = False
        await until(lambda: played.broker.resumed)
        assert played.broker.resumed == [None]
        assert played.said[1:] == ["The pool's journal at memory is back."]

    play(scene)


@pytest.mark.parametrize("loss", ["done", "not done"])
def test_what_became_of_an_append_in_doubt_is_passed_on(play, loss):
    async def scene(played: Scene) -> None:
        played.engine.lose(loss)
        played.engine.on_append = lambda: setattr(played.engine, "down", True)
        with pytest.raises(JournalInDoubt):
            played.journal.append(0, [JobNoted(at_s=0.0, job="job-1", text="note")])
        await until(lambda: played.said)
        played.engine.down = False
        await until(lambda: played.broker.resumed)
        assert played.broker.resumed == [loss == "done"]

    play(scene)


def test_a_broker_that_was_replaced_is_ended(play):
    async def scene(played: Scene) -> None:
        EngineJournal.open(MemoryEngine(played.engine.store), "home", PeerId("one"), lambda _: b"k")
        await until(lambda: played.broker.ended)
        assert "another broker has taken over" in str(played.broker.ended[0])

    play(scene)
