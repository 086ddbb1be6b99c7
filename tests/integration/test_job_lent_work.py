"""What whole jobs on real stages leave in their journals for the ledger: each committed step once, with the machines
that ran it, also after a machine was replaced; what is disputed for neither side; nothing of a faulty peer.

In one process on the shipped driver, members and backends. Neighbours: `test_cli_ledger` has the broker as well.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusionai.backends.interface import Backend
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.client.pool.work import CommittedWork, StepWork, committed_work
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.ir.cost import BlockCost, block_costs
from fusionai.storage.commits import CommitJournal, DisputedSteps, JournalledWork, read_commits
from fusionai.training import progress
from fusionai.training.inspection import Inspection
from harness.faulty_peers import LyingBackend
from harness.pool import OWNER, Data, Job, MemoryPool, Run, peer_id, tokens
from harness.small_llama import SMALL_LLAMA
from harness.strikes import events

pytestmark = pytest.mark.slow

VOCABULARY, MICROBATCHES, STEPS, ROWS, LENGTH = 31, 3, 8, 2, 6
RANGES = ((0, 1), (1, 3), (3, 5), (5, 6))
"""Three stages at peers 0 to 2; the loss, at the owner."""
STANDBYS = {0: 3, 1: 4, 2: 5}


@pytest.fixture(scope="module")
def llama() -> Captured:
    config = {**SMALL_LLAMA, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return capture(ConfigSource(config), batch=(1, 4), sequence=(1, 16))


@dataclass(frozen=True)
class Finished:
    run: Run
    records: tuple[JournalledWork, ...]
    work: CommittedWork
    blocks: tuple[BlockCost, ...]

    def steps(self) -> dict[str, int]:
        return {one.peer: one.steps for one in self.work.shares}

    def flops(self, first: int, below: int) -> float:
        """Of these blocks in one step."""
        return MICROBATCHES * sum(one.forward_flops + one.backward_flops for one in self.blocks[first:below])


def finished(
    directory: Path, captured: Captured, machines: dict[int, Backend] | None = None, **changes: Any
) -> Finished:
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
                "snapshot_every": 2,
                "checkpoint_every": 2,
                "data": Data(tokens(VOCABULARY, ROWS, LENGTH)),
                "steps": STEPS,
                "microbatches": MICROBATCHES,
                "replans": True,
            }
            job = Job(pool=pool, directory=directory, graph=captured.graph, state=captured.state, **fields | changes)
            return await job.run()

    done = asyncio.run(body())
    assert done.end is not None
    assert done.end.failed is None
    blocks = block_costs(captured.graph, {"b": ROWS, "s": LENGTH}, training=True)
    step = StepWork(OWNER, blocks, MICROBATCHES, ROWS * LENGTH)
    faulty = {one.peer for one in events(done, progress.FaultSeen) if one.kind == "faulty"}  # pyright: ignore
    path = directory / "commits.sqlite"
    with CommitJournal(path) as journal:
        assert journal.run
        work = committed_work(step, journal.committed, journal.work, faulty)
        assert work.steps == len(read_commits(path)) == STEPS
        assert work.tokens == STEPS * MICROBATCHES * ROWS * LENGTH
        return Finished(done, journal.work, work, blocks)


def test_sums_equal_the_journalled_steps_and_tokens(llama: Captured, tmp_path: Path):
    done = finished(tmp_path, llama)
    assert done.steps() == {peer_id(number): STEPS for number in range(3)}
    assert {one.tokens for one in done.work.shares} == {done.work.tokens}
    flops = {one.peer: one.flops for one in done.work.shares}
    assert flops == {peer_id(at): STEPS * done.flops(*RANGES[at]) for at in range(3)}
    assert all(one > 0 for one in flops.values())


def test_each_step_counts_for_the_machine_that_ran_it(llama: Captured, tmp_path: Path):
    """Peer 1 makes values that are not finite in step 3 and is replaced."""
    done = finished(tmp_path, llama, {1: LyingBackend("breaks", part=1.0, since=3)}, standbys=STANDBYS)
    (changed,) = events(done.run, progress.PlanChanged)
    assert isinstance(changed, progress.PlanChanged)
    successor = next(stage.peer for stage in changed.plan.stages if stage.stage == 1)
    assert done.steps() == {peer_id(0): STEPS, peer_id(1): 3, successor: STEPS - 3, peer_id(2): STEPS}
    ran = [one.flops for one in done.work.shares if one.peer in (peer_id(1), successor)]
    assert sum(ran) == pytest.approx(STEPS * done.flops(*RANGES[1]))


def test_a_faulty_peer_gets_nothing_and_every_step_counts_once(llama: Captured, tmp_path: Path):
    secret = {"standbys": STANDBYS, "secret": bytes(range(32))}
    done = finished(tmp_path, llama, {1: LyingBackend("scales", part=1.0, since=4)}, **secret)
    assert peer_id(1) not in done.steps()
    assert done.steps()[peer_id(0)] == done.steps()[peer_id(2)] == STEPS
    assert sum(done.steps().values()) <= 3 * STEPS


def test_steps_in_dispute_count_for_neither_side(llama: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opinion, disputed = Inspection.opinion, list[Check]()

    def doubtful(self: Inspection, check: Check, *others: Any) -> Opinion:
        """The first check of stage 1 finds that stage 2 got something else than stage 1 says."""
        if check.stage == 1 and not disputed:
            disputed.append(check)
            return Opinion(links=frozenset({peer_id(2)}))
        return opinion(self, check, *others)

    monkeypatch.setattr(Inspection, "opinion", doubtful)
    done = finished(tmp_path, llama, standbys=STANDBYS, secret=bytes(range(32)))
    (check,) = disputed
    assert [one for one in done.records if isinstance(one, DisputedSteps)] == [
        DisputedSteps(check.first, check.below, (peer_id(1), peer_id(2)))
    ]
    left = STEPS - (check.below - check.first)
    assert done.steps() == {peer_id(0): STEPS, peer_id(1): left, peer_id(2): left}
