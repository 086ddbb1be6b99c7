"""How a machine without an invitation gets one: by a six-digit code, from the broker of a pool that was found nearby.

The broker first proves by TLS that the announced authority has certified it. Then both sides derive a key from the code
(`security.code_exchange`), and the broker sends an ordinary invitation under that key. Joining goes on with it as with
any invitation (`enrolment`)."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec

from fusionai.primitives.errors import TransportError, TrustError, UsageError, WireError
from fusionai.transport.channels.framed import refusal
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.enrolment import MAX_ADDRESSES, InvitationContent, parse_invitation
from fusionai.transport.interface import Channel
from fusionai.transport.routes.addresses import format_address
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import StrangerCredentials
from fusionai.transport.security.code_exchange import NewcomerExchange
from fusionai.wire.messages import CodeAccepted, CodeAnswer, CodeOffer, CodeProof, Message, Refused

M = TypeVar("M", bound=Message)
_TIMEOUT_S: Final = 10.0


async def invitation_by_code(pool: NearbyPool, code: str, *, timeout_s: float = _TIMEOUT_S) -> InvitationContent:
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
    answer = await _ask(channel, CodeOffer(share=exchange.share), CodeAnswer)
    key = exchange.key(answer.share)
    accepted = await _ask(channel, CodeProof(proof=key.proof()), CodeAccepted)
    try:
        invitation = parse_invitation(key.unseal(accepted.sealed).decode(errors="replace"))
    except UsageError as error:
        raise WireError(f"the broker sent no invitation: {error.message}") from error
    if invitation.authority_key != authority_key:
        raise TrustError("expected an invitation into the announced pool, got one into another.")
    reached = format_address(channel.remote.host, channel.remote.port)
    addresses = tuple(dict.fromkeys((reached, *invitation.addresses)))[:MAX_ADDRESSES]
    return msgspec.structs.replace(invitation, addresses=addresses)


async def _ask(channel: Channel, message: Message, expected: type[M]) -> M:
    await channel.send(message)
    answer = (await channel.receive()).message
    if isinstance(answer, Refused):
        raise refusal(answer)
    if not isinstance(answer, expected):
        tags = expected.__struct_config__.tag, answer.__struct_config__.tag
        raise WireError(f"expected {tags[0]} of the broker, got {tags[1]}.")
    return answer
