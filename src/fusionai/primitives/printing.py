"""Text from elsewhere on this machine's terminal: names and reasons from other machines forge no line there.

`printable` is for one line; `log_to_stderr` applies it to every record, so that no caller has to think of it. A
terminal obeys control characters: they move its cursor, hide what was written and can change its settings.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Return `text` with control characters replaced; line breaks and tabs become spaces."""
    flat = text.replace("\n", " ").replace("\t", " ")
    return "".join(character if character.isprintable() else _REPLACEMENT for character in flat)


class PrintableFormatter(logging.Formatter):
    """Puts each record on one line. Tracebacks follow on lines that are indented, so that none looks like a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.split("\n"))


def log_to_stderr(level: str) -> None:
    """Print this process's records from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=level, handlers=[handler])
