"""A hub on loopback: speaks as much of the Hugging Face hub's HTTP as its client asks for, and misbehaves on demand.

Neighbours: tests give its address to processes as HF_ENDPOINT; the client is the shipped one.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

COMMIT = hashlib.sha1(b"the only commit", usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """`repositories`: by `owner/name`, a directory each. `breaks`: files of which the first download stops half way.
    `gated`: repositories that ask for a token."""

    repositories: dict[str, Path]
    breaks: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path, and the range that was asked for, of every request."""
    url: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process that shall see this hub and nothing it fetched before."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "5",
        }

    def fetched(self, name: str) -> list[str]:
        """The ranges of all downloads of this file."""
        return [told for method, path, told in self.asked if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    state = Hub(repositories)

    class Handler(_Handler):
        hub = state

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        for name, directory in self.hub.repositories.items():
            if name in self.hub.gated and (path.startswith((f"/api/models/{name}", f"/{name}/"))):
                self._refuse(401, "GatedRepo", "Access to this model is restricted.")
                return
            if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                self._info(name, directory)
                return
            if path in (f"/api/models/{name}/tree/main", f"/api/models/{name}/tree/{COMMIT}"):
                self._json(
                    [{"type": "file", "path": path, "size": size, "oid": ""} for path, size in _files(directory)]
                )
                return
            if path.startswith(f"/{name}/resolve/"):
                revision, _, file = path.removeprefix(f"/{name}/resolve/").partition("/")
                if revision in ("main", COMMIT) and (directory / file).is_file():
                    self._file(directory / file)
                else:
                    self._refuse(404, "EntryNotFound", "Entry not found")
                return
        self._refuse(401, "RepoNotFound", "Repository not found")

    def _info(self, name: str, directory: Path) -> None:
        listed = [{"rfilename": path, "size": size} for path, size in _files(directory)]
        self._json({"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": listed})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT})

    def _file(self, file: Path) -> None:
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        told = self.headers.get("Range", "")
        start = int(told.removeprefix("bytes=").partition("-")[0]) if told else 0
        status = 206 if told else 200
        if told:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and file.name in self.hub.breaks:
            self.hub.breaks.discard(file.name)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content) - start)}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[start : (start + len(content)) // 2])
            self.close_connection = True
            return
        self._send(status, content[start:], headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _files(directory: Path) -> list[tuple[str, int]]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return [(file.relative_to(directory).as_posix(), file.stat().st_size) for file in files]
