"""The process log: plain lines on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
"""Accepted log levels."""
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HANDLER_NAME: Final = "fusionai"


def start_logging(level: str, stream: TextIO | None = None) -> None:
    """Send the program's log from `level` on, and other libraries' warnings, to `stream` (standard error).

    Calling it again replaces the earlier choice. Raises `ValueError` on an unknown level.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"expected a log level of {', '.join(LEVELS).lower()}, got {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    handler.set_name(_HANDLER_NAME)
    root = logging.getLogger()
    for earlier in list(root.handlers):
        if earlier.get_name() == _HANDLER_NAME:
            root.removeHandler(earlier)
    root.addHandler(handler)
    logging.getLogger("fusionai").setLevel(level.upper())
