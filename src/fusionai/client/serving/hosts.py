"""Runs several served models beside each other, each as a `fusion serve` process of its own that starts when a request
needs it.

A process for each model, because loading a model patches the framework for the whole process, and because its end
returns all of its memory. The processes share this machine's membership in the pool; each has a job of its own there.
They listen on loopback only and end when their standard input does, so also if this process is killed.

`coordination.serving.hosting` decides which models are loaded. `gateway.front` forwards requests to their addresses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from fusionai.client.pool.local_pool import announced_in
from fusionai.coordination.serving.hosting import EndModel, Hosting, Phase, StartModel
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.primitives.errors import FusionError
from fusionai.primitives.process import FUSION, start_child

POLL_S: Final = 0.1
STOP_S: Final = 20.0
"""Time for a process to end its job and itself, in seconds (chosen). Then it is killed."""
FINAL_CODE: Final = 2
"""Exit code of a mistake in the model or its flags, which more room in the pool would not mend."""
KEPT_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """One of the models. `name`: for clients; `adapters`: further names that it serves; `arguments`: of `fusion
    serve`, without those about where it listens."""

    name: str
    adapters: tuple[str, ...]
    arguments: tuple[str, ...]


class ModelUnavailable(FusionError):
    """The model can't be loaded; says why."""


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    reading: asyncio.Task[None]
    url: str = ""
    last_lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=KEPT_LINES))


class ModelHosts:
    """The models' processes, used as `async with ModelHosts(...) as hosts:`. `directory`: for their announcements,
    private to this user. `say`: receives the name of a model and a line of its process. `idle_s`: see `Hosting`.
    `command`: starts a process."""

    def __init__(
        self,
        programs: Sequence[ModelProgram],
        directory: Path,
        say: Callable[[str, str], None],
        *,
        idle_s: float | None = None,
        clock: Clock | None = None,
        command: Sequence[str] = (*FUSION, "serve"),
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._directory = directory
        self._say = say
        self._clock = clock or SystemClock()
        self._command = command
        self._hosting = Hosting(self._programs, idle_s)
        self._children: dict[str, _Child] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {name: [] for name in self._programs}
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._is_closing = False

    async def __aenter__(self) -> ModelHosts:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._refuse(self._programs, ModelUnavailable("the gateway stops."))
        if self._look is not None:
            self._look.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(child) for child in self._children.values()))

    @property
    def programs(self) -> tuple[ModelProgram, ...]:
        """All models, in the order in which they were given."""
        return tuple(self._programs.values())

    @property
    def phases(self) -> dict[str, Phase]:
        """What each model's process does."""
        return {name: model.phase for name, model in self._hosting.models.items()}

    @property
    def urls(self) -> dict[str, str]:
        """Addresses of the models that are loaded, the one that was used last first."""
        models = self._hosting.models
        ready = [name for name, model in models.items() if model.phase == "ready" and name in self._children]
        ready.sort(key=lambda name: (models[name].running, models[name].used_s), reverse=True)
        return {name: self._children[name].url for name in ready}

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[str]:
        """Yield the model's address once it is loaded, which may take minutes; it stays loaded during the block. Raises
        `ModelUnavailable`."""
        if self._is_closing:
            raise ModelUnavailable("the gateway stops.")
        if self._hosting.admits(name):
            self._hosting.begin(name)
        else:
            await self._loaded(name)
        try:
            if (child := self._children.get(name)) is None:
                raise ModelUnavailable(f"the process of the model {name!r} has just ended.", hint="Try again.")
            yield child.url
        finally:
            self._hosting.finish(name, self._clock.now_s())
            self._advance()

    async def _loaded(self, name: str) -> None:
        """Wait until the model is loaded and this request counts as being answered."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[name].append(turn)
        self._hosting.wait(name, self._clock.now_s())
        self._advance()
        try:
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            if turn in self._waiting[name]:
                self._waiting[name].remove(turn)
                self._hosting.give_up(name)
            elif not turn.cancelled() and turn.exception() is None:
                self._hosting.finish(name, self._clock.now_s())
            self._advance()
            raise

    def _advance(self) -> None:
        """Take the steps that are due. Call it after each event."""
        if self._is_closing:
            return
        now_s = self._clock.now_s()
        match self._hosting.next_step(now_s):
            case StartModel(name=name):
                self._later(self._start(name))
            case EndModel(name=name, why=why):
                self._say(name, f"unloaded: {why}")
                self._later(self._end(name))
            case None:
                pass
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if (at_s := self._hosting.next_look_s()) is not None:
            self._look = asyncio.get_running_loop().call_later(max(at_s - now_s, POLL_S), self._advance)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, name: str) -> None:
        announced = self._directory / f"{secrets.token_hex(8)}.json"
        self._say(name, "loading")
        try:
            child = self._children[name] = await self._spawn(name, announced)
            url = await _url(child, announced)
        except OSError as problem:
            self._failed(name, f"its process can't be started: {problem}", is_final=False)
            return
        finally:
            announced.unlink(missing_ok=True)
        if url is None:
            code = await child.process.wait()
            await asyncio.gather(child.reading, return_exceptions=True)
            del self._children[name]
            self._failed(name, _reason(child), is_final=code == FINAL_CODE)
            return
        child.url = url
        self._hosting.started(name, self._clock.now_s())
        self._say(name, "loaded")
        self._admit(name)
        self._advance()
        await self._watch(name, child)

    async def _watch(self, name: str, child: _Child) -> None:
        """Wait for an end of the process that was not asked for."""
        await child.process.wait()
        if self._children.get(name) is not child or self._hosting.models[name].phase == "ending":
            return
        await asyncio.gather(child.reading, return_exceptions=True)
        del self._children[name]
        self._say(name, f"its process has ended: {_reason(child)}")
        self._hosting.ended(name, self._clock.now_s())
        self._advance()

    async def _end(self, name: str) -> None:
        await self._stop(self._children[name])
        del self._children[name]
        self._hosting.ended(name, self._clock.now_s())
        self._advance()

    def _failed(self, name: str, reason: str, *, is_final: bool) -> None:
        if self._hosting.failed(name, self._clock.now_s(), is_final=is_final):
            self._refuse([name], ModelUnavailable(f"the model {name!r} can't be loaded: {reason}"))
        else:
            self._say(name, "is tried again once there is room")
        self._advance()

    def _admit(self, name: str) -> None:
        waiting, self._waiting[name] = self._waiting[name], []
        for turn in waiting:
            self._hosting.give_up(name)
            self._hosting.begin(name)
            turn.set_result(None)

    def _refuse(self, names: Iterable[str], problem: ModelUnavailable) -> None:
        for name in names:
            waiting, self._waiting[name] = self._waiting[name], []
            for turn in waiting:
                self._hosting.give_up(name)
                turn.set_exception(problem)

    async def _spawn(self, name: str, announced: Path) -> _Child:
        place = ("--name", name, "--host", "127.0.0.1", "--port", "0", "--json", str(announced))
        arguments = (*self._programs[name].arguments, *place, "--lifeline", "--behind-gateway")
        process = await start_child((*self._command, *arguments))
        child = _Child(process, asyncio.create_task(asyncio.sleep(0)))
        child.reading = asyncio.create_task(self._read(name, child))
        return child

    async def _read(self, name: str, child: _Child) -> None:
        """Pass on the process's lines."""
        assert child.process.stdout is not None
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # a line longer than 64 KiB, which the stream has dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            child.last_lines.append(text)
            self._say(name, text)

    async def _stop(self, child: _Child) -> None:
        if child.process.stdin is not None:
            child.process.stdin.close()
        try:
            await asyncio.wait_for(child.process.wait(), STOP_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
        await asyncio.gather(child.reading, return_exceptions=True)


async def _url(child: _Child, announced: Path) -> str | None:
    """Wait until the process has announced its address; None if it ends before."""
    while child.process.returncode is None:
        if (written := announced_in(announced)) is not None:
            return str(msgspec.json.decode(written, type=dict[str, Any])["url"])
        await asyncio.sleep(POLL_S)
    return None


def _reason(child: _Child) -> str:
    """Return what the process said last about its error."""
    errors = [line.partition("error: ")[2] for line in child.last_lines if line.startswith("error: ")]
    return (errors or [*child.last_lines] or ["it said nothing"])[-1]
