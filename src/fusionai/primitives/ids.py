"""Names of entities as distinct types, so that a type checker finds a job id used as a peer id."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""Lower-case base32 (no padding) of the machine's 32-byte Ed25519 public key: 52 characters."""

JobId = NewType("JobId", str)
"""`<slug>-<8 hex digits>`, chosen by the job owner, unique in a pool."""

PEER_ID_LENGTH = 52
SHORT_PEER_ID_LENGTH = 8


def short(peer: PeerId) -> str:
    """The first eight characters of a peer id, for display."""
    return peer[:SHORT_PEER_ID_LENGTH]
