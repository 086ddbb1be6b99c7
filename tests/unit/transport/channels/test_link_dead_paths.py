"""What the kernel says of a connection's other side, and of sockets that are closed."""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import cast

import pytest

from fusionai.transport.channels.link import acknowledges, silent_s, unacknowledged_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other platforms give no account of a connection")


def test_a_process_that_reads_nothing_still_has_a_machine_that_acknowledges():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        accepted, _ = server.accept()
        with accepted:
            near.sendall(b"x" * 1000)
            assert (acknowledges(near), silent_s(near)) == (True, 0.0)


class ClosedByUvloop:
    def getsockopt(self, *arguments: object) -> bytes:
        raise ValueError("Invalid file descriptor: -1")


def test_nobody_can_say_anything_of_a_closed_socket():
    sock = socket.create_server(("127.0.0.1", 0))
    sock.close()
    for closed in (sock, cast("socket.socket", ClosedByUvloop())):
        assert (acknowledges(closed), silent_s(closed)) == (None, 0.0)


def test_what_a_full_reader_leaves_unsent_is_still_to_be_acknowledged():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        accepted, _ = server.accept()
        with accepted:
            assert unacknowledged_s(near) is None
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(b"x" * 65_536)
            assert unacknowledged_s(near) == 0.0
