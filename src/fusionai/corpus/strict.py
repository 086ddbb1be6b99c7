"""Converts a TOML table strictly into a frozen struct. Decides how mistakes in a recipe are worded.

Unknown keys fail, and the message names the nearest known key. The message for a wrong value has its key, what was
expected and what was found."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fusionai.primitives.errors import RecipeError, nearest

_T = TypeVar("_T", bound=msgspec.Struct)

_PLAIN: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_SHOWN_CHARACTERS: Final = 60


def convert(table: Mapping[str, object], kind: type[_T], where: str, top: str = "the top level") -> _T:
    """Convert `table` to `kind`. Messages name the file `where` and the table `top`. Raises `RecipeError`."""
    _check_table(table, kind, (), where, top)
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise RecipeError(_explained(str(problem), table, kind, where, top)) from None


def _table_name(path: tuple[str, ...], top: str) -> str:
    """`[train.optimizer]`, or `top`."""
    return f"[{'.'.join(path)}]" if path else top


def show(value: object) -> str:
    """A value for a one-line message, shortened if it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def kind_of(value: object) -> str:
    """The kind of a value from the *data*, without its content, because messages may leave this machine."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a table"
        case _:
            return type(value).__name__


def _check_table(
    table: Mapping[str, object], kind: type[msgspec.Struct], path: tuple[str, ...], where: str, top: str
) -> None:
    """Refuse unknown keys and numbers that are not finite, at any depth."""
    hints = get_type_hints(kind, include_extras=True)
    for key, value in table.items():
        if key not in hints:
            what = "table" if isinstance(value, Mapping) else "key"
            raise RecipeError(f"{where}: unknown {what} {key!r} in {_table_name(path, top)}; {nearest(key, hints)}")
        inner = _struct_in(hints[key])
        if inner is not None and isinstance(value, Mapping):
            _check_table(value, inner, (*path, key), where, top)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise RecipeError(
                    f"{where}: key {key!r} in {_table_name(path, top)}: expected a finite number, got {number}."
                )


def _parts_of(annotation: Any, meta: msgspec.Meta | None = None) -> Iterator[tuple[Any, msgspec.Meta | None]]:
    """Yield the alternatives of an annotation with their constraints, looking through `Annotated` and unions."""
    match get_origin(annotation):
        case origin if origin is Annotated:
            inner, *notes = get_args(annotation)
            yield from _parts_of(inner, next((note for note in notes if isinstance(note, msgspec.Meta)), None))
        case origin if origin in (Union, types.UnionType):
            for part in get_args(annotation):
                yield from _parts_of(part, meta)
        case _:
            yield annotation, meta


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The first struct that an annotation allows."""
    return next(
        (part for part, _ in _parts_of(annotation) if isinstance(part, type) and issubclass(part, msgspec.Struct)), None
    )


def _expected(annotation: Any) -> str:
    """Describes the whole numbers and the choices that an annotation allows; empty if it has no choices."""
    parts = list(_parts_of(annotation))
    choices = ", ".join(repr(choice) for part, _ in parts if get_origin(part) is Literal for choice in get_args(part))
    if not choices:
        return ""
    bounds = next((meta for part, meta in parts if part is int and meta is not None), None)
    if bounds is None:
        return f"one of {choices}"
    return f"a whole number{'' if bounds.ge is None else f' >= {bounds.ge}'} or {choices}"


def _explained(problem: str, table: Mapping[str, object], kind: type[msgspec.Struct], where: str, top: str) -> str:
    """msgspec's message (`Expected `int`, got `str` - at `$.train.steps``) in the terms of a recipe."""
    message, _, at = problem.partition(" - at ")
    path = [name or int(index) for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", at)]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    if missing is not None:
        where_missing = _table_name(tuple(str(part) for part in path), top)
        if _struct_in(_annotation_at(kind, [str(part) for part in [*path, missing[1]]])) is not None:
            return f"{where}: the table [{'.'.join(str(part) for part in [*path, missing[1]])}] is missing."
        return f"{where}: {where_missing} lacks the key {missing[1]!r}."
    keys = [part for part in path if isinstance(part, str)]
    owner, key = tuple(keys[:-1]), keys[-1] if keys else ""
    value: Any = table
    for part in path:
        value = value[part]
    annotation = _annotation_at(kind, keys)
    expected = _expected(annotation)
    if not expected and " matching regex " in message:
        expected = next(meta.description for _, meta in _parts_of(annotation) if meta is not None and meta.description)
    if not expected:
        expected = message.removeprefix("Expected ").split(", got ")[0]
        expected = re.sub(r"`([^`]+)`", _plain_kinds, expected)
    return f"{where}: key {key!r} in {_table_name(owner, top)}: expected {expected}, got {show(value)}."


def _plain_kinds(match: re.Match[str]) -> str:
    kinds = [part for part in match[1].split(" | ") if part != "null"]
    return " or ".join(_PLAIN.get(part, part) for part in kinds)


def _annotation_at(kind: type[msgspec.Struct], keys: list[str]) -> Any:
    annotation: Any = kind
    for key in keys:
        inner = _struct_in(annotation)
        if inner is None:
            return annotation
        annotation = get_type_hints(inner, include_extras=True)[key]
    return annotation
