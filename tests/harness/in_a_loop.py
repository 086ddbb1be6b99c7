"""A test that is a coroutine, run in an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def whole(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return whole
