"""A TCP proxy on loopback that misbehaves on command: it stands where the network between two machines would be.

Decides when the bytes of a direction go on: delayed, slowly, later, never. It never looks into them. A black hole comes
in two kinds, because a proxy can't lose packets below TCP: `hold` is what lost packets look like from above (nothing
arrives until `heal`, then everything does, nothing is missing), `swallow` loses the bytes for good (a box on the way
that acknowledges and forgets). Ends and resets of a connection are lost in a black hole too, and arrive when it heals.

Runs in a thread of its own, so tests of processes and tests with an event loop use it alike; every method may be called
from any thread but its own. A peer stands behind it when others are told the proxy's address:

    with FaultProxy() as proxy:
        proxy.aim(port := free_port())
        pool.start("one", invitation, "--port", port, "--address", proxy.address)
        proxy.hold(TO_TARGET)

Neighbours: `harness.killer` strikes processes, this strikes what lies between them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Final, Literal, TypeVar

from harness.patience import CEILING_S

LOOPBACK: Final = "127.0.0.1"
_LISTENED: Final = (20_000, 32_000)
CHUNK_BYTES: Final = 64 * 1024
UNDER_WAY_BYTES: Final = 4 * 1024 * 1024
"""A direction takes no more than this (and a chunk) from its sender before it passes something on."""
SLICE_S: Final = 0.02
"""A throttled direction passes on what it may send in so much time, then waits."""
MOST_LATE_S: Final = 0.05
"""A throttled direction makes up for so much sleeping too long."""
PATIENCE_S: Final = CEILING_S

T = TypeVar("T")


class Direction(Enum):
    TO_TARGET = "to the target"
    TO_CLIENT = "to the client"


TO_TARGET, TO_CLIENT = Direction.TO_TARGET, Direction.TO_CLIENT


@dataclass(frozen=True, slots=True)
class Weather:
    """How one direction of one connection behaves."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    flow: Literal["pass", "hold", "swallow"] = "pass"


CLEAR: Final = Weather()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one direction so far. What is neither passed nor swallowed waits in the proxy."""

    arrived_bytes: int = 0
    passed_bytes: int = 0
    swallowed_bytes: int = 0


class Controls(ABC):
    """The faults; without a direction, both."""

    @abstractmethod
    def change(self, directions: tuple[Direction, ...], change: Callable[[Weather], Weather]) -> None:
        """Give these directions other weather."""

    @abstractmethod
    def cut(self, *, reset: bool = True) -> None:
        """End connections at once, with what is under way in them: RST, or an orderly close (FIN)."""

    def delay(self, delay_s: float, *directions: Direction) -> None:
        """Pass bytes on `delay_s` after they came; what waits already counts from when it came."""
        self.change(directions, lambda weather: replace(weather, delay_s=delay_s))

    def throttle(self, bytes_per_s: float, *directions: Direction) -> None:
        """Pass on so many bytes a second, per connection and direction."""
        self.change(directions, lambda weather: replace(weather, bytes_per_s=bytes_per_s))

    def hold(self, *directions: Direction) -> None:
        """Pass nothing on, lose nothing; the sender is held up once enough waits here."""
        self.change(directions, lambda weather: replace(weather, flow="hold"))

    def swallow(self, *directions: Direction) -> None:
        """Take every byte and lose it."""
        self.change(directions, lambda weather: replace(weather, flow="swallow"))

    def heal(self, *directions: Direction) -> None:
        """No fault any more; what was held or delayed goes on at once, in order."""
        self.change(directions, lambda _: CLEAR)


class FaultProxy(Controls):
    """`with FaultProxy(port) as proxy:` forwards `proxy.address` to `target_port` on loopback.

    Its own faults are for all connections, those to come too; each of `links` takes faults for itself.
    """

    def __init__(self, target_port: int | None = None) -> None:
        self.links: tuple[Link, ...] = ()
        """Connections that are not over, oldest first."""
        self.accepted = 0
        """Connections that were let in so far."""
        self.refused = 0
        self.on_link: Callable[[Link], None] = lambda link: None
        """Called in the proxy's thread with each connection before its first byte goes on; may `blow` its lanes."""
        self.port = 0
        self._target_port = target_port
        self._refusing = False
        self._weather = dict.fromkeys(Direction, CLEAR)
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """For `--address`."""
        return f"tcp://{LOOPBACK}:{self.port}"

    def aim(self, target_port: int) -> None:
        """Forward connections from now on to this port; before the first aim they are refused."""
        self.in_loop(lambda: setattr(self, "_target_port", target_port))

    def refuse(self, refusing: bool = True) -> None:
        """Reset whoever connects from now on (`heal` lets them in again). Present connections stay."""
        self.in_loop(lambda: setattr(self, "_refusing", refusing))

    def change(self, directions: tuple[Direction, ...], change: Callable[[Weather], Weather]) -> None:
        def apply() -> None:
            for direction in directions or tuple(Direction):
                self._weather[direction] = change(self._weather[direction])
                for link in self.links:
                    link.lanes[direction].blow(change)

        self.in_loop(apply)

    def heal(self, *directions: Direction) -> None:
        self.refuse(False)
        super().heal(*directions)

    def cut(self, *, reset: bool = True) -> None:
        self.in_loop(lambda: [link.end(reset=reset) for link in self.links])

    def wait_until(self, condition: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
        """Until `condition()` is true; it is asked whenever bytes move or connections come and go."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not (answer := condition()):
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise TimeoutError(f"not within {timeout_s} s; traffic: {[link.traffic for link in self.links]}")
            return answer

    # -------------------------------------------------------------------------------------------------- life

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._let_in, LOOPBACK, 0), self._loop)
        self._server = server.result(PATIENCE_S)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for link in self.links:
            link.end(reset=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = None
        if not self._refusing and self._target_port is not None:
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
                lanes = {
                    TO_TARGET: _Lane(reader, far_writer, self._weather[TO_TARGET], self.say),
                    TO_CLIENT: _Lane(far_reader, writer, self._weather[TO_CLIENT], self.say),
                }
                link = Link(self, self.accepted, lanes, writer.get_extra_info("peername")[1])
        if link is None:
            _reset(writer)
            self.refused += 1
            self.say()
            return
        self.on_link(link)
        self.links = (*self.links, link)
        self.accepted += 1
        self.say()
        try:
            await link.run()
        finally:
            self.links = tuple(other for other in self.links if other is not link)
            self.say()

    def say(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def in_loop(self, action: Callable[[], object]) -> None:
        """Do this in the proxy's own thread, and wait until it is done."""

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(PATIENCE_S)


@dataclass(slots=True, eq=False)
class Link(Controls):
    """One connection through the proxy; `number` counts them from 0."""

    proxy: FaultProxy
    number: int
    lanes: dict[Direction, _Lane]
    client_port: int
    """By which the system knows whose connection it is."""

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        return {direction: lane.traffic for direction, lane in self.lanes.items()}

    def change(self, directions: tuple[Direction, ...], change: Callable[[Weather], Weather]) -> None:
        def apply() -> None:
            for direction in directions or tuple(Direction):
                self.lanes[direction].blow(change)

        self.proxy.in_loop(apply)

    def cut(self, *, reset: bool = True) -> None:
        self.proxy.in_loop(lambda: self.end(reset=reset))

    def end(self, *, reset: bool) -> None:
        for lane in self.lanes.values():
            _reset(lane.sink) if reset else lane.sink.close()

    async def run(self) -> None:
        """Until both directions are over, or one was reset."""
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self.lanes.values():
                    group.create_task(lane.take())
                    group.create_task(lane.pass_on())
        except* OSError:  # ending one direction of a connection that was reset meanwhile is no ConnectionError
            pass
        finally:
            for lane in self.lanes.values():
                _reset(lane.sink) if self._broken else lane.sink.close()

    @property
    def _broken(self) -> bool:
        return any(lane.broken for lane in self.lanes.values())


END: Final = b""
"""The sender said that nothing follows."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction: takes from `source`, gives to `sink` as the weather allows."""

    source: asyncio.StreamReader
    sink: asyncio.StreamWriter
    weather: Weather
    say: Callable[[], None]
    traffic: Traffic = Traffic()
    broken: bool = False
    """The sender reset the connection."""
    _parcels: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(when it came, what came); the last is `END`."""
    _free_at_s: float = 0.0
    """When a throttled direction may send again."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    def blow(self, change: Callable[[Weather], Weather]) -> None:
        self.weather = change(self.weather)
        self._free_at_s = 0.0
        self._changed.set()

    async def take(self) -> None:
        clock = asyncio.get_running_loop()
        while True:
            try:
                data = await self.source.read(CHUNK_BYTES)
            except OSError:
                data, self.broken = END, True
            self._parcels.append((clock.time(), data))
            self._count(arrived_bytes=len(data))
            self._changed.set()
            if data == END:
                return
            while self._waiting_bytes >= UNDER_WAY_BYTES:
                self._room.clear()
                await self._room.wait()

    async def pass_on(self) -> None:
        """Raises `ConnectionError` when the receiver is gone, or the sender was."""
        while True:
            data = await self._next()
            if data == END:
                if self.broken:
                    raise ConnectionResetError
                self.sink.write_eof()
                return
            if self.weather.flow == "swallow":
                self._count(swallowed_bytes=len(data))
            else:
                self.sink.write(data)
                await self.sink.drain()
                self._count(passed_bytes=len(data))
            self._room.set()

    async def _next(self) -> bytes:
        """What comes next, once its moment is there."""
        while (wait_s := self._wait_s()) != 0.0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        came_s, data = self._parcels.popleft()
        rate = self.weather.bytes_per_s
        if rate is None or self.weather.flow == "swallow":
            return data
        most = max(1, int(rate * SLICE_S))
        if len(data) > most:
            self._parcels.appendleft((came_s, data[most:]))
            data = data[:most]
        # From the moment it was due, not from when this loop woke up: else every slice would take too long.
        due_s = max(came_s + self.weather.delay_s, self._free_at_s, asyncio.get_running_loop().time() - MOST_LATE_S)
        self._free_at_s = due_s + len(data) / rate
        return data

    def _wait_s(self) -> float | None:
        """Seconds until the next parcel may go; None: not before something changes."""
        if not self._parcels:
            return None
        came_s, data = self._parcels[0]
        match self.weather.flow:
            case "hold":
                return None
            case "swallow":
                return None if data == END else 0.0
            case "pass":
                due_s = max(came_s + self.weather.delay_s, self._free_at_s)
                return max(0.0, due_s - asyncio.get_running_loop().time())

    def _count(self, *, arrived_bytes: int = 0, passed_bytes: int = 0, swallowed_bytes: int = 0) -> None:
        past = self.traffic
        self.traffic = Traffic(
            past.arrived_bytes + arrived_bytes,
            past.passed_bytes + passed_bytes,
            past.swallowed_bytes + swallowed_bytes,
        )
        self.say()

    @property
    def _waiting_bytes(self) -> int:
        return self.traffic.arrived_bytes - self.traffic.passed_bytes - self.traffic.swallowed_bytes


def free_port() -> int:
    """A port nobody listens on at this moment: a peer behind the proxy must be told its port beforehand. It lies below
    those that the system gives to connections (32768 and above on Linux), or one of them may have it until the peer
    listens."""
    while True:
        port = random.SystemRandom().randrange(*_LISTENED)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def _reset(writer: asyncio.StreamWriter) -> None:
    """End with RST instead of FIN; what was not sent is dropped."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
