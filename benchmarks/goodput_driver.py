"""The pieces of a training job in a process of its own, as `fusion train` is one: what it says comes to the benchmark.

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

from fusionai.client.training import train as client
from fusionai.client.training.preparation import PreparedJob
from fusionai.client.training.train import Planned, RunEvent, TrainOptions
from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import FusionError
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress

Event = Plan | progress.Progress
LEAVING_S = 30.0
"""Between the last word and the end of the process."""


@dataclass(frozen=True)
class Failed:
    """Why the piece ended before it was asked to."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The piece is over; the process waits for the next one."""


class DriverProcess:
    """One job's driver for all its pieces: the model is captured once. `pid` from the first piece on, else None."""

    def __init__(self, recipe: Recipe, options: TrainOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, self._there = context.Pipe()
        self._process = context.Process(target=drive, args=(recipe, options, self._there), name="driver")
        self._asked = False
        """Whether the present piece was told to stop."""

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def run(self, on_event: Callable[[float, Event], None]) -> None:
        """One piece, until it has stopped. `on_event` gets the moment (`time.monotonic`, which all processes of a
        machine share) it happened at. Raises `RuntimeError` with the driver's own words where it failed."""
        loop = asyncio.get_running_loop()

        def read() -> Ended | Failed:
            while True:
                try:
                    at_s, event = self._here.recv()
                except (EOFError, OSError):
                    return Failed("the driver's process is gone")
                if isinstance(event, Ended | Failed):
                    return event
                loop.call_soon_threadsafe(on_event, at_s, event)

        if self.pid is None:
            self._process.start()
            self._there.close()
        self._asked = False
        self._here.send("go")
        end = await asyncio.to_thread(read)
        await asyncio.sleep(0)  # what `read` handed over last
        if isinstance(end, Failed):
            raise RuntimeError(end.text)
        self.stop()

    def stop(self) -> None:
        """After the step under way. Every piece is told once."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(OSError):  # it is gone: `run` says how
                self._here.send("stop")

    def close(self) -> None:
        """Blocking: the process ends by itself, or is ended."""
        self._here.close()
        if self.pid is not None:
            self._process.join(LEAVING_S)
            if self._process.is_alive():
                self._process.kill()


def drive(recipe: Recipe, options: TrainOptions, pipe: Connection) -> None:
    """The child: a piece whenever it is told to go, until the benchmark is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: the benchmark decides
        signal.signal(number, signal.SIG_IGN)
    _prepare_once()
    with contextlib.suppress(EOFError, OSError):
        while pipe.recv() == "go":
            end: Ended | Failed = Ended()
            stop = _Stop(pipe)
            try:
                asyncio.run(_drive(recipe, options, pipe, stop))
            except FusionError as error:
                end = Failed(str(error))
            pipe.send((time.monotonic(), end))
            stop.join()


def _prepare_once() -> None:
    """Capturing a model takes half a minute of a core, and each piece of a job has the same."""
    prepare, kept = client.prepare, list[PreparedJob]()

    def once(recipe: Recipe, directory: RunDirectory, tell: Callable[[str], None]) -> PreparedJob:
        if not kept:
            kept.append(prepare(recipe, directory, tell))
        return kept[0]

    client.prepare = once


class _Stop(threading.Thread):
    """Waits for the one word that ends a piece."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(daemon=True)
        self.asked = threading.Event()
        self._pipe = pipe
        self.start()

    def run(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._pipe.recv()
        self.asked.set()


async def _drive(recipe: Recipe, options: TrainOptions, pipe: Connection, asked: _Stop) -> None:
    stop = asyncio.Event()

    async def listen() -> None:
        await asyncio.to_thread(asked.asked.wait)
        stop.set()

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
                | progress.JobWaiting()
                | progress.Recovered()
                | progress.BrokerAway()
                | progress.BrokerBack()
                | progress.Warned()
            ):
                pipe.send((time.monotonic(), event))
            case _:
                return

    listening = asyncio.create_task(listen())
    await client.train(recipe, options, on_event=tell, stop=stop)
    asked.asked.set()  # a piece that ended by itself
    await listening
