"""Families of transformers served from caches: greedy tokens and every step's logits equal transformers' own.

Weights are drawn wide (std 0.25): models as initialised repeat a token whatever a cache does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fusionai.backends.serving import ServingProgram
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.build import construct_real
from fusionai.capture.capture import Captured, capture
from fusionai.capture.source import ConfigSource
from fusionai.capture.state import to_host
from fusionai.ir.serving import require_servable, serving_graph
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.serving import Segment, ServeOptions

STEPS = 6
TOLERANCE = 1e-4
OPTIONS = ServeOptions(pages=64, sessions=4, pass_tokens=64, page_tokens=4)
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
# Windows are shorter than the texts, so that rings go round.
_EVERYWHERE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "mixtral": _EXPERTS,
}
_MORE: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "bos_token_id": 1, "eos_token_id": 1},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "num_hidden_layers": 6},
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "qwen3_moe": {**_MOE, "head_dim": 8, "decoder_sparse_step": 1},
    "olmo2": {},
    "starcoder2": {"sliding_window": 6},
    "stablelm": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "phi": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3},
    "cohere": {},
    "smollm3": {},
    "glm4": {"head_dim": 8},
    "opt": _OPT,
    "deepseek_v3": {**_LATENT, **_ROUTED, **_MOE, "num_key_value_heads": 4},
    "gpt_oss": {**_EXPERTS, "head_dim": 8, "sliding_window": 5},
}
FAMILIES = [
    *[pytest.param(name, changes, marks=pytest.mark.slow) for name, changes in _EVERYWHERE.items()],
    *[pytest.param(name, changes, marks=pytest.mark.long) for name, changes in _MORE.items()],
]


@dataclass
class Served:
    """A family's module with its weights, and the program that serves the same."""

    module: nn.Module
    program: ServingProgram


def captured_of(name: str, changes: dict[str, Any]) -> Captured:
    base = {} if name == "gpt2" else _BASE
    source = ConfigSource({"model_type": name, **base, **changes}, "causal_lm")
    return capture(source, task="causal_lm", batch=(1, 1), sequence=(1, 64), train=False)


def served(name: str, changes: dict[str, Any]) -> Served:
    captured = captured_of(name, changes)
    graph = validate(serving_graph(captured.graph))
    require_servable(graph, attention_nodes=captured.attention_nodes, attention_layers=captured.attention_layers)
    module = construct_real(captured.source.built).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    program = TorchBackend("cpu").serve(graph, options=OPTIONS)
    for spec in graph.params.values():
        own = tensors.get(spec.key)
        program.import_weights(captured.state([spec.key]) if own is None else [(spec.key, to_host(own))])
    return Served(module, program)


def run(program: ServingProgram, segments: list[Segment], ids: list[int], rows: list[int]) -> np.ndarray:
    """Logits [rows, vocabulary]."""
    given = {"input_ids": host_tensor("int64", (1, len(ids)), np.array(ids, dtype=np.int64).tobytes())}
    found = program.run(segments, given, wanted=["logits"], rows=rows)["logits"]
    return np.frombuffer(found.data, dtype=np.float32).reshape(len(rows), -1)


@pytest.mark.parametrize(("name", "changes"), FAMILIES)
def test_a_family_served_from_caches_equals_transformers(name: str, changes: dict[str, Any]) -> None:
    family = served(name, changes)
    generator = np.random.default_rng(0)
    prompts = [[int(token) for token in generator.integers(3, 67, length)] for length in (5, 17, 30)]
    texts, cached, tables = [list(prompt) for prompt in prompts], [0, 0, 0], [0, 0, 0]
    free = [int(page) for page in np.random.default_rng(1).permutation(OPTIONS.pages)]
    for turn in range(STEPS + 5):
        segments: list[Segment] = []
        ids: list[int] = []
        rows: list[int] = []
        for number, joins in enumerate((0, 2, 5)):
            if turn < joins or len(texts[number]) == len(prompts[number]) + STEPS:
                continue
            new = texts[number][cached[number] :]
            pages = -(-len(texts[number]) // OPTIONS.page_tokens) - tables[number]
            taken = tuple(free.pop() for _ in range(pages))
            segments.append(Segment(number, cached[number], len(new), tables[number], taken))
            tables[number] += pages
            cached[number] = len(texts[number])
            ids += new
            rows.append(len(ids) - 1)
        got = run(family.program, segments, ids, rows)
        for row, segment in zip(got, segments, strict=True):
            text = texts[segment.session]
            with torch.no_grad():
                expected = family.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy()
            assert np.abs(row - expected).max() <= TOLERANCE * np.abs(expected).max()
            text.append(int(row.argmax()))
    for text, prompt in zip(texts, prompts, strict=True):
        given = torch.tensor([prompt])
        own = family.module.generate(  # pyright: ignore[reportCallIssue]
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert text == own[0].tolist()
    # Alone, on other pages, a session gets the bits that it got among the others.
    family.program.forget_all()
    joined = [Segment(n, 0, len(prompt), 0, tuple(range(10 * n, 10 * n + 9))) for n, prompt in enumerate(prompts)]
    ends = list(np.cumsum([len(prompt) for prompt in prompts]) - 1)
    together = run(
        family.program, joined, [token for prompt in prompts for token in prompt], [int(end) for end in ends]
    )
    family.program.forget_all()
    for number, prompt in enumerate(prompts):
        alone = run(
            family.program, [Segment(9 + number, 0, len(prompt), 0, tuple(range(50, 59)))], prompt, [len(prompt) - 1]
        )
        assert np.array_equal(alone[0], together[number])
        family.program.forget_all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_families_whose_attention_is_hidden_are_refused(name: str) -> None:
    captured = captured_of(name, {"n_layer": 2, "n_head": 4, "alibi": True} if name == "bloom" else {"alibi": True})
    with pytest.raises(GraphError, match="attention layers are the semantic operator"):
        require_servable(
            serving_graph(captured.graph),
            attention_nodes=captured.attention_nodes,
            attention_layers=captured.attention_layers,
        )
