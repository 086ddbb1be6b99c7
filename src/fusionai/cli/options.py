"""Flags that several commands share: their names, help texts and parsing. `primitives.units` parses quantities.

Also writes `--json FILE`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec

from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import LEVELS
from fusionai.primitives.units import parse_seconds
from fusionai.storage.atomic import write_atomic
from fusionai.transport.routes.addresses import SCHEME, parse_address

_Function = TypeVar("_Function", bound=Callable[..., Any])


class HowMany(click.ParamType[Any]):
    """Parameter type: a whole number from 1 on, or `auto`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number < 1:
            self.fail(f"expected a whole number of at least 1, or auto; got {value!r}.", param, ctx)
        return number


def options(*given: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a command several options, in the order of its help."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(given):
            function = option(function)
        return function

    return decorate


def number_option(
    flag: str, what: str, default: int, least: int | None = None, most: int | None = None, *, metavar: str = "N"
) -> Callable[[_Function], _Function]:
    """Give a command an option that is a whole number from `least` to `most`. `what`: the help."""
    kind = click.INT if least is None else click.IntRange(least, most)
    return click.option(flag, type=kind, default=default, show_default=True, metavar=metavar, help=what)


def quantity_option(
    flag: str, parse: Callable[[str], Any], metavar: str, what: str, default: str | None = None, *, name: str = ""
) -> Callable[[_Function], _Function]:
    """Give a command an option with a unit, as the parameter `name` or the flag's own. `what`: the help. An error of
    `parse` becomes the usage error of that flag."""

    def convert(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except UsageError as wrong:
            raise click.BadParameter(wrong.message, context, parameter) from wrong

    names = (flag, name) if name else (flag,)
    return click.option(*names, callback=convert, default=default, show_default=True, metavar=metavar, help=what)


def device_option(what: str, *, auto: bool = True) -> Callable[[_Function], _Function]:
    """Give a command the parameter `device: str`. `what`: the imperative sentence of the help, without its period."""
    first = "auto" if auto else "cpu"
    chosen = "; auto: with PyTorch, cuda if there is one, else mps, else cpu" if auto else ""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda", "mps"] if auto else ["cpu", "cuda", "mps"]),
        default=first,
        show_default=True,
        help=f"{what}{chosen}.",
    )


def threads_option(what: str) -> Callable[[_Function], _Function]:
    """Give a command the parameter `threads: int | None`."""
    return click.option("--threads", type=click.IntRange(min=1), metavar="N", help=f"{what}.  [default: all cores]")


def own_part_options(what: str) -> Callable[[_Function], _Function]:
    """Give a job's command the parameters `invitation`, `device` and `threads`. `what` this machine computes itself."""
    return options(
        click.option(
            "--invite",
            "invitation",
            metavar="INVITE",
            help="Join the pool with this invitation first. Needed only until this machine has joined.",
        ),
        device_option(f"Compute the job owner's part ({what}) on this device of this machine"),
        threads_option("Compute the job owner's part with this many threads"),
    )


recipe_argument = click.argument("recipe", metavar="RECIPE.toml", type=click.Path(path_type=Path))
"""Gives a command the parameter `recipe: Path`."""

stages_option = click.option(
    "--stages",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cut the model into exactly this many stages (per replica).  [default: the planner chooses]",
)
"""Gives a command the parameter `stages: int | None`."""

host_option = click.option(
    "--host",
    default="0.0.0.0",
    show_default=True,
    metavar="ADDRESS",
    help="Listen on this address of the machine; 0.0.0.0: on all its IPv4 addresses.",
)
"""Gives a command that other machines connect to the parameter `host: str`."""


def port_option(what: str, *, default: int | None = 0, shown: str) -> Callable[[_Function], _Function]:
    """Give a command the parameter `port`. `shown`: the default in the help."""
    help_text = f"{what}  [default: {shown}]"
    return click.option("--port", type=click.IntRange(0, 65_535), default=default, metavar="PORT", help=help_text)


def invitation_options(uses: int) -> Callable[[_Function], _Function]:
    """Give a command the parameters `uses: int`, with this default, and `lifetime: float` in seconds."""
    return options(
        number_option("--uses", "Let this many machines join with the invitation.", uses, 1, 100_000),
        quantity_option(
            "--lifetime", _lifetime, "TIME", "Let machines join with the invitation for this long, e.g. 30min.", "24h"
        ),
    )


def _lifetime(text: str) -> float:
    seconds = parse_seconds(text)
    if not seconds:
        raise UsageError(f"expected a time above 0, such as 30min or 24h, got {text!r}.")
    return seconds


def lora_option(function: _Function) -> _Function:
    """Give a command the parameter `lora: int | None`."""
    return click.option(
        "--lora",
        type=click.IntRange(1, 4096),
        metavar="RANK",
        help="Train LoRA adapters of this rank on every linear layer except the head, instead of the whole model.",
    )(function)


def home_option(function: _Function) -> _Function:
    """Give a command the parameter `home: Path`."""
    return click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        default=environment.fusion_home,
        callback=lambda _context, _parameter, home: _writable(home),
        help="Directory for this machine's key, pool membership and runs.  [default: $FUSION_HOME, or the platform's "
        "data directory]",
    )(function)


def _writable(home: Path) -> Path:
    """Return `home`. Raises `UsageError` if it can't be written: the machine would get a new key at every start."""
    standing = next(place for place in (home.absolute(), *home.absolute().parents) if place.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        what = "not writable" if standing.is_dir() else "a file"
        raise UsageError(
            f"this machine's key can't be stored in {home}: {standing} is {what}.",
            hint="Choose another directory with --home or FUSION_HOME.",
        )
    return home


def privacy_option(default: str) -> Callable[[_Function], _Function]:
    """Give a command the parameter `privacy: PrivacyLevel | None`. `default`: the level if the flag is not given."""
    what = "Set what stays on the job owner's machine; `fusion privacy` explains the levels."
    return click.option("--privacy", type=click.Choice(LEVELS), help=f"{what}  [default: {default}]")


def address_option(function: _Function) -> _Function:
    """Give a command the parameter `addresses: tuple[str, ...]`, as `tcp://host:port`."""
    return click.option(
        "--address",
        "addresses",
        multiple=True,
        metavar="HOST:PORT",
        callback=lambda context, parameter, given: tuple(_address(context, parameter, text) for text in given),
        help="Announce this address instead of the machine's own, e.g. a forwarded port or a name. May be repeated.",
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


def json_option(function: _Function) -> _Function:
    """Give a click command the parameter `json_file: Path | None`."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=lambda _context, _parameter, path: None if path is None else _checked(path),
        help="Also write the results to FILE as one JSON object.",
        metavar="FILE",
    )(function)


def write_json(path: Path | None, command: str, figures: Mapping[str, object]) -> None:
    """Write `figures` to `path` under the schema of `command`; nothing if `path` is None. NaN and infinities become
    null, as JSON has neither. Raises `StorageError` if the file can't be written; an existing file is then
    unchanged."""
    if path is None:
        return
    encoded = msgspec.json.encode({"schema": f"fusionai.{command}/1", **figures}, enc_hook=_encode)
    write_atomic(path, msgspec.json.format(encoded, indent=2) + b"\n")


def _checked(path: Path) -> Path:
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"can't write {path}: there is no directory {folder}.", hint="Create it or name another file.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"can't write {path}: {folder} is not writable.", hint="Name a file in another directory.")
    return path


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
