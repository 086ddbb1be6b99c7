"""Every causal family of transformers, small: a configuration of each name in its table of causal language models.

One rule shrinks what a configuration class is made of by default: known sizes become small, and of lists with an entry
for each layer those entries stay that show every kind of layer. Families for which the rule gives no valid model have
their own fields in `EXCEPTIONS`. Runs nothing; `harness.served_families` serves what is made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fusionai.capture.models.source import ConfigSource

LAYERS: Final = 4
"""Layers, unless more kinds of layers than that must be shown."""
WIDTH: Final = 32
HEADS: Final = 4

SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 67),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), 5),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "attention_chunk_size": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 8,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a size becomes where a configuration has it and it is not None."""

ALSO_UNSET: Final = frozenset({"num_key_value_heads", "head_dim", "is_decoder", "num_experts_per_tok"})
"""Sizes that are given although a configuration leaves them to be computed from others."""

_SCANS: Final = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_TWO_KINDS: Final = ["sliding_attention", "full_attention"] * 2
_SHARED_KEYS: Final = {
    "layer_types": _TWO_KINDS, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_TWO_ROTATIONS: Final = {
    name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("sliding_attention", "full_attention")
}
EXCEPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": _SCANS | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _SCANS | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": _TWO_KINDS, "rope_parameters": _TWO_ROTATIONS},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": _SHARED_KEYS | {
        "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "laurel_rank": 8,
    },
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layers_block_type": None, "mamba_d_state": 8},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_assistant": {
        "backbone_hidden_size": WIDTH,
        "text_config": {
            "num_hidden_layers": 2, "layer_types": _TWO_KINDS[:2], "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}  # fmt: skip
"""Fields of families for which the rule gives no valid model, in place of the rule's. Those of a configuration inside
another, as the text half of a model of images has, are under its own name here, or under the field's."""


def family_names() -> tuple[str, ...]:
    """Every name that transformers knows a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def family_source(name: str) -> ConfigSource:
    """A small configuration of the family."""
    from transformers import CONFIG_MAPPING

    return ConfigSource({"model_type": name, **_shrunk(CONFIG_MAPPING[name](), EXCEPTIONS.get(name, {}))})


def _shrunk(config: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    had: dict[str, Any] = config.to_dict()
    aliases: dict[str, str] = config.attribute_map
    fields: dict[str, Any] = {}
    for name, value in SIZES.items():
        real = aliases.get(name, name)
        given = real in had and (had[real] is not None or name in ALSO_UNSET)
        if given and not isinstance(had[real], list) and real not in fields:
            fields[real] = value
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = HEADS
    fields |= _of_layers(config, had)
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            given = own.get(name, EXCEPTIONS.get(inner.model_type, {}))
            fields[name] = {"model_type": inner.model_type, **_shrunk(inner, given)}
    return fields | {name: value for name, value in own.items() if name not in config.sub_configs}


def _of_layers(config: Any, had: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, cut to layers that show every kind."""
    name = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in had), None)
    count = had.get(name or "")
    if not isinstance(count, int):
        return {}
    lists = {key: value for key, value in had.items() if isinstance(value, list) and len(value) == count > 1}
    if not lists:
        return {}
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(repr([value[layer] for value in lists.values()]), layer)
    chosen = [*first.values()]
    chosen += [layer for layer in range(count) if layer not in chosen][: max(0, LAYERS - len(chosen))]
    chosen.sort()
    return {str(name): len(chosen), **{key: [value[at] for at in chosen] for key, value in lists.items()}}
