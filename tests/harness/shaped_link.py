"""A link of a given bandwidth, delay and loss between two network namespaces of its own, made in user space.

    with ShapedLink(Shape(bandwidth_bits_per_s=100e6, one_way_s=0.01)) as link:
        server = link.start("far", [sys.executable, "server.py", link.address("far")])

Each end is a process in a namespace of its own that holds a TUN device; this process carries packets between the two: a
line that is busy for as long as a packet takes, a queue that drops what does not fit, losses drawn from a seed, then
a fixed delay. Namespaces and devices go with the processes that hold them. Unlike a proxy it shapes packets: what TCP
makes of loss and delay is the kernel's own doing.

Works as root, or where user namespaces are allowed; `unavailable` says why it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from harness.patience import CEILING_S

End = Literal["near", "far"]
ENDS: Final[tuple[End, End]] = ("near", "far")
ADDRESSES: Final = {"near": "10.77.0.1", "far": "10.77.0.2"}
DEVICE: Final = "shaped0"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_PER_TURN: Final = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Both directions alike. `queue_s`: of the line's time, what waits before packets are dropped."""

    bandwidth_bits_per_s: float
    one_way_s: float
    loss: float = 0.0
    queue_s: float = 0.1
    mtu_bytes: int = 1500

    @property
    def goodput_bytes_per_s(self) -> float:
        """What TCP can carry at most: of each packet 52 bytes are headers and time stamps."""
        return self.bandwidth_bits_per_s / 8 * (self.mtu_bytes - 52) / self.mtu_bytes


class ShapedLink:
    """Use as a context. Raises `OSError` where no namespace can be made."""

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        self.shape = shape
        self.dropped, self.lost, self.carried = 0, 0, 0
        """Packets: for want of room, by chance, and through."""
        self._seed = seed
        self._holders: dict[End, subprocess.Popen[bytes]] = {}
        self._devices: list[int] = []
        self._stopping = threading.Event()
        self._carrier = threading.Thread(target=self._carry, name="shaped link", daemon=True)

    def address(self, end: End) -> str:
        return ADDRESSES[end]

    def __enter__(self) -> ShapedLink:
        try:
            for end in ENDS:
                self._devices.append(self._hold(end))
        except BaseException:
            self._let_go()
            raise
        self._carrier.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._carrier.join()
        self._let_go()

    def start(self, end: End, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process at this end. `options`: of `subprocess.Popen`."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        holder = self._holders[end].pid
        return subprocess.Popen(["nsenter", "--target", str(holder), "--net", *user, *argv], **options)

    def _hold(self, end: End) -> int:
        """Start the process that keeps this end's namespace; returns its device."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            argv = [sys.executable, str(Path(__file__).resolve()), end, str(theirs.fileno()), str(self.shape.mtu_bytes)]
            holder = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)
            self._holders[end] = holder
            theirs.close()
            ours.settimeout(CEILING_S)
            said, devices, _, _ = socket.recv_fds(ours, 4096, 1)
            if not devices:
                raise OSError(f"no namespace can be made here: {said.decode() or 'the helper ended'}")
        os.set_blocking(devices[0], False)
        return devices[0]

    def _let_go(self) -> None:
        for device in self._devices:
            os.close(device)
        for holder in self._holders.values():
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            if holder.stdin is not None:
                holder.stdin.close()

    # ------------------------------------------------------------------------------------------------ the packets

    def _carry(self) -> None:
        lines = [_Line(self.shape, random.Random(self._seed * 2 + way)) for way in range(2)]
        poll = select.poll()
        for device in self._devices:
            poll.register(device, select.POLLIN)
        while not self._stopping.is_set():
            now_s = time.monotonic()
            due_s = min(line.due_s for line in lines)
            ready = poll.poll(min(50.0, max(0.0, (due_s - now_s) * 1000)))
            for device, _ in ready:
                lines[self._devices.index(device)].take(device)
            for way, line in enumerate(lines):
                line.give(self._devices[1 - way])
        self.dropped = sum(line.dropped for line in lines)
        self.lost = sum(line.lost for line in lines)
        self.carried = sum(line.carried for line in lines)


class _Line:
    """One direction: a queue, a line, a delay."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self._shape = shape
        self._chance = chance
        self._free_s = 0.0
        """When the line has sent all that it took."""
        self._on_their_way: deque[tuple[float, bytes]] = deque()
        self.dropped, self.lost, self.carried = 0, 0, 0

    @property
    def due_s(self) -> float:
        return self._on_their_way[0][0] if self._on_their_way else float("inf")

    def take(self, device: int) -> None:
        """What the kernel sends. A packet that is lost took its time on the line all the same."""
        for _ in range(_MOST_PER_TURN):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            begins_s = max(now_s, self._free_s)
            if begins_s - now_s > self._shape.queue_s:
                self.dropped += 1
                continue
            self._free_s = begins_s + len(packet) * 8 / self._shape.bandwidth_bits_per_s
            if self._shape.loss and self._chance.random() < self._shape.loss:
                self.lost += 1
                continue
            self._on_their_way.append((self._free_s + self._shape.one_way_s, packet))

    def give(self, device: int) -> None:
        now_s = time.monotonic()
        while self._on_their_way and self._on_their_way[0][0] <= now_s:
            # What the receiving kernel has no room for is lost, as anywhere.
            with contextlib.suppress(BlockingIOError):
                os.write(device, self._on_their_way[0][1])
            self._on_their_way.popleft()
            self.carried += 1


def unavailable() -> str:
    """Why there can be no shaped link here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    try:
        with ShapedLink(Shape(1e9, 0.0)) as link:
            tried = link.start("near", ["true"], stderr=subprocess.PIPE)
            _, told = tried.communicate(timeout=CEILING_S)
            return "" if tried.returncode == 0 else told.decode().strip()
    except OSError as error:
        return str(error)


# ---------------------------------------------------------------------------------------------- the holding process


def _hold(end: End, answer: socket.socket, mtu_bytes: int) -> None:
    """In the process that keeps a namespace: make it and its device, hand the device over, wait to be ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _CLONE_NEWNET | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for words in (
        ["address", "add", f"{ADDRESSES[end]}/30", "dev", DEVICE],
        ["link", "set", "dev", DEVICE, "mtu", str(mtu_bytes), "txqueuelen", "10000", "up"],
        ["link", "set", "dev", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True, capture_output=True)
    socket.send_fds(answer, [b"made"], [device])
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _end, _answer, _mtu = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    try:
        _hold("near" if _end == "near" else "far", _answer, _mtu)
    except (OSError, subprocess.CalledProcessError) as _error:
        _answer.sendall(str(_error).encode())
