"""Prints lines and tables: framed tables on a terminal, aligned plain text elsewhere. Every command prints through it.

Text from other machines (names, titles, reasons) passes through `printable`, so that it can't move the cursor or
colour the terminal. Live views are in `dashboard`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import IO, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusionai.primitives.printing import printable as printable


def line(text: str = "") -> None:
    """Print a line, or a few, to standard output."""
    click.echo(_wrapped(text, sys.stdout))


def error(message: str, hint: str | None = None) -> None:
    """Print what failed, and what to do next, to standard error."""
    _to_standard_error(f"error: {printable(message)}")
    if hint:
        _to_standard_error(printable(hint))


def note(message: str) -> None:
    """Print a progress note to standard error."""
    _to_standard_error(printable(message))


def warning(message: str) -> None:
    """Print a warning to standard error; the command continues."""
    _to_standard_error(f"warning: {printable(message)}")


def _to_standard_error(text: str) -> None:
    click.echo(_wrapped(text, sys.stderr), err=True)


_QUOTED: Final = re.compile(r"`[^`]*`|(?<=: )fusion .*")
_KEPT_SPACE: Final = "\x00"


def _wrapped(text: str, stream: IO[str]) -> str:
    """Break the lines of a text for a terminal between words. Commands stay whole, so that they can be copied: what is
    in backquotes or follows a colon, and lines that are indented or begin with a command."""
    if not stream.isatty():
        return text
    width = Console(file=stream).width
    return "\n".join(_wrapped_line(one, width) for one in text.split("\n"))


def _wrapped_line(text: str, width: int) -> str:
    if len(text) <= width or text.startswith((" ", "fusion ", "curl ")):
        return text
    kept = _QUOTED.sub(lambda found: found.group().replace(" ", _KEPT_SPACE), text)
    after = "  " if kept.startswith("- ") else ""
    lines = wrap(kept, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=after)
    return "\n".join(lines).replace(_KEPT_SPACE, " ")


def width() -> int | None:
    """Columns of the terminal that standard output is, None if it is none."""
    return Console().width if sys.stdout.isatty() else None


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table: framed on a terminal, elsewhere aligned columns without truncation. `right`: indices of columns to
    align right. `spare`: headers of columns that a narrow terminal leaves out, in this order, and names below the
    table. A terminal on which the rest would break words gets a block of lines for each row instead."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _framed_table(headers, cells, title, {headers[place] for place in right}, spare)
        return
    if title:
        line(title)
    widths = _widths(headers, cells)
    for row in [list(headers), *cells]:
        padded = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        line("  ".join(padded).rstrip())


def _widths(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[place]) for row in [headers, *cells]) for place in range(len(headers))]


_BETWEEN_COLUMNS = 3
"""Characters of the frame for each column."""


def _framed_table(
    headers: Sequence[str], cells: Sequence[Sequence[str]], title: str, right: set[str], spare: Sequence[str]
) -> None:
    terminal = Console()
    widths = dict(zip(headers, _widths(headers, cells), strict=True))
    left_out: list[str] = []
    for header in spare:
        if sum(widths.values()) + _BETWEEN_COLUMNS * len(widths) + 1 <= terminal.width:
            break
        if header in widths:
            del widths[header]
            left_out.append(header)
    shown = [[row[headers.index(header)] for header in widths] for row in cells]
    words = _widths(
        [_longest_word(header) for header in widths], [[_longest_word(cell) for cell in row] for row in shown]
    )
    if sum(words) + _BETWEEN_COLUMNS * len(words) + 1 > terminal.width:
        _blocks(list(widths), shown, title)
    else:
        framed = Table(title=title or None, title_justify="left", header_style="bold")
        for header, least in zip(widths, words, strict=True):
            justify = "right" if header in right else "left"
            framed.add_column(header, justify=justify, overflow="fold", min_width=least)
        for row in shown:
            framed.add_row(*(Text(cell) for cell in row))
        terminal.print(framed)
    if left_out:
        line(f"A wider terminal also shows: {', '.join(header for header in headers if header in left_out)}.")


def _longest_word(text: str) -> str:
    return max(text.split(), key=len, default="")


def _blocks(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    if title:
        line(title)
    for row in rows:
        line()
        line(f"{headers[0]}: {row[0]}" if headers[0] else row[0])
        for header, cell in zip(headers[1:], row[1:], strict=True):
            line(f"  {header}: {cell}" if header else f"  {cell}")
