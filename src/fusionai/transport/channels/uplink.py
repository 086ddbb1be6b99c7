"""One machine's uplink: which connection sends its large frames when, with which congestion control, and how fast.

Bulk sends are serialised over the uplink. While a large frame is in transit, the kernel's statistics are sampled: they
pace the connection, change it to BBR if the path loses packets, and release the uplink as soon as all but a few
milliseconds of its data have left, or if that takes far too long. On platforms without statistics the uplink is
released at once. The provider's rate limit is a debt that is paid off with time. Small frames go at once while the debt
is small, so that heartbeats and decoded tokens do not wait behind tensors. `channels.tcp` writes the data.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import sys
from collections import deque
from dataclasses import dataclass
from typing import Final

from fusionai.transport.channels import link as links
from fusionai.transport.channels.framed import ReceiveBuffers

RISE: Final = 0.003
"""Rise of the estimate per sample at full pace without a queue, as a fraction."""
FAST_RISE: Final = 0.03
"""The same after `CALM_SAMPLES` such samples."""
FALL: Final = 0.006
"""Fall of the estimate per sample while a queue stands, as a fraction."""
CALM_SAMPLES: Final = 20
"""Samples at full pace without a queue after which the estimate rises faster: the line is faster than measured."""
LEAST: Final = 0.85
"""Lowest estimate, as a fraction of the measured bandwidth. Below it a standing queue is caused by other traffic."""
QUEUE_SAMPLES: Final = 3
"""Samples in a row with a queue after which it counts as standing, not as a burst."""
SHARED_BELOW: Final = 0.4
"""Fraction of the line. While the current senders use less than this together, another may send at the same time."""


class UplinkScheduler:
    """Grants the uplink of one machine to its connections, usually to one at a time."""

    def __init__(self) -> None:
        self.uplink_bytes_per_s: float | None = None
        """Estimated uplink bandwidth; None if unknown."""
        self._measured = 0.0
        self._standing = 0
        self._calm = 0
        self._holders: dict[object, float] = {}
        """Connections that have a grant, with the bytes per second each delivers alone; infinite if unknown."""
        self._waiting: deque[tuple[object, float, asyncio.Future[None]]] = deque()

    async def take(self, who: object, bytes_per_s: float | None) -> None:
        """Wait until `who` has a grant. `bytes_per_s`: its last delivery rate. The caller must call `release`
        afterwards."""
        rate = math.inf if bytes_per_s is None else bytes_per_s
        if not self._waiting and self._admits():
            self._holders[who] = rate
            return
        granted = asyncio.get_running_loop().create_future()
        entry = (who, rate, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self.release(who)
            raise

    def measured(self, bytes_per_s: float) -> None:
        """Set the measured uplink bandwidth."""
        self.uplink_bytes_per_s = self._measured = bytes_per_s

    def seen(self, *, queues: bool, held: bool) -> None:
        """Report a sample of a sender at the line's pace: whether it reached the pace (`held`) and whether a queue
        stands."""
        if self.uplink_bytes_per_s is None:
            return
        self._standing = self._standing + 1 if queues else 0
        if queues:
            self._calm = 0
            if self._standing >= QUEUE_SAMPLES:
                self.uplink_bytes_per_s = max((1 - FALL) * self.uplink_bytes_per_s, LEAST * self._measured)
        elif held:
            self._calm += 1
            self.uplink_bytes_per_s *= 1 + (RISE if self._calm < CALM_SAMPLES else FAST_RISE)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def release(self, who: object) -> None:
        """End the grant of `who`, if it has one. If it is still waiting, its `take` returns without a grant."""
        self._holders.pop(who, None)
        for entry in [one for one in self._waiting if one[0] is who]:
            self._waiting.remove(entry)
            if not entry[2].cancelled():
                entry[2].set_result(None)
        while self._waiting and self._admits():
            next_one, rate, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._holders[next_one] = rate
                granted.set_result(None)

    def _admits(self) -> bool:
        if not self._holders or self.uplink_bytes_per_s is None:
            return True
        return sum(self._holders.values()) < SHARED_BELOW * self.uplink_bytes_per_s


BURST_S: Final = 0.05
"""Unused allowance that may be sent at once, in seconds of the limit."""
SMALL_DEBT_S: Final = 0.25
"""Debt above which small frames wait too, in seconds of the limit: a stream of small frames must also keep the limit.
"""
SLICE_S: Final = 0.02
"""Duration of a slice of a large frame, in seconds of the limit."""


class RateLimit:
    """Limits all connections of one machine in one direction to `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"expected a limit above 0 bytes per second, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._credit_bytes = bytes_per_s * BURST_S
        self._at_s: float | None = None

    def take(self, nbytes: int, now_s: float) -> float:
        """Count `nbytes` and return the seconds until they are paid for. They count at once, whether the caller waits
        or not."""
        self._pay(now_s)
        self._credit_bytes -= nbytes
        return max(0.0, -self._credit_bytes / self.bytes_per_s)

    def admits_small(self, now_s: float) -> bool:
        """Whether a small frame may go without waiting."""
        self._pay(now_s)
        return -self._credit_bytes <= self.bytes_per_s * SMALL_DEBT_S

    def slice_bytes(self, largest: int) -> int:
        """Size of the pieces in which a large frame is sent."""
        return max(1024, min(largest, int(self.bytes_per_s * SLICE_S)))

    def _pay(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        most = self.bytes_per_s * BURST_S
        self._credit_bytes = min(most, self._credit_bytes + elapsed_s * self.bytes_per_s)


class TransferLimits:
    """Limits of one machine: `upload` and `download` rates (None: unlimited), `uplink`, which orders bulk sends, and
    `received`, the memory for what arrives."""

    def __init__(self, *, upload_bytes_per_s: float | None = None, download_bytes_per_s: float | None = None) -> None:
        self.upload = None if upload_bytes_per_s is None else RateLimit(upload_bytes_per_s)
        self.download = None if download_bytes_per_s is None else RateLimit(download_bytes_per_s)
        self.uplink = UplinkScheduler()
        self.received = ReceiveBuffers()


CLEAN_PATHS: Final = "cubic"
LOSSY_PATHS: Final = "bbr"
SAMPLE_EVERY_S: Final = 0.1
"""Time between samples of the kernel's statistics, in seconds."""
QUEUE_OF_ROUND_TRIP: Final = 0.4
"""Queueing delay as a fraction of the minimum round trip above which a queue counts as standing."""
LEAST_QUEUE_S: Final = 0.004
"""Queueing delay in seconds below which a queue is treated as noise: it does not hurt other traffic."""
BACK_OFF: Final = 0.96
"""Factor on the cap per sample while a queue stands."""
FIRST_RISE: Final = 0.02
"""First rise of the cap per sample without a queue, as a fraction."""
MOST_RISE: Final = 0.16
"""Largest rise of the cap per sample. While no queue stands, the rise doubles from sample to sample up to this value,
so that a line that others have released is used again within a few samples; boundary tensors last one or two each."""
OWN_LIMIT: Final = 0.9
"""Fraction of the cap above which a delivery rate counts as limited by the cap, not by the line."""
LEAST_OF_BEST: Final = 0.8
"""Lowest cap as a fraction of the best delivery rate: a standing queue may be caused by others, and bulk yields to
them, but does not give up the line."""
LOSSY: Final = 1.6
LOSS_MEMORY: Final = 0.92
"""Decay of the loss score per sample. A path counts as lossy once its score reaches `LOSSY`: after two samples with a
loss at most 0.6 s apart, or three that are each 1 s apart."""
MOST_SINGLE: Final = 5
"""Retransmissions per sample up to which they count as random loss. More in one sample indicate an overflowing
queue."""
OF_UPLINK: Final = 0.97
"""Pace as a fraction of the measured uplink bandwidth, so that no queue builds."""
LONG_QUEUE_SAMPLES: Final = 30
"""Samples with a standing queue after which another line counts as the bottleneck, because the pace of this machine
makes no queue."""
UNCAPPED_SAMPLES: Final = 10
"""Samples without a cap while the bandwidth is unknown: one second of plain TCP, so that a probe can find the
bandwidth."""
BEST_OF_SAMPLES: Final = 100
"""Samples over which the best delivery rate is kept: ten seconds of sending. In a shorter window, a tensor that shared
the line would determine the estimate."""
_NOT_CAPPED: Final = 2**32 - 1
_SO_MAX_PACING_RATE: Final = 47


@dataclass(frozen=True, slots=True)
class KernelView:
    """The kernel's statistics of a connection. `limited_here`: the sender sometimes had no data to send."""

    rtt_s: float
    jitter_s: float
    """Mean deviation of the round trip."""
    least_rtt_s: float
    delivered_bytes_per_s: float
    limited_here: bool
    unsent_bytes: int = 0
    in_flight_bytes: int = 0
    resent_segments: int = 0

    @property
    def queues(self) -> bool:
        """Whether packets wait in a queue on the path."""
        queue_s = self.rtt_s - self.jitter_s - self.least_rtt_s
        return queue_s > max(QUEUE_OF_ROUND_TRIP * self.least_rtt_s, LEAST_QUEUE_S)


class Pacing:
    """Computes the cap of one connection's bulk rate. `bytes_per_s` None means no cap."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._best_before = self._best_now = 0.0
        """Highest delivery rate in the previous window of `BEST_OF_SAMPLES` samples, and in the current one."""
        self._samples = 0
        self._rise = FIRST_RISE
        self._standing = 0
        self._slower = False
        """Whether something other than the machine's own uplink limits this connection."""

    @property
    def uses_own_uplink(self) -> bool:
        """Whether the cap is that of the machine's own uplink."""
        return self.bytes_per_s is not None and not self._slower

    def sample(self, view: KernelView, uplink_bytes_per_s: float | None = None) -> None:
        """Update the cap from a sample. `uplink_bytes_per_s`: measured bandwidth of this machine's uplink, None if
        unknown."""
        self._standing = self._standing + 1 if view.queues and not view.limited_here else 0
        self._slower = uplink_bytes_per_s is None or self._slower or self._standing >= LONG_QUEUE_SAMPLES
        self._samples += 1
        if uplink_bytes_per_s is None:
            if self._samples > UNCAPPED_SAMPLES:
                self._follow(view)
            return
        most = OF_UPLINK * uplink_bytes_per_s
        if self._slower:
            self._follow(view)
            self._slower = self.bytes_per_s is not None and self.bytes_per_s < most
        if not self._slower:
            self.bytes_per_s = most

    def _follow(self, view: KernelView) -> None:
        """Set the cap just below the delivery rate while a queue stands, and raise it otherwise."""
        reached = view.delivered_bytes_per_s
        held = self.bytes_per_s is not None and reached >= OWN_LIMIT * self.bytes_per_s
        # The best rate is kept while the cap holds. Otherwise cap and best rate would pull each other down to nothing
        # wherever other traffic keeps the queue standing, even another connection of the same machine.
        best = max(self._best_before, self._best_now, reached)
        self._best_now = best if held else max(self._best_now, reached)
        if self._samples % BEST_OF_SAMPLES == 0:
            self._best_before, self._best_now = self._best_now, 0.0
        if view.queues:
            if not view.limited_here:
                lower = min(reached, reached if self.bytes_per_s is None else self.bytes_per_s) * BACK_OFF
                self.bytes_per_s = max(lower, best * LEAST_OF_BEST)
                self._rise = FIRST_RISE
        elif self.bytes_per_s is not None:
            risen = self.bytes_per_s * (1 + self._rise)
            self._rise = min(2 * self._rise, MOST_RISE)
            self.bytes_per_s = None if risen > 2 * best else risen


class Losses:
    """Detects paths with random loss: samples with a few retransmissions while no queue stands."""

    def __init__(self) -> None:
        self._resent = 0
        self._score = 0.0

    def sample(self, view: KernelView) -> bool:
        lost = view.resent_segments - self._resent
        self._resent = view.resent_segments
        if lost > MOST_SINGLE:
            self._score = 0.0
        else:
            self._score = LOSS_MEMORY * self._score + (lost > 0 and not view.queues)
        return self._score >= LOSSY


def use_for_bulk(sock: socket.socket, algorithm: str = LOSSY_PATHS) -> bool:
    """Use this congestion control for sending from now on. Returns False if the kernel does not offer it or permit
    it."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
    except OSError:
        return False
    return True


def kernel_view(sock: socket.socket) -> KernelView | None:
    """Return the kernel's statistics; None where the platform has none."""
    info = links.tcp_info(sock)
    if info is None or not info[links.LEAST_RTT_US]:
        return None
    return KernelView(
        info[links.RTT_US] / 1e6,
        info[links.JITTER_US] / 1e6,
        info[links.LEAST_RTT_US] / 1e6,
        float(info[links.DELIVERED]),
        bool(info[links.FLAGS] & 1),
        unsent_bytes=info[links.NOT_SENT],
        in_flight_bytes=info[links.UNACKED] * info[links.MSS],
        resent_segments=info[links.RESENT],
    )


def set_pacing_rate(sock: socket.socket, bytes_per_s: float | None) -> None:
    """Limit the socket's sending rate from now on; None removes the limit."""
    cap = _NOT_CAPPED if bytes_per_s is None else min(_NOT_CAPPED - 1, int(bytes_per_s))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", cap))


def bulk_is_available() -> bool:
    """Return whether this process may use the congestion control for lossy paths."""
    with socket.socket() as tried:
        return use_for_bulk(tried)


LEFT_S: Final = 0.005
LEAST_LEFT_BYTES: Final = 4 * 2**10
"""Remaining data (in seconds at the delivery rate, and the minimum in bytes) at which the next grant begins, so that
the uplink is never idle."""
GRANT_S: Final = 0.2
LEAST_GRANT_BYTES: Final = 512 * 2**10
"""Longest grant while others wait (in seconds at the line's rate, and the minimum in bytes), so that a connection that
sends a whole state shares the line with one that sends boundary tensors."""
TOO_LONG: Final = 4.0
"""Multiple of the time a grant needs at the line's rate after which it ends: the receiver or another line is the
bottleneck."""
LEAST_TOO_LONG_S: Final = 0.25
NEARBY_S: Final = 0.003
"""Round trip in seconds below which the receiver is in the local network, so that its data does not use the uplink."""
SURE_S: Final = 1.0
"""Seconds a grant must last before its samples adjust the bandwidth estimate: short bursts say little about it."""
_WATCH_S: Final = (0.001, 0.02)
"""Shortest and longest time between samples of the kernel's statistics, in seconds."""


class Bulk:
    """Bulk state of one connection. Call `end` when the connection is gone."""

    def __init__(self, transport: asyncio.Transport, uplink: UplinkScheduler) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._uplink = uplink
        self._pacing = Pacing()
        self._losses: Losses | None = None
        """Loss detector; None once BBR is used."""
        if uplink.uplink_bytes_per_s is None:
            use_for_bulk(self._socket, LOSSY_PATHS)
        elif use_for_bulk(self._socket, CLEAN_PATHS):
            self._losses = Losses()
        self._loop = asyncio.get_running_loop()
        self._sample_at_s = self._loop.time() + SAMPLE_EVERY_S
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._released = asyncio.Event()
        """Set while the uplink is not granted to this connection."""
        self._released.set()
        self._written = True
        """Whether everything of this grant has been written."""
        self._granted_at_s = 0.0
        self._grant_bytes = 0
        self._delivered_bytes_per_s: float | None = None

    async def slice(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be written."""
        line = self._uplink.uplink_bytes_per_s
        if line is not None and not self._released.is_set() and self._uplink.has_waiting:
            most = max(LEAST_GRANT_BYTES, GRANT_S * line)
            if self._written or self._grant_bytes + nbytes > most:
                self.written()
                await self._released.wait()
        if self._released.is_set() and not self._gone:
            if line is not None and not self._is_near():
                await self._uplink.take(self, self._delivered_bytes_per_s)
                if self._gone:
                    return
            self._released.clear()
            self._granted_at_s, self._grant_bytes = self._loop.time(), 0
            self._watch_in(_WATCH_S[1])
        self._written = False
        self._grant_bytes += nbytes

    def written(self) -> None:
        """The frame, or this grant's part of it, has been passed to the transport or the kernel."""
        self._written = True
        if not self._released.is_set():
            self._watch()

    def end(self) -> None:
        """The connection is gone: release the uplink."""
        self._gone = True
        self._end_grant()
        if self._timer is not None:
            self._timer.cancel()

    def _view(self) -> KernelView | None:
        return None if self._gone else kernel_view(self._socket)

    def _is_near(self) -> bool:
        view = self._view()
        return view is None or view.least_rtt_s < NEARBY_S

    def _watch(self) -> None:
        """Sample the connection repeatedly while a grant lasts."""
        if (view := self._view()) is None:
            self._end_grant()
            return
        now_s = self._loop.time()
        self._adapt(view, now_s)
        rate = view.delivered_bytes_per_s
        self._delivered_bytes_per_s = rate if rate > 0 else None
        # Data in flight beyond one round trip's worth waits in a router's queue: the line still has to send it.
        left_bytes = self._transport.get_write_buffer_size() + view.unsent_bytes
        left_bytes += max(0, view.in_flight_bytes - int(rate * view.least_rtt_s))
        if self._is_over(left_bytes, rate, view, now_s):
            self._end_grant()
            return
        expected_s = 0.8 * left_bytes / rate if rate > 0 else _WATCH_S[1]
        self._watch_in(min(max(expected_s, _WATCH_S[0]), _WATCH_S[1]))

    def _watch_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._watch)

    def _is_over(self, left_bytes: int, rate: float, view: KernelView, now_s: float) -> bool:
        if self._written and left_bytes <= max(LEAST_LEFT_BYTES, rate * LEFT_S):
            return True
        line = self._uplink.uplink_bytes_per_s
        due_s = 0.0 if line is None else TOO_LONG * self._grant_bytes / line
        return now_s - self._granted_at_s > max(LEAST_TOO_LONG_S, 3 * view.least_rtt_s, due_s)

    def _adapt(self, view: KernelView, now_s: float) -> None:
        """Adjust the pace every `SAMPLE_EVERY_S`, so that the line's queue stays short."""
        if now_s < self._sample_at_s:
            return
        self._sample_at_s = now_s + SAMPLE_EVERY_S
        if self._losses is not None and self._losses.sample(view):
            use_for_bulk(self._socket, LOSSY_PATHS)
            self._losses = None
        known = self._pacing.bytes_per_s
        self._pacing.sample(view, self._uplink.uplink_bytes_per_s)
        if self._pacing.uses_own_uplink and now_s - self._granted_at_s > SURE_S and view.least_rtt_s >= NEARBY_S:
            self._uplink.seen(queues=view.queues, held=view.delivered_bytes_per_s >= OWN_LIMIT * (known or math.inf))
        if self._pacing.bytes_per_s != known:
            set_pacing_rate(self._socket, self._pacing.bytes_per_s)

    def _end_grant(self) -> None:
        self._released.set()
        self._uplink.release(self)
