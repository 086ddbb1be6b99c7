"""Note where a module's own code reads `self.training` while it is traced.

A trace in training contains only the branch that such code took. If PyTorch's own layers read their mode, the graph
(dropout, batch normalisation) or `capture.by_mode` handles it. Any other code may branch, so the module must be traced
in evaluation too.

Neighbours: `capture.capture` watches the trace and lets `capture.evaluation` add what evaluation computes differently.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torch import nn

from fusionai.capture import code_lines

_LIBRARY: Final = "transformers"
_DROPOUT: Final = re.compile(r"training=self\.training|0\.0 if not self\.training else|if self\.training else 0\.0,")
"""How transformers' models pass the mode to dropout, which handles it in a graph. Nearly all models do this, and
tracing each of them twice would double the time."""


class ModeReads:
    """`first`: class of the first module whose mode was read, and the line; empty if none was read."""

    def __init__(self) -> None:
        self.first = ""

    def __bool__(self) -> bool:
        return bool(self.first)

    def note(self, module: nn.Module, frame: FrameType) -> None:
        """Note one read, by the code of `frame`."""
        if self.first or not code_lines.is_of_model(frame.f_code.co_filename) or _is_dropout(frame):
            return
        self.first = f"{type(module).__name__}{code_lines.of_frame(frame)}"


@contextmanager
def mode_reads() -> Iterator[ModeReads]:
    """While open, note reads of `training`."""
    reads = ModeReads()

    def read(module: nn.Module) -> Any:
        reads.note(module, sys._getframe(1))
        return module.__dict__["training"]

    def write(module: nn.Module, mode: bool) -> None:
        module.__dict__["training"] = mode

    setattr(nn.Module, "training", property(read, write))  # noqa: B010 - otherwise an attribute of each module
    try:
        yield reads
    finally:
        delattr(nn.Module, "training")


def _is_dropout(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return _LIBRARY in Path(path).parts and _DROPOUT.search(linecache.getline(path, frame.f_lineno)) is not None
