"""Starts `fusion` commands as processes of their own without importing everything anew: one process has, and forks.

What runs in such a process is the shipped command, with its own arguments, environment and pipes; only the seconds that
Python takes to import torch are saved, some hundred times in a run of the tests. Where a process must not have been
there before (what it has loaded is looked at), start an interpreter instead.

The child side of this file is run by path. Neighbour: `harness.live_pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TextIO
from unittest.mock import patch

if TYPE_CHECKING:
    from fusionai.backends.worker.channel import Arena

STARTING_S: Final = 300.0
"""For a fork, on a machine that has other work."""
_LENGTH: Final = struct.Struct("<I")
_MODULES: Final = (
    "fusionai.cli.pool.broker",
    "fusionai.cli.pool.join",
    "fusionai.cli.training.train",
    "fusionai.broker.server",
    "fusionai.peer.daemon",
    "fusionai.client.training.train",
    "fusionai.backends.torch.backend",
    "fusionai.backends.worker.client",
    "fusionai.backends.worker.server",
    "fusionai.capture.capture",
    "torch.fx.experimental.symbolic_shapes",
)
"""What commands would import; none of it starts threads or opens anything."""


class Child:
    """As far as tests use one, a `subprocess.Popen`. `stdout`: text of both streams."""

    def __init__(self, zygote: Zygote, pid: int, stdout: TextIO | None = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._zygote = zygote

    @property
    def returncode(self) -> int | None:
        return self._zygote.ended.get(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._zygote.news:
            if not self._zygote.news.wait_for(lambda: self.pid in self._zygote.ended, timeout):
                raise subprocess.TimeoutExpired("fusion", timeout or 0.0)
        return self._zygote.ended[self.pid]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class LocalChild:
    """As far as local pools and hosts of models use one, an `asyncio.subprocess.Process`."""

    def __init__(self, child: Child, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader | None) -> None:
        self.pid, self.stdin, self.stdout = child.pid, stdin, stdout
        self.kill, self.terminate = child.kill, child.terminate
        self._child = child

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the process
                loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(code))

        self._child._zygote.when_ended(self.pid, tell)
        return await ended


class Zygote:
    """The process that forks, and what to say to it. Started by a test process with its first command, gone with it;
    what it forked speaks to it by a channel of its own."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        self._channel = self._begun() if channel is None else channel
        self.ended: dict[int, int] = {}
        """Pid -> exit code, as `subprocess` has it."""
        self.news = threading.Condition()
        self._waiting: dict[int, list[Callable[[int], None]]] = {}
        self._started: queue.Queue[int] = queue.Queue()
        self._turn = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _begun(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        theirs.close()
        return ours

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """`fusion ARGUMENTS`, which reads nothing."""
        reading, writing = os.pipe()
        try:
            child = self._forked(arguments, environment, {writing: (1, 2)})
        finally:
            os.close(writing)
        child.stdout = os.fdopen(reading, encoding="utf-8")
        return child

    async def start_child(self, command: Sequence[str], output: IO[bytes] | None = None, **_: object) -> LocalChild:
        """In the place of `fusionai.primitives.process.start_child`."""
        arguments = command[command.index("fusionai") + 1 :]
        given, giving = os.pipe()
        reading, writing = os.pipe() if output is None else (None, output.fileno())
        try:
            child = self._forked(arguments, _environment(), {given: (0,), writing: (1, 2)}, session=True)
        finally:
            os.close(given)
            if reading is not None:
                os.close(writing)
        return LocalChild(child, await _writer(giving), None if reading is None else await _reader(reading))

    def when_ended(self, pid: int, tell: Callable[[int], None]) -> None:
        """Tell the exit code, from another thread if the process still runs."""
        with self.news:
            if pid not in self.ended:
                self._waiting.setdefault(pid, []).append(tell)
                return
        tell(self.ended[pid])

    def _forked(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Mapping[int, tuple[int, ...]],
        *,
        session: bool = False,
    ) -> Child:
        """`streams`: descriptors of this process -> those that they become."""
        told = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "at": os.getcwd(),
            "streams": list(streams.values()),
            "session": session,
        }
        body = json.dumps(told).encode()
        with self._turn:
            socket.send_fds(self._channel, [_LENGTH.pack(len(body))], list(streams))
            self._channel.sendall(body)
            pid = self._started.get(timeout=STARTING_S)
        if not pid:
            raise RuntimeError("the process that forks commands has ended; its error is above.")
        return Child(self, pid)

    def _listen(self) -> None:
        with self._channel.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                if "started" in told:
                    self._started.put(told["started"])
                    continue
                with self.news:
                    self.ended[told["ended"]] = told["code"]
                    self.news.notify_all()
                    waiting = self._waiting.pop(told["ended"], [])
                for tell in waiting:
                    tell(told["code"])
        self._started.put(0)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(descriptor, "wb")
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb")
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


@cache
def of_this_process() -> Zygote:
    return Zygote()


@contextlib.contextmanager
def forking(zygote: Callable[[], Zygote] = of_this_process) -> Generator[None]:
    """Local pools and hosts of models that this process opens meanwhile fork what they start."""
    from fusionai.client.pool import local_pool
    from fusionai.client.serving import hosts

    with (
        patch.object(local_pool, "start_child", lambda *given, **more: zygote().start_child(*given, **more)),
        patch.object(hosts, "start_child", lambda *given, **more: zygote().start_child(*given, **more)),
    ):
        yield


# ------------------------------------------------------------------------------------------------------ the process


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int], socket.socket] | None:
    """In a child: what it is to run, its streams and its channel. In the zygote None, when the test process ended."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    channels, asked_by = [channel], dict[int, socket.socket]()
    while True:
        for ready in select.select([waking, *channels], [], [])[0]:
            if ready == waking:
                os.read(waking, 4096)
                _tell_of_the_dead(asked_by)
                continue
            told, streams = _question(ready)
            if told is None:
                if ready is channel:
                    return None
                channels.remove(ready)
                ready.close()
                continue
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (waking, woken):
                    os.close(descriptor)
                for one in (*channels, ours):
                    one.close()
                return told, streams, theirs
            theirs.close()
            for stream in streams:
                os.close(stream)
            channels.append(ours)
            asked_by[pid] = ready
            with contextlib.suppress(OSError):
                ready.sendall(json.dumps({"started": pid}).encode() + b"\n")


def _question(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """None when there is none left to ask."""
    try:
        head, streams, _, _ = socket.recv_fds(channel, _LENGTH.size, 3)
        content, size = b"", _LENGTH.unpack(head)[0] if head else 0
        while len(content) < size:
            content += channel.recv(size - len(content)) or b"\0" * size
        return (json.loads(content) if head else None), streams
    except (OSError, ValueError):  # it was killed while it asked
        return None, []


def _tell_of_the_dead(asked_by: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            asked_by.pop(pid).sendall(json.dumps({"ended": pid, "code": code}).encode() + b"\n")


class ForkedWorker:
    """As far as `WorkerProcess` uses one, a `subprocess.Popen`: the worker is forked, and has torch already."""

    def __init__(self, arena: Arena, environment: Mapping[str, str], directory: Path) -> None:
        (asked, asking), (answering, answered) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(asked, answered, arena.descriptor, environment, directory)
            finally:
                os._exit(1)
        for descriptor in (asked, answered):
            os.close(descriptor)
        self.stdin, self.stdout = os.fdopen(asking, "wb"), os.fdopen(answering, "rb")
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def _become(self, asked: int, answered: int, arena: int, environment: Mapping[str, str], directory: Path) -> None:
        """Become a worker: no descriptor but the pipes and the arena, and its own environment."""
        os.dup2(asked, 0)
        os.dup2(answered, 1)
        kept = os.dup2(arena, max(arena, 3))
        os.closerange(3, kept)
        os.closerange(kept + 1, 4096)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        from fusionai.backends.worker import server

        sys.stdin = os.fdopen(0, "r")
        server.main()
        os._exit(0)

    def poll(self) -> int | None:
        return self._reaped(os.WNOHANG)

    def wait(self) -> int:
        code = self._reaped(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reaped(self, options: int) -> int | None:
        with self._reaping:  # the event loop asks whether it lives while another thread waits for its end
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


def main() -> None:
    import gc
    import importlib

    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    work = _serve(socket.socket(fileno=int(sys.argv[1])))
    if work is None:
        return
    told, streams, channel = work
    for stream, become in zip(streams, told["streams"], strict=True):
        for number in become:
            os.dup2(stream, number)
        os.close(stream)
    if told["session"]:
        os.setsid()
    sys.stdin = os.fdopen(0, "r", closefd=False)
    os.chdir(told["at"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = ["fusion", *told["arguments"]]
    from fusionai.backends.worker import client as worker_client
    from fusionai.cli.main import entry

    worker_client.start_process = ForkedWorker  # pyright: ignore[reportAttributeAccessIssue]
    with forking(cache(lambda: Zygote(channel))):
        entry()


if __name__ == "__main__":
    main()
