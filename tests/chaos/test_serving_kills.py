"""Peers killed, frozen and missing while streams run: nobody who listens can tell but by the time it took.

Every token is compared with transformers' forward over the whole text, and some answers with the same requests asked
again when nobody is killed. A run is replayed by its seed: FUSION_CHAOS_SEED=... pytest ...; FUSION_CHAOS_KILLS sets
the length of long ones.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest

from fusionai.coordination.round.liveness import LEARNING_S
from fusionai.scheduling.standby.takeover import SETTLE_S
from harness.besieged_job import kills_of, peers, seed_of
from harness.killer import Habits, Killer, Role
from harness.live_pool import LivePool
from harness.serving_siege import Answer, Fall, ServingSiege, besieging
from harness.serving_siege_streams import Reference, write_model

pytestmark = pytest.mark.slow

STREAMS: Final = 8
STAGES: Final = 3
HEARD_S: Final = SETTLE_S + 6.0
"""Seconds after its loss at which a spare that was started again at once may be planned with: plans ask for `SETTLE_S`,
and the broker hears of it with its second heartbeat at the latest."""
KILLING: Final = Habits(together=0.0, freezing=0.0, pause_s=(0.2, 1.5))
AGAIN: Final = 8
"""Answers that are asked for again at the end, when nobody is killed."""
HURRY: Final = 0.15
"""Part of the kills after which the next one does not wait until the job is past it."""
TAKEOVER_S: Final = (0.0, 0.4)
"""When that one falls."""
QUIET_S: Final = 0.5
"""Who waits is given nothing for so long."""
FROZEN_S: Final = 3.0
"""The promise for somebody who stops without ending, and was prompt before."""
STARVED_S: Final = 10.0
"""What a machine that is busy with other tests may add: a watcher that does not run does not see."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    """Three may run a stage, two are spare; every test leaves them so."""
    directory = tmp_path_factory.mktemp("pool")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FUSION_HOME", str(directory / "default"))
        environment.setenv("FUSION_LOG", "info")
        with LivePool(directory, peers(STAGES + 2), broker_options=("--rest-after", "0")) as pool:
            yield pool


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)  # noqa: T201 - figures, and where a long run is

    return say


def check(answers: list[Answer], reference: Reference, tell: Callable[[str], None]) -> None:
    """Every answer is as long as was asked for, and what transformers would have said."""
    assert all(answer.end is not None and answer.end.reason == "length" for answer in answers)
    assert all(len(answer.tokens) == answer.ask.max_tokens for answer in answers)
    tell(str(reference.compare([(answer.ask, answer.tokens) for answer in answers])))


async def same_again(siege: ServingSiege, count: int) -> int:
    """Ask for the last answers that met a fault once more, undisturbed; how many tokens differ from then."""
    met = [answer for answer in siege.answers if answer.held][-count:]
    again = [Answer(answer.ask) for answer in met]
    await asyncio.gather(*(siege.listen(one, scope="again") for one in again))
    assert not any(one.held for one in again), "somebody disturbed the undisturbed run"
    assert [len(one.tokens) for one in again] == [len(one.tokens) for one in met]
    return sum(
        before != now
        for one, other in zip(met, again, strict=True)
        for before, now in zip(one.tokens, other.tokens, strict=True)
    )


async def kill_many(siege: ServingSiege, killer: Killer, kills: int, hurry: float, tell: Callable[[str], None]) -> int:
    """How many tokens of answers that met a fault differ when nobody is killed."""
    choose = random.Random(killer.seed)
    pending: list[Fall] = []
    async with siege.streams(STREAMS):
        while len(siege.falls) < kills:
            if pending:
                await asyncio.sleep(choose.uniform(*TAKEOVER_S))
            else:
                await siege.guarded()
                await asyncio.sleep(killer.pause_s())
            pending.append(siege.strike(killer))
            if choose.random() >= hurry or len(siege.falls) == kills or len(pending) == STAGES:
                await siege.recover(*pending)
                for fall in pending:
                    tell(told(fall))
                pending = []
    await siege.guarded()
    return await same_again(siege, AGAIN)


def told(fall: Fall) -> str:
    standby = ("warm standby" if fall.warm else "no warm standby") + (", into another takeover" if fall.hurried else "")
    noticed = "never" if fall.noticed_s is None else f"{fall.noticed_s:.3f} s"
    return f"{fall.what} ({standby}): noticed {noticed}, longest gap of a stream {fall.longest_gap_s:.3f} s"


@pytest.mark.parametrize(
    ("kills", "hurry"),
    [pytest.param(3, 0.0, marks=pytest.mark.long), pytest.param(100, HURRY, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_peers_killed_at_random_change_no_token(
    kills: int,
    hurry: float,
    pool: LivePool,
    model: Path,
    reference: Reference,
    tmp_path: Path,
    tell: Callable[[str], None],
):
    seed = seed_of(1)
    if kills > 3:
        kills = kills_of(kills)

    async def story() -> tuple[ServingSiege, int]:
        with Killer(seed, KILLING, log=tmp_path / "strikes.jsonl", say=tell) as killer:
            async with besieging(pool, model, seed, stages=STAGES) as siege:
                return siege, await kill_many(siege, killer, kills, hurry, tell)

    siege, differing = asyncio.run(story())
    check(siege.answers, reference, tell)
    met = sum(bool(answer.held) for answer in siege.answers)
    tell(
        f"seed {seed}: {json.dumps(siege.figures())}; {met} answers met a fault; "
        f"{differing} tokens differ when asked again"
    )
    (tmp_path / "falls.json").write_text(json.dumps([asdict(fall) for fall in siege.falls], indent=1))
    assert met >= STREAMS, "nobody was disturbed"
    assert differing == 0, "an answer that met a fault is another one than the undisturbed"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_who_came_back_is_the_next_standby_as_soon_as_a_stage_has_none(
    pool: LivePool, model: Path, reference: Reference, tell: Callable[[str], None]
):
    """A spare is lost and returns; then a stage's holder falls, and right after it its heir: nobody waits for the
    broker to hear for long enough of the one machine that is left."""
    seed = seed_of(4)

    async def story() -> tuple[ServingSiege, Fall, list[str]]:
        with Killer(seed, KILLING, say=tell) as killer:
            async with besieging(pool, model, seed, stages=STAGES) as siege:
                async with siege.streams(STREAMS):
                    await siege.guarded()
                    back = siege.strike(killer, Role.SPARE)
                    await siege.recover(back)
                    await siege.guarded()
                    await siege.until(lambda: time.monotonic() > back.at_s + HEARD_S, "the spare was heard again")
                    fell_s = time.monotonic()
                    holder = siege.strike(killer)
                    await siege.until(lambda: siege.plans_since(fell_s), "another plan")
                    plan = siege.plans_since(fell_s)[0]
                    members = [siege.served.names[one.peer] for one in (*plan.stages, *plan.standbys)]
                    assert back.name in members, f"{back.name} is there, the first plan has only {members}"
                    (heir,) = [one.name for one in siege.stages() if one.stage == holder.stages[0]]
                    fall = siege.strike(killer, name=heir)
                    await siege.recover(holder, fall)
                said = [held for answer in siege.answers for at_s, held in answer.held if at_s > fell_s]
                return siege, fall, [held.state for held in said]

    siege, fall, states = asyncio.run(story())
    tell(told(fall))
    check(siege.answers, reference, tell)
    assert fall.hurried
    assert "waiting" not in states, "nobody had the stage, though a machine was there"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_somebody_who_stops_without_ending_is_replaced(
    pool: LivePool, model: Path, reference: Reference, tell: Callable[[str], None]
):
    seed = seed_of(2)
    habits = Habits(together=0.0, freezing=1.0, freeze_s=(120.0, 120.0))

    async def story() -> tuple[ServingSiege, Fall]:
        with Killer(seed, habits, say=tell) as killer:
            async with besieging(pool, model, seed, stages=STAGES) as siege:
                async with siege.streams(STREAMS):
                    await siege.guarded()
                    await asyncio.sleep(LEARNING_S + 1.0)  # until then nobody is known well enough to be missed soon
                    fall = siege.strike(killer)
                    await siege.recover(fall)
                    killer.wake_all()
                    # It hears that it was replaced, and stands by.
                    await siege.guarded()
                return siege, fall

    siege, fall = asyncio.run(story())
    tell(told(fall))
    check(siege.answers, reference, tell)
    assert fall.noticed_s is not None
    assert fall.longest_gap_s < FROZEN_S + STARVED_S


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_without_spares_requests_wait_and_go_on_when_a_machine_joins(
    pool: LivePool, model: Path, reference: Reference, tell: Callable[[str], None]
):
    seed = seed_of(3)

    async def story() -> tuple[ServingSiege, str, float]:
        with Killer(seed, KILLING, say=tell) as killer:
            async with besieging(pool, model, seed, stages=STAGES) as siege:
                async with siege.streams(STREAMS):
                    await siege.until(lambda: siege.flows_since(0.0), "every stream has begun")
                    spares = [siege.strike(killer, Role.SPARE).name for _ in range(2)]
                    await siege.until(lambda: not any(one.spare for one in siege.stages()), "the spares are missed")
                    fall = siege.strike(killer)
                    engine = siege.served.engine
                    await siege.until(lambda: engine.status.state == "waiting", "the job waits")
                    late = Answer(siege.answers[0].ask)
                    asking = asyncio.create_task(siege.listen(late))
                    running = [answer for answer in siege.answers if answer.end is None]
                    await siege.until(lambda: all(one.held for one in (*running, late)), "everybody is told to wait")
                    said = [one.held[-1][1] for one in (*running, late)]
                    assert {one.state for one in said} == {"waiting"}
                    stage = f"run stage {fall.stages[0]}"
                    assert all(stage in one.detail and fall.name in one.detail for one in said), said
                    waited_from_s = time.monotonic()
                    await asyncio.sleep(QUIET_S)
                    assert engine.status.state == "waiting"
                    assert not any(one.came_at_s and one.came_at_s[-1] > waited_from_s for one in (*running, late))
                    detail = engine.status.detail
                    await siege.revive(spares[0])
                    joined_s = time.monotonic()
                    await siege.until(lambda: siege.flows_since(joined_s), "every stream goes on")
                    went_on_s = time.monotonic() - joined_s
                    await asking
                    siege.answers.append(late)
                for name in (spares[1], fall.name):
                    await siege.revive(name)
                return siege, detail, went_on_s

    siege, detail, went_on_s = asyncio.run(story())
    tell(f"waiting: {detail!r}; went on {went_on_s:.2f} s after a machine had joined")
    check(siege.answers, reference, tell)
    assert all(answer.held[-1][1].state == "running" for answer in siege.answers if answer.held)
