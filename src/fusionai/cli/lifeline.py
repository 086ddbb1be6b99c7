"""A process that ends with the one that started it, however that ended: its standard input is the line between them.

Decides nothing but when the line is cut: a pipe reaches its end when the process at its other end is gone, killed
outright or not, on every system. Neighbours: `cli.running` ends the command; `client.local_pool` and `cli.chat` hold
the other end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])
_READ_BYTES: Final = 4096


def lifeline_option(function: _Function) -> _Function:
    """Give a command the parameter `lifeline: bool`; for programs that start it, not for people."""
    return click.option("--lifeline", is_flag=True, hidden=True, help="End when standard input does.")(function)


def when_cut(tell: Callable[[], None]) -> None:
    """Call `tell` in a thread of its own once standard input has ended; what comes before that is thrown away."""

    def watch() -> None:
        # Not through Python's own buffer: a thread that waits in there can't be left behind when the process ends.
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), _READ_BYTES):
                pass
        tell()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
