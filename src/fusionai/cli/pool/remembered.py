"""Flags that `fusion join` remembers in the machine's home: a later call without a flag means what the last one with it
meant. Otherwise a machine that lends 2 GB would lend all of its memory after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from fusionai.cli.options import given_options, written_option
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.storage.atomic import write_atomic

FILE: Final = "lending.json"
_KEPT: Final = "fusionai.cli.pool.kept"
_ADDED: Final = "fusionai.cli.pool.added"


class RememberingCommand(click.Command):
    """Completes the flags of a call by remembered ones, unless it has `--fresh`. `remembered`: names of parameters."""

    def __init__(self, *args: Any, remembered: frozenset[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remembered = remembered

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = given_options(self, ctx, args)
        home = Path(str(given.get("home") or environment.fusion_home()))
        known = {} if "fresh" in given or "owner" in given else self._read(home / FILE)
        own = {name: value for name, value in given.items() if name in self._remembered}
        options = {param.name or "": param for param in self.params if isinstance(param, click.Option)}
        added = [
            text for name, value in known.items() if name not in own for text in written_option(options[name], value)
        ]
        ctx.meta[_KEPT], ctx.meta[_ADDED] = {**known, **own}, added
        return super().parse_args(ctx, [*added, *args])

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            known = msgspec.json.decode(file.read_bytes(), type=dict[str, str | bool | list[str]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as problem:
            raise _unreadable(file, str(problem)) from problem
        if unknown := sorted(known.keys() - self._remembered):
            raise _unreadable(file, f"unknown settings {', '.join(unknown)}")
        return known


def _unreadable(file: Path, problem: str) -> UsageError:
    return UsageError(
        f"{file}: the settings of earlier calls can't be used: {problem}.", hint="Give --fresh to forget them."
    )


def added_flags(context: click.Context) -> Sequence[str]:
    """Return the remembered flags that the call did not have."""
    return context.meta[_ADDED]


def remember(context: click.Context, home: Path) -> None:
    """Keep the call's flags and those that were remembered. Raises `StorageError`."""
    write_atomic(home / FILE, msgspec.json.format(msgspec.json.encode(context.meta[_KEPT]), indent=2) + b"\n")
