"""Compares what a model's own forward hands to its layers for a picture with what the served graph will be handed.

The model runs until its layers are reached, with an embedding made up here, so that no weights of the layers are
needed. Rows that differ, positions that differ, or anything else that depends on the picture show that images mean more
to this model than `capture.models.images` takes over. That module calls this with a sample when a model is opened."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """`difference`: how the inputs of the model's layers differ from a graph's, in words; None if they don't.
    `together`: rows of images see each other."""

    difference: str | None
    together: bool = False


def compared(
    model: Any, inputs: Mapping[str, Any], image: EncodedImage, is_row: torch.Tensor, axes: np.ndarray | None
) -> ImageComparison:
    """Compare the inputs of the model's layers with a graph's. `inputs`: of the model's own forward, by its processor.
    `is_row`: [tokens], whether a row of `image` takes a token's place. `axes`: [tokens, 3], their positions; None for a
    model with one position per token."""
    given = _handed_to_layers(model, inputs, image.rows.shape[1])
    together = _sees_together(given.get("attention_mask"), is_row, _window(model))
    if together is None:
        return ImageComparison("its attention treats positions of images in a way of their own")
    return ImageComparison(_difference(given, inputs, image, is_row, axes), together)


def _difference(
    given: Mapping[str, Any],
    inputs: Mapping[str, Any],
    image: EncodedImage,
    is_row: torch.Tensor,
    axes: np.ndarray | None,
) -> str | None:
    wanted = _made_up(inputs["input_ids"], image.rows.shape[1])
    wanted[0, is_row] = torch.from_numpy(image.rows)
    if not _equal(given.get("inputs_embeds"), wanted):
        return "its layers get other features than those of its encoder, or at other places"
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


def _window(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "sliding_window", None)


def _sees_together(given: Any, is_row: torch.Tensor, window: int | None) -> bool | None:
    """Return whether the masks that layers get let rows of an image see each other; None if they differ from that and
    from attention to earlier positions. Without masks, or with one of padding, layers make such attention
    themselves."""
    if given is None or (isinstance(given, torch.Tensor) and given.ndim == 2):
        return False
    masks = given if isinstance(given, Mapping) else {"": given}
    positions = torch.arange(len(is_row))
    back = positions[:, None] - positions
    begun = is_row & ~torch.cat([torch.zeros(1, dtype=torch.bool), is_row[:-1]])
    group = torch.where(is_row, begun.cumsum(0), 0)
    mutual = (group[:, None] == group) & is_row
    found: set[bool | None] = set()
    for kind, mask in masks.items():
        near = back < window if kind == "sliding_attention" and window else torch.ones_like(mutual)
        plain, mixed = (back >= 0) & near, ((back >= 0) | mutual) & near
        seen = plain if mask is None else _seen(mask)
        alike = [seen is not None and torch.equal(seen, one) for one in (plain, mixed)]
        found.add(False if alike[0] else True if alike[1] else None)
    return found.pop() if len(found) == 1 else None


def _seen(mask: Any) -> torch.Tensor | None:
    """Return a mask [1, 1, tokens, tokens] as bool [tokens, tokens], True where a key is seen; None for any other."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[:2] != (1, 1):
        return None
    return (mask if mask.dtype == torch.bool else mask >= 0)[0, 0]


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
