"""The tree of exceptions in the docstring is the tree of classes."""

from __future__ import annotations

import inspect
import re

from fusionai.primitives import errors
from fusionai.primitives.errors import FusionError, UsageError

CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, FusionError)
}


def drawn() -> dict[str, str]:
    """Class -> parent, from the drawing."""
    parents: dict[str, str] = {}
    stack: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^(?P<branches>(?:[│ ]   )*(?:[├└]── )?)(?P<name>[A-Z]\w+)\s{2,}\S", line)
        if match:
            depth = len(match["branches"]) // 4
            del stack[depth:]
            if stack:
                parents[match["name"]] = stack[-1]
            stack.append(match["name"])
    return parents


def test_the_drawing_equals_the_classes():
    actual = {name: cls.__base__.__name__ for name, cls in CLASSES.items() if cls.__base__ and cls is not FusionError}
    assert drawn() == actual


def test_what_the_user_can_mend_exits_2_and_the_rest_1():
    for cls in CLASSES.values():
        assert cls.exit_code == (2 if issubclass(cls, UsageError) else 1)
        error = cls("expected a, got b.", hint="Do c.")
        assert (error.message, error.hint, str(error)) == ("expected a, got b.", "Do c.", "expected a, got b. Do c.")
