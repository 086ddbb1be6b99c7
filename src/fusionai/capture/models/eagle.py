"""EAGLE-3 heads, which lie in a directory of their own (arXiv 2503.01840): one Llama layer on features of the model.

The features are the states between three layers of the served model. A projection (`fc`) makes one state of them, and
the layer's attention reads it together with the token's embedding. Logits are over the head's own, smaller vocabulary;
`d2t` says which token each stands for. For further guesses the head reads its own state before its last norm. Formulas
and names are those of the published heads (SpecForge), and of vLLM and SGLang, which serve them.

Decides what a directory holds. Neighbours: `capture.heads` captures the modules and makes the features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fusionai.capture.models.source import read_config
from fusionai.capture.models.state import read_tensor, tensor_shapes
from fusionai.capture.tracing.attention import ATTENTION, register
from fusionai.primitives.errors import ModelError

_FEATURES: Final = 3
"""Layers of the served model whose states a head reads."""
_LIST: Final = "eagle_aux_hidden_state_layer_ids"
"""Field of a configuration that names these layers."""
_LAYER: Final = "midlayer."
_OTHER_NAME: Final = "layers.0."
"""Names of the head's layer in files."""


@dataclass(frozen=True, slots=True)
class EagleFiles:
    """An EAGLE-3 head's directory. `names`: module's name -> (file, name in the file)."""

    path: Path
    config: Mapping[str, Any]
    names: Mapping[str, tuple[Path, str]]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def width(self) -> int:
        """Size of the head's states."""
        return int(self.config["hidden_size"])

    @property
    def tokens(self) -> int:
        """Size of the head's vocabulary."""
        return self.shapes["lm_head.weight"][0]

    def targets(self, vocabulary: int) -> NDArray[np.int64] | None:
        """Return the token of each column of the head's logits; None if they are the model's tokens. Reads them from
        the files. Raises `ModelError` if some are no tokens of a vocabulary of this size."""
        if "d2t" not in self.names:
            if self.tokens == vocabulary:
                return None
            raise ModelError(
                f"the head in {self.path} knows {self.tokens} of {vocabulary} tokens and lacks 'd2t', expected with "
                f"the shape [{self.tokens}], which says which ones.",
                hint="Fetch the head's files again, or take another head.",
            )
        if self.shapes["d2t"] != (self.tokens,):
            raise ModelError(
                f"'d2t' of the head in {self.path} has the shape {list(self.shapes['d2t'])}, expected [{self.tokens}]."
            )
        path, name = self.names["d2t"]
        offsets = read_tensor(path, name, "d2t", torch.empty(0, dtype=torch.int64)).numpy()
        tokens = np.arange(self.tokens) + offsets
        if tokens.min() < 0 or tokens.max() >= vocabulary or len(np.unique(tokens)) < len(tokens):
            raise ModelError(
                f"'d2t' of the head in {self.path} does not name {self.tokens} different tokens below {vocabulary}.",
                hint="The head belongs to another model.",
            )
        return tokens

    def layers(self, count: int) -> tuple[int, ...]:
        """Return the layers of a served model with `count` of them whose inputs the head reads. Raises `ModelError`."""
        inner = self.config.get("eagle_config")
        if isinstance(inner, Mapping) and inner.get(_LIST):
            # The trainers' numbering: the states behind a layer.
            found = tuple(int(layer) + 1 for layer in inner[_LIST])
        else:
            found = tuple(int(layer) for layer in self.config.get(_LIST) or (2, count // 2, count - 3))
        if len(found) != _FEATURES or any(not 0 <= layer < count for layer in found):
            raise ModelError(
                f"the head in {self.path} reads the states before the layers {', '.join(map(str, found))}, and the "
                f"served model has {count} layers.",
                hint="The head belongs to another model.",
            )
        return found


def eagle_files(path: Path) -> EagleFiles | None:
    """Return the EAGLE-3 head in a directory; None if it holds something else. Raises `ModelError` for earlier heads of
    EAGLE and for heads without safetensors."""
    if not (path / "config.json").is_file():
        return None
    config = read_config(path / "config.json")
    weights = sorted(path.glob("*.safetensors"))
    named = any("eagle" in str(one).lower() for one in config.get("architectures") or ())
    if not weights:
        if named:
            raise ModelError(
                f"the head in {path} has no *.safetensors; pickles (*.bin) are never loaded.",
                hint="Take the head's safetensors, or convert it.",
            )
        return None
    shapes = {_plain(name): (file, name, shape) for name, (file, shape) in tensor_shapes(weights).items()}
    fc = shapes.get("fc.weight")
    if fc is None or len(fc[2]) != 2:
        return None
    if f"{_LAYER}hidden_norm.weight" not in shapes:
        if fc[2][1] == 2 * fc[2][0]:
            raise ModelError(
                f"{path} holds a head of EAGLE-1 or EAGLE-2, and only those of EAGLE-3 are served.",
                hint="Take an EAGLE-3 head of the same model, or a draft model.",
            )
        return None
    return EagleFiles(
        path,
        config,
        {name: (file, filed) for name, (file, filed, _) in shapes.items()},
        {name: shape for name, (_, _, shape) in shapes.items()},
    )


def _plain(name: str) -> str:
    """Return a file's name of a tensor as the module has it."""
    name = name.removeprefix("model.")
    return f"{_LAYER}{name.removeprefix(_OTHER_NAME)}" if name.startswith(_OTHER_NAME) else name


class EagleHead(nn.Module):
    """The head behind `fc`. `vocabulary` and `tokens`: sizes of the served model's vocabulary and of the head's."""

    def __init__(self, config: Any, vocabulary: int, tokens: int) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        width: int = config.hidden_size
        self.embed_tokens = nn.Embedding(vocabulary, width)
        layer: Any = LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            made: nn.Linear = getattr(layer.self_attn, name)
            wider = nn.Linear(2 * width, made.out_features, bias=made.bias is not None)
            setattr(layer.self_attn, name, wider)
        layer.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.midlayer = layer
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.normed_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return logits, and the states for the next guess. `input_ids` [b, s]: the tokens after the positions whose
        `states` [b, s, hidden size] come with them."""
        layer: Any = self.midlayer
        normed = layer.hidden_norm(states)
        joined = torch.cat((layer.input_layernorm(self.embed_tokens(input_ids)), normed), dim=-1)
        attended, _ = layer.self_attn(
            joined, position_embeddings=self.rotary_emb(states, position_ids), attention_mask=None
        )
        hidden = attended + (normed if self.normed_residual else states)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return {"logits": self.lm_head(self.norm(hidden)), "hidden": hidden}


class FeatureProjection(nn.Module):
    """Makes one state of a position's features."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, width, bias=False)

    def forward(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.fc(states)}


def construct_eagle(files: EagleFiles, vocabulary: int) -> nn.Module:
    """Construct the head behind `fc`. Raises `ModelError` for a configuration that is not a Llama's."""
    from transformers import CONFIG_MAPPING

    register()
    fields = {key: value for key, value in files.config.items() if key not in ("model_type", "architectures")}
    try:
        config = CONFIG_MAPPING["llama"](**fields)
    except Exception as error:  # a configuration may fail in any way
        raise ModelError(f"the configuration of the head in {files.path} is not valid: {error}.") from error
    config._attn_implementation = ATTENTION
    return EagleHead(config, vocabulary, files.tokens).eval()
