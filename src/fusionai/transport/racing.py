"""Several ways to one machine, tried one a moment after the other. Decides which wins and what failing means.

An attempt that fails makes room for the next at once; the first whose other side proves to be the expected one wins,
and the others are dropped.
Neighbours: `tcp` races addresses, `peer_transport` races ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError
from fusionai.transport.framed import FramedChannel

STAGGER_S: Final = 0.25
"""An attempt gets this head start before the next one begins beside it."""
ALL_BEGUN_S: Final = 1.0
"""However many there are, the last begins by then: it may be the only one that works."""

C = TypeVar("C", bound=FramedChannel)


@dataclass(frozen=True, slots=True)
class Attempt(Generic[C]):
    """`name`: what is tried, for people. `start` is called once, or never."""

    name: str
    start: Callable[[], Coroutine[Any, Any, C]]


async def first_to_answer(attempts: Sequence[Attempt[C]], *, timeout_s: float) -> C:
    """Raises `RefusedError` at once, else when all have failed: `TrustError` (somebody else answered) or
    `TransportError` (nobody did)."""
    waiting = list(attempts[::-1])
    stagger_s = min(STAGGER_S, ALL_BEGUN_S / len(waiting)) if waiting else 0.0
    running: set[asyncio.Task[C]] = set()
    failures: list[FusionError] = []
    try:
        async with asyncio.timeout(timeout_s):
            while waiting or running:
                if waiting:
                    running.add(asyncio.create_task(waiting.pop().start()))
                done, running = await asyncio.wait(
                    running, timeout=stagger_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                # Two may succeed at once: the first is used, the others go the way of the losers.
                for task in sorted(done, key=lambda task: task.exception() is not None):
                    match task.exception():
                        case None:
                            running |= done - {task}
                            return task.result()
                        case RefusedError() as error:
                            raise error
                        case FusionError() as error:
                            failures.append(error)
                        case error:
                            raise error
    except TimeoutError:
        failures.append(
            TransportError(
                f"nobody answered at {', '.join(attempt.name for attempt in attempts)} within {timeout_s:g} s.",
                hint="Check that the other machine is on and that its port is reachable.",
            )
        )
    finally:
        await _drop(running)
    # Somebody else answering is the more important news than nobody answering elsewhere.
    raise next((error for error in failures if isinstance(error, TrustError)), failures[-1])


async def _drop(tasks: set[asyncio.Task[C]]) -> None:
    """End attempts that lost the race, whatever has become of them."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, FramedChannel):
            outcome.abort()
