"""Keeps one service running: starts its command, logs what it prints, and starts it again after an error.

`supervise` is what the system's service manager starts at login (`cli.service.managers`). It behaves alike on every
platform, so the manager needs only to start it. The command has the supervisor's pipe as its lifeline: it ends cleanly
even if the supervisor is killed.

services/NAME.json        what runs; may contain an invitation, so only this user may read the directory
services/NAME.state.json  what became of it
services/NAME.log         what it printed, with times; older parts in NAME.log.1 to NAME.log.3

The directory is the user's, whatever FUSION_HOME says: the system's manager knows services by their names alone.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from fusionai.cli.console import printable
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.process import FUSION, start_child
from fusionai.primitives.units import format_seconds
from fusionai.storage.atomic import JobLock
from fusionai.transport.security.identity import make_private_directory, read_private_json, write_private_json

WRONG_USE: Final = 2
"""Exit code for a user's mistake. Only some correct themselves, such as a model on a disk that is not there yet."""
FIRST_DELAY_S: Final = 5.0
LONGEST_DELAY_S: Final = 300.0
HEALTHY_S: Final = 600.0
"""A command that ran this long counts as healthy, and its next failure as the first (all three chosen)."""
END_S: Final = 45.0
"""Time that a command gets to hand over its work after it was asked to end (chosen)."""
LOG_BYTES: Final = 4_000_000
OLDER_LOGS: Final = 3
_READ_BYTES: Final = 65_536


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a service runs: `fusion ARGUMENTS` in `directory`, with `variables` added to the environment."""

    name: str
    arguments: tuple[str, ...]
    directory: str
    variables: dict[str, str] = {}


class ServiceState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a service does since the wall-clock time `since_s`. `last_exit`: the latest exit code of its command."""

    phase: Literal["running", "waiting", "stopped", "ended"]
    since_s: float
    process: int = 0
    restarts: int = 0
    last_exit: int | None = None


@dataclass(frozen=True, slots=True)
class StartAgain:
    """The command is started again after a while. `failures`: how many in a row there were."""

    delay_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class LeaveEnded:
    """The command is not started again."""

    why: str


def after_exit(code: int, ran_s: float, failures: int) -> StartAgain | LeaveEnded:
    """Decide what follows when the command ended by itself after `ran_s` seconds. `failures`: how many of its runs had
    failed in a row before. A network that is away for a day costs a try every five minutes, and so does a command that
    can't work."""
    if code == 0:
        return LeaveEnded("the command ended by itself")
    if code == WRONG_USE:
        return StartAgain(LONGEST_DELAY_S, failures + 1)
    before = 0 if ran_s >= HEALTHY_S else failures
    return StartAgain(min(FIRST_DELAY_S * 2.0 ** min(before, 10), LONGEST_DELAY_S), before + 1)


class ServiceFiles:
    """The files of one of the user's services."""

    def __init__(self, name: str) -> None:
        self.directory = environment.services_directory()
        self.name = name
        self.definition = self.directory / f"{name}.json"
        self.state = self.directory / f"{name}.state.json"
        self.log = self.directory / f"{name}.log"
        self.lock = self.directory / f"{name}.lock"

    def read(self) -> Service:
        """Return what the service runs. Raises `UsageError` if there is no such service, `StorageError` for a file that
        is not one."""
        found = read_private_json(
            self.definition, Service, what="a service", hint=f"Remove it with `fusion service remove {self.name}`."
        )
        if found is None:
            known = ", ".join(installed()) or "none is installed"
            raise UsageError(
                f"there is no service {self.name!r}; known: {known}.",
                hint="`fusion service install COMMAND` makes one, e.g. `fusion service install join`.",
            )
        return found

    def write(self, service: Service) -> None:
        make_private_directory(self.directory)
        write_private_json(self.definition, service)

    def read_state(self) -> ServiceState | None:
        """Return what became of the service, None before its first start."""
        return read_private_json(self.state, ServiceState, what="the state of a service", hint="Delete the file.")

    def lines(self) -> list[str]:
        """Return the last lines that the service printed: all of the current log and of the one before."""
        lines: list[str] = []
        for path in (self.log.with_name(f"{self.log.name}.1"), self.log):
            with suppress(FileNotFoundError):
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines

    def remove(self) -> None:
        older = [self.log.with_name(f"{self.log.name}.{number}") for number in range(1, OLDER_LOGS + 1)]
        for path in (self.definition, self.state, self.lock, self.log, *older):
            path.unlink(missing_ok=True)


def installed() -> list[str]:
    """Return the names of the user's services."""
    files = environment.services_directory().glob("*.json")
    return sorted(path.stem for path in files if not path.name.endswith(".state.json"))


class ServiceLog:
    """Writes what a command prints to its log, a time before each line. The log rotates, so that it never fills a
    disk."""

    def __init__(self, path: Path) -> None:
        self._handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=OLDER_LOGS, encoding="utf-8", delay=True
        )
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        self._rest = b""

    def line(self, text: str) -> None:
        record = logging.LogRecord("service", logging.INFO, "", 0, "%s", (printable(text),), None)
        self._handler.emit(record)

    def write(self, data: bytes) -> None:
        """Log the complete lines of `data` and of what was left before; keep the rest for the next call."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _READ_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for text in lines:
            self.line(text.decode("utf-8", errors="replace").rstrip("\r"))

    def end_line(self) -> None:
        """Log a line that was begun."""
        if self._rest:
            self.write(b"\n")

    def close(self) -> None:
        self._handler.close()


async def supervise(files: ServiceFiles, stop: asyncio.Event) -> int:
    """Run a service until `stop` is set or its command ends for good, and return its exit code. Raises `UsageError` if
    there is no such service, `InUse` if it runs already."""
    service = files.read()
    with JobLock(files.lock):
        log = ServiceLog(files.log)
        try:
            return await _keep_running(service, files, log, stop)
        finally:
            log.close()


async def _keep_running(service: Service, files: ServiceFiles, log: ServiceLog, stop: asyncio.Event) -> int:
    failures = restarts = 0
    clock = asyncio.get_running_loop().time
    while True:
        began_s = clock()
        process = await start_command(service)
        log.line(f"[started: process {process.pid}]")
        running = ServiceState(phase="running", since_s=time.time(), process=process.pid, restarts=restarts)
        write_private_json(files.state, running)
        code = await run_to_end(process, log, stop)
        after = after_exit(code, clock() - began_s, failures)
        if stop.is_set():
            after = LeaveEnded("stopped")
        log.line(f"[ended with exit code {code}: {_words(after)}]")
        match after:
            case LeaveEnded():
                phase = "stopped" if stop.is_set() else "ended"
                _note(files, running, phase, code)
                return 0 if stop.is_set() else code
            case StartAgain(delay_s, failures):
                _note(files, running, "waiting", code)
                restarts += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), delay_s)
        if stop.is_set():
            _note(files, running, "stopped", code)
            return 0


def _words(after: StartAgain | LeaveEnded) -> str:
    match after:
        case StartAgain(delay_s):
            return f"it is started again in {format_seconds(delay_s)}"
        case LeaveEnded(why):
            return why


def _note(files: ServiceFiles, state: ServiceState, phase: Literal["waiting", "stopped", "ended"], code: int) -> None:
    changed = msgspec.structs.replace(state, phase=phase, since_s=time.time(), process=0, last_exit=code)
    write_private_json(files.state, changed)


async def start_command(service: Service) -> asyncio.subprocess.Process:
    """Start `fusion ARGUMENTS --lifeline`, with its output in one pipe."""
    command = (*FUSION, *service.arguments, "--lifeline")
    return await start_child(command, directory=_directory(service), variables=service.variables)


def _directory(service: Service) -> str | None:
    """Return where the command runs, None for the supervisor's own directory if the service's is gone."""
    return service.directory if Path(service.directory).is_dir() else None


async def run_to_end(process: asyncio.subprocess.Process, log: ServiceLog, stop: asyncio.Event) -> int:
    """Log what the command prints, ask it to end when `stop` is set, and return its exit code."""
    printed = asyncio.ensure_future(_copy(process, log))
    stopping = asyncio.ensure_future(stop.wait())
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            _ask_to_end(process)
            if not await _within(END_S, ended):
                process.kill()
        code = await ended
        # Programs that the command started may hold its output open.
        await _within(1.0, printed)
        return code
    finally:
        for task in (printed, stopping, ended):
            task.cancel()
        if process.returncode is None:
            process.kill()


async def _within(limit_s: float, task: asyncio.Future[Any]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    return bool(done)


def _ask_to_end(process: asyncio.subprocess.Process) -> None:
    """On Windows no signal can be handled, so the command's lifeline is cut."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError):
            process.terminate()
    elif process.stdin is not None:
        process.stdin.close()


async def _copy(process: asyncio.subprocess.Process, log: ServiceLog) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(_READ_BYTES):
        log.write(data)
    log.end_line()
