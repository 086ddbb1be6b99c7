"""How a stranger with an invitation becomes a member. Decides what is checked, in which order, and what is stored.

The broker proves its identity first: its certificate must be signed by the authority whose key the invitation holds.
Only then is the token sent. The returned certificate is checked the same way before anything is written.

The broker answers `JoinRequest`; `security.certificates` uses the result.

A machine without an invitation gets one by a six-digit code, from the broker of a pool that was found nearby. The
broker first proves by TLS that the announced authority has certified it. Then both sides derive a key from the code
(`security.code_exchange`), and the broker sends an ordinary invitation under that key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import StorageError, TransportError, TrustError, UsageError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.channels.framed import refusal
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.interface import Channel
from fusionai.transport.routes.addresses import format_address
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import (
    MemberCredentials,
    StrangerCredentials,
    authority_key_of,
    pool_of,
    verify_certificate,
)
from fusionai.transport.security.code_exchange import NewcomerExchange
from fusionai.transport.security.identity import Identity, load_identity, read_private_json, write_private_json
from fusionai.wire.messages import (
    CodeAccepted,
    CodeAnswer,
    CodeOffer,
    CodeProof,
    JoinGranted,
    JoinRequest,
    Message,
    Refused,
)

M = TypeVar("M", bound=Message)
log = logging.getLogger(__name__)

PREFIX: Final = "fusion1-"
MAX_LENGTH: Final = 4096
MAX_TEXT_LENGTH: Final = 2**16
"""Limit on the characters of a text with an invitation in it."""
_WORD: Final = re.compile(r"[A-Za-z0-9_-]+")
MAX_ADDRESSES: Final = 32
_CHECKSUM_BYTES: Final = 4
_HINT: Final = "Copy the whole line again, or ask the pool's owner for a new one."


class InvitationContent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content of an invitation. `addresses` are the brokers' addresses, `authority_key` is the raw Ed25519 key of the
    pool's authority, `token` is the secret that the broker issued."""

    pool: Annotated[str, Meta(min_length=1, max_length=64)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(min_length=1, max_length=MAX_ADDRESSES)]
    authority_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    token: Annotated[bytes, Meta(min_length=16, max_length=64)]

    def __repr__(self) -> str:
        return f"Invitation(pool={self.pool!r}, addresses={self.addresses!r}, token=hidden)"


def format_invitation(invitation: InvitationContent) -> str:
    data = msgspec.msgpack.encode(invitation)
    return PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")


def parse_invitation(text: str) -> InvitationContent:
    """Decode an invitation, also with its command, in quotes, wrapped over lines or within other text. Raises
    `UsageError` with the reason; the message never repeats the text, which is a secret."""
    if len(text) > MAX_TEXT_LENGTH:
        raise UsageError(
            f"expected an invitation in at most {MAX_TEXT_LENGTH} characters, got {len(text)}.", hint=_HINT
        )
    _, prefix, after = text.partition(PREFIX)
    if not prefix:
        raise UsageError(f"expected an invitation starting with {PREFIX!r}, got another text.", hint=_HINT)
    content = _found(after)
    if content is None:
        raise UsageError(
            f"the invitation is cut off or mistyped: its checksum fits at none of its first {MAX_LENGTH} characters.",
            hint=_HINT,
        )
    try:
        return msgspec.msgpack.decode(content, type=InvitationContent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the invitation's content can't be decoded: {error}.", hint=_HINT) from error


def _found(text: str) -> bytes | None:
    """Return the content of the invitation that `text` begins with. Words belong to it until its checksum fits: where a
    line was wrapped can't be seen otherwise."""
    body = ""
    for word in _WORD.findall(text):
        body += word
        if len(body) > MAX_LENGTH:
            return None
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except binascii.Error:
            continue
        content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if len(data) > _CHECKSUM_BYTES and _checksum(content) == checksum:
            return content
    return None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]


MEMBERSHIP_FILE: Final = "membership.json"

Purpose = Literal["provider", "owner"]


@dataclass(frozen=True, slots=True)
class Membership:
    """This machine's membership in a pool."""

    pool: str
    purpose: Purpose
    broker: BrokerAddresses
    credentials: MemberCredentials
    home: Path | None = None
    """Directory that has it; None: it is kept nowhere."""

    def __post_init__(self) -> None:
        self.broker.authority_key = self.credentials.authority_key
        self.broker.on_learned = self._keep

    def _keep(self, _: tuple[str, ...]) -> None:
        """Keep the broker's new address. Raises nothing: this process knows it in any case."""
        if self.home is not None:
            try:
                keep_membership(self.home, self)
            except StorageError as error:
                log.warning("the broker's new address could not be kept: %s", error)

    @property
    def peer(self) -> PeerId:
        return self.credentials.identity.peer


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `membership.json`. Certificates are DER in base64."""

    schema: Literal["fusionai.membership/1"]
    pool: str
    purpose: Purpose
    broker_addresses: Annotated[tuple[str, ...], Meta(min_length=1)]
    certificate: bytes
    authority: bytes


async def enrol(
    invitation: str | InvitationContent, home: Path, purpose: Purpose, *, timeout_s: float = 10.0
) -> Membership:
    """Join the invitation's pool with the key in `home` (created if there is none) and store the membership there.
    Raises `UsageError` (malformed invitation), `TransportError` (no broker answered), `TrustError` (another machine
    answered), `RefusedError` (the token is unknown, used up or expired), `StorageError`."""
    invited = parse_invitation(invitation) if isinstance(invitation, str) else invitation
    transport = TcpTransport(StrangerCredentials(invited.authority_key))
    broker = BrokerAddresses(invited.addresses, invited.authority_key)
    return await _join(transport, broker, invited.token, home, purpose, timeout_s=timeout_s)


async def enrol_second_key(machine: Membership, home: Path, purpose: Purpose, *, timeout_s: float = 10.0) -> Membership:
    """Have an additional key of this machine, in `home`, certified by the broker on behalf of its existing membership.
    Raises `TransportError`, `TrustError`, `RefusedError` (too many such keys), `StorageError`."""
    transport = TcpTransport(machine.credentials)
    broker = BrokerAddresses(machine.broker.known, machine.credentials.authority_key)
    return await _join(transport, broker, b"", home, purpose, timeout_s=timeout_s)


async def further_membership(machine: Membership, home: Path, purpose: Purpose) -> Membership:
    """Return the membership kept in `home`, or have a further key certified if there is none of the machine's pool.
    Raises as `enrol_second_key`."""
    if (home / MEMBERSHIP_FILE).is_file():
        kept = load_membership(home)
        if kept.credentials.authority == machine.credentials.authority:
            return kept
    return await enrol_second_key(machine, home, purpose)


async def _join(
    transport: TcpTransport,
    broker: BrokerAddresses,
    token: bytes,
    home: Path,
    purpose: Purpose,
    *,
    timeout_s: float,
) -> Membership:
    """Have the key in `home` certified, check the answer, and store the membership."""
    identity = load_identity(home)
    request = JoinRequest(token=token, public_key=identity.public_key, purpose=purpose)
    granted = await _ask(transport, broker, request, timeout_s)
    credentials = _accepted(granted, broker.authority_key, identity)
    membership = Membership(pool_of(granted.authority), purpose, broker, credentials, home)
    keep_membership(home, membership)
    credentials.revoked.keep_at(home, broker.authority_key)
    return membership


async def _ask(transport: TcpTransport, broker: BrokerAddresses, request: JoinRequest, timeout_s: float) -> JoinGranted:
    channel = await broker.dial(transport, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.send(request)
            answer = (await channel.receive()).message
    except TimeoutError as error:
        raise TransportError(
            f"the broker received the join request and did not answer within {timeout_s:g} s.", hint="Try again later."
        ) from error
    finally:
        await channel.close()
    match answer:
        case JoinGranted():
            return answer
        case Refused():
            raise refusal(answer)
        case _:
            raise WireError(f"expected an answer to a join request, got {answer.__struct_config__.tag}.")


async def renew_if_due(
    ask: Callable[[Message], Awaitable[Message]], membership: Membership, *, now_wall_s: float
) -> None:
    """Have the broker renew the membership's certificate if its end is near, and keep it. `ask` sends the request and
    returns the broker's answer. A certificate that can't be kept is used all the same. Raises `TrustError` for one of
    another authority or key."""
    credentials = membership.credentials
    if not credentials.is_renewal_due(now_wall_s):
        return
    key, purpose = credentials.identity.public_key, membership.purpose
    granted = await ask(JoinRequest(token=b"", public_key=key, purpose=purpose))
    if not isinstance(granted, JoinGranted):
        raise WireError(f"expected a renewed certificate, got {granted.__struct_config__.tag}.")
    credentials.renew(_accepted(granted, credentials.authority_key, credentials.identity).certificate)
    if membership.home is not None:
        try:
            keep_membership(membership.home, membership)
        except StorageError as error:
            log.warning("the renewed certificate could not be kept: %s", error)
    log.info("this machine's certificate has been renewed")


def keep_membership(home: Path, membership: Membership) -> None:
    """Write the membership to `home`, replacing an existing one. Raises `StorageError`."""
    kept = _Kept(
        schema="fusionai.membership/1",
        pool=membership.pool,
        purpose=membership.purpose,
        broker_addresses=membership.broker.known,
        certificate=membership.credentials.certificate,
        authority=membership.credentials.authority,
    )
    write_private_json(home / MEMBERSHIP_FILE, kept)


def load_membership(home: Path) -> Membership:
    """Return the membership that `enrol` stored. Raises `UsageError` if this machine has not joined a pool,
    `StorageError` for a broken file, `TrustError` if the certificate is invalid or another key's."""
    path = home / MEMBERSHIP_FILE
    hint = "Delete the file and join again with a new invitation."
    kept = read_private_json(path, _Kept, what="a membership", hint=hint)
    if kept is None:
        raise UsageError(
            f"this machine has not joined a pool (there is no {path}).",
            hint="`fusion join` finds pools in the local network. Elsewhere, ask a pool's owner for an invitation.",
        )
    identity = load_identity(home)
    certified = verify_certificate(kept.certificate, authority_key_of(kept.authority), now_wall_s=time.time())
    if certified.peer != identity.peer:
        raise TrustError(
            f"the membership in {path} belongs to another key than this machine's.",
            hint="Restore that key, or delete the file and join again with a new invitation.",
        )
    credentials = MemberCredentials(identity, kept.certificate, kept.authority)
    credentials.revoked.keep_at(home, credentials.authority_key)
    return Membership(kept.pool, kept.purpose, BrokerAddresses(kept.broker_addresses), credentials, home)


def _accepted(granted: JoinGranted, authority_key: bytes, identity: Identity) -> MemberCredentials:
    """Check the broker's grant. Raises `TrustError` if it is of another authority, key or role."""
    if authority_key_of(granted.authority) != authority_key:
        raise TrustError("expected the certificate of the authority in the invitation, got another authority's.")
    certified = verify_certificate(granted.certificate, authority_key, now_wall_s=time.time())
    if certified.peer != identity.peer or certified.role != "member":
        raise TrustError("expected a member's certificate for this machine's key, got one for another key or role.")
    return MemberCredentials(identity, granted.certificate, granted.authority)


async def invitation_by_code(pool: NearbyPool, code: str, *, timeout_s: float = 10.0) -> InvitationContent:
    """Return an invitation into `pool` for this machine. Raises `TransportError` (no answer), `TrustError` (another
    machine answered, or one that does not know the code), `RefusedError` (a wrong or dead code)."""
    transport = TcpTransport(StrangerCredentials(pool.authority_key))
    channel = await transport.dial(pool.addresses, expect=None, stream="control", timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchanged(channel, pool.authority_key, code)
    except TimeoutError as error:
        raise TransportError(f"the broker did not answer within {timeout_s:g} s.", hint="Try again later.") from error
    finally:
        await channel.close()


async def _exchanged(channel: Channel, authority_key: bytes, code: str) -> InvitationContent:
    if channel.remote.peer is None:
        raise TrustError("expected the broker's certificate, got none.")
    exchange = NewcomerExchange(code, authority_key, channel.remote.peer)
    answer = await _answer_to(channel, CodeOffer(share=exchange.share), CodeAnswer)
    key = exchange.key(answer.share)
    accepted = await _answer_to(channel, CodeProof(proof=key.proof()), CodeAccepted)
    try:
        invitation = parse_invitation(key.unseal(accepted.sealed).decode(errors="replace"))
    except UsageError as error:
        raise WireError(f"the broker sent no invitation: {error.message}") from error
    if invitation.authority_key != authority_key:
        raise TrustError("expected an invitation into the announced pool, got one into another.")
    reached = format_address(channel.remote.host, channel.remote.port)
    addresses = tuple(dict.fromkeys((reached, *invitation.addresses)))[:MAX_ADDRESSES]
    return msgspec.structs.replace(invitation, addresses=addresses)


async def _answer_to(channel: Channel, message: Message, expected: type[M]) -> M:
    await channel.send(message)
    answer = (await channel.receive()).message
    if isinstance(answer, Refused):
        raise refusal(answer)
    if not isinstance(answer, expected):
        tags = expected.__struct_config__.tag, answer.__struct_config__.tag
        raise WireError(f"expected {tags[0]} of the broker, got {tags[1]}.")
    return answer
