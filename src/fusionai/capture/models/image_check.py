"""Compares what a model's own forward hands to its layers for a picture with what the served graph will be handed.

The model runs until its layers are reached, with an embedding made up here, so that no weights of the layers are
needed. Rows that differ, positions that differ, or anything else that depends on the picture show that images mean more
to this model than `capture.models.images` takes over. That module calls this with a sample when a model is opened."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fusionai.capture.tracing.patching import patched

if TYPE_CHECKING:
    from fusionai.capture.models.images import EncodedImage

TOLERANCE: Final = 1e-4
"""Largest difference of features, relative to the largest; an encoder's sums may come in another order."""
_KNOWN: Final = frozenset({"inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "cache_position"})
"""Tensors that layers are handed and that are compared here, or follow from what is compared."""


class _Reached(Exception):
    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


def difference(
    model: Any, inputs: Mapping[str, Any], image: EncodedImage, is_row: torch.Tensor, axes: np.ndarray | None
) -> str | None:
    """Return in words how the layers' inputs differ from a graph's; None if they don't. `inputs`: of the model's own
    forward, by its processor. `is_row`: [tokens], whether a row of `image` takes a token's place. `axes`: [tokens, 3],
    their positions; None for a model with one position per token."""
    given = _handed_to_layers(model, inputs, image.rows.shape[1])
    wanted = _made_up(inputs["input_ids"], image.rows.shape[1])
    wanted[0, is_row] = torch.from_numpy(image.rows)
    if not _equal(given.get("inputs_embeds"), wanted):
        return "its layers get other features than those of its encoder, or at other places"
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return "its attention treats positions of images in a way of their own"
    if axes is not None and not _equal(given.get("position_ids"), torch.from_numpy(axes.T[:, None])):
        return "it counts the positions of images in another way"
    parts = given.get("deepstack_visual_embeds") or []
    added = None if image.layer_rows is None else torch.from_numpy(image.layer_rows)
    if not _equal(torch.cat(list(parts), -1) if parts else None, added):
        return "its layers add features of images in another way"
    others = [name for name, value in given.items() if isinstance(value, torch.Tensor) and name not in _KNOWN]
    return f"its layers also get {', '.join(others)}" if others else None


def _handed_to_layers(model: Any, inputs: Mapping[str, Any], width: int) -> Mapping[str, Any]:
    """Return the arguments of the first call of the part that has the layers."""

    def reached(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        raise _Reached(given)

    parameters = inspect.signature(model.forward).parameters
    taken = {name: value for name, value in inputs.items() if name in parameters}
    hook = model.get_decoder().register_forward_pre_hook(reached, with_kwargs=True)
    embedding = model.get_input_embeddings()
    try:
        with patched((embedding, "forward", lambda ids: _made_up(ids, width))), torch.inference_mode():
            model(**taken)
    except _Reached as end:
        return end.given
    finally:
        hook.remove()
    return {}


def _made_up(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Return an embedding that differs for every token, of shape [..., width]."""
    return torch.sin(ids.unsqueeze(-1) + torch.arange(width, dtype=torch.float32))


def _equal(got: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    if got.shape != wanted.shape:
        # Some models put the numbers of tokens before the three axes.
        if got.ndim != wanted.ndim or got.shape[0] != wanted.shape[0] + 1:
            return False
        got = got[1:]
    return torch.allclose(got.float(), wanted.float(), rtol=0.0, atol=TOLERANCE * max(1.0, float(wanted.abs().max())))
