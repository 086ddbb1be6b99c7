"""Signed statements: a signature followed by the content, verified offline.

- Pairing tokens, signed by the pool: "these two peers may meet at the relay, and this one dials". The peer that shows
  its token also proves that it holds the named key.
- Tickets, signed by the pool: "this peer has this role in this job". A member shows its ticket when it dials another.
- Placements, signed by the job's owner: "in this round of my job these keys hold these stages". The broker grants plans
  and signs tickets, but can't sign placements, so it can't bring a machine into a job on its own.

`trust` defines a fourth kind, endorsements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH, JobId, PeerId, short
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.transport.security.identity import peer_of, public_bytes, public_key_of
from fusionai.wire.base import MAX_PLACEMENT_BYTES, Addresses, Fence

SIGNATURE_BYTES: Final = 64

T = TypeVar("T", bound=msgspec.Struct)


class StatementKind(Generic[T]):
    """One kind of signed statement. `domain` precedes the signed content, so that a signature over anything else (a
    certificate, another kind) does not count. `canonical`: content in any other encoding is refused."""

    def __init__(self, name: str, content: type[T], domain: bytes, max_bytes: int, *, canonical: bool = False) -> None:
        self._name = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        self._domain = domain
        self._max_bytes = max_bytes
        self._canonical = canonical
        self._decoder = msgspec.msgpack.Decoder(content)

    def sign(self, content: T, key: Ed25519PrivateKey) -> bytes:
        encoded = msgspec.msgpack.encode(content)
        return key.sign(self._domain + encoded) + encoded

    def verify(self, data: bytes, public_key: bytes, *, by: str = "by this pool's authority") -> T:
        """Return the content if the holder of `public_key` (32 raw bytes) signed it. Raises `TrustError`."""
        self._check_size(data)
        if not holds(data[:SIGNATURE_BYTES], self._domain + data[SIGNATURE_BYTES:], public_key):
            raise TrustError(f"expected {self._name} signed {by}, got one that is not.")
        return self.read(data)

    def read(self, data: bytes) -> T:
        """Return the content without checking the signature. Raises `TrustError` if it can't be decoded."""
        self._check_size(data)
        encoded = data[SIGNATURE_BYTES:]
        try:
            content = self._decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TrustError(
                f"expected {self._name} of this version, got content that can't be decoded: {error}.",
                hint="Update FusionAI on the older of the two machines.",
            ) from error
        if self._canonical and msgspec.msgpack.encode(content) != encoded:
            raise TrustError(f"expected {self._name} in its canonical encoding, got another encoding.")
        return content

    def _check_size(self, data: bytes) -> None:
        if not SIGNATURE_BYTES < len(data) <= self._max_bytes:
            raise TrustError(
                f"expected {self._name} of {SIGNATURE_BYTES + 1} to {self._max_bytes} bytes, got {len(data)}."
            )


def holds(signature: bytes, data: bytes, public_key: bytes) -> bool:
    """Return whether the holder of `public_key` signed `data`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


MAX_TOKEN_BYTES: Final = 512
MEETING_BYTES: Final = 16
LIFETIME_S: Final = 30.0
"""Lifetime of a token: covers the time from the broker's answer to the connection at the relay. Chosen."""
_PROOF_DOMAIN: Final = b"fusionai pairing proof 1\x00"

Side = Literal["dials", "answers"]
_Peer = Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]


class PairingToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Permission for `peer` to meet `other`. `meeting` is drawn by the broker for the two peers. `expires_at_s` is in
    seconds since 1970."""

    meeting: Annotated[bytes, Meta(min_length=MEETING_BYTES, max_length=MEETING_BYTES)]
    peer: _Peer
    other: _Peer
    side: Side
    expires_at_s: Annotated[float, Meta(ge=0, le=1e12)]


_PAIRING: Final = StatementKind("pairing token", PairingToken, b"fusionai pairing 1\x00", MAX_TOKEN_BYTES)
sign_pairing: Final = _PAIRING.sign


def verify_pairing(data: bytes, authority_key: bytes, *, now_wall_s: float) -> PairingToken:
    """Return the token if `authority_key` (32 raw bytes) signed it and it has not expired. Raises `TrustError`."""
    token = _PAIRING.verify(data, authority_key)
    if token.peer == token.other:
        raise TrustError("expected a pairing token for two peers, got one for a peer with itself.")
    if now_wall_s >= token.expires_at_s:
        raise TrustError(
            f"expected a valid pairing token, got one that expired {now_wall_s - token.expires_at_s:.0f} s ago."
        )
    return token


def prove_holding(data: bytes, own_key: Ed25519PrivateKey) -> bytes:
    """Return a signature over the token by the peer it is for."""
    return own_key.sign(_PROOF_DOMAIN + data)


def check_holder(data: bytes, proof: bytes, public_key: bytes) -> None:
    """Raises `TrustError` unless the peer with `public_key` made `proof` over the token."""
    if len(proof) != SIGNATURE_BYTES or not holds(proof, _PROOF_DOMAIN + data, public_key):
        raise TrustError("expected a pairing token shown by the peer it is for, got one shown by another.")


Role = Literal["driver", "stage", "standby"]
DRIVER_STAGE: Final = -1
MAX_TICKET_BYTES: Final = 16_384


class ExpiredTicket(TrustError):
    """A correctly signed ticket that has expired."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Role of one peer in one job. `stage` is -1 for the driver; for a `standby` it is the first stage whose snapshots
    it keeps. `expires_at_s` is in seconds since 1970. `addresses`: where the peer listens, as the broker vouches; other
    members dial it there and nowhere else. None for the driver, which no member dials."""

    job: Annotated[str, Meta(min_length=1, max_length=128)]
    peer: Annotated[str, Meta(min_length=52, max_length=52)]
    stage: Annotated[int, Meta(ge=-1, le=2**20)]
    plan_version: Annotated[int, Meta(ge=0, le=2**62)]
    role: Role
    expires_at_s: Annotated[float, Meta(ge=0, le=1e12)]
    addresses: Addresses


_TICKET: Final = StatementKind("ticket", Ticket, b"fusionai ticket 2\x00", MAX_TICKET_BYTES)


def sign_ticket(ticket: Ticket, authority_key: Ed25519PrivateKey) -> bytes:
    _check_role(ticket)
    return _TICKET.sign(ticket, authority_key)


def expiry_s(data: bytes) -> float:
    """Return when a ticket expires, in seconds since 1970, without verifying it. Raises `TrustError` if it can't be
    decoded."""
    return _TICKET.read(data).expires_at_s


def verify_ticket(
    data: bytes, authority_key: bytes, *, now_wall_s: float, job: JobId | None = None, peer: PeerId | None = None
) -> Ticket:
    """Return the ticket if `authority_key` (32 raw bytes) signed it, it is not expired, and it names `job` and `peer`
    (if given). Raises `ExpiredTicket` for an expired one, `TrustError` for any other failure."""
    ticket = _TICKET.verify(data, authority_key)
    _check_role(ticket)
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


def _check_role(ticket: Ticket) -> None:
    if (ticket.stage == DRIVER_STAGE) != (ticket.role == "driver"):
        raise TrustError(f"expected stage -1 exactly for a driver, got stage {ticket.stage} for a {ticket.role}.")


Stage = Annotated[int, Meta(ge=0, le=2**20)]
Places = Annotated[tuple[tuple[Stage, _Peer], ...], Meta(max_length=4096)]


class SignedPlacement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Placement of one round. `stages` and `standbys` are (stage, peer) in ascending order; stages that the owner keeps
    have the owner's id."""

    version: Literal[1]
    job: Annotated[str, Meta(min_length=1, max_length=128)]
    owner: _Peer
    level: PrivacyLevel
    fence: Fence
    stages: Places
    standbys: Places

    @property
    def peers(self) -> frozenset[PeerId]:
        """All peers it names, including the owner."""
        return frozenset(PeerId(peer) for _, peer in (*self.stages, *self.standbys)) | {PeerId(self.owner)}


_PLACEMENT: Final = StatementKind(
    "placement", SignedPlacement, b"fusionai placement 1\x00", MAX_PLACEMENT_BYTES, canonical=True
)
sign_placement: Final = _PLACEMENT.sign
"""Signs with the owner's key, whose certificate it shows in TLS."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A job owner's signing key (the key of its certificate) and the privacy level of its jobs in this process."""

    key: Ed25519PrivateKey = field(repr=False, compare=False)
    level: PrivacyLevel

    def placement(
        self, job: str, fence: Fence, *, stages: Iterable[tuple[int, str]], standbys: Iterable[tuple[int, str]]
    ) -> bytes:
        """Return the signed statement of which peers hold and standby which stages of `job` in the round of `fence`.
        Raises `TrustError` if it exceeds `MAX_PLACEMENT_BYTES`."""
        placement = SignedPlacement(
            version=1,
            job=job,
            owner=peer_of(public_bytes(self.key.public_key())),
            level=self.level,
            fence=fence,
            stages=tuple(sorted(stages)),
            standbys=tuple(sorted(standbys)),
        )
        data = sign_placement(placement, self.key)
        if len(data) > MAX_PLACEMENT_BYTES:
            raise TrustError(f"expected a placement of at most {MAX_PLACEMENT_BYTES} bytes, got {len(data)}.")
        return data


def verify_placement(data: bytes, owner: PeerId, *, job: str, fence: Fence) -> SignedPlacement:
    """Return the placement if `owner` signed it for exactly this round of this job. Raises `TrustError` saying what
    failed."""
    placement = _PLACEMENT.verify(data, public_key_of(owner), by=f"by the job's owner {short(owner)}")
    if placement.owner != owner:
        raise TrustError(f"expected a placement of {short(owner)}, got one of {short(PeerId(placement.owner))}.")
    if placement.job != job:
        raise TrustError(f"expected a placement of job {job}, got one of {placement.job}.")
    if placement.fence != fence:
        raise TrustError(f"expected the placement of {fence}, got that of {placement.fence}.")
    return placement
