"""One piece of a training job in a process of its own, as `fusion train` is one: what it says comes to the benchmark.

Decides what crosses the pipe: the plan, without the prepared model beside it, and what the judgement looks at. Both
ends are this benchmark's own processes. Neighbour: `goodput`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fusionai.client.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import FusionError
from fusionai.scheduling.types import Plan
from fusionai.training import progress

Event = Plan | progress.Progress
LEAVING_S = 30.0
"""Between the last word and the end of the process."""


@dataclass(frozen=True)
class Failed:
    """Why the piece ended before it was asked to."""

    text: str


class DriverProcess:
    """`pid` while `run` runs, else None."""

    def __init__(self, recipe: Recipe, options: TrainOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, self._there = context.Pipe()
        self._process = context.Process(target=drive, args=(recipe, options, self._there), name="driver")
        self._failed: Failed | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def run(self, on_event: Callable[[float, Event], None]) -> None:
        """Until it has stopped. `on_event` gets the moment (`time.monotonic`, which all processes of a machine share)
        it happened at. Raises `RuntimeError` with the driver's own words where it failed."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                try:
                    at_s, event = self._here.recv()
                except (EOFError, OSError):
                    return
                loop.call_soon_threadsafe(see, at_s, event)

        def see(at_s: float, event: Event | Failed) -> None:
            if isinstance(event, Failed):
                self._failed = event
            else:
                on_event(at_s, event)

        self._process.start()
        self._there.close()
        try:
            await asyncio.to_thread(read)
            await asyncio.sleep(0)  # what `read` handed over last
            await asyncio.to_thread(self._process.join, LEAVING_S)
        finally:
            if self._process.is_alive():
                self._process.kill()
        if self._failed is not None:
            raise RuntimeError(self._failed.text)
        if self._process.exitcode != 0:
            raise RuntimeError(f"the driver's process ended with {self._process.exitcode}")

    def stop(self) -> None:
        """After the step under way."""
        try:
            self._here.send("stop")
        except OSError:  # it is gone: `run` says how
            return


def drive(recipe: Recipe, options: TrainOptions, pipe: Connection) -> None:
    """The child: `train`, until it is told to stop or the benchmark is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: the benchmark decides
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(_drive(recipe, options, pipe))
    except FusionError as error:
        pipe.send((time.monotonic(), Failed(str(error))))


async def _drive(recipe: Recipe, options: TrainOptions, pipe: Connection) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        loop.call_soon_threadsafe(stop.set)

    def tell(event: RunEvent) -> None:
        match event:
            case Planned(plan=plan):
                pipe.send((time.monotonic(), plan))
            case (
                progress.StepDone()
                | progress.PlanChanged()
                | progress.FaultSeen()
                | progress.Restored()
                | progress.JobReady()
                | progress.Waiting()
                | progress.Recovered()
                | progress.BrokerAway()
                | progress.BrokerBack()
                | progress.Warned()
            ):
                pipe.send((time.monotonic(), event))
            case _:
                return

    threading.Thread(target=listen, daemon=True).start()
    await train(recipe, options, on_event=tell, stop=stop)
