"""Signed placements: "in this round of my job these keys hold these stages", signed with the job owner's key.

The broker grants plans and signs tickets, but can't sign as the owner. A member keeps the placement that its driver
brought, shows it to the members it dials, and admits only peers that the owner's signature names. Decides the fields,
their canonical encoding, and the checks.

Drivers sign with their host's `Seal`, `execution.member` checks for a member; `tickets` are the broker's equivalent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.transport.identity import peer_of, public_bytes, public_key_of
from fusionai.transport.signed import content_of, signed
from fusionai.wire.base import MAX_PLACEMENT_BYTES, Fence

_DOMAIN: Final = b"fusionai placement 1\x00"

Holder = Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
Stage = Annotated[int, Meta(ge=0, le=2**20)]
Places = Annotated[tuple[tuple[Stage, Holder], ...], Meta(max_length=4096)]


class SignedPlacement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Placement of one round.

    `stages` and `guards` are (stage, peer) in ascending order; stages that the owner keeps have the owner's id.
    """

    version: Literal[1]
    job: Annotated[str, Meta(min_length=1, max_length=128)]
    owner: Holder
    level: PrivacyLevel
    fence: Fence
    stages: Places
    guards: Places

    @property
    def peers(self) -> frozenset[PeerId]:
        """All peers it names, including the owner."""
        return frozenset(PeerId(peer) for _, peer in (*self.stages, *self.guards)) | {PeerId(self.owner)}


_DECODER: Final = msgspec.msgpack.Decoder(SignedPlacement)


@dataclass(frozen=True, slots=True)
class Seal:
    """A job owner's signing key (the key of its certificate) and the privacy level of its jobs in this process."""

    key: Ed25519PrivateKey = field(repr=False, compare=False)
    level: PrivacyLevel

    def placement(
        self, job: str, fence: Fence, *, stages: Iterable[tuple[int, str]], guards: Iterable[tuple[int, str]]
    ) -> bytes:
        """Return the signed statement of which peers hold and guard which stages of `job` in the round of `fence`.

        Raises `TrustError` if it exceeds `MAX_PLACEMENT_BYTES`.
        """
        placement = SignedPlacement(
            version=1,
            job=job,
            owner=peer_of(public_bytes(self.key.public_key())),
            level=self.level,
            fence=fence,
            stages=tuple(sorted(stages)),
            guards=tuple(sorted(guards)),
        )
        data = sign_placement(placement, self.key)
        if len(data) > MAX_PLACEMENT_BYTES:
            raise TrustError(f"expected a placement of at most {MAX_PLACEMENT_BYTES} bytes, got {len(data)}.")
        return data


def sign_placement(placement: SignedPlacement, key: Ed25519PrivateKey) -> bytes:
    """`key` is the owner's, whose certificate it shows in TLS."""
    return signed(msgspec.msgpack.encode(placement), _DOMAIN, key)


def verify_placement(data: bytes, owner: PeerId, *, job: str, fence: Fence) -> SignedPlacement:
    """Return the placement if `owner` signed it for exactly this round of this job.

    Raises `TrustError` saying what failed.
    """
    by = f"by the job's owner {short(owner)}"
    content = content_of(data, _DOMAIN, public_key_of(owner), what="placement", by=by, max_bytes=MAX_PLACEMENT_BYTES)
    try:
        placement = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"expected a placement of version 1, got content that can't be decoded: {error}.") from error
    if msgspec.msgpack.encode(placement) != content:
        raise TrustError("expected a placement in its canonical encoding, got another encoding.")
    if placement.owner != owner:
        raise TrustError(f"expected a placement of {short(owner)}, got one of {short(PeerId(placement.owner))}.")
    if placement.job != job:
        raise TrustError(f"expected a placement of job {job}, got one of {placement.job}.")
    if placement.fence != fence:
        raise TrustError(f"expected the placement of {fence}, got that of {placement.fence}.")
    return placement
