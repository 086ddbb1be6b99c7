"""This process: cost of the garbage collector, CPU share relative to other processes, work beside the event loop, and
processes that it starts.

Objects that stay are frozen, so that collections do not visit them. Linux shares the processors between sessions
("autogroup", sched(7)); a session may lower its own share. The operating system may ignore it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeVar

from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import UsageError

if TYPE_CHECKING:
    from asyncio.subprocess import Process

T = TypeVar("T")
THREAD_NAME: Final = "background"
"""Name of the threads of `in_background`. At its end the program looks for threads of this name that still compute."""


def set_aside_what_stays() -> None:
    """Collect garbage once, then exclude all live objects from later collections. Takes a moment. A later call examines
    everything again: objects that were frozen earlier and became garbage are freed too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # resets the collector's count of live objects to nearly none


@contextmanager
def loading() -> Generator[None]:
    """Collect nothing while modules are imported, and exclude what they created from later collections.

    That includes the collection at the end of the process. Of a framework's 370,000 objects, 8,000 are garbage in
    cycles. Finding them takes a quarter of the import's time, so they stay until the next `set_aside_what_stays`.
    Without an import nothing is frozen. Several threads may use this at once.
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            gc.collect()  # nothing to collect, but resets the collector's counts
        if enabled:
            gc.enable()


FUSION: Final = (sys.executable, "-m", "fusionai")
"""How the command line of a further process of this program begins."""


async def start_child(
    command: Sequence[str],
    output: IO[bytes] | None = None,
    *,
    directory: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Process:
    """Start a process with a pipe as its standard input, which stays open as long as this process runs. `output`: the
    file for what it prints; None: another pipe. `directory`: where it runs; `variables`: added to its environment."""
    import asyncio  # here, so that `fusion --help` does not load it

    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE if output is None else output,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
        env={**inherited(), **(variables or {}), "PYTHONUNBUFFERED": "1"},
        # Ctrl-C on the terminal must reach only this process, which ends its children itself.
        start_new_session=sys.platform != "win32",
    )


ORDINARY = 0
YIELDING = 10
"""About a tenth of an ordinary group's share if both are busy; all of the processor if no other group is."""


def weigh_session(leader: int, niceness: int) -> bool:
    """Set the niceness, 0 to 19, of the session that process `leader` began. Returns False if the system has no
    autogroups or the process is gone."""
    try:
        Path(f"/proc/{leader}/autogroup").write_text(str(niceness))
    except OSError:
        return False
    return True


async def in_background(work: Callable[[], T]) -> T:
    """Run long blocking `work` in a new daemon thread and return its result. If the call is cancelled, the thread runs
    on. Unlike with `asyncio.to_thread`, the program can end at once then, so `work` must allow to be cut off at any
    point, as in a killed process."""
    import asyncio  # here, so that `fusion --help` does not load it

    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except SystemExit as leaving:
            # The job owner's own code runs here, and its `sys.exit` must be reported.
            future.set_exception(UsageError(f"the model's code called sys.exit({leaving.code!r})."))
        except Exception as problem:  # noqa: BLE001 - passed to the awaiting caller
            future.set_exception(problem)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)
