"""Which values of a parametrised test `make test` runs: the others are variants, which `make test-long` adds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def kept(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values for `parametrize`, those that are not in `quick` with the mark `long`. Raises `ValueError` for
    one in `quick` that is no value: a renamed case would leave `make test` without notice."""
    found = list(values)
    if missing := [one for one in quick if one not in found]:
        raise ValueError(f"no such cases: {missing}")
    return [
        one if one in quick else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long)
        for one in found
    ]


def all_but(values: Iterable[Any], long: Collection[Any]) -> list[Any]:
    """As `kept`, by the cases that are long."""
    found = list(values)
    if missing := [one for one in long if one not in found]:
        raise ValueError(f"no such cases: {missing}")
    return kept(found, [one for one in found if one not in long])
