"""The fault proxy does each of its faults, and nothing else: plain sockets on both ends."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from harness.fault_proxy import (
    CHUNK_BYTES,
    LOOPBACK,
    TO_CLIENT,
    TO_TARGET,
    UNDER_WAY_BYTES,
    Direction,
    FaultProxy,
    Link,
    Traffic,
    free_port,
)
from harness.patience import CEILING_S


@dataclass
class Line:
    """One connection through the proxy, with both its ends."""

    link: Link
    client: socket.socket
    target: socket.socket

    def ends(self, direction: Direction) -> tuple[socket.socket, socket.socket]:
        """(sender, receiver)."""
        return (self.client, self.target) if direction is TO_TARGET else (self.target, self.client)


@dataclass
class Stand:
    proxy: FaultProxy
    listener: socket.socket
    lines: list[Line] = field(default_factory=list)

    def connect(self) -> Line:
        known = self.proxy.accepted
        client = socket.create_connection((LOOPBACK, self.proxy.port), timeout=CEILING_S)
        target, _ = self.listener.accept()
        target.settimeout(CEILING_S)
        self.proxy.wait_until(lambda: self.proxy.accepted > known)
        line = Line(self.proxy.links[-1], client, target)
        self.lines.append(line)
        return line


@pytest.fixture
def stand() -> Iterator[Stand]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(CEILING_S)
        with FaultProxy(listener.getsockname()[1]) as proxy:
            stand = Stand(proxy, listener)
            try:
                yield stand
            finally:
                for line in stand.lines:
                    line.client.close()
                    line.target.close()


def receive(from_: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = from_.recv(count - len(data))
        assert part, f"the connection ended after {data!r}"
        data += part
    return data


def nothing_came(to: socket.socket) -> bool:
    to.setblocking(False)
    try:
        to.recv(1)
    except BlockingIOError:
        return True
    finally:
        to.settimeout(CEILING_S)
    return False


def fill(sender: socket.socket) -> int:
    """Send until it is held up; how much went."""
    sent = 0
    try:
        while True:
            sent += sender.send(b"x" * CHUNK_BYTES)
    except TimeoutError:
        return sent


def is_refused(port: int) -> bool:
    """The reset may come while the connection is being opened, or right after."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=CEILING_S) as client:
            client.recv(1)
    except ConnectionResetError:
        return True
    return False


@contextmanager
def took_s() -> Iterator[list[float]]:
    taken: list[float] = []
    start_s = time.monotonic()
    yield taken
    taken.append(time.monotonic() - start_s)


DIRECTIONS = pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.name)
both = list(Direction)


def other(direction: Direction) -> Direction:
    return TO_CLIENT if direction is TO_TARGET else TO_TARGET


def arrived(line: Line, direction: Direction) -> int:
    return line.link.traffic[direction].arrived_bytes


@DIRECTIONS
def test_without_a_fault_every_byte_passes_in_order(stand: Stand, direction: Direction):
    sender, receiver = stand.connect().ends(direction)
    data = bytes(range(256)) * 2000
    sender.sendall(data[:100])
    assert receive(receiver, 100) == data[:100]
    sender.sendall(data[100:])
    assert receive(receiver, len(data) - 100) == data[100:]


@DIRECTIONS
def test_an_end_passes_and_the_other_direction_stays(stand: Stand, direction: Direction):
    sender, receiver = stand.connect().ends(direction)
    sender.sendall(b"last")
    sender.shutdown(socket.SHUT_WR)
    assert receive(receiver, 4) == b"last"
    assert receiver.recv(1) == b""
    receiver.sendall(b"still here")
    assert receive(sender, 10) == b"still here"


def test_a_connection_is_over_when_both_directions_are(stand: Stand):
    line = stand.connect()
    line.client.close()
    assert line.target.recv(1) == b""
    assert stand.proxy.links == (line.link,)
    line.target.close()
    stand.proxy.wait_until(lambda: stand.proxy.links == ())


@DIRECTIONS
def test_a_delay_is_for_its_direction_only(stand: Stand, direction: Direction):
    line = stand.connect()
    stand.proxy.delay(0.05, direction)
    sender, receiver = line.ends(direction)
    with took_s() as taken:
        sender.sendall(b"late")
        assert receive(receiver, 4) == b"late"
    assert taken[0] >= 0.05
    stand.proxy.delay(60.0, direction)
    receiver.sendall(b"soon")
    assert receive(sender, 4) == b"soon"


def test_delays_do_not_add_up(stand: Stand):
    """A long line is not a slow one: what is sent while something is under way arrives right behind it."""
    line = stand.connect()
    stand.proxy.delay(0.08)
    with took_s() as taken:
        for number in range(20):
            line.client.sendall(bytes([number]))
            stand.proxy.wait_until(lambda number=number: arrived(line, TO_TARGET) == number + 1)
        assert receive(line.target, 20) == bytes(range(20))
    assert 0.08 <= taken[0] < 20 * 0.08


def test_healing_releases_what_is_delayed(stand: Stand):
    line = stand.connect()
    stand.proxy.delay(3600.0)
    line.client.sendall(b"waits")
    stand.proxy.wait_until(lambda: arrived(line, TO_TARGET) == 5)
    assert nothing_came(line.target)
    stand.proxy.heal()
    assert receive(line.target, 5) == b"waits"


@DIRECTIONS
def test_a_throttle_bounds_the_rate(stand: Stand, direction: Direction):
    line = stand.connect()
    stand.proxy.throttle(20_000, direction)
    sender, receiver = line.ends(direction)
    with took_s() as taken:
        sender.sendall(b"x" * 1400)
        assert receive(receiver, 1400) == b"x" * 1400
    assert taken[0] >= 0.04  # 400 bytes at once, then 400 each 0.02 s
    with took_s() as taken:
        receiver.sendall(b"x" * 1_000_000)
        receive(sender, 1_000_000)
    assert taken[0] < 1_000_000 / 20_000


def test_a_throttle_heals(stand: Stand):
    line = stand.connect()
    stand.proxy.throttle(100)
    line.client.sendall(b"x" * 10_000)
    assert receive(line.target, 1) == b"x"
    stand.proxy.heal()
    receive(line.target, 9_999)


@DIRECTIONS
def test_held_bytes_wait_while_the_other_direction_works(stand: Stand, direction: Direction):
    line = stand.connect()
    stand.proxy.hold(direction)
    sender, receiver = line.ends(direction)
    sender.sendall(b"held")
    receiver.sendall(b"free")
    assert receive(sender, 4) == b"free"
    stand.proxy.wait_until(lambda: arrived(line, direction) == 4)
    assert nothing_came(receiver)
    stand.proxy.heal(direction)
    assert receive(receiver, 4) == b"held"


def test_nothing_crosses_when_both_directions_hold(stand: Stand):
    line = stand.connect()
    stand.proxy.hold()
    line.client.sendall(b"one")
    line.target.sendall(b"two")
    stand.proxy.wait_until(lambda: [arrived(line, direction) for direction in both] == [3, 3])
    assert nothing_came(line.client)
    assert nothing_came(line.target)
    stand.proxy.heal()
    assert receive(line.target, 3) == b"one"
    assert receive(line.client, 3) == b"two"


def test_a_held_sender_is_held_up(stand: Stand):
    """As over a real network, it can't get rid of more than the buffers on the way take."""
    line = stand.connect()
    stand.proxy.hold()
    line.client.settimeout(0.05)
    sent = fill(line.client)
    assert arrived(line, TO_TARGET) <= UNDER_WAY_BYTES + CHUNK_BYTES
    line.client.settimeout(CEILING_S)
    stand.proxy.heal()
    receive(line.target, sent)


@DIRECTIONS
def test_swallowed_bytes_are_gone_for_good(stand: Stand, direction: Direction):
    line = stand.connect()
    stand.proxy.swallow(direction)
    sender, receiver = line.ends(direction)
    sender.sendall(b"lost")
    stand.proxy.wait_until(lambda: line.link.traffic[direction].swallowed_bytes == 4)
    receiver.sendall(b"free")
    assert receive(sender, 4) == b"free"
    stand.proxy.heal(direction)
    sender.sendall(b"kept")
    assert receive(receiver, 4) == b"kept"
    stand.proxy.wait_until(lambda: line.link.traffic[direction] == Traffic(8, 4, 4))


def test_a_swallowed_sender_is_never_held_up(stand: Stand):
    line = stand.connect()
    stand.proxy.swallow(TO_TARGET)
    line.client.sendall(b"x" * (2 * UNDER_WAY_BYTES))
    stand.proxy.wait_until(lambda: line.link.traffic[TO_TARGET].swallowed_bytes == 2 * UNDER_WAY_BYTES)
    assert nothing_came(line.target)


@pytest.mark.parametrize("fault", ["hold", "swallow"])
def test_an_end_in_a_black_hole_is_heard_when_it_heals(stand: Stand, fault: str):
    line = stand.connect()
    getattr(stand.proxy, fault)(TO_TARGET)
    line.client.sendall(b"x")
    line.client.close()
    stand.proxy.wait_until(lambda: arrived(line, TO_TARGET) == 1)
    assert nothing_came(line.target)
    assert stand.proxy.links == (line.link,)
    stand.proxy.heal()
    said = [receive(line.target, 1)] if fault == "hold" else []
    assert [*said, line.target.recv(1)] == [*said, b""]


def test_a_reset_passes(stand: Stand):
    line = stand.connect()
    line.link.cut()
    with pytest.raises(ConnectionResetError):
        line.client.recv(1)
    with pytest.raises(ConnectionResetError):
        line.target.recv(1)
    stand.proxy.wait_until(lambda: stand.proxy.links == ())


def test_a_killed_process_is_seen_through_the_proxy(stand: Stand):
    """A socket closed with data unread says RST."""
    line = stand.connect()
    line.target.sendall(b"never read")
    stand.proxy.wait_until(lambda: line.link.traffic[TO_CLIENT].passed_bytes == 10)
    line.client.close()
    with pytest.raises(ConnectionResetError):
        line.target.recv(1)


def test_an_orderly_cut_says_the_end(stand: Stand):
    line = stand.connect()
    stand.proxy.cut(reset=False)
    assert line.client.recv(1) == b""
    assert line.target.recv(1) == b""


def test_a_cut_strikes_connections_in_a_black_hole(stand: Stand):
    line = stand.connect()
    stand.proxy.hold()
    line.client.sendall(b"x")
    stand.proxy.wait_until(lambda: arrived(line, TO_TARGET) == 1)
    stand.proxy.cut()
    with pytest.raises(ConnectionResetError):
        line.target.recv(1)


def test_whoever_connects_after_a_cut_is_let_in(stand: Stand):
    stand.connect()
    stand.proxy.cut()
    line = stand.connect()
    line.client.sendall(b"again")
    assert receive(line.target, 5) == b"again"


def test_a_fault_of_one_connection_leaves_the_others_alone(stand: Stand):
    first, second = stand.connect(), stand.connect()
    first.link.hold()
    for line in (first, second):
        line.client.sendall(b"x")
    assert receive(second.target, 1) == b"x"
    stand.proxy.wait_until(lambda: arrived(first, TO_TARGET) == 1)
    assert nothing_came(first.target)
    first.link.cut()
    second.client.sendall(b"y")
    assert receive(second.target, 1) == b"y"


def test_a_fault_of_all_holds_for_connections_to_come(stand: Stand):
    stand.proxy.hold(TO_TARGET)
    line = stand.connect()
    line.client.sendall(b"x")
    stand.proxy.wait_until(lambda: arrived(line, TO_TARGET) == 1)
    assert nothing_came(line.target)


def test_refusing_spares_present_connections(stand: Stand):
    line = stand.connect()
    stand.proxy.refuse()
    assert is_refused(stand.proxy.port)
    assert stand.proxy.refused == 1
    line.client.sendall(b"x")
    assert receive(line.target, 1) == b"x"
    stand.proxy.heal()
    stand.connect()


def test_a_proxy_without_a_target_or_with_a_dead_one_refuses():
    with FaultProxy() as proxy:
        assert is_refused(proxy.port)
        proxy.aim(free_port())
        assert is_refused(proxy.port)
        assert proxy.refused == 2
        with socket.create_server((LOOPBACK, 0)) as listener:
            proxy.aim(listener.getsockname()[1])
            with socket.create_connection((LOOPBACK, proxy.port), timeout=CEILING_S) as client:
                target, _ = listener.accept()
                with target:
                    client.sendall(b"x")
                    assert receive(target, 1) == b"x"


def test_what_can_be_dialled_is_the_advertised_address(stand: Stand):
    assert stand.proxy.address == f"tcp://127.0.0.1:{stand.proxy.port}"


def test_it_works_beside_an_event_loop(stand: Stand):
    async def main() -> bytes:
        reader, writer = await asyncio.open_connection(LOOPBACK, stand.proxy.port)
        stand.proxy.wait_until(lambda: stand.proxy.accepted == 1)
        stand.proxy.hold()
        writer.write(b"x")
        await writer.drain()
        link = stand.proxy.links[0]
        stand.proxy.wait_until(lambda: link.traffic[TO_TARGET].arrived_bytes == 1)
        stand.proxy.cut(reset=False)
        said = await reader.read()
        writer.close()
        return said

    assert asyncio.run(main()) == b""


def test_waiting_in_vain_says_what_has_moved(stand: Stand):
    stand.connect()
    with pytest.raises(TimeoutError, match="arrived_bytes=0"):
        stand.proxy.wait_until(lambda: False, timeout_s=0.01)
