"""Runs the HTTP server on the calling event loop, with TLS if it has a certificate. Decides what an address reachable
from other machines requires (API keys and TLS), and how streams end when the server stops.

Neighbours: `app` is the application; the command line calls `serve` beside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import sys
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, cast

import uvicorn
from cryptography import x509
from starlette.types import Receive, Scope, Send

from fusionai.gateway.admission import limited
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.metrics import HttpMetrics
from fusionai.primitives.errors import FusionError, UsageError

_BACKLOG: Final = 1024
_TLS_HINT: Final = "Give two PEM files: --tls-cert with the certificate chain, --tls-key with its private key."
_LAST_WORDS_S: Final = 1.0
"""Time for the last events of streams after `Limits.drain_s`, in seconds (chosen)."""
_RESERVED_FILES: Final = 256
"""Open files reserved for everything but clients, such as weights, connections to peers and logs (chosen)."""


class HttpApplication(Protocol):
    """What the server runs: an ASGI application with its settings and counters."""

    @property
    def config(self) -> GatewayConfig: ...

    @property
    def metrics(self) -> HttpMetrics: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def end_streams(self) -> None:
        """End the answers that still run when the server stops."""
        ...

    async def close(self) -> None:
        """Release resources after the last request."""
        ...


async def serve(
    app: HttpApplication,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until `stop` is set or the task is cancelled; streams may then continue for `Limits.drain_s`. Closes
    `listener` at the end. `on_listening` is called once clients can connect. `tls`: speak HTTPS (`tls_context`)."""
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
            ),
            tls,
            limits.head_timeout_s,
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
    """uvicorn without signal handlers, because the program handles signals itself, and with a short time for a TLS
    handshake, during which a connection does not count against the limit of connections."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Do what uvicorn does for open sockets; it has no setting for the handshake's time."""
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.Protocol:
            make = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
            return make(config=self.config, server_state=self.server_state, app_state={}, _loop=loop)

        timeout_s = None if self._tls is None else self._handshake_timeout_s
        self.servers = [
            await loop.create_server(
                connection, sock=one, ssl=self._tls, ssl_handshake_timeout=timeout_s, backlog=self.config.backlog
            )
            for one in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _close(app: HttpApplication, server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    server.should_exit = True
    late = asyncio.get_running_loop().call_later(app.config.limits.drain_s, app.end_streams)
    try:
        await running
    finally:
        late.cancel()
        await app.close()


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return what `serve` needs for HTTPS, at least TLS 1.2. `certificate`: PEM file with the server's certificate and
    those that lead to its authority; `key`: PEM file of its private key, not encrypted. Raises `UsageError` for files
    that can't be read or don't belong together, and for a certificate that is not valid today."""
    for path, what in ((certificate, "certificate"), (key, "private key")):
        try:
            path.read_bytes()
        except OSError as problem:
            raise UsageError(
                f"{path}: the TLS {what} can't be read: {problem.strerror or problem}.", hint=_TLS_HINT
            ) from problem

    def no_passphrase() -> str:
        raise UsageError(
            f"{key}: the TLS private key is encrypted with a passphrase.", hint="Give a key without one: openssl pkey."
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, no_passphrase)
        (first, *_) = x509.load_pem_x509_certificates(certificate.read_bytes())
    except (ssl.SSLError, ValueError) as problem:
        mismatch = getattr(problem, "reason", "") == "KEY_VALUES_MISMATCH"
        reason = "the key is another certificate's" if mismatch else "expected a certificate and a key in PEM form"
        raise UsageError(f"{certificate} and {key} can't be used for TLS: {reason}.", hint=_TLS_HINT) from problem
    begins, ends, now = first.not_valid_before_utc, first.not_valid_after_utc, datetime.now(UTC)
    if not begins <= now <= ends:
        raise UsageError(
            f"{certificate}: the TLS certificate is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}, not today "
            f"({now:%Y-%m-%d}).",
            hint="Renew it, or set this machine's clock.",
        )
    return context


def open_listener(
    host: str, port: int, *, has_keys: bool, has_tls: bool = False, clear_text: bool = False, flag: str = "--port"
) -> tuple[socket.socket, str]:
    """Reserve the address for `serve` and return the socket and its URL. `port` 0: any free one. Raises `UsageError` if
    it can't listen there, or if the address is reachable from other machines without API keys, or without TLS although
    `clear_text` does not allow that. `flag`: names the port in errors."""
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
    if not (has_tls or clear_text) and not all(address.is_loopback for address in addresses):
        raise UsageError(
            f"without TLS, API keys, prompts and answers travel in clear text between {host} and its clients: every "
            "machine on the way can read and change them.",
            hint="Give a certificate with --tls-cert and --tls-key; or --clear-text if only a network that you trust, "
            "such as a VPN, leads there.",
        )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    # Not on Windows, where this option would let two programs share the port.
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    try:
        with _listening_errors((host, port), flag):
            listener.bind(address)
    except UsageError:
        listener.close()
        raise
    scheme = "https" if has_tls else "http"
    return listener, f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _listening_errors(address: tuple[Any, ...], flag: str = "--port") -> Generator[None, None, None]:
    try:
        yield
    except OSError as problem:
        raise UsageError(
            f"can't listen on {address[0]}:{address[1]}: {problem.strerror or problem}.",
            hint=f"Another program may be using it: choose another with {flag}, or {flag} 0 for any free one.",
        ) from problem


def _allow_files(wanted: int) -> int | None:
    """Raise the limit of open files as far as needed and return it; None if the system has no such limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
