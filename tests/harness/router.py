"""A home's router as a program: translates addresses between a home's network namespace and the public one.

It needs neither nftables nor iptables, only TUN devices: packets that leave the home come here, get the router's public
address and a port, and answers find their way back. What nobody in the home has asked for is dropped.

    python router.py HOME_NAMESPACE PUBLIC_NAMESPACE PUBLIC_ADDRESS KIND [BITS_PER_S DELAY_S]

KIND: `preserving` keeps the port where it is free and uses it for all destinations, `symmetric` draws another for each
destination, `no-udp` is preserving and lets no UDP out, `forwarding` is preserving and gives what comes by TCP to the
machine that spoke first. With BITS_PER_S and DELAY_S the line outside has that bandwidth
and that delay, each way. Prints `ready` once both devices are there; ends when its standard input does.
Neighbours: `harness.homes` starts one per home.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
TCP, UDP = 6, 17
Place = tuple[bytes, int]


class Line:
    """One direction: busy for as long as a packet takes, drops what finds too long a queue, then a fixed delay.
    `bits_per_s` 0: as fast as can be."""

    QUEUE_S = 0.1

    def __init__(self, bits_per_s: float, delay_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._delay_s = delay_s
        self._free_s = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def put(self, packet: bytes) -> None:
        now_s = time.monotonic()
        if self._bits_per_s:
            begins_s = max(now_s, self._free_s)
            if begins_s - now_s > self.QUEUE_S:
                return
            self._free_s = begins_s + 8 * len(packet) / self._bits_per_s
            now_s = self._free_s
        self._under_way.append((now_s + self._delay_s, packet))

    def arrived(self) -> Iterator[bytes]:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            yield self._under_way.popleft()[1]

    def wait_s(self) -> float | None:
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None


class Translation:
    """Who in the home is which port outside, and who may answer there."""

    def __init__(self, public: bytes, kind: str) -> None:
        self.public = public
        self.kind = kind
        self._outside: dict[tuple[int, Place, Place | None], int] = {}
        self._inside: dict[tuple[int, int], Place] = {}
        self._asked: set[tuple[int, int, Place]] = set()
        self._random = random.Random(7)
        self._first: bytes | None = None

    def out(self, protocol: int, source: Place, target: Place) -> int | None:
        """The port outside; None: not let out."""
        if protocol == UDP and self.kind == "no-udp":
            return None
        self._first = self._first or source[0]
        key = (protocol, source, target if self.kind == "symmetric" else None)
        port = self._outside.get(key)
        if port is None:
            port = source[1]
            while self.kind == "symmetric" or (protocol, port) in self._inside:
                port = self._random.randrange(20_000, 60_000)
                if (protocol, port) not in self._inside:
                    break
            self._outside[key] = port
            self._inside[protocol, port] = source
        self._asked.add((protocol, port, target))
        return port

    def back(self, protocol: int, port: int, sender: Place) -> Place | None:
        """Who in the home is meant; None: nobody asked."""
        if (protocol, port, sender) in self._asked:
            return self._inside.get((protocol, port))
        if self.kind == "forwarding" and protocol == TCP and self._first is not None:
            self._inside[protocol, port] = self._first, port
            self._outside[protocol, (self._first, port), None] = port
            self._asked.add((protocol, port, sender))
            return self._inside[protocol, port]
        return None


def translated(packet: bytes, source: Place | None, target: Place | None) -> bytes:
    """The packet with another source or target, its checksums right again."""
    data = bytearray(packet)
    head = (data[0] & 15) * 4
    at = head + (16 if data[9] == TCP else 6)
    (check,) = struct.unpack_from("!H", data, at)
    for place, address_at, port_at in ((source, 12, head), (target, 16, head + 2)):
        if place is None:
            continue
        before = bytes(data[address_at : address_at + 4] + data[port_at : port_at + 2])
        data[address_at : address_at + 4] = place[0]
        struct.pack_into("!H", data, port_at, place[1])
        after = bytes(data[address_at : address_at + 4] + data[port_at : port_at + 2])
        check = _changed(check, before, after)
    if data[9] == TCP or check:
        struct.pack_into("!H", data, at, check or 0xFFFF)
    struct.pack_into("!H", data, 10, 0)
    struct.pack_into("!H", data, 10, ~_sum(bytes(data[:head])) & 0xFFFF)
    return bytes(data)


def _changed(check: int, before: bytes, after: bytes) -> int:
    total = ~check & 0xFFFF
    for old, new in zip(struct.unpack("!3H", before), struct.unpack("!3H", after), strict=True):
        total += (~old & 0xFFFF) + new
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _ends(packet: bytes) -> tuple[int, Place, Place] | None:
    """Protocol, source and target of a whole packet of TCP or UDP by IPv4."""
    if len(packet) < 28 or packet[0] >> 4 != 4 or packet[9] not in (TCP, UDP):
        return None
    if struct.unpack_from("!H", packet, 6)[0] & 0x1FFF:
        return None
    ports = struct.unpack_from("!2H", packet, (packet[0] & 15) * 4)
    return packet[9], (packet[12:16], ports[0]), (packet[16:20], ports[1])


def tunnel(namespace: str, name: str) -> int:
    """A TUN device in a network namespace; this process is left in it."""
    with Path(f"/run/netns/{namespace}").open("rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    return device


def main(home: str, public: str, address: str, kind: str, bits_per_s: str = "0", delay_s: str = "0") -> None:
    here = bytes(int(part) for part in address.split("."))
    inner = tunnel(home, "up0")
    subprocess.run(["ip", "route", "add", "default", "dev", "up0"], check=True)
    outer_name = f"w{address.rpartition('.')[2]}"
    outer = tunnel(public, outer_name)
    subprocess.run(["ip", "route", "add", f"{address}/32", "dev", outer_name], check=True)
    translation = Translation(here, kind)

    def leaving(packet: bytes) -> None:
        if (ends := _ends(packet)) is not None and (port := translation.out(*ends)) is not None:
            os.write(outer, translated(packet, (here, port), None))

    def coming(packet: bytes) -> None:
        if (ends := _ends(packet)) is None or ends[2][0] != here:
            return
        if (place := translation.back(ends[0], ends[2][1], ends[1])) is not None:
            os.write(inner, translated(packet, None, place))

    handlers: dict[int, Callable[[bytes], None]] = {inner: leaving, outer: coming}
    lines = {device: Line(float(bits_per_s), float(delay_s)) for device in handlers}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        waits_s = [wait_s for line in lines.values() if (wait_s := line.wait_s()) is not None]
        for device in select.select([*handlers, sys.stdin.fileno()], [], [], min(waits_s, default=None))[0]:
            if device not in handlers:
                return  # whoever started this is gone
            lines[device].put(os.read(device, 65_536))
        for device, line in lines.items():
            for packet in line.arrived():
                handlers[device](packet)


if __name__ == "__main__":
    main(*sys.argv[1:])
