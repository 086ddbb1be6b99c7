"""Trace `torch.distributions` without validation of their arguments.

A distribution checks that its parameters and samples lie in its support and raises otherwise: a branch on data, which a
graph can't hold. In a captured graph such values give NaN or infinity instead.

Neighbours: `capture.export` traces under it, `capture.draws` makes the samples from uniform numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution


@contextmanager
def unchecked_arguments() -> Iterator[None]:
    """While open, new distributions validate nothing, even with `validate_args=True`."""
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
