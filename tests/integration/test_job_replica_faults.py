"""The matrix of faults with replicas whose gradients are summed at every step: whoever dies whenever, no bit changes.

Two replicas of two stages: 0 and 1, then 3 and 4; the losses, 2 and 5, are the owner's. Stages of the first replica are
the homes of the sums. Neighbours: `test_job_faults`, the same for one replica; `test_job_replicas` has the bits of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.training import progress
from fusionai.wire import messages as wire
from harness.pool import Data, Run, peer_id, tokens
from harness.strikes import Seen, Strike, assert_same, dies, events, kills, struck_run

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

VOCABULARY, STEPS = 31, 6
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
STAGES = {0: 0, 1: 1, 3: 2, 4: 3}
"""Stage -> the peer that runs it."""
GUARDS = {0: 4, 1: 5, 3: 6, 4: 7}


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))


def run(
    directory: Path, captured: Captured, strikes: Sequence[Strike] = (), *, peers: int = 8, **changes: Any
) -> list[Run]:
    fields: dict[str, Any] = {
        "ranges": ((0, 2), (2, 4), (4, 5)),
        "owned": frozenset({2}),
        "standbys": GUARDS,
        "snapshot_every": 2,
        "checkpoint_every": 3,
        "data": Data(tokens(VOCABULARY, 2, 6)),
        "steps": STEPS,
        "replicas": 2,
        "microbatches": 4,
        "replans": True,
    }
    return struck_run(directory, captured, strikes, peers=peers, **fields | changes)


@pytest.fixture(scope="module")
def undisturbed(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    (done,) = run(tmp_path_factory.mktemp("undisturbed"), llama, standbys={}, peers=4)
    assert done.end is not None
    assert done.end.failed is None
    assert not events(done, progress.FaultSeen)
    return done


Point = Callable[[int], Seen]
POINTS: dict[str, Point] = {
    "a forward": lambda s: lambda m: isinstance(m, wire.Forward) and (m.mode, m.consumer, m.step) == ("train", s, 3),
    "a backward": lambda s: lambda m: isinstance(m, wire.Backward) and (m.producer, m.step) == (s, 3),
    "the sums": lambda s: lambda m: isinstance(m, wire.SharedGradient) and (m.phase, m.step) == ("total", 3),
    "its vote": lambda s: lambda m: isinstance(m, wire.Prepared) and (m.stage, m.step) == (s, 3),
    "the commit": lambda s: lambda m: isinstance(m, wire.Commit) and (m.stage, m.record.step) == (s, 3),
    "its word of having applied": lambda s: lambda m: isinstance(m, wire.Applied) and (m.stage, m.step) == (s, 3),
    "its state for a checkpoint": lambda s: lambda m: isinstance(m, wire.StateChunk) and m.step == 3,
    "a snapshot": lambda s: lambda m: isinstance(m, wire.Snapshot) and (m.stage, m.step, m.last) == (s, 4, True),
}


USUAL = ("the sums", "its state for a checkpoint", "a snapshot")
"""Points of which one replica has no like, or that differ most; `test_job_replicas` has others."""
EACH = [point if point in USUAL else pytest.param(point, marks=LONG) for point in POINTS]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=LONG), 1, 3, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("point", EACH)
def test_a_stage_dies_and_its_standby_takes_over(
    point: str, stage: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    (done,) = run(tmp_path, llama, [Strike(POINTS[point](stage), kills(STAGES[stage]))])
    assert_same(done, undisturbed, tmp_path, STEPS)
    (seen,) = events(done, progress.FaultSeen)
    assert isinstance(seen, progress.FaultSeen)
    assert (seen.kind, seen.peer, seen.stages) == ("peer", peer_id(STAGES[stage]), (stage,))
    (changed,) = events(done, progress.PlanChanged)
    assert isinstance(changed, progress.PlanChanged)
    assert changed.plan.stages[stage].peer == peer_id(GUARDS[stage])
    (restored,) = events(done, progress.Restored)
    assert isinstance(restored, progress.Restored)
    assert not restored.rollback
    assert len(events(done, progress.Recovered)) == 1


TOGETHER = {
    "a whole replica": (3, 4),
    "the homes": (0, 1),
    "one of each": (1, 3),
    "a home and who sends to it": (1, 4),
    "all": (0, 1, 3, 4),
}


@pytest.mark.parametrize("who", TOGETHER)
@pytest.mark.parametrize(
    "point", [pytest.param("a backward", marks=LONG), pytest.param("the sums", marks=LONG), "the commit"]
)
def test_several_die_at_once_and_replay_together(
    point: str, who: str, llama: Captured, undisturbed: Run, tmp_path: Path
):
    stages = TOGETHER[who]
    (done,) = run(tmp_path, llama, [Strike(POINTS[point](stages[0]), kills(*(STAGES[stage] for stage in stages)))])
    assert_same(done, undisturbed, tmp_path, STEPS)
    final = [event for event in done.events if isinstance(event, progress.Restored)][-1]
    assert not final.rollback


@pytest.mark.parametrize("stage", [pytest.param(1, marks=LONG), 3])
def test_a_standby_dies_and_nobody_stands_still(stage: int, llama: Captured, undisturbed: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama, [Strike(POINTS["a forward"](stage), kills(GUARDS[stage]))])
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert [event.kind for event in done.events if isinstance(event, progress.FaultSeen)] == ["standby"]
    assert not events(done, progress.Restored)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=LONG)])
def test_a_stage_dies_with_its_standby_and_all_go_back_to_the_checkpoint(
    stage: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    def late(message: wire.Message) -> bool:
        return isinstance(message, wire.Commit) and (message.stage, message.record.step) == (stage, 4)

    (done,) = run(tmp_path, llama, [Strike(late, kills(STAGES[stage], GUARDS[stage]))], peers=9)
    assert_same(done, undisturbed, tmp_path, STEPS)
    final = [event for event in done.events if isinstance(event, progress.Restored)][-1]
    assert (final.rollback, final.base, final.committed) == (True, 3, 5)


RECOVERING: dict[str, Seen] = {
    "attach": lambda m: isinstance(m, wire.Attach) and m.fence.attempt == 1,
    "load": lambda m: isinstance(m, wire.Resume) and m.source in ("import", "snapshot"),
    "replay": lambda m: isinstance(m, wire.Prepared) and m.fence.attempt == 1,
}


@pytest.mark.parametrize("second", [0, 4, GUARDS[1]], ids=["its neighbour", "who sends to it", "its stand-in"])
@pytest.mark.parametrize("moment", [pytest.param("attach", marks=LONG), pytest.param("load", marks=LONG), "replay"])
def test_another_dies_while_the_first_is_restored(
    moment: str, second: int, llama: Captured, undisturbed: Run, tmp_path: Path
):
    struck = STAGES.get(second, second)
    strikes = [Strike(POINTS["the commit"](1), kills(STAGES[1])), Strike(RECOVERING[moment], kills(struck))]
    (done,) = run(tmp_path, llama, strikes, peers=10)
    assert_same(done, undisturbed, tmp_path, STEPS)


@pytest.mark.parametrize("point", EACH)
def test_the_driver_dies_and_finds_its_stages_where_they_are(
    point: str, llama: Captured, undisturbed: Run, tmp_path: Path
):
    killed, resumed = run(tmp_path, llama, [Strike(POINTS[point](3), dies())], starts=2)
    assert killed.end is None
    assert_same(resumed, undisturbed, tmp_path, STEPS)
    assert not any(done.replayed for done in resumed.steps())
    assert not events(resumed, progress.FaultSeen)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "point", [pytest.param("a backward", marks=LONG), "the sums", pytest.param("the commit", marks=LONG)]
)
def test_the_driver_dies_with_a_stage(point: str, stage: int, llama: Captured, undisturbed: Run, tmp_path: Path):
    _, resumed = run(tmp_path, llama, [Strike(POINTS[point](stage), dies(STAGES[stage]))], starts=2)
    assert_same(resumed, undisturbed, tmp_path, STEPS)
