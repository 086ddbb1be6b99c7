"""Bulk goes by BBR where there is such a thing, at a pace that fills the line and lets nothing wait for long."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.transport.channels import uplink as congestion
from fusionai.transport.channels.uplink import KernelView, Pacing, kernel_view, set_pacing_rate, use_for_bulk
from harness.examples import examples

LINE = 12.5e6


def view(queue_s: float = 0.0, *, rtt_s: float = 0.02, delivered: float = LINE, limited: bool = False) -> KernelView:
    return KernelView(rtt_s + queue_s, 0.0, rtt_s, delivered, limited)


def settled() -> Pacing:
    """Of a connection that has sent for a second."""
    pacing = Pacing()
    for _ in range(congestion.UNCAPPED_SAMPLES):
        pacing.sample(view())
    return pacing


class Line:
    """Bulk that sends as fast as it may, at most a fifth more than the line carries as BBR does when it probes; `held`:
    round trips that it may have in flight, as BBR bounds it."""

    def __init__(self, line: float, rtt_s: float, held: float = 2.0) -> None:
        self.line, self.rtt_s, self.held = line, rtt_s, held
        self.queue_bytes = 0.0

    def turn(self, pacing: Pacing, others: float = 0.0) -> tuple[float, float]:
        """A look later: what was delivered per second, what waits in seconds."""
        free = self.line - others
        rate = min(pacing.bytes_per_s or self.line * 1.2, self.line * 1.2)
        most = (self.held - 1) * self.line * self.rtt_s
        self.queue_bytes = min(max(0.0, self.queue_bytes + (rate - free) * congestion.SAMPLE_EVERY_S), most)
        delivered = free if self.queue_bytes > 0 else min(rate, free)
        pacing.sample(view(self.queue_bytes / self.line, rtt_s=self.rtt_s, delivered=delivered))
        return delivered, self.queue_bytes / self.line


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(line=st.floats(2e5, 2e8), rtt_s=st.floats(0.002, 0.2))
def test_the_line_is_full_and_its_queue_short(line: float, rtt_s: float):
    pacing, sent = settled(), Line(line, rtt_s)
    for _ in range(50):
        sent.turn(pacing)
    turns = [sent.turn(pacing) for _ in range(600)]
    assert sum(delivered for delivered, _ in turns) > 0.95 * line * len(turns)
    waiting_s = sorted(queue_s for _, queue_s in turns)
    assert waiting_s[len(turns) // 2] <= max(0.5 * rtt_s, 2 * congestion.LEAST_QUEUE_S)


def test_without_a_queue_nothing_is_capped():
    pacing = settled()
    for _ in range(100):
        pacing.sample(view())
    assert pacing.bytes_per_s is None


def test_a_queue_of_a_few_milliseconds_is_noise():
    """On a LAN round trips are shorter than the time a busy machine takes to answer."""
    pacing = settled()
    for _ in range(100):
        pacing.sample(view(0.003, rtt_s=0.0001))
    assert pacing.bytes_per_s is None


def test_jitter_is_no_queue():
    pacing = settled()
    pacing.sample(
        KernelView(rtt_s=0.032, jitter_s=0.008, least_rtt_s=0.02, delivered_bytes_per_s=LINE, limited_here=False)
    )
    assert pacing.bytes_per_s is None
    pacing.sample(
        KernelView(rtt_s=0.032, jitter_s=0.001, least_rtt_s=0.02, delivered_bytes_per_s=LINE, limited_here=False)
    )
    assert pacing.bytes_per_s is not None


def test_who_has_nothing_to_send_is_not_slowed_down():
    pacing = settled()
    for _ in range(100):
        pacing.sample(view(0.5, limited=True))
    assert pacing.bytes_per_s is None


def test_a_queue_that_others_make_leaves_most_of_the_line():
    """Somebody else keeps the queue full whatever bulk does."""
    pacing = settled()
    for _ in range(200):
        pacing.sample(view(0.5, delivered=LINE))
    assert pacing.bytes_per_s == pytest.approx(congestion.LEAST_OF_BEST * LINE, rel=0.01)


def test_beside_a_standing_queue_cap_and_best_do_not_pull_each_other_down():
    """A cap that holds says nothing of the line: two connections of one machine had ended at an eighth of it."""
    pacing = settled()
    pacing.sample(view(delivered=LINE))
    for _ in range(2000):
        delivered = min(pacing.bytes_per_s or LINE, LINE / 2)
        pacing.sample(view(0.5, delivered=delivered))
    assert pacing.bytes_per_s is not None
    assert pacing.bytes_per_s >= congestion.LEAST_OF_BEST * congestion.OWN_LIMIT * LINE / 2


def test_a_line_that_others_have_left_is_taken_again_in_a_few_looks():
    pacing = settled()
    pacing.sample(view(delivered=LINE))
    for _ in range(500):
        pacing.sample(view(0.5, delivered=min(pacing.bytes_per_s or LINE, LINE / 4)))
    assert pacing.bytes_per_s is not None
    assert pacing.bytes_per_s < LINE / 3
    looks = 0
    while (pacing.bytes_per_s or LINE) < LINE:
        pacing.sample(view(delivered=min(pacing.bytes_per_s or LINE, LINE)))
        looks += 1
    assert looks < 15


def test_a_line_that_got_slower_is_found_and_one_that_got_faster_is_used():
    pacing, sent = settled(), Line(LINE, 0.03)
    for _ in range(100):
        sent.turn(pacing)
    sent.line = LINE / 4
    for _ in range(600):
        sent.turn(pacing)
    assert pacing.bytes_per_s is not None
    assert pacing.bytes_per_s < 1.2 * LINE / 4
    sent.line = LINE
    turns = [sent.turn(pacing) for _ in range(300)]
    assert turns[-1][0] > 0.9 * LINE


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
        with near, far:
            yield near, far


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's view is Linux's")
def test_the_kernel_tells_what_is_asked_and_takes_the_cap(pair: tuple[socket.socket, socket.socket]):
    near, far = pair
    for _ in range(20):
        near.sendall(bytes(20_000))
        left = 20_000
        while left:
            left -= len(far.recv(left))
    seen = kernel_view(near)
    assert seen is not None
    assert 0 < seen.least_rtt_s <= seen.rtt_s < 1
    assert 0 < seen.delivered_bytes_per_s < 1e12
    set_pacing_rate(near, 1e6)
    assert near.getsockopt(socket.SOL_SOCKET, 47) == 1_000_000
    set_pacing_rate(near, None)
    assert near.getsockopt(socket.SOL_SOCKET, 47) in (-1, 2**32 - 1)


def test_bulk_goes_by_bbr_where_it_is_to_be_had(pair: tuple[socket.socket, socket.socket]):
    near, _ = pair
    before = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) if sys.platform == "linux" else b""
    if use_for_bulk(near):
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"
    elif sys.platform == "linux":
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == before


def test_a_kernel_without_it_is_no_error(pair: tuple[socket.socket, socket.socket]):
    assert not use_for_bulk(pair[0], "no-such-thing")


def test_a_measured_line_is_kept_just_below_what_it_carries():
    pacing = Pacing()
    for queue_s in (0.0, 0.01, 0.0, 0.02) * 50:
        pacing.sample(view(queue_s, delivered=LINE / 3), LINE)
        assert pacing.bytes_per_s == congestion.OF_UPLINK * LINE
        assert pacing.uses_own_uplink


def test_a_queue_that_stands_for_long_is_another_lines():
    """The other end's line is full: bulk follows what comes through, and takes its own line again once that is over."""
    pacing = Pacing()
    for _ in range(congestion.LONG_QUEUE_SAMPLES + 5):
        pacing.sample(view(0.05, delivered=LINE / 3), LINE)
    assert not pacing.uses_own_uplink
    assert pacing.bytes_per_s is not None
    assert pacing.bytes_per_s < LINE / 2
    looks = 0
    while not pacing.uses_own_uplink:
        pacing.sample(view(delivered=min(pacing.bytes_per_s or LINE, LINE)), LINE)
        looks += 1
    assert looks < 30
    assert pacing.bytes_per_s == congestion.OF_UPLINK * LINE


def test_a_probe_is_not_held_back():
    pacing = Pacing()
    for _ in range(congestion.UNCAPPED_SAMPLES):
        pacing.sample(view(0.5))
        assert pacing.bytes_per_s is None


def lossy(*looks: tuple[int, float]) -> bool:
    losses = congestion.Losses()
    return any(losses.sample(dataclasses.replace(view(queue_s), resent_segments=seen)) for seen, queue_s in looks)


def test_losses_without_a_queue_are_the_paths():
    assert lossy((1, 0.0), (1, 0.0), (2, 0.0), (3, 0.0))
    assert not lossy((1, 0.0), *[(1, 0.0)] * 30, (2, 0.0), *[(2, 0.0)] * 30)


def test_what_overflowed_is_no_loss_of_the_path():
    assert not lossy(*[(number * 50, 0.1) for number in range(50)])
