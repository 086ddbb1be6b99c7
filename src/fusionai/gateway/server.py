"""Runs the HTTP server on the calling event loop. Decides that an address reachable from other machines requires API
keys, and how streams end when the server stops.

Neighbours: `app` is the application; the command line calls `serve` beside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Generator
from typing import Any, Final

import uvicorn

from fusionai.gateway.admission import limited
from fusionai.gateway.app import Gateway
from fusionai.primitives.errors import FusionError, UsageError

_BACKLOG: Final = 1024
_LAST_WORDS_S: Final = 1.0
"""Time for the last events of streams after `Limits.drain_s`, in seconds (chosen)."""
_RESERVED_FILES: Final = 256
"""Open files reserved for everything but clients, such as weights, connections to peers and logs (chosen)."""


async def serve(
    app: Gateway, listener: socket.socket, *, stop: asyncio.Event, on_listening: Callable[[], None]
) -> None:
    """Serve until `stop` is set or the task is cancelled; streams may then continue for `Limits.drain_s`. Closes
    `listener` at the end. `on_listening` is called once clients can connect."""
    with contextlib.closing(listener):
        limits = app.config.limits
        open_files = _allow_files(2 * limits.connections + _RESERVED_FILES)
        if open_files is not None and open_files < limits.connections + _RESERVED_FILES:
            raise UsageError(
                f"{limits.connections} connections need {limits.connections + _RESERVED_FILES} open files; the system "
                f"allows this process {open_files}.",
                hint="Raise the limit (`ulimit -n`) or allow fewer connections.",
            )
        server = _Server(
            uvicorn.Config(
                app,
                http=limited(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                h11_max_incomplete_event_size=64 * 2**10,
                timeout_graceful_shutdown=int(limits.drain_s + _LAST_WORDS_S) + 1,
            )
        )
        connections = server.server_state.connections
        app.metrics.connections.set_function(lambda: len(connections))
        with _listening_errors(listener.getsockname()):
            listener.listen(_BACKLOG)
        on_listening()
        running = asyncio.create_task(server.serve(sockets=[listener]))
        halt = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((running, halt), return_when=asyncio.FIRST_COMPLETED)
        finally:
            halt.cancel()
            await asyncio.shield(_close(app, server, running))
        if not halt.done() and not halt.cancelled():
            raise FusionError("the gateway's HTTP server stopped unexpectedly.")


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, because the program handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _close(app: Gateway, server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    server.should_exit = True
    late = asyncio.get_running_loop().call_later(app.config.limits.drain_s, app.end_streams)
    try:
        await running
    finally:
        late.cancel()
        app.close()


def open_listener(host: str, port: int, *, has_keys: bool) -> tuple[socket.socket, str]:
    """Reserve the address for `serve` and return the socket and its URL. `port` 0: any free one. Raises `UsageError` if
    it can't listen there, or if the address is reachable from other machines and there are no API keys."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as problem:
        raise UsageError(f"can't listen on {host}:{port}, which is not a valid address: {problem}.") from problem
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    if not has_keys and not all(address.is_loopback for address in addresses):
        raise UsageError(
            f"without API keys the gateway listens on this machine only, not on {host}.",
            hint="Give a file of keys with --api-key-file, or use --host 127.0.0.1.",
        )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    # Not on Windows, where this option would let two programs share the port.
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    try:
        with _listening_errors((host, port)):
            listener.bind(address)
    except UsageError:
        listener.close()
        raise
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _listening_errors(address: tuple[Any, ...]) -> Generator[None, None, None]:
    try:
        yield
    except OSError as problem:
        raise UsageError(
            f"can't listen on {address[0]}:{address[1]}: {problem.strerror or problem}.",
            hint="Another program may be using it: choose another with --port, or --port 0 for any free one.",
        ) from problem


def _allow_files(wanted: int) -> int | None:
    """Raise the limit of open files as far as needed and return it; None if the system has no such limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
