"""Trace `torch.distributions` without the checks of their arguments.

A distribution checks that its parameters and samples lie in its support and raises where they don't: a branch on
values, which a graph can't hold. In a captured graph such a value gives NaN or infinity instead.

Neighbours: `capture.export` traces under it, `capture.draws` makes the samples of uniform numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution


@contextmanager
def unchecked_arguments() -> Iterator[None]:
    """While open, distributions that are made check nothing, even with `validate_args=True`."""
    begin, checks = Distribution.__init__, Distribution._validate_args

    def unchecked(self: Distribution, *args: Any, **kwargs: Any) -> None:
        # The third positional argument is `validate_args`.
        begin(self, *args[:2], **{**kwargs, "validate_args": False})

    Distribution._validate_args = False
    Distribution.__init__ = unchecked
    try:
        yield
    finally:
        Distribution.__init__, Distribution._validate_args = begin, checks
