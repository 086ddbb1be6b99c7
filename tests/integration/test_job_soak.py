"""A long job with a death every third step: whatever it needs, it needs no more of it later than sooner.

Counted are objects of the product and of torch, tasks, threads and descriptors, at two moments alike with many rounds
between. A leak of one object for each round is seen. Neighbour: `harness.pool`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.program import TorchStageProgram
from fusionai.capture.capture import capture
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Standby
from fusionai.training import progress
from harness.pool import Data, Job, MemoryPool, tokens

pytestmark = pytest.mark.slow

VOCABULARY, STAGES = 31, 3
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
STEPS, EARLY, LATE = 66, 20, 62
DEATHS_BETWEEN = (LATE - EARLY) // 3
KEPT_BY_THE_TEST = (
    "fusionai.training.progress.",
    "fusionai.wire.messages.CommitRecord",
    "fusionai.scheduling.problem.types.",
)
"""What a run tells is kept whole by the harness."""


def census() -> Counter[str]:
    gc.collect()
    counted: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith(("fusionai.", "torch.Tensor", "torch.storage")) and not name.startswith(KEPT_BY_THE_TEST):
            counted[name] += 1
    counted["descriptors"] = psutil.Process().num_fds()
    counted["tasks"] = len(asyncio.all_tasks())
    counted["threads"] = threading.active_count()
    return counted


class Fate:
    """Kills at every third step, brings the dead back at the next, gives stages without a standby one at the third."""

    def __init__(self, pool: MemoryPool, job: Job) -> None:
        self.pool = pool
        self.job = job
        self.deaths = 0
        self.counted: dict[int, Counter[str]] = {}
        self._choose = random.Random(4)
        self._tasks: set[asyncio.Task[None]] = set()

    def see(self, event: progress.Progress) -> None:
        if not isinstance(event, progress.StepDone) or event.replayed:
            return
        step = event.record.step
        if step in (EARLY, LATE):
            self.counted[step] = census()
        if step >= LATE:
            return
        match step % 3:
            case 0 if not self.pool.dead:
                plan = self.job.driver.plan
                parts = {stage.peer for stage in plan.stages[:STAGES]} | {standby.peer for standby in plan.standbys}
                victim = PeerId(self._choose.choice(sorted(parts)))
                self.pool.kill(victim)
                self.deaths += 1
                self._start(self.pool.bury(victim))
            case 1:
                for peer in list(self.pool.dead):
                    self._start(self.pool.revive(peer))
            case _:
                self._reinforce()

    def _reinforce(self) -> None:
        plan = self.job.driver.plan
        standbys = {standby.stage: standby.peer for standby in plan.standbys}
        busy = {stage.peer for stage in plan.stages} | set(standbys.values()) | self.pool.dead
        idle = [host.peer for host in self.pool.hosts if host.peer not in busy]
        missing = [stage for stage in range(STAGES) if stage not in standbys]
        if not idle or not missing:
            return
        standbys |= dict(zip(missing, idle, strict=False))
        better = msgspec.structs.replace(
            plan,
            version=self.pool.newest_version + 1,
            standbys=tuple(Standby(stage=stage, peer=peer) for stage, peer in sorted(standbys.items())),
            snapshot_every=2,
        )
        self.job.driver.offer(self.pool.deployment(better), "a standby is back")

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@pytest.fixture
def unrecorded() -> Iterator[None]:
    """pytest keeps what is logged, with the errors it is about, their frames and so whole stages."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.long
def test_many_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    captured = capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))
    programs = f"{TorchStageProgram.__module__}.{TorchStageProgram.__qualname__}"

    async def body() -> Fate:
        async with MemoryPool(6, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            job = Job(
                pool=pool,
                directory=tmp_path,
                graph=captured.graph,
                state=captured.state,
                ranges=((0, 2), (2, 3), (3, 5), (5, 6)),
                owned=frozenset({STAGES}),
                standbys={0: 3, 1: 4, 2: 5},
                data=Data(tokens(VOCABULARY, 2, 6)),
                steps=STEPS,
                microbatches=3,
                checkpoint_every=9,
                replans=True,
                patience_s=120,
            )
            fate = Fate(pool, job)
            done = await job.run(on_event=fate.see)
            assert done.end is not None
            assert done.end.failed is None
            return fate

    fate = asyncio.run(body())
    assert fate.deaths >= DEATHS_BETWEEN + EARLY // 3
    grown = fate.counted[LATE] - fate.counted[EARLY]
    assert {name: more for name, more in grown.items() if more >= DEATHS_BETWEEN // 2} == {}
    assert fate.counted[LATE][programs] == STAGES + 1
