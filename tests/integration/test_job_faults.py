"""Members, standbys and drivers die at every point of a job in one process; losses and weights keep their bits.

Strikes fall on messages, never on moments. Neighbours: `harness.strikes`; `test_job_replica_faults`, the same for
replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.ids import PeerId
from fusionai.training import progress
from fusionai.wire import messages as wire
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens
from harness.strikes import Strike, assert_same, dies, events, kills, struck_run

pytestmark = pytest.mark.slow

VOCABULARY, MICROBATCHES, STEPS = 31, 3, 7
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
DATA = Data(tokens(VOCABULARY, 2, 6))
RANGES = ((0, 2), (2, 3), (3, 5), (5, 6))
"""Embedding and first layer, a layer, last layer and head; the loss, at the owner."""
STAGES = (0, 1, 2)
GUARDS = {0: 3, 1: 4, 2: 5}
CHECKPOINT_EVERY, SNAPSHOT_EVERY = 3, 2
LAST = "step-00000007"

Point = Callable[[int], Callable[[wire.Message], bool]]
"""Stage -> whether this is the message to strike at."""


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))


def run(
    directory: Path, captured: Captured, strikes: Sequence[Strike] = (), *, peers: int = 6, **changes: Any
) -> list[Run]:
    """See `harness.strikes.struck_run`."""
    fields: dict[str, Any] = {
        "ranges": RANGES,
        "owned": frozenset({3}),
        "standbys": GUARDS,
        "snapshot_every": SNAPSHOT_EVERY,
        "checkpoint_every": CHECKPOINT_EVERY,
        "data": DATA,
        "steps": STEPS,
        "microbatches": MICROBATCHES,
        "replans": True,
    }
    return struck_run(directory, captured, strikes, peers=peers, **fields | changes)


@pytest.fixture(scope="module")
def undisturbed(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Nobody standbys anything, nobody dies."""
    (done,) = run(tmp_path_factory.mktemp("undisturbed"), llama, standbys={}, peers=3)
    assert done.end is not None
    assert done.end.failed is None
    assert not events(done, progress.FaultSeen)
    return done


POINTS: dict[str, Point] = {
    "a forward": lambda s: (
        lambda m: isinstance(m, wire.Forward) and (m.mode, m.consumer, m.step, m.microbatch) == ("train", s, 3, 1)
    ),
    "a backward": lambda s: lambda m: isinstance(m, wire.Backward) and (m.producer, m.step, m.microbatch) == (s, 3, 1),
    "its vote": lambda s: lambda m: isinstance(m, wire.Prepared) and (m.stage, m.step) == (s, 3),
    "the commit": lambda s: lambda m: isinstance(m, wire.Commit) and (m.stage, m.record.step) == (s, 3),
    "its word of having applied": lambda s: lambda m: isinstance(m, wire.Applied) and (m.stage, m.step) == (s, 3),
    "its state for a checkpoint": lambda s: lambda m: isinstance(m, wire.StateChunk) and (m.stage, m.step) == (s, 3),
    "a snapshot": lambda s: lambda m: isinstance(m, wire.Snapshot) and (m.stage, m.step, m.last) == (s, 4, True),
}


def test_with_standby_and_in_peace_no_bit_changes(llama: Captured, undisturbed: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama)
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert not events(done, progress.FaultSeen)


def sampled(firsts: Iterable[object], seconds: Sequence[object]) -> list[Any]:
    """All pairs. `make test` runs every first with one second, in turn, `make test-long` the others."""
    return [
        pytest.param(first, second, marks=() if at == number % len(seconds) else pytest.mark.long)
        for number, first in enumerate(firsts)
        for at, second in enumerate(seconds)
    ]


@pytest.mark.parametrize(("point", "stage"), sampled(POINTS, STAGES))
def test_a_stage_dies_and_its_standby_takes_over(
    point: str, stage: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    (done,) = run(tmp_path, llama, [Strike(POINTS[point](stage), kills(stage))])
    assert_same(done, undisturbed, tmp_path, STEPS)
    (seen,) = events(done, progress.FaultSeen)
    assert isinstance(seen, progress.FaultSeen)
    assert (seen.kind, seen.peer, seen.stages) == ("peer", peer_id(stage), (stage,))
    (changed,) = events(done, progress.PlanChanged)
    assert isinstance(changed, progress.PlanChanged)
    assert changed.plan.stages[stage].peer == peer_id(GUARDS[stage])
    (restored,) = events(done, progress.Restored)
    assert isinstance(restored, progress.Restored)
    assert (restored.stages, restored.rollback) == ((stage,), False)
    assert len(events(done, progress.Recovered)) == 1


@pytest.mark.parametrize("point", ["a forward", "a backward", "the commit"])
def test_a_takeover_of_a_stage_that_makes_activations_again_changes_no_bit(
    point: str, llama: Captured, undisturbed: Run, tmp_path: Path
):
    (done,) = run(tmp_path, llama, [Strike(POINTS[point](1), kills(1))], recompute=True)
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert len(events(done, progress.Restored)) == 1


# ------------------------------------------------------------------------------------------------- several, and
# standbys


@pytest.mark.parametrize(
    ("stages", "point"), sampled([(0, 1), (1, 2), (0, 2), (0, 1, 2)], ["a backward", "the commit"])
)
def test_several_stages_die_at_once_and_replay_together(
    point: str, stages: tuple[int, ...], llama: Captured, undisturbed: Run, tmp_path: Path
):
    (done,) = run(tmp_path, llama, [Strike(POINTS[point](stages[0]), kills(*stages))])
    assert_same(done, undisturbed, tmp_path, STEPS)
    final = [event for event in done.events if isinstance(event, progress.Restored)][-1]
    assert set(stages) <= set(final.stages)
    assert not final.rollback


@pytest.mark.parametrize("point", ["a forward", "a snapshot"])
def test_a_standby_dies_and_nobody_stands_still(point: str, llama: Captured, undisturbed: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama, [Strike(POINTS[point](1), kills(GUARDS[1]))])
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert [event.kind for event in done.events if isinstance(event, progress.FaultSeen)] == ["standby"]
    assert not events(done, progress.PlanChanged)
    assert not events(done, progress.Restored)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2))])
def test_a_stage_dies_with_its_standby_and_all_go_back_to_the_checkpoint(
    stage: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    (done,) = run(tmp_path, llama, [Strike(on_commit(stage, 5), kills(stage, GUARDS[stage]))], peers=7)
    assert_same(done, undisturbed, tmp_path, STEPS)
    final = [event for event in done.events if isinstance(event, progress.Restored)][-1]
    assert (final.rollback, final.base, final.committed) == (True, 3, 6)


def test_a_standby_dies_first_its_stage_later(llama: Captured, undisturbed: Run, tmp_path: Path):
    strikes = [Strike(POINTS["a forward"](1), kills(GUARDS[1])), Strike(on_commit(1, 4), kills(1))]
    (done,) = run(tmp_path, llama, strikes, peers=7)
    assert_same(done, undisturbed, tmp_path, STEPS)
    final = [event for event in done.events if isinstance(event, progress.Restored)][-1]
    assert (final.rollback, final.base, final.committed) == (True, 3, 5)
    replayed = [done.record.step for done in done.steps() if done.replayed]
    assert replayed == [3, 4]


def on_commit(stage: int, step: int) -> Callable[[wire.Message], bool]:
    return lambda m: isinstance(m, wire.Commit) and (m.stage, m.record.step) == (stage, step)


RECOVERING: dict[str, Callable[[wire.Message], bool]] = {
    "attach": lambda m: isinstance(m, wire.Attach) and m.fence.attempt == 1,
    "status": lambda m: isinstance(m, wire.Status) and m.fence.attempt == 1,
    "load": lambda m: isinstance(m, wire.Resume) and m.source in ("import", "snapshot"),
    "loaded": lambda m: isinstance(m, wire.Ready) and m.fence.attempt == 1,
    "replay": lambda m: isinstance(m, wire.Prepared) and m.fence.attempt == 1,
}


@pytest.mark.parametrize(("moment", "second"), sampled(RECOVERING, [0, GUARDS[1], 2]))
def test_another_dies_while_the_first_is_restored(
    moment: str, second: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    strikes = [Strike(on_commit(1, 3), kills(1)), Strike(RECOVERING[moment], kills(second))]
    (done,) = run(tmp_path, llama, strikes, peers=8)
    assert_same(done, undisturbed, tmp_path, STEPS)


# ---------------------------------------------------------------------------------------------- driver, broker, nobody


@pytest.mark.parametrize("point", POINTS)
def test_the_driver_dies_and_finds_its_stages_where_they_are(
    point: str, llama: Captured, undisturbed: Run, tmp_path: Path
):
    killed, resumed = run(tmp_path, llama, [Strike(POINTS[point](1), dies())], starts=2)
    assert killed.end is None
    assert_same(resumed, undisturbed, tmp_path, STEPS)
    assert not any(done.replayed for done in resumed.steps())
    assert not events(resumed, progress.FaultSeen)


@pytest.mark.parametrize("point", ["a backward", "the commit", "its state for a checkpoint", "a snapshot"])
def test_the_driver_dies_with_a_stage(point: str, llama: Captured, undisturbed: Run, tmp_path: Path):
    _, resumed = run(tmp_path, llama, [Strike(POINTS[point](1), dies(1))], starts=2)
    assert_same(resumed, undisturbed, tmp_path, STEPS)
    assert not any(done.replayed for done in resumed.steps()), resumed.events


@pytest.mark.parametrize("point", ["a forward", "the commit"])
def test_without_its_broker_a_job_waits_only_for_a_lost_stage(
    point: str, llama: Captured, undisturbed: Run, tmp_path: Path
):
    def strike(pool: MemoryPool, job: Job) -> None:
        pool.broker_there.clear()
        pool.kill(peer_id(GUARDS[0]), peer_id(1))

    def come_back(pool: MemoryPool, event: progress.Progress) -> None:
        if isinstance(event, progress.FaultSeen) and event.kind == "peer":
            asyncio.get_running_loop().call_soon(pool.broker_there.set)

    (done,) = run(tmp_path, llama, [Strike(POINTS[point](1), strike)], then=come_back)
    assert_same(done, undisturbed, tmp_path, STEPS)


@pytest.mark.parametrize("point", ["a forward", "the commit", "its state for a checkpoint"])
def test_with_nobody_left_a_job_waits_until_the_machine_is_back(
    point: str, llama: Captured, undisturbed: Run, tmp_path: Path
):
    tasks: list[asyncio.Task[None]] = []

    def revive(pool: MemoryPool, event: progress.Progress) -> None:
        if isinstance(event, progress.JobWaiting):
            tasks.append(asyncio.ensure_future(pool.revive(peer_id(1))))

    (done,) = run(tmp_path, llama, [Strike(POINTS[point](1), kills(1))], standbys={}, peers=3, then=revive)
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert len(events(done, progress.JobWaiting)) == 1
    final = [event for event in done.events if isinstance(event, progress.Restored)][-1]
    assert final.base in (0, 3)


# ------------------------------------------------------------------------------------------------- changing places


def exchange(pool: MemoryPool, job: Job) -> None:
    """Stage 1 and its standby are to change places."""
    plan, former, standby = job.driver.plan, peer_id(1), peer_id(GUARDS[1])
    better = msgspec.structs.replace(
        plan,
        version=pool.newest_version + 1,
        stages=tuple(msgspec.structs.replace(one, peer=standby) if one.stage == 1 else one for one in plan.stages),
        standbys=tuple(msgspec.structs.replace(one, peer=former) if one.stage == 1 else one for one in plan.standbys),
    )
    job.driver.offer(pool.deployment(better), "a faster machine")


def home_of_stage_1(done: Run) -> PeerId:
    return PeerId(next(one.peer for one in done.job.driver.plan.stages if one.stage == 1))


@pytest.mark.parametrize(("point", "stage"), [("a forward", 0), ("the commit", 1), ("its state for a checkpoint", 2)])
def test_with_nobody_left_those_that_remain_go_on_with_another_cut(
    point: str, stage: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    (done,) = run(
        *(tmp_path, llama, [Strike(POINTS[point](stage), kills(stage))]),
        peers=3,
        standbys={},
        recut=((0, 3), (3, 5), (5, 6)),
    )
    assert_same(done, undisturbed, tmp_path, STEPS)
    (changed,) = events(done, progress.PlanChanged)
    assert isinstance(changed, progress.PlanChanged)
    assert peer_id(stage) not in {one.peer for one in changed.plan.stages}
    (restored,) = events(done, progress.Restored)
    assert isinstance(restored, progress.Restored)
    assert (restored.stages, restored.rollback) == ((0, 1, 2), True)
    assert restored.base in (0, 3)
    assert len(events(done, progress.Recovered)) == 1


def test_a_stage_changes_places_with_its_standby_without_a_checkpoint(
    llama: Captured, undisturbed: Run, tmp_path: Path
):
    offered = Strike(POINTS["its vote"](1), exchange)
    (done,) = run(tmp_path, llama, [offered], checkpoint_every=0)
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert home_of_stage_1(done) == peer_id(GUARDS[1])
    assert not events(done, progress.FaultSeen)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000000", LAST]


@pytest.mark.parametrize("message", [wire.Enlisted, wire.Status, wire.Ready])
def test_the_new_place_dies_before_its_former_one_has_a_snapshot(
    message: type[wire.Message], llama: Captured, undisturbed: Run, tmp_path: Path
):
    """The former one has the stage itself: nobody goes back to the checkpoint."""
    changed: list[int] = []

    def offer(pool: MemoryPool, job: Job) -> None:
        exchange(pool, job)
        changed.append(pool.newest_version)

    def under_the_new_plan(heard: wire.Message) -> bool:
        mine = not isinstance(heard, wire.Status | wire.Ready) or heard.stage == 1
        return isinstance(heard, message) and mine and [heard.fence.plan_version] == changed

    dying = Strike(under_the_new_plan, kills(GUARDS[1]))
    (done,) = run(tmp_path, llama, [Strike(POINTS["its vote"](1), offer), dying], checkpoint_every=0)
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert home_of_stage_1(done) == peer_id(1)
    assert not any(event.rollback for event in done.events if isinstance(event, progress.Restored))
