"""Refuse functions that no graph can hold, with errors that name them as the model's author calls them.

Each entry says what to write instead. A trace would refuse these functions with PyTorch's internal names. Neighbours:
`capture.export` traces under it; `capture.lowering` refuses operators that the vocabulary lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._functorch import eager_transforms

from fusionai.capture import code_lines
from fusionai.primitives.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Refused:
    """`place` and `attribute`: the PyTorch function that every call goes through."""

    place: Any
    attribute: str
    name: str
    reason: str
    hint: str


_REFUSED: Final = (
    _Refused(
        torch,
        "ctc_loss",
        "torch.nn.functional.ctc_loss",
        "its recursion reads the lengths as numbers",
        "Train on the cross-entropy of aligned frames, or write the recursion over a fixed number of frames with "
        "torch.logaddexp, and torch.where for the lengths.",
    ),
    _Refused(
        torch._VF,
        "_pack_padded_sequence",
        "torch.nn.utils.rnn.pack_padded_sequence",
        "the shape of a PackedSequence depends on the lengths",
        "Give the recurrent layer the padded batch, multiply its output by "
        "(torch.arange(steps) < lengths[:, None])[..., None], and take the last step of each row by gather.",
    ),
    _Refused(
        eager_transforms,
        "_jvp_with_argnums",
        "torch.func.jvp",
        "a graph has reverse-mode gradients only",
        "Write the directional derivative with operations: for y = tanh(x) along t it is (1 - y * y) * t.",
    ),
)


@contextmanager
def refused_by_name() -> Iterator[None]:
    """While open, a call of one of these functions raises `ModelError` with the line of the model."""
    originals = [(entry, getattr(entry.place, entry.attribute)) for entry in _REFUSED]
    # The module `torch._VF` finds its functions by __getattr__: attributes that were not there are deleted again.
    held = {entry.name for entry in _REFUSED if entry.attribute in vars(entry.place)}
    try:
        for entry in _REFUSED:
            setattr(entry.place, entry.attribute, _refusal(entry))
        yield
    finally:
        for entry, original in originals:
            if entry.name in held:
                setattr(entry.place, entry.attribute, original)
            else:
                delattr(entry.place, entry.attribute)


def _refusal(entry: _Refused) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        where = code_lines.of_frame(sys._getframe(1))
        raise ModelError(
            f"the model calls {entry.name}{where}, which a graph can't hold: {entry.reason}.", hint=entry.hint
        )

    return refuse
