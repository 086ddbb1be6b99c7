"""Starts `fusion` commands as processes of their own without importing everything anew: one process has, and forks.

What runs in such a process is the shipped command, with its own arguments, environment and pipes; only the seconds that
Python takes to import torch are saved, some hundred times in a run of the tests. Where a process must not have been
there before (what it has loaded is looked at), start an interpreter instead.

The child side of this file is run by path. Neighbour: `harness.live_pool`.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from fusionai.backends.worker.channel import Arena

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

    def __init__(self, zygote: Zygote, pid: int, stdout: TextIO) -> None:
        self.pid = pid
        self.stdout: TextIO | None = stdout
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


class Zygote:
    """One of a test process; started with the first command, gone with the test process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.ended: dict[int, int] = {}
        """Pid -> exit code, as `subprocess` has it."""
        self.news = threading.Condition()
        self._started: queue.Queue[int] = queue.Queue()
        self._turn = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        from harness.patience import CEILING_S  # not at the top: the process that forks finds only what is installed

        reading, writing = os.pipe()
        try:
            with self._turn:
                told = json.dumps({"arguments": list(arguments), "environment": dict(environment), "at": os.getcwd()})
                body = told.encode()
                socket.send_fds(self._channel, [_LENGTH.pack(len(body))], [writing])
                self._channel.sendall(body)
                pid = self._started.get(timeout=CEILING_S)
        finally:
            os.close(writing)
        if not pid:
            raise RuntimeError("the process that forks commands has ended; its error is above.")
        return Child(self, pid, os.fdopen(reading, encoding="utf-8"))

    def _listen(self) -> None:
        with self._channel.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                if "started" in told:
                    self._started.put(told["started"])
                else:
                    with self.news:
                        self.ended[told["ended"]] = told["code"]
                        self.news.notify_all()
        self._started.put(0)


# ------------------------------------------------------------------------------------------------------ the process


def _serve(channel: socket.socket) -> tuple[int, dict[str, Any]] | None:
    """In a child: the pipe it writes to, and what it is to run. In the zygote None, when nobody needs it any more."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            _tell_of_the_dead(channel)
        if channel not in ready:
            continue
        head, pipes, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
        if not head:
            return None
        told = json.loads(_exactly(channel, _LENGTH.unpack(head)[0]))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (waking, woken):
                os.close(descriptor)
            channel.close()
            return pipes[0], told
        os.close(pipes[0])
        channel.sendall(json.dumps({"started": pid}).encode() + b"\n")


def _exactly(channel: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += channel.recv(size - len(content))
    return content


def _tell_of_the_dead(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps({"ended": pid, "code": code}).encode() + b"\n")


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
    pipe, told = work
    for stream in (1, 2):
        os.dup2(pipe, stream)
    os.close(pipe)
    os.chdir(told["at"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = ["fusion", *told["arguments"]]
    from fusionai.backends.worker import client as worker_client
    from fusionai.cli.main import entry

    worker_client.start_process = ForkedWorker  # pyright: ignore[reportAttributeAccessIssue]
    entry()


if __name__ == "__main__":
    main()
