"""Entry point of the `fusion` command: the list of commands and the handling of their errors.

Maps errors to exit codes (0 done, 1 failed, 2 wrong use, 130 interrupted) and shows a traceback only with `--debug`.
Commands are imported when called, so that `fusion --help` stays quick. Each command has a module in this package;
`cli.console` prints, and `primitives.errors` gives each error its exit code.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final, NoReturn

import click

from fusionai import __version__
from fusionai.cli import console
from fusionai.primitives import environment
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.primitives.printing import log_to_stderr
from fusionai.primitives.process import loading

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Location of a command (`module:attribute`) and its line in the list of commands."""

    target: str
    summary: str

    def load(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        with loading():
            command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is not a command")
        return command


COMMANDS: Final = {
    name: LazyCommand(*command)
    for name, command in {
        "demo": ("fusionai.cli.training.demo:demo", "Train on local processes, kill some, compare with plain PyTorch."),
        "broker": ("fusionai.cli.pool.broker:broker", "Run the broker of a pool and print an invitation."),
        "invite": ("fusionai.cli.pool.broker:invite", "Print a new invitation to the pool of this machine's broker."),
        "evict": ("fusionai.cli.pool.broker:evict", "Send a member away from the pool of this machine's broker."),
        "join": ("fusionai.cli.pool.join:join", "Join a pool with an invitation and lend this machine to it."),
        "service": (
            "fusionai.cli.service.commands:service",
            "Run join, broker or serve by itself, from login on.",
        ),
        "pool": ("fusionai.cli.pool.members:pool", "List the members of the pool and what they are doing."),
        "leave": ("fusionai.cli.pool.members:leave", "Take this machine out of the pool."),
        "trust": ("fusionai.cli.pool.trust:trust", "Choose which machines this machine's `trusted` jobs may use."),
        "train": (
            "fusionai.cli.training.train:train",
            "Train a model on the pool from a recipe; run it again to resume.",
        ),
        "data": ("fusionai.cli.training.train:data", "Show what a recipe trains on: counts, bad rows, sample rows."),
        "serve": (
            "fusionai.cli.serving.serve:serve",
            "Serve a model from the pool: OpenAI's, Anthropic's and Ollama's APIs.",
        ),
        "chat": ("fusionai.cli.serving.chat:chat", "Chat with a served model in the terminal."),
        "export": ("fusionai.cli.export:export", "Write a model as a GGUF file for llama.cpp and its relatives."),
        "jobs": ("fusionai.cli.pool.members:jobs", "List the jobs of the pool and their progress."),
        "logs": ("fusionai.cli.pool.members:logs", "Show the event history of one job."),
        "stop": ("fusionai.cli.pool.members:stop", "Stop a job cleanly; it can be resumed."),
        "check": ("fusionai.cli.check:check", "Check whether a model is supported: operators, blocks, parameters."),
        "plan": ("fusionai.cli.planning.plan:plan", "Plan a model over a pool: stages, memory, predicted speed."),
        "analyze": (
            "fusionai.cli.planning.analyze:analyze",
            "Compare many small machines on home links with a few large ones.",
        ),
        "privacy": ("fusionai.cli.privacy:privacy", "Show the privacy levels and what peers could reconstruct."),
        "audit": ("fusionai.cli.privacy:audit", "Attack your own job: what could peers reconstruct of its text?"),
        "simulate": (
            "fusionai.cli.planning.simulate:simulate",
            "Simulate hours of a job on a pool whose machines come and go.",
        ),
        "doctor": ("fusionai.cli.doctor:doctor", "Check this machine: devices, speed, network, and what to fix."),
        "completion": ("fusionai.cli.completion:completion", "Print what makes a shell complete commands and flags."),
    }.items()
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature, here and below
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        lazy = COMMANDS.get(cmd_name)
        return None if lazy is None else lazy.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else f" The commands are: {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {name!r}.{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fusion")
@click.option("--debug", is_flag=True, help="Show tracebacks and the full process log.")
def fusion(debug: bool) -> None:
    """Train and serve neural networks on machines pooled across homes and networks."""
    level = "DEBUG" if debug else environment.log_level()
    known = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level not in known:
        expected = ", ".join(name.lower() for name in known)
        raise UsageError(f"FUSION_LOG is {level.lower()!r}; expected one of {expected}.")
    log_to_stderr(level)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Raises only with `--debug`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given[: _first_command(given)]
    try:
        result = fusion.main(args=given, prog_name="fusion", standalone_mode=False)
    except BaseException as error:  # The process boundary: every error becomes a message and an exit code.
        if debug and isinstance(error, Exception) and not isinstance(error, click.ClickException):
            raise
        return _explain(error)
    return result if isinstance(result, int) else EXIT_DONE


def entry() -> NoReturn:
    """Run the `fusion` script. The process exits with the command's code even if a signal arrives during shutdown."""
    code = EXIT_INTERRUPTED
    try:
        code = main()
        _end_at_once_when_interrupted()
    except KeyboardInterrupt:  # between a command's handlers and the one set below
        _end_at_once_when_interrupted()
    if _computes_still():
        # If the interpreter shut down first, the thread's next call from a library's C++ code into Python would end
        # in `std::terminate`: "terminate called without an active exception", SIGABRT and a core file.
        _flush()
        os._exit(code)
    sys.exit(code)


def _computes_still() -> bool:
    """Return whether an abandoned background thread still computes."""
    if threading.active_count() == 1:
        return False
    from fusionai.primitives.process import THREAD_NAME

    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _end_at_once_when_interrupted() -> None:
    """Make further Ctrl-C end the process at once. The command has ended, but exit handlers of libraries may take a
    while, and a Ctrl-C raised inside one of them is printed as a traceback."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    _flush()
    signal.signal(signal.SIGINT, leave)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()


def _first_command(given: Sequence[str]) -> int:
    return next((place for place, word in enumerate(given) if not word.startswith("-")), len(given))


def _explain(error: BaseException) -> int:
    """Print the error to stderr and return the exit code."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case click.ClickException():
            error.show()
            return error.exit_code
        case FusionError():
            console.error(error.message, error.hint)
            return error.exit_code
        case click.Abort() | KeyboardInterrupt():
            console.error("interrupted.")
            return EXIT_INTERRUPTED
        case SystemExit():
            return error.code if isinstance(error.code, int) else EXIT_FAILED
        case BaseExceptionGroup():
            # Concurrent tasks fail together. The first `FusionError` is taken as the cause, the others as consequences.
            leaves = _leaves(error)
            ours = next((leaf for leaf in leaves if isinstance(leaf, FusionError)), leaves[0])
            return _explain(ours)
        case OSError() if error.errno in _SYSTEM_SENTENCES:
            where = f" ({error.filename})" if error.filename else ""
            sentence, hint = _SYSTEM_SENTENCES[error.errno or 0]
            console.error(f"{sentence}{where}.", hint)
            return EXIT_FAILED
        case MemoryError():
            console.error("this machine ran out of memory.", "Lend less with --max-memory, or use a smaller batch.")
            return EXIT_FAILED
        case _:
            console.error(f"internal error: {type(error).__name__}: {error}.", _record(error))
            return EXIT_FAILED


_SYSTEM_SENTENCES: Final[dict[int, tuple[str, str]]] = {
    errno.ENOSPC: ("the disk is full", "Free some space and run the command again; it resumes where it stopped."),
    errno.EDQUOT: ("the disk quota is used up", "Free some space and run the command again."),
    errno.EROFS: ("the file system is read-only", "Choose another directory with FUSION_HOME or --home."),
    errno.EACCES: ("permission denied", "Choose a file or directory that you may write to."),
    errno.EADDRINUSE: ("the address is already in use", "Choose another --port, or 0 for any free one."),
    errno.EMFILE: ("too many open files", "Raise the limit (`ulimit -n`) and run the command again."),
}


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for child in group.exceptions:
        found.extend(_leaves(child) if isinstance(child, BaseExceptionGroup) else [child])
    return found


def _record(error: BaseException) -> str:
    """Write the traceback to a file under `FUSION_HOME` and return the hint that names the file."""
    place = environment.fusion_home() / "errors" / f"{os.getpid()}.txt"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return "Run it again as `fusion --debug ...` to see where it happened."
    return f"Please report it with the traceback in {place}."
