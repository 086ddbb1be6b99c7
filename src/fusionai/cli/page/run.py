"""Runs a broker together with its page: where the page listens, who may sign in, and in which order both end.

On loopback, the page's secret is a random key, which is kept in the broker's home and printed within the page's
address. Elsewhere it is a password, over TLS. The broker serves until the page has ended, so that programs of the page
can report their end.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from cryptography import x509

from fusionai.broker.home import DIRECTORY
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import Announcement, BrokerServer, run_broker
from fusionai.cli.page.access import LOOPBACK, SHORTEST_PASSWORD, SessionGate, gate_of
from fusionai.cli.page.app import BrokerPage, PageAddress
from fusionai.cli.page.desk import BrokerDesk
from fusionai.cli.page.programs import PagePrograms
from fusionai.gateway.server import open_listener, serve, tls_context
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import UsageError
from fusionai.transport.routes.addresses import is_loopback
from fusionai.transport.security.identity import keep_private, make_private_directory
from fusionai.transport.security.trust import TRUST_FILE

KEY_FILE: Final = "page-key"
PAGE_DIRECTORY: Final = "page"
DEFAULT_PAGE_PORT: Final = 4780


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Where the page listens. Beyond loopback it needs a password and both files of a certificate."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PAGE_PORT
    password_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class OpenPage:
    """The page's address, reserved, and what opens it. `link`: for the terminal, with the key on loopback."""

    listener: socket.socket
    address: PageAddress
    tls: ssl.SSLContext | None
    gate: SessionGate
    link: str


def open_page(options: PageOptions, home: Path) -> OpenPage:
    """Reserve the page's address. Raises `UsageError`, before anything of the pool is touched."""
    tls = _tls(options)
    if not options.is_local and tls is None:
        raise UsageError(
            f"beyond this machine the page needs TLS: {options.host} is not loopback.",
            hint="Give a certificate with --page-tls-cert and --page-tls-key, or leave --page-host out and use an SSH "
            "tunnel: ssh -L 4780:127.0.0.1:4780 THIS-MACHINE.",
        )
    password = _password(options)
    listener, url = open_listener(
        options.host, options.port, has_keys=True, has_tls=tls is not None, flag="--page-port"
    )
    if password is None:
        make_private_directory(home)
        make_private_directory(home / DIRECTORY)
        key = keep_private(home / DIRECTORY / KEY_FILE, lambda: secrets.token_urlsafe(24).encode()).decode()
        gate, link = gate_of(key), f"{url}/#{key}"
    else:
        gate, link = gate_of(password), f"{url}/"
    scheme, port = ("http" if tls is None else "https"), listener.getsockname()[1]
    return OpenPage(listener, PageAddress(scheme, _hosts(options), port), tls, gate, link)


def _tls(options: PageOptions) -> ssl.SSLContext | None:
    match options.tls_cert, options.tls_key:
        case None, None:
            return None
        case Path() as certificate, Path() as key:
            return tls_context(certificate, key)
        case _:
            raise UsageError("a certificate and its private key are needed: give --page-tls-cert and --page-tls-key.")


def _password(options: PageOptions) -> str | None:
    """Return the password, None where none is needed. Asks for it on a terminal."""
    if options.password_file is not None:
        try:
            lines = options.password_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(f"{options.password_file}: the page's password can't be read: {problem}.") from problem
        return _long_enough(lines[0].strip() if lines else "")
    if options.is_local:
        return None
    if not sys.stdin.isatty():
        raise UsageError("beyond this machine the page needs a password.", hint="Give --page-password-file FILE.")
    return _long_enough(click.prompt("Password of the page", hide_input=True, confirmation_prompt=True))


def _long_enough(password: str) -> str:
    if len(password) < SHORTEST_PASSWORD:
        raise UsageError(
            f"expected a password of at least {SHORTEST_PASSWORD} characters for the page, got {len(password)}.",
            hint="It lets its holder invite machines, evict them and start jobs.",
        )
    return password


def _hosts(options: PageOptions) -> frozenset[str]:
    """Return the names by which browsers may address the page: loopback, and those of the certificate."""
    if options.tls_cert is None:
        return LOOPBACK
    certificate, *_ = x509.load_pem_x509_certificates(options.tls_cert.read_bytes())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return LOOPBACK
    addresses = (str(one) for one in names.get_values_for_type(x509.IPAddress))
    return LOOPBACK | {name.lower() for name in names.get_values_for_type(x509.DNSName)} | {*addresses}


def _approves(options: BrokerOptions) -> bool:
    """Return whether the broker takes the endorsements of its own home's trust list."""
    file, own = options.trust_file, options.home / TRUST_FILE
    return file is not None and own.exists() and file.samefile(own)


async def run_with_page(
    options: BrokerOptions,
    page: OpenPage,
    *,
    announce: Callable[[Announcement], None],
    stop: asyncio.Event,
    notice: Callable[[str], None],
    opened: Callable[[BrokerServer], None] = lambda _: None,
) -> None:
    """Run the broker like `run_broker`, with the page beside it."""
    closing_pool = asyncio.Event()
    running: asyncio.Future[BrokerServer] = asyncio.get_running_loop().create_future()
    desk: list[BrokerDesk] = []
    home = options.home.absolute()
    programs = PagePrograms(home / PAGE_DIRECTORY)

    def noticed(sentence: str) -> None:
        notice(sentence)
        for one in desk:
            one.notice(sentence)

    def open_now(server: BrokerServer) -> None:
        opened(server)
        running.set_result(server)

    async def keep_page() -> None:
        try:
            if not await _opens(running, stop):
                return
            desk.append(BrokerDesk(running.result(), home, programs, approves=_approves(options)))
            app = BrokerPage(desk[0], page.gate, page.address, SystemClock())
            await serve(app, page.listener, stop=stop, on_listening=lambda: None, tls=page.tls)
        finally:
            try:
                await programs.close()
            finally:
                closing_pool.set()

    with closing(page.listener):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_page())
            await run_broker(options, announce=announce, stop=closing_pool, notice=noticed, opened=open_now)


async def _opens(running: asyncio.Future[BrokerServer], stop: asyncio.Event) -> bool:
    """Wait until the broker is open, which may have to wait for another broker's lease. Returns False if `stop` is set
    before."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    return running.done()
