"""Tickets: short-lived statements "this peer has this part in this job", signed by the pool's authority.

A member shows its ticket when it dials another; the other checks it offline, together with the key TLS has proven.
Decides the fields and the checks. Time is an argument.
Neighbours: the broker signs, `execution` verifies at `OpenJob` and `Attach`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.transport.signed import SIGNATURE_BYTES, content_of, signed

Role = Literal["driver", "stage", "guard"]
DRIVER_STAGE: Final = -1
MAX_TICKET_BYTES: Final = 1024
_DOMAIN: Final = b"fusionai ticket 1\x00"
"""Signed in front of the content, so that no signature over anything else (a certificate) can pass as a ticket."""


class ExpiredTicket(TrustError):
    """A ticket that was good once."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`stage` is -1 for the driver, for a `guard` the first stage it keeps snapshots of. `expires_at_s` counts seconds
    since 1970."""

    job: Annotated[str, Meta(min_length=1, max_length=128)]
    peer: Annotated[str, Meta(min_length=52, max_length=52)]
    stage: Annotated[int, Meta(ge=-1, le=2**20)]
    plan_version: Annotated[int, Meta(ge=0, le=2**62)]
    role: Role
    expires_at_s: Annotated[float, Meta(ge=0, le=1e12)]


_DECODER: Final = msgspec.msgpack.Decoder(Ticket)


def sign_ticket(ticket: Ticket, authority_key: Ed25519PrivateKey) -> bytes:
    if (ticket.stage == DRIVER_STAGE) != (ticket.role == "driver"):
        raise TrustError(f"expected stage -1 exactly for a driver, got stage {ticket.stage} for a {ticket.role}.")
    return signed(msgspec.msgpack.encode(ticket), _DOMAIN, authority_key)


def expiry_s(data: bytes) -> float:
    """When a ticket the broker gave to this machine ends, seconds since 1970. Checks nothing: others do.

    Raises `TrustError` for what is no ticket."""
    try:
        return _DECODER.decode(data[SIGNATURE_BYTES:]).expires_at_s
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"expected a ticket of this version, got another content: {error}.") from error


def verify_ticket(
    data: bytes,
    authority_key: bytes,
    *,
    now_wall_s: float,
    job: JobId | None = None,
    peer: PeerId | None = None,
) -> Ticket:
    """The ticket, if `authority_key` (32 raw bytes) signed it, it is in date, and names `job` and `peer` where given.

    Raises `ExpiredTicket` for one out of date, `TrustError` for anything else.
    """
    content = content_of(data, _DOMAIN, authority_key, what="ticket", max_bytes=MAX_TICKET_BYTES)
    try:
        ticket = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"expected a ticket of this version, got another content: {error}.") from error
    if (ticket.stage == DRIVER_STAGE) != (ticket.role == "driver"):
        raise TrustError(f"expected stage -1 exactly for a driver, got stage {ticket.stage} for a {ticket.role}.")
    if job is not None and ticket.job != job:
        raise TrustError(f"expected a ticket for job {job}, got one for {ticket.job}.")
    if peer is not None and ticket.peer != peer:
        raise TrustError(f"expected a ticket for peer {short(peer)}, got one for {short(PeerId(ticket.peer))}.")
    if now_wall_s >= ticket.expires_at_s:
        raise ExpiredTicket(
            f"expected a ticket in date, got one that expired {now_wall_s - ticket.expires_at_s:.0f} s ago.",
            hint="The job owner must ask the broker for a new one; check both machines' clocks.",
        )
    return ticket
