"""Models of all kinds, small and without dropout: what "any model" is tried with.

Architectures of transformers come as configurations, as a user would name them; modules by hand have what those lack.
Decides sizes; runs nothing. Windows are shorter than the texts, so that the windowed path is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fusionai.capture.models.source import ConfigSource, FactorySource, ModelSource, architecture_of
from fusionai.capture.tasks import ExampleInput, Task
from harness.complex_models import ComplexRotary, FourierMixing, FrequencyFilters

Kind = Literal[
    "decoder", "mixture of experts", "state space", "encoder", "encoder-decoder", "vision", "speech", "by hand"
]


@dataclass(frozen=True)
class Model:
    name: str
    kind: Kind
    task: Task
    source: ModelSource
    examples: Mapping[str, ExampleInput] | None = None
    positions: int = 32
    """Longest sequence it is captured for."""


_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
_TEXT = _BASE | {"num_key_value_heads": 2, "attention_dropout": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 67, "n_positions": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_SMALL_STATE = {"state_size": 8, "num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 67}
_SMALL_STATE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"head_dim": 8, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}

_HYBRID = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_chunk_size": 8}
_HYBRID |= {"layer_types": ["mamba", "attention", "mamba", "attention"]}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
_NEMOTRON |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 24, "head_dim": 8}
_NEMOTRON |= {"layers_block_type": ["mamba", "attention", "moe", "moe"], "topk_group": 1, "n_group": 1}

_KIMI = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_shared_experts": 1}
_KIMI |= {"linear_head_dim": 8, "linear_num_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_KIMI |= {"layer_types": ["linear_attention", "full_attention"] * 2}
_KIMI |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}

_DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama": _TEXT,
    "qwen2": _TEXT,
    "qwen3": _TEXT | {"head_dim": 8},
    "mistral": _TEXT | {"sliding_window": 5},
    "gemma": _TEXT | {"head_dim": 8},
    "gemma2": _TEXT | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": _TEXT | {"head_dim": 8, "sliding_window": 5, "num_hidden_layers": 6},
    "phi": _TEXT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": _TEXT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo2": _TEXT,
    "starcoder2": _TEXT | {"sliding_window": 6, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "stablelm": _TEXT | {"hidden_dropout": 0.0},
    "gpt_neox": _BASE | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "granite": _TEXT | {"logits_scaling": 2.0, "attention_multiplier": 0.3},
    "cohere": _TEXT,
    "smollm3": _TEXT,
    "glm4": _TEXT | {"head_dim": 8},
    "opt": _BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 67},
    "falcon": _BASE | {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 4, "num_heads": 4, "vocab_size": 67, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 2]], "window_size": 5, "bos_token_id": 1, "eos_token_id": 2,
        "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
    },
    "gptj": _GPT2 | {"rotary_dim": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": 67, "max_seq_len": 64},
}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 24}
_LAYERS = {"layer_types": ["full_attention"] * 4}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _TEXT | _EXPERTS,
    "qwen2_moe": _TEXT | _MOE | _SHARED | {"decoder_sparse_step": 1},
    "qwen3_moe": _TEXT | _MOE | {"head_dim": 8, "decoder_sparse_step": 1},
    "olmoe": _TEXT | {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": _TEXT | {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _TEXT | _EXPERTS | {"head_dim": 8, "sliding_window": 5},
    "deepseek_v2": _TEXT
    | _LATENT
    | _ROUTED
    | {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v3": _TEXT | _LATENT | _ROUTED | _MOE | {"num_key_value_heads": 4},
    "glm4_moe": _TEXT | _ROUTED | {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8},
    "dots1": _TEXT | _ROUTED | {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": _TEXT
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": _TEXT | {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "phimoe": _TEXT | _EXPERTS | {"sliding_window": 5, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "minimax_m2": _TEXT | _EXPERTS | {"head_dim": 8, "rotary_dim": 4},
    "granitemoe": _TEXT | _EXPERTS,
    "granitemoeshared": _TEXT | _EXPERTS | {"shared_intermediate_size": 24},
    "afmoe": _TEXT | _MOE | {"head_dim": 8, "num_dense_layers": 1, "sliding_window": 5},
    "lfm2_moe": _TEXT | _MOE | _LAYERS | {"num_dense_layers": 1},
}  # fmt: skip
_STATES: dict[str, dict[str, Any]] = {
    "mamba": _SMALL_STATE,
    "falcon_mamba": _SMALL_STATE,
    "mamba2": _SMALL_STATE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "qwen3_next": _TEXT | _MOE | _DELTA,
    "granitemoehybrid": _TEXT | _EXPERTS | _HYBRID | {"shared_intermediate_size": 24},
    "jamba": _TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": _TEXT | _NEMOTRON,
    "minimax": _TEXT | _EXPERTS | {"head_dim": 8, "block_size": 8},
    "kimi_linear": _TEXT | _KIMI | {"num_key_value_heads": 4, "kv_lora_rank": 16, "v_head_dim": 12},
}
_ENCODER = _BASE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER | {"pad_token_id": 1},
    "electra": _ENCODER | {"embedding_size": 32},
    "albert": _ENCODER | {"embedding_size": 16},
    "distilbert": {
        "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "vocab_size": 67, "max_position_embeddings": 64,
        "dropout": 0.0, "attention_dropout": 0.0,
    },
    "modernbert": _BASE | {"cls_token_id": 3, "sep_token_id": 4, "local_attention": 8},
}  # fmt: skip
_SEQUENCES = {"d_model": 32, "vocab_size": 67, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART = _SEQUENCES | {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0,
    "decoder_start_token_id": 2,
}  # fmt: skip
_PAIRS: dict[str, dict[str, Any]] = {
    "t5": _SEQUENCES | {
        "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
    "bart": _BART,
    "marian": _BART,
    "pegasus": _BART,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_STEPS = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1]}
_IMAGES: dict[str, dict[str, Any]] = {
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": _VIT | {"drop_path_rate": 0.0},
    "resnet": _STEPS | {"embedding_size": 8, "layer_type": "basic"},
    "convnext": _STEPS | {"image_size": 32, "drop_path_rate": 0.0},
    "swin": {
        "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 16, "patch_size": 2,
        "drop_path_rate": 0.0,
    },
    "mobilenet_v2": {"image_size": 32, "depth_multiplier": 0.25, "classifier_dropout_prob": 0.0},
}  # fmt: skip
_SOUND = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": [8, 8, 8], "conv_stride": [5, 4, 4], "conv_kernel": [10, 8, 8], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 32, "classifier_proj_size": 16, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
    "final_dropout": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False,
}  # fmt: skip
_SPEECH: dict[str, tuple[Task, dict[str, Any]]] = {
    "wav2vec2": ("classification", _SOUND),
    "hubert": ("classification", _SOUND),
    "audio-spectrogram-transformer": ("classification", _VIT | {"max_length": 32, "num_mel_bins": 16}),
    "whisper": ("seq2seq_lm", _BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64}),
}
_CLIP = {
    "text_config": _BASE | {"projection_dim": 16},
    "vision_config": _VIT | {"projection_dim": 16},
    "projection_dim": 16,
}


_SPARSE = _TEXT | _LATENT | _ROUTED | {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_key_value_heads": 4}
_ALL = _SPARSE | _MOE | _EXPERTS | {"head_dim": 8, "num_dense_layers": 1, "sliding_window": 5}
_OTHERS: dict[str, dict[str, Any]] = {
    "aria_text": _TEXT | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 8},
    "axk1": _ALL,
    "bailing_hybrid": _ALL,
    "cohere2_moe": _ALL,
    "deepseek_v32": _ALL,
    "deepseek_v4": _ALL,
    "exaone_moe": _ALL,
    "glm4_moe_lite": _ALL,
    "glm_moe_dsa": _ALL,
    "hrm_text": _TEXT | {"head_dim": 8},
    "hy_v3": _ALL,
    "inkling2_text": _ALL,
    "jetmoe": _ALL,
    "kimi_linear": _ALL,
    "laguna": _ALL,
    "llama4_text": _ALL,
    "longcat_flash": _SPARSE | {"num_layers": 2, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "moe_topk": 2},
    "mimo_v2_flash": _ALL,
    "olmo_hybrid": _TEXT,
    "qwen3_5_moe_text": _ALL | _SHARED,
    "qwen3_5_text": _TEXT | {"head_dim": 8},
    "solar_open": _ALL,
}


def _known(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of these fields, those that the family has."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    known = {*kind().to_dict(), *kind.attribute_map}
    return {key: value for key, value in fields.items() if key in known}


def untraced() -> dict[str, ConfigSource]:
    """Further families whose weights transformers converts: tried with files alone."""
    return {name: ConfigSource({"model_type": name, **_known(name, fields)}) for name, fields in _OTHERS.items()}


def _numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _tokens() -> ExampleInput:
    return ExampleInput(torch.arange(36).reshape(4, 9) * 7 % 31, ("b", "s"))


class Convolutions(nn.Module):
    """Convolutions with batch normalisation, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in [(3, 6), (6, 6), (6, 8), (8, 8)]
        )
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            image = block(image)
            if index == 1:
                image = self.pool(image)
        return self.head(image.mean(dim=(2, 3)))


class UNet(nn.Module):
    """Down and up again; what comes up is joined with what went down."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(32, 8, 2, stride=2)])
        self.norm = nn.GroupNorm(4, 16)
        self.leave = nn.Conv2d(16, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.enter(image))
        second = F.silu(self.norm(self.down[0](first)))
        deepest = F.relu(self.down[1](second))
        joined = torch.cat([self.up[0](deepest), second], dim=1)
        return self.leave(torch.cat([self.up[1](joined), first], dim=1))


class Recurrent(nn.Module):
    """Two layers of an LSTM over twelve positions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(dim=1))


class ThreeInputs(nn.Module):
    """Three inputs, values that skip over two stages, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.gate = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        first = torch.tanh(self.layers[0](x))
        opened = torch.sigmoid(self.gate(gate))
        second = torch.tanh(self.layers[1](first)) * scale
        third = torch.tanh(self.layers[2](second))
        fourth = self.layers[3](third) * opened + first
        return {"loss": F.huber_loss(fourth, x) + 0.1 * fourth.abs().mean()}


class GraphConvolution(nn.Module):
    """Kipf and Welling, arXiv 1609.02907: nodes of a graph hear of their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in [(6, 16), (16, 16), (16, 3)])

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        linked = edges + torch.eye(edges.shape[-1], device=edges.device)
        degree = linked.sum(dim=-1, keepdim=True).clamp(min=1.0).rsqrt()
        linked = degree * linked * degree.transpose(-1, -2)
        for index, layer in enumerate(self.layers):
            nodes = linked @ layer(nodes)
            if index < 2:
                nodes = F.relu(nodes)
        return nodes.mean(dim=1)


class Tied(nn.Module):
    """An embedding that is the head as well, and one layer that is run four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.shared = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for _ in range(4):
            hidden = hidden + self.shared(self.norm(hidden))
        return self.head(hidden)


class ManyOutputs(nn.Module):
    """Three results of different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.side = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = F.mish(self.layers[0](x))
        second = F.elu(self.layers[1](first))
        third = F.leaky_relu(self.layers[2](second))
        return {"low": self.side(first), "middle": second.norm(dim=-1), "high": self.layers[3](third)}


def _by_hand(name: str, make: Callable[[], nn.Module], task: Task, **examples: ExampleInput | torch.Tensor) -> Model:
    given = {key: value if isinstance(value, ExampleInput) else ExampleInput(value) for key, value in examples.items()}
    return Model(name, "by hand", task, FactorySource(make, name), given)


def models() -> tuple[Model, ...]:
    """All of them, by kind."""

    def named(kind: Kind, task: Task, table: Mapping[str, Mapping[str, Any]]) -> list[Model]:
        return [
            Model(name, kind, task, ConfigSource({"model_type": name, **fields}, architecture_of(task)))
            for name, fields in table.items()
        ]

    edges = (_numbers(4, 7, 7, seed=1) > 0.5).float()
    return (
        *named("decoder", "causal_lm", _DECODERS),
        *named("mixture of experts", "causal_lm", _MIXTURES),
        *named("state space", "causal_lm", _STATES),
        *named("encoder", "masked_lm", _ENCODERS),
        *named("encoder-decoder", "seq2seq_lm", _PAIRS),
        *named("vision", "classification", _IMAGES),
        *named("vision", "none", {"clip": _CLIP}),
        *(model for name, (task, fields) in _SPEECH.items() for model in named("speech", task, {name: fields})),
        _by_hand("CNN with BatchNorm", Convolutions, "classification", image=_numbers(4, 3, 8, 8)),
        _by_hand("U-Net", UNet, "regression", image=_numbers(4, 3, 8, 8)),
        _by_hand("LSTM", Recurrent, "classification", x=_numbers(4, 12, 6)),
        _by_hand("nn.TransformerEncoder", Encoder, "classification", x=_numbers(4, 9, 16)),
        _by_hand(
            "three inputs and a loss", ThreeInputs, "module_loss",
            x=_numbers(4, 8), gate=_numbers(4, 4, seed=1), scale=_numbers(4, 1, seed=2),
        ),
        _by_hand("graph convolution", GraphConvolution, "classification", nodes=_numbers(4, 7, 6), edges=edges),
        _by_hand(
            "tied and shared layers", Tied, "masked_lm",
            input_ids=_tokens(),
        ),
        _by_hand("three outputs", ManyOutputs, "none", x=_numbers(4, 8)),
        _by_hand("complex rotary positions", ComplexRotary, "masked_lm", input_ids=_tokens()),
        _by_hand("Fourier mixing", FourierMixing, "masked_lm", input_ids=_tokens()),
        _by_hand("filters of frequencies", FrequencyFilters, "classification", image=_numbers(4, 6, 6, 5)),
    )  # fmt: skip
