"""Pictures by URL: which addresses are dialled, how redirects, sizes and errors end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fusionai.gateway import images
from fusionai.gateway.images import fetched, is_public
from fusionai.primitives.errors import UsageError


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("255.255.255.255", False), ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("ff02::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False), ("2001:0:7f00:1::", False),
    ],
)  # fmt: skip
def test_only_the_public_internet_is_dialled(address: str, public: bool):
    assert is_public(address) is public


@pytest.fixture
def server() -> Iterator[str]:
    stopped = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/cat.png?size=1":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"a cat")
            elif self.path == "/slow":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not stopped.wait(0.01):
                    try:
                        self.wfile.write(b"a")
                    except OSError:
                        return
            elif self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
            else:
                self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    stopped.set()
    served.shutdown()
    thread.join()
    served.server_close()


def test_a_server_that_sends_a_byte_now_and_then_is_cut_off(server: str, monkeypatch: pytest.MonkeyPatch):
    """Within the head of its answer, where no piece of a body shows how long it takes."""
    monkeypatch.setattr(images, "FETCH_S", 0.2)
    with pytest.raises(UsageError):
        fetched(f"{server}/slow", 100, anyone)


def anyone(_address: str) -> bool:
    return True


def test_a_picture_is_fetched_also_over_a_redirect(server: str):
    assert fetched(f"{server}/cat.png?size=1#ear", 100, anyone) == b"a cat"
    assert fetched(f"{server}/to//cat.png?size=1", 100, anyone) == b"a cat"


def test_what_goes_wrong_is_said(server: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="answered 404"):
        fetched(f"{server}/dog.png", 100, anyone)
    with pytest.raises(UsageError, match="more than 3 bytes"):
        fetched(f"{server}/cat.png?size=1", 3, anyone)
    with pytest.raises(UsageError, match="more than 3 redirects"):
        fetched(f"{server}/to//to//to//to//to//cat.png", 100, anyone)
    with pytest.raises(UsageError, match="can't be fetched"):
        fetched("http://nowhere.invalid/x", 100, anyone)
    monkeypatch.setattr(images, "FETCH_S", 0.0)
    with pytest.raises(UsageError, match="within 0 s"):
        fetched(f"{server}/cat.png?size=1", 100, anyone)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://x/y", "//x", "http://", "http://a:b@c/", "http://x:0/", "http://[::1", "x"]
)
def test_other_kinds_of_urls_are_refused(url: str):
    with pytest.raises(UsageError):
        fetched(url, 100, anyone)


def test_an_inner_address_is_not_dialled_also_behind_a_redirect_or_a_name(server: str, monkeypatch: pytest.MonkeyPatch):
    """A name with a public and an inner address is refused whole, and a name is resolved once per request: an answer
    that changes between check and connection would lead inside."""
    with pytest.raises(UsageError, match=r"127\.0\.0\.1, which is not on the public internet"):
        fetched(f"{server}/cat.png?size=1", 100)
    port = int(server.rpartition(":")[2])
    only_here = lambda address: address == "127.0.0.1"  # noqa: E731
    with pytest.raises(UsageError, match=r"127\.0\.0\.2, which"):
        fetched(f"{server}/to/http://127.0.0.2:{port}/cat.png?size=1", 100, only_here)
    asked: list[str] = []

    def resolved(host: str, port: int, *_more: Any, **_options: Any) -> list[Any]:
        asked.append(host)
        both = ("127.0.0.1", "10.0.0.1") if host == "two.example" else ("127.0.0.1",)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in both]

    monkeypatch.setattr(images.socket, "getaddrinfo", resolved)
    with pytest.raises(UsageError, match=r"10\.0\.0\.1"):
        fetched(f"http://two.example:{port}/cat.png?size=1", 100, only_here)
    asked.clear()
    assert fetched(f"http://one.example:{port}/cat.png?size=1", 100, only_here) == b"a cat"
    assert asked[0] == "one.example"
    assert "one.example" not in asked[1:]
