"""A whole pool on this machine: a broker and peers as processes of their own, over mutual TLS on loopback.

Decides where their homes are and how long to wait for them. The peers are the shipped `fusion join`, nothing special.
Always ends what it started.

Neighbours: `client.demo` uses it; the processes talk to each other, not to this module.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import msgspec

from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import FusionError

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A peer to start. `share` makes machines unequal by resting between pieces of work."""

    name: str
    share: float = 1.0
    threads: int = 1
    device: str = "cpu"


@dataclass(slots=True)
class _Child:
    name: str
    process: asyncio.subprocess.Process
    log: IO[bytes]
    log_path: Path


@dataclass(slots=True)
class LocalPool:
    """`async with LocalPool(directory, peers) as pool:`; `invitation` is good for the peers and one job owner."""

    directory: Path
    peers: Sequence[LocalPeer]
    invitation: str = ""
    _children: list[_Child] = field(default_factory=list)

    async def __aenter__(self) -> LocalPool:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        announced = self.directory / "broker.json"
        announced.unlink(missing_ok=True)
        arguments = ["broker", "--pool", "demo", "--host", "127.0.0.1", "--port", "0", "--json", str(announced)]
        broker = await self._spawn("broker", self.directory / "broker", arguments)
        self.invitation = (await self._announced(broker, announced))["invitation"]
        await asyncio.gather(*(self._start_peer(peer) for peer in self.peers))

    async def _start_peer(self, peer: LocalPeer) -> None:
        announced = self.directory / f"{peer.name}.json"
        announced.unlink(missing_ok=True)
        arguments = ["join", "-", "--name", peer.name, "--host", "127.0.0.1", "--device", peer.device]
        arguments += ["--threads", str(peer.threads), "--share", f"{peer.share * 100:g}%", "--json", str(announced)]
        child = await self._spawn(peer.name, self.directory / peer.name, arguments, said=f"{self.invitation}\n")
        await self._announced(child, announced)

    async def _spawn(self, name: str, home: Path, arguments: Sequence[str], *, said: str | None = None) -> _Child:
        """Start `fusion ARGUMENTS --home HOME`; the invitation goes by standard input, where nobody can list it."""
        log_path = self.directory / f"{name}.log"
        log = _open_log(home, log_path)
        # One thread per peer must mean one: the libraries below the framework read these when they are loaded.
        environment = {**inherited(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fusionai",
            *arguments,
            "--home",
            str(home),
            stdin=asyncio.subprocess.PIPE if said is not None else asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # A Ctrl-C on the terminal is for the job's owner; the pool is ended afterwards, in order.
            start_new_session=sys.platform != "win32",
        )
        child = _Child(name, process, log, log_path)
        self._children.append(child)
        if said is not None and process.stdin is not None:
            process.stdin.write(said.encode())
            await process.stdin.drain()
            process.stdin.close()
        return child

    async def _announced(self, child: _Child, path: Path) -> dict[str, str]:
        """Wait until the process says it is ready."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (said := _read_json(path)) is None:
                    if child.process.returncode is not None:
                        raise FusionError(f"{child.name} ended at once: {_last_line(child.log_path)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise FusionError(
                f"{child.name} was not ready within {START_TIMEOUT_S:.0f} s: {_last_line(child.log_path)}"
            ) from None
        return said

    async def stop(self) -> None:
        """End peers, then the broker; kill what does not end by itself."""
        for children in (self._children[1:], self._children[:1]):
            for child in children:
                if child.process.returncode is None:
                    with suppress(ProcessLookupError):
                        child.process.terminate()
            for child in children:
                try:
                    await asyncio.wait_for(child.process.wait(), STOP_TIMEOUT_S)
                except TimeoutError:
                    with suppress(ProcessLookupError):
                        child.process.kill()
                    await child.process.wait()
                child.log.close()
        self._children.clear()


def _open_log(home: Path, log_path: Path) -> IO[bytes]:
    home.mkdir(parents=True, exist_ok=True)
    return log_path.open("ab")


def _read_json(path: Path) -> dict[str, str] | None:
    """None until the file is there; it appears whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict)
    except FileNotFoundError:
        return None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
