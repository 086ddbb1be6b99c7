"""Heads for multi-token prediction (MTP) that lie in a model's own files, as modules of transformers' classes.

A head reads the model's state at a position and the token after it, and predicts the token after that: both are
normalised, joined and projected to one state, a decoder layer of the model's own class computes it, and a norm follows.
Embedding and head matrix are the model's own (DeepSeek-V3, arXiv 2412.19437, section 2.2). For further guesses, the
head reads its own result in place of the model's state.

Decides whether a model's files hold such a head, and in which layout. Neighbours: `capture.heads` captures the module
and finds its weights, `capture.models.huggingface` makes the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from fusionai.capture.models.huggingface import HuggingFaceModel
from fusionai.primitives.errors import ModelError

_INDEXED: Final = re.compile(r"(?:\w+\.)*?layers\.(\d+)\.eh_proj\.weight")
"""Projection of a head that is filed behind the model's last layer (DeepSeek-V3, GLM-4.5)."""
_APART: Final = re.compile(r"(?:model\.)?mtp\.fc\.weight")
"""Projection of a head that is filed under a name of its own (Qwen3-Next, Mellum)."""
_UNKNOWN: Final = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
"""Names in files of heads in any layout."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Where a model's files hold its first head: under names of their own (`apart`), or as layer `number`."""

    apart: bool
    number: int

    def holds(self, name: str) -> bool:
        """Return whether a tensor in the files belongs to the head."""
        if not self.apart:
            return re.search(rf"(?:^|\.)layers\.{self.number}\.", name) is not None
        own = re.search(r"(?:^|\.)mtp\.(?:layers\.(\d+)\.)?", name)
        return own is not None and own[1] in (None, "0")


def find_head(names: Iterable[str], layers: int) -> HeadFiles | None:
    """Return where files with tensors of these names hold the head of a model with this number of layers; None if they
    hold none in a known layout."""
    for name in names:
        if _APART.fullmatch(name):
            return HeadFiles(True, 0)
        if (found := _INDEXED.fullmatch(name)) is not None and int(found[1]) == layers:
            return HeadFiles(False, layers)
    return None


def has_unknown_head(names: Iterable[str]) -> bool:
    """Return whether tensors of these names seem to belong to a head."""
    return any(_UNKNOWN.search(name) for name in names)


class _Called(nn.Module):
    """Base class put before transformers' `MtpModel`: called as a stage that serves is called."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return logits, and the states for the next guess. `input_ids` [b, s]: the tokens after the positions whose
        `states` [b, s, hidden size] come with them."""
        model: Any = self
        hidden = model.forward_layer(0, states, position_ids, None, input_ids=input_ids)
        return {"logits": model._project_to_logits(hidden), "hidden": hidden}


@cache
def _called(kind: type[nn.Module]) -> type[nn.Module]:
    return type("MtpHead", (_Called, kind), {})


@dataclass(frozen=True, slots=True)
class ConstructedHead:
    """`shared`: the head's parameters that are the model's own, by the head's names. `conversions`: transformers'
    transforms from the files' names to the module's; None: those of the module itself."""

    module: nn.Module
    shared: dict[str, str]
    conversions: list[Any] | None = None


def construct_mtp(model: HuggingFaceModel) -> ConstructedHead:
    """Construct the head on its model. Raises `ModelError` if transformers can't make it."""
    from transformers.modeling_layers import MtpModel

    main: Any = replace(model, config=_described(model.config)).construct()
    try:
        made: Any = MtpModel(main, 1)
        conversions = list(made.get_weight_conversions(main))
    except (ValueError, AttributeError, TypeError, IndexError, StopIteration) as error:
        raise ModelError(
            f"transformers makes no MTP head for {type(main).__name__}: {type(error).__name__}: {error}.",
            hint="Serve the model with --speculate off, or guess with a draft model: --draft MODEL.",
        ) from error
    made.__class__ = _called(MtpModel)
    names = {id(parameter): name for name, parameter in main.named_parameters()}
    shared = {name: names[id(one)] for name, one in made.named_parameters() if id(one) in names}
    return ConstructedHead(made, shared, conversions)


def _described(config: Any) -> Any:
    """Return the configuration with what transformers needs to make one layer of the head, where it does not say it
    yet: the head's layer has full attention, and the experts of the model's last layer."""
    described = copy.deepcopy(config)
    texts: Any = described.get_text_config()
    for field, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        kinds = getattr(texts, field, None)
        if kinds and not getattr(texts, own, None):
            setattr(texts, own, ["full_attention" if field == "layer_types" else kinds[-1]])
    texts.num_mtp_layers = 1
    return described
