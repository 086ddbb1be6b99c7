"""Lets a process end with the process that started it: standard input is a pipe whose end is noticed here.

On every system the pipe ends when the starting process is gone, even if that was killed. `cli.running` then ends the
command; `client.pool.local_pool` and `cli.chat` hold the other end of the pipe.
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
    """Give a command the hidden parameter `lifeline: bool`, for programs that start the command."""
    return click.option("--lifeline", is_flag=True, hidden=True, help="End when standard input ends.")(function)


def when_cut(tell: Callable[[], None]) -> None:
    """Call `tell` in a new thread once standard input has ended. Input is discarded."""

    def watch() -> None:
        # `os.read` instead of `sys.stdin`: a thread blocked in Python's buffer would block the process's exit.
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), _READ_BYTES):
                pass
        tell()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
