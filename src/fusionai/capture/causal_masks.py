"""Recognise causal masks of `nn.Transformer` and its parts by how they were made instead of by their values.

If PyTorch gets a mask without a hint, it compares the mask's values with a causal one, which is a branch on data that a
graph can't hold. A mask from `generate_square_subsequent_mask` is causal at every length. Any other mask is applied as
it is, which gives the same numbers.

Neighbours: `capture.export` traces under it; `capture.attention` makes the semantic operator of causal attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules import transformer
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def recognised_causal_masks() -> Iterator[None]:
    """While open, PyTorch does not compare the values of masks."""
    generate, detect = transformer._generate_square_subsequent_mask, transformer._detect_is_causal_mask
    made = WeakTensorKeyDictionary()

    def generated(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask = generate(*args, **kwargs)
        made[mask] = True
        return mask

    def detected(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is not None or mask is None:
            return is_causal is True
        return mask in made and (size is None or statically_known_true(mask.shape[-1] == size))

    transformer._generate_square_subsequent_mask = generated
    transformer._detect_is_causal_mask = detected
    try:
        yield
    finally:
        transformer._generate_square_subsequent_mask, transformer._detect_is_causal_mask = generate, detect
