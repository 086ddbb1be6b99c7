"""A model served by stages on PyTorch, JAX and ONNX Runtime: the tokens of transformers, faults included."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling
from fusionai.wire.messages import ServeOptions
from harness.backend_kinds import Kinds
from harness.pool import peer_id
from harness.serving_pool import model_weights, served, tokens_of
from harness.small_llama import SMALL_LLAMA as LLAMA
from harness.small_llama import SMALL_MAMBA, SMALL_MAMBA2, VOCABULARY

pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
pytestmark = pytest.mark.slow
LONG = pytest.mark.long

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": 128,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "initializer_range": 0.6,
    },
    "mamba": SMALL_MAMBA,
    "mamba2": SMALL_MAMBA2,
}
WHOLE = ("mamba",)
"""What is served here without caches."""
OPTIONS = ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=32)
RANGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
"""Embedding; a layer each; norm and head. The first and the last are the owner's, on PyTorch."""
KINDS = ("jax", "torch", "onnxruntime")
GREEDY = Sampling(temperature=0)
PROMPTS = [tuple((7 * place + 13 * number) % VOCABULARY for place in range(3 + 4 * number)) for number in range(4)]


def captured(model: str) -> Captured:
    return capture(ConfigSource(MODELS[model]), batch=(1, 4), sequence=(1, 128), train=False)


def expected(model: str, graph: Captured, directory: Path, count: int) -> list[list[int]]:
    fields = {key: value for key, value in MODELS[model].items() if key != "model_type"}
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(MODELS[model]["model_type"], **fields)).eval()
    weights = model_weights(graph, directory)
    state = {}
    for spec in weights.specs:
        tensor = weights.read(spec)
        state[spec.key] = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)
    reference.load_state_dict(state, strict=False)
    reference.tie_weights()
    found: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        found.append(made[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("model", ["llama", *(pytest.param(name, marks=LONG) for name in MODELS if name != "llama")])
def test_tokens_are_those_of_transformers(model: str, tmp_path: Path):
    graph = captured(model)

    async def story() -> list[list[int]]:
        options = msgspec.structs.replace(OPTIONS, whole=model in WHOLE)
        async with served(
            graph, tmp_path, RANGES, vocabulary=VOCABULARY, backends=Kinds(KINDS), options=options
        ) as job:
            asked = [Generation(prompt=prompt, max_tokens=12, sampling=GREEDY) for prompt in PROMPTS]
            return await asyncio.gather(*(tokens_of(job.engine, one) for one in asked))

    assert asyncio.run(story()) == expected(model, graph, tmp_path / "owner", 12)


@LONG
@pytest.mark.parametrize("model", ["llama", "mamba2", *WHOLE])
@pytest.mark.parametrize(("victim", "spare"), [("torch", "jax"), ("jax", "onnxruntime"), ("onnxruntime", "torch")])
def test_a_stage_moves_to_another_framework_under_running_streams(model: str, victim: str, spare: str, tmp_path: Path):
    """Its cache is rebuilt there from what the stage before retained."""
    graph = captured(model)
    kinds = Kinds(("torch", victim, "torch", spare))

    async def story() -> list[list[int]]:
        standby = Standby(stage=2, peer=peer_id(3))
        async with served(
            *(graph, tmp_path, RANGES),
            standbys=[standby],
            spares=1,
            vocabulary=VOCABULARY,
            backends=kinds,
            options=msgspec.structs.replace(OPTIONS, whole=model in WHOLE),
        ) as job:
            while not any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

            async def listen(prompt: tuple[int, ...], kill_at: int | None) -> list[int]:
                tokens: list[int] = []
                async for event in job.engine.submit(Generation(prompt=prompt, max_tokens=16, sampling=GREEDY)):
                    match event:
                        case Emitted(index=index, token=token):
                            tokens.append(token)
                            if index == kill_at:
                                job.pool.kill(peer_id(1))
                        case Finished(reason=reason, detail=detail):
                            assert reason == "length", detail
                        case _:
                            pass
                return tokens

            return await asyncio.gather(
                *(listen(prompt, 5 if number == 0 else None) for number, prompt in enumerate(PROMPTS))
            )

    assert asyncio.run(story()) == expected(model, graph, tmp_path / "owner", 16)
