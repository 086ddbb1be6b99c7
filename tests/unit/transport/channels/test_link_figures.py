"""What the kernel's account of a connection says, and what it does not."""

from __future__ import annotations

import socket
import sys

import pytest

from fusionai.transport.channels.link import UNKNOWN, part, tcp_figures


def test_the_part_that_was_lost():
    assert part(1, 4) == 0.25
    assert part(0, 0) == 0.0
    assert part(9, 3) == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel gives this account")
def test_a_connection_that_carried_something_has_figures():
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as near,
        door.accept()[0] as far,
    ):
        for _ in range(200):
            near.sendall(bytes(10_000))
            left = 10_000
            while left:
                left -= len(far.recv(left))
        found = tcp_figures(near)
    assert 0 < found.round_trip_s < 1
    assert found.bandwidth_bytes_per_s > 1e4
    assert found.loss < 0.5


def test_elsewhere_nothing_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with socket.socket() as sock:
        assert tcp_figures(sock) == UNKNOWN
