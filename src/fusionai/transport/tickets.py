"""Tickets: short-lived statements "this peer has this role in this job", signed by the pool's authority.

A member shows its ticket when it dials another. The other verifies it offline, together with the key that TLS has
proven. Decides the fields and the checks; time is an argument. The broker signs, `execution` verifies at `OpenJob` and
`Attach`.
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
"""Prefix of the signed content, so that a signature over anything else (a certificate) can't be used as a ticket."""


class ExpiredTicket(TrustError):
    """A correctly signed ticket that has expired."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Role of one peer in one job.

    `stage` is -1 for the driver; for a `guard` it is the first stage whose snapshots it keeps. `expires_at_s` is in
    seconds since 1970.
    """

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
    """Return when a ticket expires, in seconds since 1970, without verifying it.

    Raises `TrustError` if it can't be decoded.
    """
    try:
        return _DECODER.decode(data[SIGNATURE_BYTES:]).expires_at_s
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"expected a ticket of this version, got content that can't be decoded: {error}.") from error


def verify_ticket(
    data: bytes,
    authority_key: bytes,
    *,
    now_wall_s: float,
    job: JobId | None = None,
    peer: PeerId | None = None,
) -> Ticket:
    """Return the ticket if `authority_key` (32 raw bytes) signed it, it is not expired, and it names `job` and `peer`
    (if given).

    Raises `ExpiredTicket` for an expired one, `TrustError` for any other failure.
    """
    content = content_of(data, _DOMAIN, authority_key, what="ticket", max_bytes=MAX_TICKET_BYTES)
    try:
        ticket = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"expected a ticket of this version, got content that can't be decoded: {error}.") from error
    if (ticket.stage == DRIVER_STAGE) != (ticket.role == "driver"):
        raise TrustError(f"expected stage -1 exactly for a driver, got stage {ticket.stage} for a {ticket.role}.")
    if job is not None and ticket.job != job:
        raise TrustError(f"expected a ticket for job {job}, got one for {ticket.job}.")
    if peer is not None and ticket.peer != peer:
        raise TrustError(f"expected a ticket for peer {short(peer)}, got one for {short(PeerId(ticket.peer))}.")
    if now_wall_s >= ticket.expires_at_s:
        raise ExpiredTicket(
            f"expected a valid ticket, got one that expired {now_wall_s - ticket.expires_at_s:.0f} s ago.",
            hint="The job owner must ask the broker for a new one; check both machines' clocks.",
        )
    return ticket
