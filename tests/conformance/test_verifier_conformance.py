"""A stretch of one framework's work run again by each framework that trains: honest work passes, falsified does not.

The shipped verifier and the shipped limits, without a network. Neighbours: `tests/integration/test_job_faulty_peers.py`
has whole jobs, `benchmarks/verification.py` thousands of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fusionai.backends.interface import Call
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.execution.host import ComputeThread
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.tensors import step_key
from fusionai.execution.training.boundary import boundaries
from fusionai.execution.training.stages import LoadedStage
from fusionai.execution.training.verifier import StepVerifier
from fusionai.execution.training.work import StagePass
from fusionai.ir.partition import cut_blocks
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.training.inspection import Inspection, limits
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import CommitRecord, Fence, OptimizerSpec, StageOptions
from harness.backend_kinds import opened
from harness.faulty_peers import LyingBackend
from harness.pool import tensor
from harness.stand import RANGES, layers

pytestmark = pytest.mark.slow

FENCE = Fence(1, 1, 0)
MICROBATCHES, STEPS, WIDTH = 2, 2, 64
OPTIONS = StageOptions(microbatches=MICROBATCHES, optimizer=OptimizerSpec(weight_decay=0.1), takeover="tolerant")
CHECK = Check(1, "worker", "verifier", 0, STEPS)
Backends = Callable[[], Any]


def loaded(backend: Any) -> LoadedStage:
    """The middle one of three stages: a linear layer."""
    partition = cut_blocks(layers(WIDTH), RANGES)
    boundary = boundaries(partition)[1]
    graph = partition.stages[1].graph
    return LoadedStage(graph, boundary, backend.load(graph, grad_inputs=boundary.grad_inputs, options=OPTIONS))


def drawn(*seed: int) -> HostTensor:
    return tensor(np.random.default_rng(seed).standard_normal((8, WIDTH)).astype(np.float32))


class Stretch:
    """What a worker did, what it said of it, and what its neighbours gave it."""

    def __init__(self, backend: Any) -> None:
        stage = loaded(backend)
        assert stage.program.initialise() == ()
        passed = StagePass(stage.program, stage.boundary, OPTIONS)
        self.inspection = Inspection(b"s" * 32, "owner")
        self.sent: list[tuple[Any, dict[str, HostTensor]]] = []
        self.records: list[CommitRecord] = []
        self.begin = dict(stage.program.export_state(("model", "optimizer")))
        for step in range(STEPS):
            sketches = [one for microbatch in range(MICROBATCHES) for one in self._task(passed, step, microbatch)]
            norms = stage.program.gradient_norms()
            stage.program.apply(scale=0.5, learning_rate=1e-3)
            said = wire.Prepared(fence=FENCE, stage=1, step=step, norms=norms, sketches=tuple(sketches))
            self.inspection.hear("worker", said)
            self.records.append(
                CommitRecord(
                    step=step,
                    scale=0.5,
                    learning_rate=1e-3,
                    total_norm=0.0,
                    norms_hash="",
                    fence=FENCE,
                    loss=0.0,
                )
            )
        self.end = dict(stage.program.export_state(("model", "optimizer")))

    def _task(self, passed: StagePass, step: int, microbatch: int) -> list[wire.Sketch]:
        key = step_key(self.inspection.secret_of(1, "worker"), step)
        call = Call("train", step, microbatch)
        got, back = {"y0": drawn(step, microbatch)}, {"y1": drawn(step, microbatch, 1)}
        where: dict[str, Any] = {"fence": FENCE, "step": step, "replica": 0, "microbatch": microbatch}
        self.sent.append((wire.Forward(mode="train", producer=0, consumer=1, tensors=headers(got), **where), got))
        self.sent.append((wire.Backward(consumer=2, producer=1, tensors=headers(back), **where), back))
        _, gave = passed.forward(call, got)
        arrived: Any = {"y1": {2: back["y1"]}}
        returned = passed.backward(call, arrived)
        return [
            *passed.sketches(microbatch, passed.received(got), key, sent=False, forward=True),
            *passed.sketches(microbatch, passed.returned(arrived), key, sent=False, forward=False),
            *passed.sketches(microbatch, gave, key, sent=True, forward=True),
            *passed.sketches(microbatch, returned, key, sent=True, forward=False),
        ]

    def told(self, **changes: Any) -> wire.Recheck:
        fields: dict[str, Any] = {
            "fence": FENCE,
            "stage": 1,
            "first": 0,
            "below": STEPS,
            "graph_hash": "",
            "boundary": msgspec.Raw(b""),
            "options": OPTIONS,
            "records": tuple(self.records),
            "keys": self.inspection.keys(CHECK, ()),
        }
        return wire.Recheck(**{**fields, **changes})

    def again(self, backend: Any, *, fingerprint: str = "another") -> Opinion:
        """By a machine of this fingerprint; the worker's is `one`."""

        async def body() -> wire.Rechecked:
            compute = ComputeThread()
            try:
                verifier = StepVerifier(self.told(), loaded(backend), compute, memory=MemoryBudget(2**20))
                for message, tensors in self.sent:
                    verifier.take(message, tensors)
                return await verifier.run(self.begin, self.end)
            finally:
                compute.close()

        return self.inspection.opinion(CHECK, asyncio.run(body()), limits(OPTIONS, "one", fingerprint))


@pytest.fixture(scope="module")
def honest() -> Stretch:
    return Stretch(opened("torch"))


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_honest_work_passes_whoever_runs_it_again(kind: str, honest: Stretch):
    assert honest.again(opened(kind)) == Opinion()


def test_between_equal_machines_nothing_may_differ(honest: Stretch):
    assert honest.again(opened("torch"), fingerprint="one") == Opinion()


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("lie", ["scales", "stale", "four_bits", "four_bits_kept", "skips"])
def test_falsified_work_does_not_pass(kind: str, lie: Any):
    assert Stretch(LyingBackend(lie, part=1.0)).again(opened(kind)).own


def test_a_first_state_that_does_not_follow_from_the_seed_is_seen(honest: Stretch):
    """The faulty peer has consistent results, from weights of its own."""
    begin, end = honest.begin, honest.end
    try:
        honest.begin = {name: drawn(5) if value.shape == (WIDTH, WIDTH) else value for name, value in begin.items()}
        honest.begin |= {"model/layer1.weight": tensor(np.eye(WIDTH, dtype=np.float32))}
        honest.begin |= {name: value for name, value in begin.items() if name.startswith("optimizer/")}
        assert honest.again(opened("torch")).own
    finally:
        honest.begin, honest.end = begin, end


@pytest.mark.parametrize("changes", [{"below": 3}, {"below": 0}, {"options": StageOptions(sync_every=1)}], ids=str)
def test_what_is_no_stretch_is_refused(changes: dict[str, Any], honest: Stretch):
    with pytest.raises(ExecutionError):
        StepVerifier(honest.told(**changes), loaded(opened("torch")), None, memory=MemoryBudget(2**20))  # pyright: ignore


def test_what_does_not_belong_to_it_is_refused_and_too_much_as_well(honest: Stretch):
    stage = loaded(opened("torch"))
    verifier = StepVerifier(honest.told(), stage, None, memory=MemoryBudget(2**20))  # pyright: ignore
    message, tensors = honest.sent[0]
    with pytest.raises(ExecutionError, match="step 9"):
        verifier.take(msgspec.structs.replace(message, step=9), tensors)
    with pytest.raises(ExecutionError, match="expected"):
        verifier.take(message, {"y7": tensors["y0"]})
    small = StepVerifier(honest.told(), stage, None, memory=MemoryBudget(100))  # pyright: ignore
    with pytest.raises(ExecutionError, match="100 are left, expected at least 2048"):
        small.take(message, tensors)
