"""Stages on PyTorch and on JAX in one training job: the losses are those of PyTorch alone, faults included.

Peers are those of `harness.pool`, in one process; the owner's part (the loss) runs on PyTorch.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionai.backends.tolerance import TOLERANCES
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.training import progress
from fusionai.wire import messages as wire
from harness.backend_kinds import Kinds
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens

pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
pytestmark = pytest.mark.slow
LONG = pytest.mark.long

VOCABULARY, STEPS = 31, 50
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
LLAMA = {
    "model_type": "llama",
    **SIZES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "tie_word_embeddings": False,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TIED = {**LLAMA, "tie_word_embeddings": True}
MODELS = {"llama": LLAMA, "gpt2 with dropout": GPT2, "qwen3": QWEN3, "llama, tied": TIED, "mixtral": MIXTRAL}
FOUR_AND_LOSS = ((0, 2), (2, 3), (3, 4), (4, 6), (6, 7))
"""Embedding and a layer, a layer, a layer, a layer and the head; the loss, at the owner."""
DATA = Data(tokens(VOCABULARY, 2, 8))
PURE, MIXED = ("torch",) * 4, ("torch", "jax", "torch", "jax")


@cache
def captured(model: str) -> Captured:
    return capture(ConfigSource(MODELS[model]), batch=(1, 4), sequence=(1, 16))


def run(
    directory: Path,
    model: str,
    kinds: tuple[str, ...],
    watch: Callable[[MemoryPool, wire.Message], None] = lambda pool, message: None,
    **changes: Any,
) -> Run:
    async def body() -> Run:
        graph = captured(model)
        async with MemoryPool(len(kinds), Kinds(kinds)) as pool:
            pool.on_message = lambda sender, receiver, message: watch(pool, message)
            job = Job(
                pool=pool,
                directory=directory,
                graph=graph.graph,
                state=graph.state,
                ranges=FOUR_AND_LOSS,
                owned=frozenset({4}),
                data=DATA,
                microbatches=3,
                patience_s=90.0,
                **{"steps": STEPS, "learning_rate": lambda step: 1e-3, **changes},
            )
            return await job.run()

    return asyncio.run(body())


def assert_close(found: list[float], expected: list[float]) -> None:
    apart = np.abs(np.array(found) - np.array(expected)) / np.array(expected)
    assert apart.max() <= TOLERANCES["float32"].loss, f"{apart.max():.2g} at step {int(apart.argmax())}"


@pytest.mark.parametrize("model", [name for name in MODELS if name != "mixtral"])
@pytest.mark.long
def test_stages_of_two_frameworks_train_as_those_of_one(model: str, tmp_path: Path) -> None:
    pure = run(tmp_path / "pure", model, PURE)
    mixed = run(tmp_path / "mixed", model, MIXED, tolerant=True)
    assert mixed.end is not None
    assert mixed.end.failed is None
    assert len(mixed.losses) == STEPS
    assert_close(mixed.losses, pure.losses)


@LONG
@pytest.mark.timeout(900)
def test_a_mixture_of_experts_agrees_at_each_step_from_one_state(tmp_path: Path) -> None:
    """Where two experts are nearly equal a router may choose either, and losses part for good: so each step begins
    with PyTorch's state. Compared are its loss and, by the next one's, what its update did."""
    pure_losses: list[float] = []
    for step in range(STEPS):
        resumed = run(tmp_path / "pure", "mixtral", PURE, steps=step + 1)
        pure_losses += resumed.losses
        assert len(pure_losses) == step + 1
        shutil.copytree(tmp_path / "pure", tmp_path / f"after {step + 1}")
        if step == 0:
            continue
        before = tmp_path / f"after {step - 1}"
        mixed = run(before, "mixtral", MIXED, steps=step + 1, tolerant=True)
        assert mixed.end is not None
        assert mixed.end.failed is None
        assert_close(mixed.losses, pure_losses[-2:])
        shutil.rmtree(before)


@LONG
def test_a_weight_tied_across_frameworks_is_kept_once_and_the_job_goes_on_from_it(tmp_path: Path) -> None:
    """The first stage's copy; the last one's, on the other framework, is as near as rounding explains. Resumed, both
    begin with it."""
    pure = run(tmp_path / "pure", "llama, tied", PURE)
    mixed = run(tmp_path / "mixed", "llama, tied", ("torch", "torch", "torch", "jax"), tolerant=True, steps=30)
    assert mixed.end is not None
    assert mixed.end.failed is None
    resumed = run(tmp_path / "mixed", "llama, tied", ("jax", "torch", "torch", "torch"), tolerant=True)
    assert resumed.end is not None
    assert (resumed.end.failed, resumed.end.steps) == (None, STEPS)
    assert_close([*mixed.losses, *resumed.losses][:STEPS], pure.losses)


@pytest.mark.parametrize(
    ("victim", "spare"), [pytest.param(0, "jax", marks=LONG), pytest.param(1, "torch", marks=LONG)]
)
def test_a_stage_moves_to_another_framework_in_the_middle_of_training(victim: int, spare: str, tmp_path: Path) -> None:
    """A peer dies; the one that stood by for its stage has the other framework."""
    struck: list[int] = []

    def watch(pool: MemoryPool, message: wire.Message) -> None:
        if not struck and isinstance(message, wire.Backward) and message.step == 10:
            struck.append(victim)
            pool.kill(peer_id(victim))

    pure = run(tmp_path / "pure", "llama", PURE, steps=20)
    moved = run(tmp_path / "moved", "llama", (*MIXED, spare), watch, steps=20, standbys={victim: 4}, replans=True)
    assert struck
    assert moved.end is not None
    assert moved.end.failed is None
    assert any(isinstance(event, progress.FaultSeen) for event in moved.events)
    assert_close(moved.losses, pure.losses)
