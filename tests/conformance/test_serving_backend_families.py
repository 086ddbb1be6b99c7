"""Families of transformers served in three stages: greedy tokens and every step's logits are transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusionai.backends.registry import open_backend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.ir.serving import require_servable, serves_from_caches, serving_graph
from fusionai.primitives.errors import GraphError
from fusionai.wire.serving import Segment, ServeOptions
from harness.staged_serving import OPTIONS, Served, served

STEPS = 6
TOLERANCE = 1e-4
LENGTHS = (5, 17, 30, 3, 11, 23, 8, 40)
JOINS = (0, 0, 1, 2, 4, 5, 7, 9)
CHUNK = 8
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
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
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 67, "n_positions": 64}
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
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MOE, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 24},
    "deepseek_v3": {**_LATENT, **_ROUTED, **_MOE, "num_key_value_heads": 4},
    "gpt_oss": {**_EXPERTS, "head_dim": 8, "sliding_window": 5},
}
_IN_ONE_CALL = {"llama", "mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3"}
"""Families, mixtures of experts among them, whose single positions are computed by row programs."""
_SPACE = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_chunk_size": 8}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
_NEMOTRON |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 24, "head_dim": 8, "topk_group": 1, "n_group": 1}
_STATES: dict[str, dict[str, Any]] = {
    "mamba2": _SPACE,
    "lfm2": {**_CONV, "block_ff_dim": 48},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "lfm2_moe": {**_CONV, **_MOE, "num_dense_layers": 1},
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {"layer_types": _DELTA["layer_types"]},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 24,
    },
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {**_MAMBA, "head_dim": 8, "mamba_d_ssm": 64},
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_headdim": 8, "num_mem_blocks": 1,
        "chunk_size": 8, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4,
    },
    "nemotron_h": {**_NEMOTRON, "layers_block_type": ["mamba", "attention", "moe"]},
}  # fmt: skip
"""With states: short convolutions, state spaces, delta rules, most of them beside attention."""
FAMILIES = [
    *[pytest.param(name, changes, marks=pytest.mark.slow) for name, changes in _EVERYWHERE.items()],
    pytest.param("mamba2", _STATES["mamba2"], marks=pytest.mark.slow),
    *[pytest.param(name, changes, marks=pytest.mark.long) for name, changes in _MORE.items()],
    *[pytest.param(name, changes, marks=pytest.mark.long) for name, changes in _STATES.items() if name != "mamba2"],
]


def captured_of(name: str, changes: dict[str, Any], positions: int = 64) -> Captured:
    base = {} if name == "gpt2" else _BASE
    source = ConfigSource({"model_type": name, **base, **changes}, "causal_lm")
    return capture(source, task="causal_lm", batch=(1, 2), sequence=(1, positions), train=False)


def family_of(
    name: str,
    changes: dict[str, Any],
    options: ServeOptions = OPTIONS,
    positions: int = 64,
    kinds: tuple[str, ...] = ("torch",),
) -> Served:
    backends = [open_backend(kind, device="cpu", threads=1) for kind in kinds]
    return served(captured_of(name, changes, positions), backends, options)


class Sessions:
    """Texts that grow. Prompts come in chunks, then what was chosen, on pages in a scrambled order."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.texts = [list(prompt) for prompt in prompts]
        self.cached = [0] * len(prompts)
        self.tables = [0] * len(prompts)
        self.free = [int(page) for page in np.random.default_rng(1).permutation(OPTIONS.pages)]

    def is_done(self, number: int) -> bool:
        return len(self.texts[number]) == len(self.prompts[number]) + STEPS

    def segment(self, number: int) -> tuple[Segment, list[int]]:
        """The next chunk."""
        start = self.cached[number]
        new = self.texts[number][start : start + CHUNK]
        end = self.cached[number] = start + len(new)
        pages = -(-end // OPTIONS.page_tokens) - self.tables[number]
        taken = tuple(self.free.pop() for _ in range(pages))
        self.tables[number] += pages
        return Segment(number, start, len(new), self.tables[number] - pages, taken), new

    def is_read(self, number: int) -> bool:
        return self.cached[number] == len(self.texts[number])


@pytest.mark.parametrize(("name", "changes"), FAMILIES)
def test_a_family_served_in_three_stages_equals_transformers(name: str, changes: dict[str, Any]) -> None:
    family = family_of(name, changes)
    assert not family.whole
    assert serves_from_caches(serving_graph(captured_of(name, changes).graph)), "plans would be for something else"
    if name in _IN_ONE_CALL:
        # The first stage looks up embeddings, which row programs do not.
        assert all(program._plan is not None for program in family.pipeline.programs[1:])  # pyright: ignore[reportAttributeAccessIssue]
    equals_transformers(family)


@pytest.mark.long
@pytest.mark.parametrize(("name", "changes"), [*_EVERYWHERE.items(), *_MORE.items(), *_STATES.items()])
def test_so_it_does_by_three_frameworks(name: str, changes: dict[str, Any]) -> None:
    """Embedding and first layer by PyTorch, the next by JAX, the last and the head by ONNX Runtime."""
    pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
    pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
    equals_transformers(family_of(name, changes, kinds=("torch", "jax", "onnxruntime")))


def equals_transformers(family: Served) -> None:
    generator = np.random.default_rng(0)
    prompts = [[int(token) for token in generator.integers(3, 67, length)] for length in LENGTHS]
    sessions = Sessions(prompts)
    for turn in range(60):
        segments: list[Segment] = []
        ids: list[int] = []
        rows: list[int] = []
        read: list[int] = []
        for number, joins in enumerate(JOINS):
            if turn < joins or sessions.is_done(number):
                continue
            segment, new = sessions.segment(number)
            segments.append(segment)
            ids += new
            if sessions.is_read(number):
                rows.append(len(ids) - 1)
                read.append(number)
        if not segments:
            break
        for row, number in zip(family.pipeline.run(segments, ids, rows), read, strict=True):
            text = sessions.texts[number]
            with torch.no_grad():
                expected = family.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy()
            assert np.abs(row - expected).max() <= TOLERANCE * np.abs(expected).max()
            text.append(int(row.argmax()))
    for text, prompt in zip(sessions.texts, prompts, strict=True):
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
    family.pipeline.forget_all()
    some = prompts[:3]
    joined = [Segment(n, 0, len(prompt), 0, tuple(range(10 * n, 10 * n + 9))) for n, prompt in enumerate(some)]
    ends = [int(end) - 1 for end in np.cumsum([len(prompt) for prompt in some])]
    together = family.pipeline.run(joined, [token for prompt in some for token in prompt], ends)
    for number, prompt in enumerate(some):
        family.pipeline.forget_all()
        segment = Segment(9 + number, 0, len(prompt), 0, tuple(range(50, 59)))
        assert np.array_equal(family.pipeline.run([segment], prompt, [len(prompt) - 1])[0], together[number])


_COPIED = {"gemma2": _EVERYWHERE["gemma2"], "mamba2": _STATES["mamba2"], "lfm2": _STATES["lfm2"], "llama": {}}


@pytest.mark.parametrize(("name", "changes"), [
    pytest.param(name, changes, marks=pytest.mark.slow if name in ("gemma2", "mamba2") else pytest.mark.long)
    for name, changes in _COPIED.items()
])  # fmt: skip
@pytest.mark.parametrize("kinds", [("torch",), pytest.param(("jax", "onnxruntime", "torch"), marks=pytest.mark.long)])
def test_a_text_goes_on_from_a_copy_with_the_bits_of_one_that_was_read(
    name: str, changes: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    """Of windows, states and pages: two texts begin as a copy that was taken of a third while it was read, also after
    that one has gone on and was dropped."""
    for kind in kinds[:-1]:
        pytest.importorskip(kind, reason=f"the extra fusionai[{kind}] is not installed")
    family = family_of(name, changes, kinds=kinds)
    generator = np.random.default_rng(5)
    common, *ends = ([int(token) for token in generator.integers(3, 67, length)] for length in (32, 20, 24, 20))
    shared = tuple(range(-(-32 // OPTIONS.page_tokens)))

    def pages(first: int, behind: tuple[int, ...] = ()) -> tuple[int, ...]:
        return (*behind, *range(first, first + 15 - len(behind)))

    cold: list[np.ndarray] = []
    for number, end in enumerate(ends, 1):
        family.pipeline.forget_all()
        family.pipeline.run([Segment(number, 0, 32, 0, pages(20))], common, [31])
        rows = [family.pipeline.run([Segment(number, 32, len(end))], end, [len(end) - 1])[0]]
        rows.append(family.pipeline.run([Segment(number, 32 + len(end), 1)], [5], [0])[0])
        cold.append(np.stack(rows))
    family.pipeline.forget_all()
    copy = 2**61
    family.pipeline.run([Segment(1, 0, 32, 0, pages(20, shared), 0, 0, copy)], common, [31])
    warm = [[family.pipeline.run([Segment(1, 32, len(ends[0]))], ends[0], [len(ends[0]) - 1])[0]]]
    begun = [Segment(number, 32, len(ends[number - 1]), 0, pages(20 * number, shared), 0, copy) for number in (2, 3)]
    together = family.pipeline.run(begun, [*ends[1], *ends[2]], [23, 43])
    warm += [[row] for row in together]
    family.pipeline.forget([copy])
    for number, end in enumerate(ends, 1):
        warm[number - 1].append(family.pipeline.run([Segment(number, 32 + len(end), 1)], [5], [0])[0])
    for one, other in zip(warm, cold, strict=True):
        assert np.array_equal(np.stack(one), other)


_LONG: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 700},
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "changes"), _LONG.items())
def test_a_prompt_of_4096_tokens_comes_in_chunks(name: str, changes: dict[str, Any]) -> None:
    options = ServeOptions(pages=70, sessions=2, pass_tokens=264, page_tokens=64)
    family = family_of(name, {**changes, "max_position_embeddings": 4160}, options, 4160)
    text = [int(token) for token in np.random.default_rng(3).integers(3, 67, 4096)]
    other = [int(token) for token in np.random.default_rng(4).integers(3, 67, 60)]
    # Another session decodes beside it, and has the bits that it has alone.
    beside: list[np.ndarray] = []
    alone: list[np.ndarray] = []
    family.pipeline.run([Segment(1, 0, 8, 0, (69,))], other[:8], [7])
    for chunk, start in enumerate(range(0, 4096, 256)):
        pages = tuple(range(start // 64, start // 64 + 4))
        segments = [Segment(0, start, 256, start // 64, pages), Segment(1, 8 + chunk, 1)]
        rows = family.pipeline.run(segments, [*text[start : start + 256], other[8 + chunk]], [255, 256])
        beside.append(rows[1])
    steps = [rows[0]]  # pyright: ignore[reportPossiblyUnboundVariable] — there are sixteen chunks
    for position in range(4096, 4100):
        text.append(int(steps[-1].argmax()))
        steps.append(family.pipeline.run([Segment(0, position, 1, 64, (64,))], text[-1:], [0])[0])
    with torch.no_grad():
        expected = family.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, 4095:].numpy()
    for row, own in zip(steps, expected, strict=True):
        assert np.abs(row - own).max() <= TOLERANCE * np.abs(own).max()
        assert row.argmax() == own.argmax()
    family.pipeline.forget_all()
    family.pipeline.run([Segment(1, 0, 8, 0, (69,))], other[:8], [7])
    for chunk in range(16):
        alone += list(family.pipeline.run([Segment(1, 8 + chunk, 1)], [other[8 + chunk]], [0]))
    assert np.array_equal(np.stack(alone), np.stack(beside))


_HIDDEN: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {"alibi": True},
    # Its masks are cut from one of that size: a graph does for every length but this one.
    "gpt_neo": {
        "attention_types": [[["global", "local", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 65,
    },
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "changes"), _HIDDEN.items())
def test_families_whose_attention_is_hidden_do_not_pass_for_cached_ones(name: str, changes: dict[str, Any]) -> None:
    captured = captured_of(name, changes, 48)
    with pytest.raises(GraphError, match="attention layers are the semantic operator"):
        require_servable(
            serving_graph(captured.graph),
            attention_nodes=captured.attention_nodes,
            attention_layers=captured.attention_layers,
        )


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("torch",), ("torch", "jax", "onnxruntime")], ids="-".join)
@pytest.mark.parametrize(("name", "changes"), _HIDDEN.items())
def test_what_no_cache_serves_is_computed_anew_and_equals_transformers(
    name: str, changes: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    for kind in kinds[1:]:
        pytest.importorskip(kind, reason=f"the extra fusionai[{kind}] is not installed")
    family = family_of(name, changes, kinds=kinds)
    assert family.whole
    equals_transformers(family)
