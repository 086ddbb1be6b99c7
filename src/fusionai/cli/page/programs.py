"""Commands that were started from the page: `fusion train` and `fusion serve` as processes of the broker's machine.

They run as long as the broker: each has a pipe of it as its lifeline and is asked to end before the broker ends, so
that a training job writes its last checkpoint. What they print is kept below the broker's home:

page/NAME/         a recipe that was made on the page, and the job's output
page/logs/N.log    what command N printed since the broker started

`cli.service.supervisor` starts and ends a process, `training` and `desk` say which.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.cli.page.overview import ProgramRow
from fusionai.cli.service.supervisor import Service, ServiceLog, run_to_end, start_command
from fusionai.primitives import environment
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.primitives.process import FUSION
from fusionai.transport.security.identity import make_private_directory

MOST_RUNNING: Final = 8
MOST_SHOWN: Final = 20
LOG_LINES: Final = 400
"""Lines of a log that are sent (all three chosen)."""
ONCE_S: Final = 600.0
"""Time for a command that only computes an answer, in seconds (chosen)."""
_STAMP_LENGTH: Final = len("2026-01-01 00:00:00 ")


class _ServeFigures(msgspec.Struct):
    """What is read of the file that `fusion serve --json` writes when the model is ready."""

    url: str


@dataclass
class PageProgram:
    """One command. `json_file`: where `fusion serve` writes its address."""

    number: int
    kind: Literal["train", "serve"]
    title: str
    arguments: tuple[str, ...]
    log: Path
    json_file: Path | None = None
    since_s: float = field(default_factory=time.time)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    url: str = ""
    last: str = ""

    def row(self) -> ProgramRow:
        self._look()
        ended = self.exit_code is not None
        return ProgramRow(
            number=self.number,
            kind=self.kind,
            title=self.title,
            command=shlex.join(("fusion", *self.arguments)),
            state="ended" if ended else "ending" if self.stop.is_set() else "running",
            since_s=self.since_s,
            exit_code=self.exit_code,
            url="" if ended else self.url,
            last=self.last,
        )

    def _look(self) -> None:
        """Read the program's last line, and its address if it has just become known."""
        lines = tail(self.log, 1)
        self.last = lines[0][_STAMP_LENGTH:] if lines else ""
        if self.json_file is not None and not self.url and self.json_file.is_file():
            with suppress(OSError, msgspec.DecodeError):
                self.url = msgspec.json.decode(self.json_file.read_bytes(), type=_ServeFigures).url


class PagePrograms:
    """All commands that were started since the broker started. `directory`: below the broker's home."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._programs: dict[int, PageProgram] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def rows(self) -> tuple[ProgramRow, ...]:
        """Return the newest commands first."""
        newest = sorted(self._programs.values(), key=lambda one: -one.number)
        return tuple(one.row() for one in newest[:MOST_SHOWN])

    def running(self, kind: Literal["train", "serve"], title: str) -> bool:
        return any((one.kind, one.title) == (kind, title) for one in self._live())

    def _live(self) -> list[PageProgram]:
        return [one for one in self._programs.values() if one.exit_code is None]

    def start(self, kind: Literal["train", "serve"], title: str, arguments: Sequence[str]) -> PageProgram:
        """Start `fusion ARGUMENTS`. Raises `UsageError` if too many run, or one of this kind with this title does."""
        if self.running(kind, title):
            raise UsageError(f"{title} runs already.", hint="End it first.")
        if len(self._live()) >= MOST_RUNNING:
            raise UsageError(f"{MOST_RUNNING} programs run, which is the limit of the page.", hint="End one first.")
        logs = self.directory / "logs"
        make_private_directory(logs)
        number = len(self._programs) + 1
        log, file = logs / f"{number}.log", logs / f"{number}.json"
        for old in (log, file):
            old.unlink(missing_ok=True)
        if kind == "serve":
            arguments = (*arguments, "--json", str(file))
        program = PageProgram(number, kind, title, tuple(arguments), log, file if kind == "serve" else None)
        self._programs[number] = program
        task = asyncio.create_task(self._run(program))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return program

    def end(self, number: int) -> PageProgram:
        """Ask a command to end. Raises `UsageError` if it does not run."""
        program = self._programs.get(number)
        if program is None or program.exit_code is not None:
            raise UsageError(f"program {number} does not run.")
        program.stop.set()
        return program

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the last lines that a command printed. Raises `UsageError` for an unknown one."""
        program = self._programs.get(number)
        if program is None:
            raise UsageError(f"there is no program {number}.")
        return tail(program.log, LOG_LINES)

    async def close(self) -> None:
        """End all commands, and return when they have."""
        for program in self._programs.values():
            program.stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def once(self, arguments: Sequence[str]) -> str:
        """Return what `fusion ARGUMENTS` prints. Raises `FusionError` with its own words if it fails."""
        make_private_directory(self.directory)
        process = await asyncio.create_subprocess_exec(
            *(*FUSION, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.directory,
            env=environment.inherited(),
            start_new_session=sys.platform != "win32",
        )
        try:
            async with asyncio.timeout(ONCE_S):
                printed, complaints = await process.communicate()
        except TimeoutError:
            raise FusionError(f"`fusion {arguments[0]}` did not end within {ONCE_S:.0f} s.") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            said = complaints.decode(errors="replace").strip().splitlines()
            raise UsageError("\n".join(said[-6:]) or f"`fusion {arguments[0]}` failed.")
        return printed.decode(errors="replace")

    async def _run(self, program: PageProgram) -> None:
        log = ServiceLog(program.log)
        service = Service(name=program.title, arguments=program.arguments, directory=str(self.directory))
        try:
            log.line(f"[{shlex.join(('fusion', *program.arguments))}]")
            code = await run_to_end(await start_command(service), log, program.stop)
            log.line(f"[ended with exit code {code}]")
            program.exit_code = code
        except OSError as problem:
            log.line(f"[not started: {problem}]")
        finally:
            program.since_s = time.time()
            program.exit_code = 1 if program.exit_code is None else program.exit_code
            log.close()


def tail(path: Path, count: int) -> tuple[str, ...]:
    """Return the last lines of a log, none if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 512 * count))
            return tuple(file.read().decode(errors="replace").splitlines()[-count:])
    except FileNotFoundError:
        return ()
