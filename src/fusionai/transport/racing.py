"""Races connection attempts to one machine, started a moment apart. Decides which wins and which error is raised.

If an attempt fails, the next starts at once. The first attempt whose other side proves to be the expected machine
wins, and the others are dropped. `tcp` races addresses, `peer_transport` races routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError
from fusionai.transport.framed import FramedChannel

STAGGER_S: Final = 0.25
"""Head start of an attempt over the next one, in seconds."""
ALL_BEGUN_S: Final = 1.0
"""Time in seconds by which all attempts have started, however many there are: the last may be the
only one that works.
"""

C = TypeVar("C", bound=FramedChannel)


@dataclass(frozen=True, slots=True)
class Attempt(Generic[C]):
    """One way to connect. `name` is shown to people. `start` is called at most once."""

    name: str
    start: Callable[[], Coroutine[Any, Any, C]]


async def first_to_answer(attempts: Sequence[Attempt[C]], *, timeout_s: float) -> C:
    """Return the channel of the first attempt that succeeds.

    Raises `RefusedError` at once. If all attempts have failed, raises `TrustError` (another machine answered) or
    `TransportError` (no answer).
    """
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
                # Two may succeed at once: the first is used, the others are dropped like those that lost.
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
    # That another machine answered is more important than that others did not answer.
    raise next((error for error in failures if isinstance(error, TrustError)), failures[-1])


async def _drop(tasks: set[asyncio.Task[C]]) -> None:
    """Cancel attempts that lost the race and drop the channels of those that succeeded."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, FramedChannel):
            outcome.abort()
