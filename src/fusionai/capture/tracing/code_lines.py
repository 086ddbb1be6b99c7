"""Find the line of the model's own code behind an operation or error: the innermost line outside torch and this
package. Also the line of an error's text that an error message of ours repeats."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Final

import torch

_LIBRARIES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_RECORDED: Final = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
"""One frame of a stack as `torch.export` records it."""

_Frame = tuple[str, int, str]
"""File, line, function."""


def of_error(error: BaseException) -> str:
    """Return the model's line that led to `error`, as ` at net.py:7 in forward (`...`)`; empty if there is none."""
    stack = traceback.extract_tb(error.__traceback__)
    return _innermost((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack))


def reason(error: BaseException) -> str:
    """Return the first line of an error's text without a full stop; its class if it has no text."""
    lines = str(error).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__).rstrip(".")


def of_frame(frame: FrameType) -> str:
    """Return the model's line that led to `frame`."""
    stack = traceback.walk_stack(frame)
    return _innermost((one.f_code.co_filename, line, one.f_code.co_name) for one, line in stack)


def of_recorded(stack: str | None) -> str:
    """Return the model's line in a stack that `torch.export` recorded with an operation."""
    found: list[tuple[str, str, str]] = _RECORDED.findall(stack or "")
    return _innermost((path, int(line), function) for path, line, function in reversed(found))


def is_of_model(path: str) -> bool:
    """Return whether a file is outside torch and this package."""
    return not path.startswith((*_LIBRARIES, "<"))


def _innermost(frames: Iterable[_Frame]) -> str:
    """Return the first line of the model's code in frames ordered from the innermost outwards."""
    for path, line, function in frames:
        if is_of_model(path):
            return f" at {Path(path).name}:{line} in {function} (`{linecache.getline(path, line).strip()}`)"
    return ""
