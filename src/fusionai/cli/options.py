"""Flags that several commands share. Decides their spelling and how text becomes values; does nothing with them.

Neighbours: the commands beside this file; `primitives.units` reads quantities.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import LEVELS
from fusionai.transport.addresses import SCHEME, parse_address

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Value = TypeVar("_Value")


def quantity(parse: Callable[[str], _Value]) -> Callable[[click.Context, click.Parameter, str | None], _Value | None]:
    """A click callback for a flag with a unit: the parser's own sentence becomes the usage error of that flag."""

    def convert(context: click.Context, parameter: click.Parameter, text: str | None) -> _Value | None:
        if text is None:
            return None
        try:
            return parse(text)
        except UsageError as wrong:
            raise click.BadParameter(wrong.message, context, parameter) from wrong

    return convert


class HowMany(click.ParamType[Any]):
    """A number from 1 on, or `auto`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number < 1:
            self.fail(f"expected a whole number from 1 on, or auto, got {value!r}.", param, ctx)
        return number


def own_part_options(what: str) -> Callable[[_Function], _Function]:
    """Give a job's command the parameters `invitation`, `device` and `threads`. `what` this machine computes itself."""

    def options(function: _Function) -> _Function:
        given = (
            click.option(
                "--invite", "invitation", metavar="INVITE", help="Enter the pool with this invitation (once)."
            ),
            click.option(
                "--device",
                type=click.Choice(["auto", "cpu", "cuda", "mps"]),
                default="auto",
                show_default=True,
                help=f"Where this machine computes the job owner's part ({what}).",
            ),
            click.option("--threads", type=click.IntRange(min=1), help="Threads for that part.  [default: all cores]"),
        )
        for option in reversed(given):
            function = option(function)
        return function

    return options


def lora_option(function: _Function) -> _Function:
    """Give a command the parameter `lora: int | None`."""
    return click.option(
        "--lora",
        type=click.IntRange(1, 4096),
        metavar="RANK",
        help="Train an adapter of this rank on every linear layer but the head, in the place of the whole model.",
    )(function)


def home_option(function: _Function) -> _Function:
    """Give a command the parameter `home: Path`."""
    return click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        default=environment.fusion_home,
        callback=lambda _context, _parameter, home: _writable(home),
        show_default="$FUSION_HOME, or the platform's data directory",
        help="Where this machine keeps its key, its pool and its runs.",
    )(function)


def _writable(home: Path) -> Path:
    """A key that can't be kept would be another one each time. Raises `UsageError`."""
    standing = next(place for place in (home.absolute(), *home.absolute().parents) if place.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        what = "not writable" if standing.is_dir() else "a file"
        raise UsageError(
            f"this machine's key can't be kept in {home}: {standing} is {what}.",
            hint="Choose another directory with --home or FUSION_HOME.",
        )
    return home


def privacy_option(function: _Function) -> _Function:
    """Give a command the parameter `privacy: PrivacyLevel | None`."""
    return click.option(
        "--privacy",
        type=click.Choice(LEVELS),
        help="What stays with the job owner; before what a recipe says.",
    )(function)


def address_option(function: _Function) -> _Function:
    """Give a command the parameter `addresses: tuple[str, ...]`, as `tcp://host:port`."""
    return click.option(
        "--address",
        "addresses",
        multiple=True,
        metavar="HOST:PORT",
        callback=lambda context, parameter, given: tuple(_address(context, parameter, text) for text in given),
        help="Tell others this address instead of the machine's own (a forwarded port, a name). May be repeated.",
    )(function)


def _address(context: click.Context, parameter: click.Parameter, text: str) -> str:
    address = text if "://" in text else f"{SCHEME}://{text}"
    try:
        known = parse_address(address)
    except UsageError as wrong:
        raise click.BadParameter(wrong.message, context, parameter) from wrong
    if known is None:
        raise click.BadParameter(f"expected HOST:PORT, got {text!r}.", context, parameter)
    return address
