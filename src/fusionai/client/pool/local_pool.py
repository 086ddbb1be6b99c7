"""Runs a whole pool on this machine: a broker and peers as separate processes, over mutual TLS on loopback.

Also keeps the homes of such processes (`local_home`), limits their restarts (`Restarts`), and says how many threads and
how much memory each gets when a model is served.

The processes are ordinary `fusion broker` and `fusion join` commands. A process that ends with an error, for example
killed by the system, is restarted (`restarts` says when). One killed through `LocalPool.kill` stays down until
`start_again`, and one that ended cleanly is not restarted. All processes end with this one: if it is killed, their
standard input ends, and they end themselves.

`client.training.demo` and `client.serving.serve` use this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import msgspec

from fusionai.execution.measurement import FILE as MEASUREMENT
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.primitives.errors import FusionError, StorageError, UsageError
from fusionai.primitives.process import FUSION, ORDINARY, YIELDING, start_child, weigh_session
from fusionai.storage.atomic import JobLock, write_atomic

FIRST_S: Final = 1.0
"""Delay before the first restart, in seconds (chosen); doubled with each further one within `WINDOW_S`."""
MOST: Final = 6
"""Most restarts within `WINDOW_S` (chosen). A process that ends more often would end again."""
WINDOW_S: Final = 600.0
"""Time after which an end of the process no longer counts, in seconds (chosen)."""


@dataclass(slots=True)
class Restarts:
    """Restarts of one process."""

    _ended_s: list[float] = field(default_factory=list[float])

    def ended(self, now_s: float) -> float | None:
        """Record an end at `now_s`. Returns the seconds until the restart, None if it must not be restarted."""
        self._ended_s = [at_s for at_s in self._ended_s if now_s - at_s < WINDOW_S]
        count = len(self._ended_s)
        self._ended_s.append(now_s)
        return FIRST_S * 2**count if count < MOST else None


@contextmanager
def local_home(parent: Path) -> Iterator[Path]:
    """Yield a new directory in `parent` and remove it with its content afterwards. Blocking."""
    clear_left(parent)
    directory = parent / secrets.token_hex(4)
    # Locked before it is created, because a directory without a lock is removed as left over.
    with JobLock(_lock_of(directory)):
        try:
            directory.mkdir()
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            _lock_of(directory).unlink(missing_ok=True)


def clear_left(parent: Path) -> None:
    """Remove the directories of processes that are gone. Files that can't be removed stay."""
    for directory in parent.glob("*/"):
        try:
            lock = JobLock(_lock_of(directory))
        except StorageError:
            continue
        with lock:
            shutil.rmtree(directory, ignore_errors=True)
            _lock_of(directory).unlink(missing_ok=True)


def _lock_of(directory: Path) -> Path:
    return directory.with_suffix(".lock")


log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.05
NAMES: Final = ("tower", "desktop", "laptop", "workshop", "bedroom", "attic")
"""Names of the first peers."""
MOST_SERVING: Final = 16
OWNERS_SHARE: Final = 2
"""Share of the free memory for the job owner's process beside serving peers, in shares of a peer (chosen)."""
REMEMBERED: Final = "weights.json"
"""File with the hashes of model files, in a job owner's home."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables that the framework's libraries read when loaded; without them they would start more threads than
`threads`."""
BROKER: Final = "broker"
"""Name of the broker's process; no peer may have it."""


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A peer to start. `share`: fraction of time it computes, which makes machines unequal. `memory_bytes`: memory that
    it lends, None: most of what is free. `port`: where it listens, None: any free one. `address`: the one it announces
    instead of its own. `limit_bytes_per_s`: limit for sending and for receiving. `weights_beside`: see
    `peer.options`."""

    name: str
    share: float = 1.0
    threads: int = 1
    device: str = "cpu"
    memory_bytes: int | None = None
    port: int | None = None
    address: str | None = None
    limit_bytes_per_s: float | None = None
    weights_beside: Path | None = None


@dataclass(slots=True)
class _Child:
    name: str
    process: asyncio.subprocess.Process
    log: IO[bytes]
    log_path: Path
    killed: bool = False
    """Whether it was killed through `LocalPool.kill`."""

    @property
    def lives(self) -> bool:
        return self.process.returncode is None


@dataclass(slots=True)
class LocalPool:
    """A pool, used as `async with LocalPool(directory, peers) as pool:`. `invitation` also admits a job owner. Any
    process can be killed and started again. It keeps its home and so its identity, and the broker its port. One peer
    measures this machine, and the others use its measurement, which is kept in `directory`. `say` receives lines about
    processes that ended unexpectedly and their restarts."""

    directory: Path
    peers: Sequence[LocalPeer]
    name: str = "demo"
    invitation: str = ""
    say: Callable[[str], None] = log.warning
    clock: Clock = field(default_factory=SystemClock)
    names: dict[str, str] = field(default_factory=dict)
    """Maps peer ids to names, for all peers that have joined."""
    _children: dict[str, _Child] = field(default_factory=dict)
    """Latest process of each name."""
    _port: int = 0
    _restarts: dict[str, Restarts] = field(default_factory=dict)
    _watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> LocalPool:
        try:
            await self._start_broker()
            await asyncio.gather(*(self._start_peer(peer, invited=True) for peer in self.peers))
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def broker_home(self) -> Path:
        return self.directory / BROKER

    def pid(self, name: str) -> int:
        """Return the process id of the latest process of this name (a peer's, or `BROKER`), running or not."""
        return self._child(name).process.pid

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of all running processes, by name."""
        return {name: child.process.pid for name, child in self._children.items() if child.lives}

    def lives(self, name: str) -> bool:
        return self._child(name).lives

    async def kill(self, name: str) -> None:
        """Send SIGKILL and wait until the process is gone. Raises `FusionError` if it had already ended."""
        child = self._child(name)
        if not child.lives:
            raise FusionError(f"{name} can't be killed: it has already ended ({_last_line(child.log_path)}).")
        child.killed = True
        child.process.kill()
        await child.process.wait()

    async def start_again(self, name: str) -> None:
        """Restart an ended process with the same arguments and home, and wait until it is ready. A peer starts at low
        priority if the system allows it, because its start takes seconds of computation that on a machine of its own
        would not slow down others. Raises `FusionError` if the process still runs or can't start."""
        child = self._child(name)
        if child.lives:
            raise FusionError(f"{name} can't be restarted: it is still running.")
        if name == BROKER:
            await self._start_broker()
        else:
            await self._start_peer(next(peer for peer in self.peers if peer.name == name), invited=False)

    def _child(self, name: str) -> _Child:
        if name not in self._children:
            raise FusionError(f"expected a process of {', '.join(self._children) or 'none yet'}, got {name!r}.")
        return self._children[name]

    async def _start_broker(self) -> None:
        """Start the broker, on a free port the first time and on the same port later, where its members look for it."""
        announced = self.directory / f"{BROKER}.json"
        announced.unlink(missing_ok=True)
        arguments = ["broker", "--pool", self.name, "--host", "127.0.0.1", "--port", str(self._port)]
        arguments += ["--no-invite" if self.invitation else "--invite"]
        broker = await self._spawn(BROKER, self.broker_home, [*arguments, "--json", str(announced)])
        announcement = await self._announced(broker, announced)
        self._port = int(announcement["addresses"][0].rpartition(":")[2])
        self.invitation = self.invitation or announcement["invitation"]
        self._watch(broker)

    async def _start_peer(self, peer: LocalPeer, *, invited: bool) -> None:
        announced = self.directory / f"{peer.name}.json"
        announced.unlink(missing_ok=True)
        arguments = ["join", "--name", peer.name, "--host", "127.0.0.1", "--device", peer.device]
        arguments += ["--threads", str(peer.threads), "--share", f"{peer.share * 100:g}%", "--json", str(announced)]
        rate = None if peer.limit_bytes_per_s is None else f"{peer.limit_bytes_per_s * 8 / 1e6:g}Mbit"
        limits = {
            "--max-memory": None if peer.memory_bytes is None else f"{peer.memory_bytes}B",
            "--port": peer.port,
            "--address": peer.address,
            "--upload-limit": rate,
            "--download-limit": rate,
            "--weights-beside": peer.weights_beside,
            "--measured-beside": self.directory,
        }
        arguments += [text for name, value in limits.items() if value is not None for text in (name, str(value))]
        home = self.directory / peer.name
        if invited:
            child = await self._spawn(peer.name, home, [*arguments, "-"], given_input=f"{self.invitation}\n")
            announcement = await self._announced(child, announced)
        else:
            child = await self._spawn(peer.name, home, arguments)
            yielding = weigh_session(child.process.pid, YIELDING)
            announcement = await self._announced(child, announced)
            if yielding:
                await _ordinary(child)
        self.names[announcement["peer"]] = peer.name
        self._watch(child)

    async def _spawn(
        self, name: str, home: Path, arguments: Sequence[str], *, given_input: str | None = None
    ) -> _Child:
        """Start `fusion ARGUMENTS --home HOME`. The invitation is passed by standard input, so that process lists don't
        show it."""
        log_path = self.directory / f"{name}.log"
        log = _log_in(home, log_path)
        command = (*FUSION, *arguments, "--lifeline", "--home", str(home))
        process = await start_child(command, log, variables=_ONE_THREAD)
        child = _Child(name, process, log, log_path)
        former = self._children.get(name)
        if former is not None:
            former.log.close()
        self._children[name] = child
        if given_input is not None and process.stdin is not None:
            process.stdin.write(given_input.encode())
            await process.stdin.drain()
        return child

    async def _announced(self, child: _Child, path: Path) -> dict[str, Any]:
        """Wait for the JSON file that the process writes, atomically, when it is ready, and return its content. Raises
        `FusionError` if the process ends first or takes longer than `START_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (written := announced_in(path)) is None:
                    if not child.lives:
                        raise FusionError(f"{child.name} ended during its start: {_last_line(child.log_path)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise FusionError(
                f"{child.name} was not ready within {START_TIMEOUT_S:.0f} s: {_last_line(child.log_path)}"
            ) from None
        return msgspec.json.decode(written, type=dict)

    def _watch(self, child: _Child) -> None:
        task = asyncio.create_task(self._bring_back(child))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _bring_back(self, child: _Child) -> None:
        """Wait until the process ends. If it ended unexpectedly, restart it until it runs or has ended too often."""
        status = await child.process.wait()
        if child.killed or status == 0:
            return
        why = f"was killed (signal {-status})" if status < 0 else f"ended: {_last_line(child.log_path)}"
        restarts = self._restarts.setdefault(child.name, Restarts())
        while (delay_s := restarts.ended(self.clock.now_s())) is not None:
            self.say(f"{child.name} {why.rstrip('.')}; it is restarted in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            if self._children.get(child.name) is not child and self._child(child.name).lives:
                return
            try:
                await self.start_again(child.name)
            except FusionError as error:
                why = f"could not be started: {error.message}"
                continue
            self.say(f"{child.name} is running again")
            return
        self.say(f"{child.name} {why.rstrip('.')}; it ended too often and is not restarted")

    async def stop(self) -> None:
        """Terminate the peers, then the broker. Kill processes that don't end within `STOP_TIMEOUT_S`."""
        for task in tuple(self._watching):
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        peers = [child for name, child in self._children.items() if name != BROKER]
        brokers = [child for name, child in self._children.items() if name == BROKER]
        for children in (peers, brokers):
            for child in children:
                if child.lives:
                    with suppress(ProcessLookupError):
                        child.process.terminate()
            for child in children:
                try:
                    await asyncio.wait_for(child.process.wait(), STOP_TIMEOUT_S)
                except TimeoutError:
                    with suppress(ProcessLookupError):
                        child.process.kill()
                    await child.process.wait()
                if child.process.stdin is not None:
                    child.process.stdin.close()
                child.log.close()
        self._children.clear()


async def _ordinary(child: _Child) -> None:
    """Give a process back its ordinary priority, with retries: the system accepts ten such requests a second, over all
    programs together."""
    while child.lives:
        if weigh_session(child.process.pid, ORDINARY):
            return
        await asyncio.sleep(POLL_S)


def _log_in(home: Path, path: Path) -> IO[bytes]:
    """Open the log and make the home of a process."""
    home.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def announced_in(path: Path) -> bytes | None:
    """Return what a process has written into the file that says that it is ready; None: nothing yet."""
    return path.read_bytes() if path.exists() else None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not lines and not shutil.disk_usage(path.parent).free:
        return f"the disk of {path.parent} is full"
    return lines[-1] if lines else "it printed nothing"


@asynccontextmanager
async def serving_pool(home: Path, count: int, spares: int, *, say: Callable[[str], None]) -> AsyncIterator[LocalPool]:
    """Run a pool of `count` active peers and `spares` further ones during the block. Their homes are in a directory of
    `home`, which is removed afterwards. The peers share the hashes of model files that `home` has, and what one peer
    measured is kept for the peers of later pools."""
    if not 1 <= count <= MOST_SERVING:
        raise UsageError(f"expected --local from 1 to {MOST_SERVING}, got {count}.")
    machines = count + spares
    names = [*NAMES, *(f"peer{number}" for number in range(len(NAMES), machines))][:machines]
    lent_bytes = own_memory_bytes(machines) // OWNERS_SHARE
    threads = local_threads(count)
    peers = [
        LocalPeer(name, threads=threads, memory_bytes=lent_bytes, weights_beside=home / REMEMBERED) for name in names
    ]
    with local_home(home / "local") as directory:
        kept = home / "local" / MEASUREMENT
        hand_out(kept, directory)
        async with LocalPool(directory, peers, name="local", say=say) as pool:
            hand_out(directory / MEASUREMENT, kept.parent)
            yield pool


def hand_out(measurement: Path, directory: Path) -> None:
    """Copy a kept measurement of this machine, if there is one, into `directory`. Peers that it does not fit
    measure."""
    try:
        write_atomic(directory / measurement.name, measurement.read_bytes())
    except (OSError, StorageError) as problem:
        log.info("peers measure this machine anew: %s", problem)


def local_threads(peers: int) -> int:
    """Return the threads per local process: its share of the cores, because stages of several sessions work at once."""
    return max(1, (os.cpu_count() or 1) // peers)


def own_memory_bytes(machines: int) -> int:
    """Return the memory for this machine's own process beside `machines` local peers."""
    import psutil

    return psutil.virtual_memory().available * OWNERS_SHARE // (machines + OWNERS_SHARE)
