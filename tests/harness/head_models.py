"""Small models with heads: for multi-token prediction in their own files, as DeepSeek-V3, GLM-4.5 and Mellum file
theirs, and EAGLE-3 heads in directories of their own.

Decides sizes, names in files, and how a head is loaded beside an engine."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fusionai.capture.capture import Captured
from fusionai.capture.heads import CapturedHead
from fusionai.serving.drafting import LoadedDraft, load_program
from fusionai.wire.messages import ServeOptions
from harness.serving_pool import backend

VOCABULARY = 61
_ALIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
}
DEEPSEEK: dict[str, Any] = {
    **_ALIKE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
GLM: dict[str, Any] = {
    **_ALIKE,
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
MELLUM: dict[str, Any] = {
    **_ALIKE,
    "model_type": "mellum",
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "layer_types": ["full_attention"] * 3,
    "mlp_layer_types": ["sparse"] * 3,
    "num_mtp_layers": 1,
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["sparse"],
}
FIVE_STAGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
"""Embedding; a layer each; norm and head."""


def save_model_with_head(config: dict[str, Any], directory: Path, *, copies: bool = False) -> nn.Module:
    """Save a random model of `config` with a head, and return transformers' module of the head. `copies`: the head
    repeats the token that it reads, and so does the model, whose weights are small."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(5)
    fields = {**config, "initializer_range": 0.02, "tie_word_embeddings": True} if copies else config
    main: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    main.save_pretrained(directory)
    head: Any = MtpModel(main, 1).eval()
    with torch.no_grad():
        for name, parameter in head.layers.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.0 if copies else 0.4)
        if copies:
            width = fields["hidden_size"]
            head.layers[0].eh_proj.weight[:, :width] = torch.eye(width)
    add_head(directory, head.layers, config["num_hidden_layers"], apart=config["model_type"] == "mellum")
    return head


def add_head(directory: Path, layers: nn.Module, count: int, *, apart: bool = False) -> None:
    """Add a head, transformers' `MtpModel.layers`, to the files of a model with `count` layers: behind the last one, or
    `apart` under names of its own."""
    path = directory / "model.safetensors"
    state = load_file(path)
    for name, tensor in {**dict(layers.named_parameters()), **dict(layers.named_buffers())}.items():
        state |= _filed(name, tensor.detach().clone(), count, apart)
    save_file(state, path, {"format": "pt"})


def _filed(name: str, tensor: torch.Tensor, layers: int, apart: bool) -> dict[str, torch.Tensor]:
    """Return a parameter of the head under the names that its files have."""
    inner = name.removeprefix("0.").replace("mtp_block.", "")
    if apart:
        outer = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
        first = inner.split(".")[0]
        filed = f"mtp.{inner.replace(first, outer[first])}" if first in outer else f"mtp.layers.0.{inner}"
    else:
        filed = f"model.layers.{layers}.{inner.replace('post_norm.', 'shared_head.norm.')}"
    if (found := re.fullmatch(r"(.*experts)\.(gate_up|down)_proj", filed)) is None:
        return {filed: tensor}
    made: dict[str, torch.Tensor] = {}
    for number, matrix in enumerate(tensor):
        parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if found[2] == "gate_up" else [("down", matrix)]
        made |= {f"{found[1]}.{number}.{part}_proj.weight": one.contiguous().clone() for part, one in parts}
    return made


def save_eagle_head(directory: Path, width: int, features: int, *, tokens: int = 40, copies: bool = False) -> None:
    """Save a random EAGLE-3 head for a model whose states have `width` numbers. `copies`: its layer adds nothing, so
    that it guesses the same token for the same state."""
    torch.manual_seed(11)
    heads, size, inner = 4, 4, 24
    scale = 0.0 if copies else 0.4
    shapes = {
        "fc.weight": (width, features),
        "midlayer.self_attn.q_proj.weight": (heads * size, 2 * width),
        "midlayer.self_attn.k_proj.weight": (heads // 2 * size, 2 * width),
        "midlayer.self_attn.v_proj.weight": (heads // 2 * size, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, heads * size),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (tokens, width),
    }
    state = {name: torch.randn(shape) * (scale if "midlayer" in name else 0.4) for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    state |= {f"{name}.weight": 1 + 0.1 * torch.randn(width) for name in norms}
    known = torch.randperm(VOCABULARY)[:tokens].sort().values
    state |= {"d2t": known - torch.arange(tokens), "t2d": torch.isin(torch.arange(VOCABULARY), known)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": size,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": tokens,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    (directory / "config.json").write_text(json.dumps(config))


def loaded_head(head: CapturedHead, model: Captured, options: ServeOptions) -> LoadedDraft:
    """Load a head on torch. Call it on the thread where it will run, or before that thread is used."""
    weights = chain(head.part.tensors(), model.state(head.part.shared))
    projection = head.projection
    return LoadedDraft(
        program=load_program(backend(), head.part.graph, weights, options),
        options=options,
        vocabulary=VOCABULARY,
        context_tokens=128,
        projection=None
        if projection is None
        else load_program(backend(), projection.graph, projection.tensors(), options),
        tokens=head.tokens,
    )
