"""Signed statements: the signature, then the content. Decides how they are made and verified, not what they mean.

A domain prefix is signed together with the content, so that a signature over one kind of statement (or over a
certificate) can't be used for another kind. `tickets` (a role in a job) and `pairing` (a meeting at a relay) are
statements of the pool's authority, `placements` of a job's owner, `endorsements` of any trusted signing key.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fusionai.primitives.errors import TrustError

SIGNATURE_BYTES: Final = 64


def signed(content: bytes, domain: bytes, key: Ed25519PrivateKey) -> bytes:
    return key.sign(domain + content) + content


def content_of(
    data: bytes, domain: bytes, public_key: bytes, *, what: str, max_bytes: int, by: str = "by this pool's authority"
) -> bytes:
    """Return the content if the holder of `public_key` (32 raw bytes) signed it in this domain. Raises `TrustError`."""
    if not SIGNATURE_BYTES < len(data) <= max_bytes:
        raise TrustError(f"expected {_an(what)} of {SIGNATURE_BYTES + 1} to {max_bytes} bytes, got {len(data)}.")
    signature, content = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if not holds(signature, domain + content, public_key):
        raise TrustError(f"expected {_an(what)} signed {by}, got one that is not.")
    return content


def holds(signature: bytes, data: bytes, public_key: bytes) -> bool:
    """Return whether the holder of `public_key` signed `data`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _an(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
