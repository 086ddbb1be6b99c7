"""Replicas whose gradients are summed at every step: the bits of one process that sums in the same order, also when
stages of any replica die.

The order: each replica adds its microbatches one after the other, then the first replica's sums are added to by the
second's, the third's and so on. Neighbour: `test_job_faults`, the same for one replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.optimizers import make_optimizer
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.execution.training.work import StageExecutor
from fusionai.training import progress
from fusionai.wire import messages as wire
from fusionai.wire.messages import CommitRecord
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

VOCABULARY, STEPS = 31, 5
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
DATA = Data(tokens(VOCABULARY, 2, 6))
TWO_AND_LOSS = ((0, 3), (3, 5), (5, 6))
"""Embedding and two layers, a layer and the head; the loss, at the owner."""


def backend() -> TorchBackend:
    return TorchBackend(device="cpu", threads=1)


@cache
def untied() -> Captured:
    return capture(ConfigSource({**LLAMA, "tie_word_embeddings": False}), batch=(1, 4), sequence=(1, 16))


Watch = Callable[[MemoryPool, wire.Message], None]


def run(directory: Path, captured: Captured, watch: Watch = lambda pool, message: None, **changes: object) -> Run:
    async def body() -> Run:
        fields: dict[str, object] = {
            "ranges": TWO_AND_LOSS,
            "owned": frozenset({2}),
            "data": DATA,
            "steps": STEPS,
            "replicas": 2,
            "microbatches": 4,
            "replans": True,
            **changes,
        }
        standbys = fields.get("standbys") or {}
        assert isinstance(standbys, dict)
        async with MemoryPool(2 * int(str(fields["replicas"])) + len(standbys), backend) as pool:
            pool.on_message = lambda sender, receiver, message: watch(pool, message)
            job = Job(pool=pool, directory=directory, graph=captured.graph, state=captured.state, **fields)  # pyright: ignore
            return await job.run()

    return asyncio.run(body())


def transformers_model(captured: Captured) -> nn.Module:
    fields = {key: value for key, value in (captured.config or {}).items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))


def plain(model: nn.Module, done: Run) -> list[float]:
    """One process that keeps the sums of each replica's microbatches apart until the step's end."""
    weights = done.weights(0)
    state = {key: weights[f"model/{key}"] for key in model.state_dict() if f"model/{key}" in weights}
    missing, _ = model.load_state_dict({key: torch.from_numpy(np.array(value)) for key, value in state.items()}, False)
    assert set(missing) <= {"lm_head.weight"}  # tied to the embedding
    model.train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(done.job.optimizer, parameters)
    job = done.job
    losses: list[float] = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate(step)
        values: dict[int, float] = {}
        totals: list[torch.Tensor] = []
        for replica in range(job.replicas):
            for microbatch in range(replica, job.microbatches, job.replicas):
                made = job.data.make(step, microbatch)
                batch = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in made.items()}
                logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.float()
                loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), batch["labels"].view(-1))
                (loss / job.microbatches).backward()
                values[microbatch] = loss.item()
            sums = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(sums) == len(parameters)
            totals = [total + one for total, one in zip(totals, sums, strict=True)] if totals else sums
            optimizer.zero_grad()
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        nn.utils.clip_grad_norm_(parameters, job.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(values[number] for number in sorted(values)) / len(values))
    return losses


@pytest.mark.parametrize(("replicas", "microbatches"), [(2, 4), (4, 6)])
def test_the_bits_are_those_of_one_process_that_sums_in_the_same_order(
    replicas: int, microbatches: int, tmp_path: Path
) -> None:
    captured = untied()
    done = run(tmp_path, captured, replicas=replicas, microbatches=microbatches)
    assert done.end is not None
    assert done.end.failed is None
    model = transformers_model(captured)
    assert done.losses == plain(model, done)
    weights = done.weights(STEPS)
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(weights[f"model/{key}"], value.numpy(), err_msg=key)


def test_a_home_that_applies_late_keeps_what_another_replica_has_summed_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other replica waits for nothing of it, and sends its sums once."""
    come = asyncio.Event()
    apply = StageExecutor._apply

    async def late(self: StageExecutor, record: CommitRecord | None) -> None:
        if record is not None and record.step == 1 and self._boundary.stage == 0:
            await come.wait()
        await apply(self, record)

    def watch(pool: MemoryPool, message: wire.Message) -> None:
        if isinstance(message, wire.SharedGradient) and (message.receiver, message.step) == (0, 2):
            come.set()

    monkeypatch.setattr(StageExecutor, "_apply", late)
    captured = untied()
    done = run(tmp_path, captured, watch)
    assert come.is_set()
    assert done.end is not None
    assert done.end.failed is None
    assert done.losses == plain(transformers_model(captured), done)


def test_weights_tied_within_replicas_stay_one_weight(tmp_path: Path) -> None:
    """A stage then has its own parameters summed in the first replica's stage and the tied one in another. The order
    of a tied weight's sum is that of the stages, so bits may differ from one process's."""
    captured = capture(ConfigSource({**LLAMA, "tie_word_embeddings": True}), batch=(1, 4), sequence=(1, 16))
    done = run(tmp_path, captured)
    assert done.end is not None
    assert done.end.failed is None
    model = transformers_model(captured)
    np.testing.assert_allclose(done.losses, plain(model, done), rtol=1e-6)


DIES: dict[str, Callable[[wire.Message], bool]] = {
    "a forward": lambda m: isinstance(m, wire.Forward) and (m.step, m.microbatch) == (2, 2) and m.producer >= 0,
    "a backward": lambda m: isinstance(m, wire.Backward) and (m.step, m.microbatch) == (2, 3),
    "its part of the sums": lambda m: isinstance(m, wire.SharedGradient) and (m.step, m.phase) == (2, "partial"),
    "the sums": lambda m: isinstance(m, wire.SharedGradient) and (m.step, m.phase) == (2, "total"),
    "its vote": lambda m: isinstance(m, wire.Prepared) and m.step == 2,
    "the commit": lambda m: isinstance(m, wire.Commit) and m.record.step == 2,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("undisturbed"), untied())


CASES = [
    pytest.param(at, victim, guarded, marks=() if (victim, guarded) == ((0, True), (3, False))[number % 2] else LONG)
    for number, at in enumerate(DIES)
    for victim in range(4)
    for guarded in (True, False)
]
"""`make test` runs each moment with the first stage of one replica, guarded, or the last of the other, unguarded."""


@pytest.mark.parametrize(("at", "victim", "guarded"), CASES)
def test_a_stage_of_any_replica_dies_and_no_bit_changes(
    at: str, victim: int, guarded: bool, undisturbed: Run, tmp_path: Path
) -> None:
    struck: list[str] = []

    def watch(pool: MemoryPool, message: wire.Message) -> None:
        if not struck and DIES[at](message):
            struck.append(at)
            pool.kill(peer_id(victim))
            if not guarded:
                returned.append(asyncio.get_running_loop().create_task(back(pool)))

    async def back(pool: MemoryPool) -> None:
        await pool.bury(peer_id(victim))
        await pool.revive(peer_id(victim))

    returned: list[asyncio.Task[None]] = []
    standbys = {0: 4, 1: 5, 3: 6, 4: 7} if guarded else {}
    done = run(tmp_path, untied(), watch, standbys=standbys, checkpoint_every=2)
    assert struck
    assert done.end is not None
    assert done.end.failed is None
    assert any(isinstance(event, progress.FaultSeen) for event in done.events)
    assert done.losses[-1:] == undisturbed.losses[-1:]
    assert {done.record.step: done.record.loss for done in done.steps()} == dict(enumerate(undisturbed.losses))
    before, after = undisturbed.weights(STEPS), done.weights(STEPS)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
