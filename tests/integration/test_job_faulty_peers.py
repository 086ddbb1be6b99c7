"""Members that give wrong results are found, named and left out, and what they did is done again; the honest stay.

Whole jobs in one process on the shipped driver, members and backends. Neighbours: `harness.faulty_peers` has the lies.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionai.backends.interface import Backend
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.training import progress
from harness.faulty_peers import LIES, Lie, LyingBackend
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens
from harness.strikes import assert_same, events

pytestmark = pytest.mark.slow

VOCABULARY, MICROBATCHES, STEPS = 31, 3, 8
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
RANGES = ((0, 2), (2, 3), (3, 5), (5, 6))
"""Embedding and first layer, a layer, last layer and head; the loss, at the owner."""
GUARDS = {0: 3, 1: 4, 2: 5}
SECRET = bytes(range(32))
LAST_RESORT = 7
"""A peer that stands by for nothing and takes over what a faulty peer's standby may not."""


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))


def run(directory: Path, captured: Captured, machines: dict[int, Backend] | None = None, **changes: Any) -> Run:
    """`machines`: number of a peer -> its backend; the others are honest."""
    made = iter(range(-1, 100))  # the owner's first

    def backend() -> Backend:
        number = next(made)
        return (machines or {}).get(number) or TorchBackend(device="cpu", threads=1)

    async def body() -> Run:
        async with MemoryPool(8, backend) as pool:
            fields: dict[str, Any] = {
                "ranges": RANGES,
                "owned": frozenset({3}),
                "standbys": GUARDS,
                "snapshot_every": 2,
                "checkpoint_every": 2,
                "data": Data(tokens(VOCABULARY, 2, 6)),
                "steps": STEPS,
                "microbatches": MICROBATCHES,
                "replans": True,
                "secret": SECRET,
            }
            job = Job(pool=pool, directory=directory, graph=captured.graph, state=captured.state, **fields | changes)
            return await job.run()

    return asyncio.run(body())


def checks(done: Run) -> list[progress.StepsChecked]:
    return [event for event in done.events if isinstance(event, progress.StepsChecked)]


@pytest.fixture(scope="module")
def undisturbed(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Nobody standbys anything, nobody lies."""
    done = run(tmp_path_factory.mktemp("undisturbed"), llama, standbys={}, secret=b"")
    assert done.end is not None
    assert done.end.failed is None
    return done


def test_honest_machines_are_checked_and_no_bit_changes(llama: Captured, undisturbed: Run, tmp_path: Path):
    done = run(tmp_path, llama)
    assert_same(done, undisturbed, tmp_path, STEPS)
    assert not events(done, progress.FaultSeen)
    # A check that still runs when the next one is due takes its place: their number depends on the machine's load.
    assert len(checks(done)) >= 2 * len(GUARDS)
    assert {one.outcome for one in checks(done)} == {"valid"}
    assert {one.stage for one in checks(done)} == set(GUARDS)


@pytest.mark.parametrize("lie", LIES)
def test_a_faulty_peer_is_found_named_and_left_out_and_its_work_done_again(
    lie: Lie, llama: Captured, undisturbed: Run, tmp_path: Path
):
    faulty_peer = LyingBackend(lie)
    done = run(tmp_path, llama, {1: faulty_peer})
    assert faulty_peer.lied
    (seen,) = events(done, progress.FaultSeen)
    assert isinstance(seen, progress.FaultSeen)
    assert (seen.kind, seen.peer, seen.stages) == ("faulty", peer_id(1), (1,))
    assert faulty_peer.tasks <= 300
    (changed,) = events(done, progress.PlanChanged)
    assert isinstance(changed, progress.PlanChanged)
    assert peer_id(1) not in {stage.peer for stage in changed.plan.stages}
    assert_same(done, undisturbed, tmp_path, STEPS)


@pytest.mark.parametrize("lie", ["breaks", "breaks_back"])
@pytest.mark.parametrize("lasting", [True, False])
def test_a_step_that_is_not_finite_is_never_committed(
    lie: Lie, lasting: bool, llama: Captured, undisturbed: Run, tmp_path: Path
):
    """Without spot checks. A peer that keeps making such values is replaced; one that did once stays."""
    faulty_peer = LyingBackend(lie, part=1.0, since=3, once=None if lasting else 3)
    done = run(tmp_path, llama, {1: faulty_peer}, secret=b"")
    assert faulty_peer.lied
    seen = events(done, progress.FaultSeen)
    assert [(one.kind, one.peer, one.stages) for one in seen] == [("stage", peer_id(1), (1,))] * (2 if lasting else 1)
    assert all("step 3: stage 1 makes values that are not finite" in one.reason for one in seen)
    changes = events(done, progress.PlanChanged)
    assert len(changes) == lasting
    assert all(peer_id(1) not in {stage.peer for stage in one.plan.stages} for one in changes)
    assert_same(done, undisturbed, tmp_path, STEPS)


def test_a_training_in_which_no_peer_makes_finite_values_ends_with_advice(llama: Captured, tmp_path: Path):
    lying = {number: LyingBackend("breaks", part=1.0, since=3) for number in range(1, 8)}
    done = run(tmp_path, llama, lying, secret=b"")
    assert done.end is not None
    assert done.end.failed is not None
    assert "step 3: stage 1 makes values that are not finite from finite ones, on two peers" in done.end.failed
    assert done.end.steps == 3


def test_a_standby_that_accuses_the_honest_is_the_one_to_go(llama: Captured, undisturbed: Run, tmp_path: Path):
    standby = LyingBackend("scales", part=1.0)
    done = run(tmp_path, llama, {GUARDS[1]: standby})
    assert standby.lied
    (seen,) = events(done, progress.FaultSeen)
    assert isinstance(seen, progress.FaultSeen)
    assert (seen.kind, seen.peer, seen.stages) == ("faulty", peer_id(GUARDS[1]), ())
    assert not events(done, progress.PlanChanged)
    assert_same(done, undisturbed, tmp_path, STEPS)


def test_what_is_wrong_from_the_middle_on_is_taken_back_to_there(llama: Captured, undisturbed: Run, tmp_path: Path):
    faulty_peer = LyingBackend("scales", part=1.0, since=5)
    done = run(tmp_path, llama, {1: faulty_peer})
    (restored,) = [event for event in done.events if isinstance(event, progress.Restored)]
    # Steps 4 and 5 are a stretch. How many of those before were checked in time depends on the machine's load.
    held = max(one.below for one in checks(done) if one.stage == 1 and one.outcome == "valid")
    assert held <= restored.base <= 4
    assert restored.base % 2 == 0
    assert_same(done, undisturbed, tmp_path, STEPS)


def test_two_faulty_peers_one_after_the_other(llama: Captured, undisturbed: Run, tmp_path: Path):
    done = run(tmp_path, llama, {0: LyingBackend("skips", part=0.5), 2: LyingBackend("scales", part=0.5, seed=1)})
    seen = [event for event in done.events if isinstance(event, progress.FaultSeen)]
    assert {(one.kind, one.peer) for one in seen} == {("faulty", peer_id(0)), ("faulty", peer_id(2))}
    assert_same(done, undisturbed, tmp_path, STEPS)


def test_without_checks_nobody_notices(llama: Captured, undisturbed: Run, tmp_path: Path):
    """The positive control: the same lie, unchecked, ends in other weights."""
    done = run(tmp_path, llama, {1: LyingBackend("scales")}, secret=b"")
    assert not events(done, progress.FaultSeen)
    assert done.losses != undisturbed.losses


@pytest.mark.parametrize("changes", [{"room": True}, {"recompute": True}, {"offload": True}, {"codecs": ("int8",) * 3}])
def test_whatever_way_a_stage_computes_the_honest_stay(changes: dict[str, Any], llama: Captured, tmp_path: Path):
    done = run(tmp_path, llama, **changes)
    assert not events(done, progress.FaultSeen)
    assert {one.outcome for one in checks(done)} == {"valid"}


def test_stages_that_share_a_parameter_are_checked_too(tmp_path: Path):
    tied = capture(ConfigSource({**LLAMA, "tie_word_embeddings": True}), batch=(1, 4), sequence=(1, 16))
    done = run(tmp_path, tied)
    assert not events(done, progress.FaultSeen)
    assert {one.outcome for one in checks(done)} == {"valid"}
    assert {one.stage for one in checks(done)} == set(GUARDS)


def test_a_faulty_peer_among_replicas_whose_gradients_are_summed(llama: Captured, tmp_path: Path):
    done = run(
        tmp_path,
        llama,
        {1: LyingBackend("scales", part=0.5)},
        ranges=((0, 3), (3, 5), (5, 6)),
        owned=frozenset({2}),
        replicas=2,
        microbatches=4,
        standbys={0: 4, 1: 5, 3: 6, 4: 7},
    )
    (seen,) = events(done, progress.FaultSeen)
    assert isinstance(seen, progress.FaultSeen)
    assert (seen.kind, seen.peer) == ("faulty", peer_id(1))
    assert done.end is not None
    assert done.end.failed is None
