"""Somebody in the middle, over real TLS on loopback: other authorities, other keys, other members, bytes changed.

Both directions: whoever dials must reach the key it expects or nobody, whoever listens must hear of no key that was not
proven to it. The impostor may be the broker itself, so certificates of the pool's own authority are among what it
shows. Neighbour: `tests/property/test_trust_tampering` does the same to statements.
"""

from __future__ import annotations

import asyncio
import datetime
import random
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel, Remote, Role
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import (
    Authority,
    Credentials,
    MemberCredentials,
    StrangerCredentials,
    load_authority,
)
from fusionai.transport.security.identity import Identity, load_identity
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Message
from harness.credentials import credentials
from harness.in_a_loop import in_a_loop

pytestmark = pytest.mark.slow

EACH = 15
"""Dials of every kind of impostor, each way."""
GARBLED = 120
"""Connections through somebody who changes a byte."""
NOW_S = datetime.datetime.now(datetime.UTC).timestamp()
OPENING = wire.OpenJob(job="private-00c0ffee", fence=Fence(1, 1, 0), ticket=b"a ticket of some length" * 10)


CERTIFIED, BROKERS = "another member", "the broker's certificate"


class Impostor(MemberCredentials):
    """Shows what it has without looking at it, and believes whomever it meets."""

    __slots__ = ()

    @property
    def role(self) -> Role:
        return "member"

    def dialling_context(self) -> ssl.SSLContext:
        context = super().dialling_context()
        context.verify_mode = ssl.CERT_NONE
        return context

    def listening_context(self, *, strangers: bool) -> ssl.SSLContext:
        context = super().listening_context(strangers=strangers)
        context.verify_mode = ssl.CERT_NONE
        return context

    def remote(self, certificate: bytes | None, end: Callable[[], None]) -> Remote:
        del certificate, end
        return Remote(None, "broker")


class Cast:
    """`victim` is whom everybody means to reach; `impostors` have whatever can be had without the victim's key."""

    def __init__(self, directory: Path) -> None:
        self.pool: Authority = load_authority(directory / "pool", "pool", now_wall_s=NOW_S)
        elsewhere: Authority = load_authority(directory / "elsewhere", "pool", now_wall_s=NOW_S)
        self.victim = credentials(self.pool, directory / "victim", issued_at_s=NOW_S)
        self.caller = credentials(self.pool, directory / "caller", issued_at_s=NOW_S)
        eve, victim = load_identity(directory / "eve"), self.victim.identity.peer
        old_s = NOW_S - 4 * 365 * 86_400
        shown = {
            CERTIFIED: self.pool.issue(eve.public_key, "member", now_wall_s=NOW_S),
            BROKERS: self.pool.issue(eve.public_key, "broker", now_wall_s=NOW_S),
            "of another authority of the same name": elsewhere.issue(eve.public_key, "member", now_wall_s=NOW_S),
            "self-signed": _named(eve, eve.peer, eve.key),
            "self-signed in the victim's name": _named(eve, victim, eve.key),
            "its own key in the victim's name, by the pool's authority": _named(
                eve, victim, self.pool.key, issuer="pool"
            ),
            "out of date": self.pool.issue(eve.public_key, "member", now_wall_s=old_s),
        }
        self.impostors = {
            kind: Impostor(eve, certificate, self.pool.certificate) for kind, certificate in shown.items()
        }


def _named(identity: Identity, name: PeerId, signer: Ed25519PrivateKey, *, issuer: str = "") -> bytes:
    """A certificate of the impostor's key that says it is `name`'s."""
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "member"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "pool"),
        ]
    )
    authority = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "FusionAI pool authority"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, issuer),
        ]
    )
    now = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority if issuer else subject)
        .public_key(identity.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(identity.key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return builder.sign(signer, algorithm=None).public_bytes(serialization.Encoding.DER)


class Heard:
    """What a listening side was told, by whom."""

    def __init__(self) -> None:
        self.messages: list[tuple[PeerId | None, Message]] = []

    async def accept(self, channel: Channel) -> None:
        with suppress(FusionError):
            while True:
                self.messages.append((channel.remote.peer, (await channel.receive()).message))
                await channel.send(wire.Done())


async def said(
    shown: Credentials, addresses: tuple[str, ...], expect: PeerId | None, *, patience_s: float = 5.0
) -> Message | None:
    """The answer of whoever was reached; None where nobody was."""
    try:
        async with asyncio.timeout(patience_s):
            channel = await TcpTransport(shown).dial(addresses, expect=expect, stream="control", timeout_s=5.0)
            try:
                await channel.send(OPENING)
                return (await channel.receive()).message
            finally:
                channel.abort()
    except (FusionError, TimeoutError):
        return None


@in_a_loop
async def test_who_dials_reaches_the_key_it_expects_or_nobody(tmp_path: Path):
    parts, accepted, tried = Cast(tmp_path), Counter[str](), Counter[str]()
    for kind, shown in parts.impostors.items():
        heard = Heard()
        listener = await TcpTransport(shown).listen(heard.accept, host="127.0.0.1", port=0, strangers=True)
        for _ in range(EACH):
            tried[kind] += 1
            answer = await said(parts.caller, listener.addresses, parts.victim.identity.peer)
            accepted[kind] += answer is not None or bool(heard.messages)
        await listener.close()
    assert not +accepted, accepted
    assert set(tried.values()) == {EACH}
    heard = Heard()
    listener = await TcpTransport(parts.victim).listen(heard.accept, host="127.0.0.1", port=0)
    assert await said(parts.caller, listener.addresses, parts.victim.identity.peer) == wire.Done()
    await listener.close()


@in_a_loop
async def test_who_listens_hears_of_no_key_that_was_not_proven(tmp_path: Path):
    parts, accepted, tried = Cast(tmp_path), Counter[str](), Counter[str]()
    heard = Heard()
    listener = await TcpTransport(parts.victim).listen(heard.accept, host="127.0.0.1", port=0)
    for kind, shown in parts.impostors.items():
        for _ in range(EACH):
            heard.messages.clear()
            await said(shown, listener.addresses, None)
            tried[kind] += 1
            # A certified member is let in as who it is, and as nobody else: its ticket is checked against that.
            known = {shown.identity.peer} if kind in (CERTIFIED, BROKERS) else set()
            accepted[kind] += any(peer not in known for peer, _ in heard.messages)
    for _ in range(EACH):
        heard.messages.clear()
        await said(StrangerCredentials(parts.pool.public_key), listener.addresses, parts.victim.identity.peer)
        tried["a stranger"] += 1
        accepted["a stranger"] += bool(heard.messages)
    assert not +accepted, accepted
    assert set(tried.values()) == {EACH}
    heard.messages.clear()
    assert await said(parts.caller, listener.addresses, parts.victim.identity.peer) == wire.Done()
    assert heard.messages == [(parts.caller.identity.peer, OPENING)]
    await listener.close()


class Middle:
    """Passes bytes on between both sides, and changes the one at `at` of a direction."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.at = -1
        self.upwards = True
        self.mask = 1
        self.changed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(
            self._pass(reader, to_writer, changes=self.upwards), self._pass(to_reader, writer, changes=not self.upwards)
        )

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, changes: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := await reader.read(65_536):
                if changes and passed <= self.at < passed + len(data):
                    garbled = bytearray(data)
                    garbled[self.at - passed] ^= self.mask
                    data = bytes(garbled)
                    self.changed += 1
                passed += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


@in_a_loop
async def test_a_byte_changed_on_the_way_is_noticed_wherever_it_is(tmp_path: Path):
    parts, draw, heard = Cast(tmp_path), random.Random(7), Heard()
    listener = await TcpTransport(parts.victim).listen(heard.accept, host="127.0.0.1", port=0)
    port = int(listener.addresses[0].rpartition(":")[2])
    middle = Middle(port)
    server = await asyncio.start_server(middle.serve, "127.0.0.1", 0)
    through = (f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}",)
    wrong = 0
    assert await said(parts.caller, through, parts.victim.identity.peer) == wire.Done(), "unchanged, it goes through"
    for _ in range(GARBLED):
        heard.messages.clear()
        middle.upwards, middle.at, middle.mask = draw.random() < 0.5, draw.randrange(2200), 1 << draw.randrange(8)
        # A changed length is waited for.
        answer = await said(parts.caller, through, parts.victim.identity.peer, patience_s=0.2)
        wrong += any(message != OPENING for _, message in heard.messages) or answer not in (None, wire.Done())
    server.close()
    await listener.close()
    assert wrong == 0
    assert middle.changed > GARBLED // 2, "most of them met a byte"
