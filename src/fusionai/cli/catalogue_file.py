"""Reads the shipped catalogue of devices and, with `--catalogue FILE`, the user's entries.

FILE is TOML in the form of `scheduling/data/catalogue.toml`; its entries replace shipped ones of the same name.
`scheduling.analysis.catalogue` defines the types; `cli.pool_file`, `cli.plan`, `cli.simulate` and `cli.analyze` use
this."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from fusionai.corpus.strict import convert
from fusionai.primitives.errors import RecipeError
from fusionai.scheduling.analysis.catalogue import Catalogue, Device

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHIPPED: Final = "data/catalogue.toml"


@cache
def shipped_catalogue() -> Catalogue:
    text = files("fusionai.scheduling").joinpath(_SHIPPED).read_text(encoding="utf-8")
    return Catalogue(devices=_devices(tomllib.loads(text), _SHIPPED))


def read_catalogue(path: Path | None) -> Catalogue:
    """Return the shipped catalogue with the entries of `path` replacing or adding to it. Raises `RecipeError`."""
    if path is None:
        return shipped_catalogue()
    return shipped_catalogue().with_devices(_devices(read_toml(path, "catalogue"), path.name))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the parsed file. `what` names its kind in errors. Raises `RecipeError` if it can't be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no {what} file at {path}.", hint="Give the path of a TOML file.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RecipeError(f"{path}: not valid TOML: {problem}.") from None
    except OSError as problem:
        raise RecipeError(f"{path}: can't be read ({problem.strerror}).") from None


def catalogue_option(function: _Function) -> _Function:
    """Give a command the parameter `catalogue_file: Path | None`."""
    return click.option(
        "--catalogue",
        "catalogue_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Add or replace devices of the shipped catalogue from this TOML file.",
    )(function)


def _devices(table: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    entries = table.get("devices")
    unknown = sorted(set(table) - {"devices"})
    if unknown or not isinstance(entries, list) or not entries:
        found = f"got {', '.join(unknown)}" if unknown else "found none"
        raise RecipeError(f"{where}: expected a list of tables [[devices]], {found}.")
    return tuple(
        convert(entry, Device, f"{where}: device {entry.get('name', number)!r}")
        if isinstance(entry, dict)
        else _not_a_table(where)
        for number, entry in enumerate(entries, start=1)
    )


def _not_a_table(where: str) -> Device:
    raise RecipeError(f"{where}: expected a list of tables [[devices]].")
