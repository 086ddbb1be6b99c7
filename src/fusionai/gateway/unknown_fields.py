"""Removes fields of a request that its struct does not know. Decides which fields a request may do without.

What is removed is named in the answer's header `x-fusion-ignored`: clients send fields of many servers, and no setting
may be ignored silently. `fusion serve --strict` refuses such requests instead. Neighbours: `requests` reads bodies,
`admission` writes the header.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import inspect

IGNORED_HEADER: Final = "x-fusion-ignored"
_NAMED: Final = 16
"""Number of fields that the header names (chosen)."""
_LONGEST_NAME: Final = 80


def without_unknown(value: Any, form: type[msgspec.Struct], ignored: set[str]) -> Any:
    """Return the decoded body without fields that `form` and the structs in it lack; adds their paths to `ignored`."""
    return _without(value, _kind(form), "", ignored)


def header_of(ignored: set[str]) -> str:
    """Return the header's value: names in order, without letters that headers can't have."""
    names = [quote(name[:_LONGEST_NAME], safe="[]._-") for name in sorted(ignored)]
    more = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"and {more} more"] if more > 0 else [])])


@cache
def _kind(form: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(form)


def _without(value: Any, kind: inspect.Type, path: str, ignored: set[str]) -> Any:
    match kind:
        case inspect.StructType() if isinstance(value, dict):
            known = {field.encode_name: field.type for field in kind.fields}
            kept: dict[Any, Any] = {}
            for name, inner in value.items():
                where = f"{path}.{name}" if path else str(name)
                if name in known:
                    kept[name] = _without(inner, known[name], where, ignored)
                elif name == kind.tag_field:
                    kept[name] = inner
                else:
                    ignored.add(where)
            return kept
        case inspect.ListType() if isinstance(value, list):
            return [_without(inner, kind.item_type, f"{path}[]", ignored) for inner in value]
        case inspect.UnionType():
            chosen = next((one for one in kind.types if _fits(value, one)), None)
            return value if chosen is None else _without(value, chosen, path, ignored)
        case _:
            return value


def _fits(value: Any, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        return kind.tag_field is None or value.get(kind.tag_field) == kind.tag
    return isinstance(kind, inspect.ListType) and isinstance(value, list)
