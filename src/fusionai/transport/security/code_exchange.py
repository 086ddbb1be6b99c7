"""A key from a six-digit code: SPAKE2 between a machine that joins and a broker. Decides what the key is bound to.

Each side sends a share that hides its random number behind the code. A listener learns nothing about the code from the
shares. A machine that does not know the code can try one value per exchange and learns whether it was right only by
showing a proof, which the broker counts (`coordination.broker.join_code`).

The key is bound to the sides' roles, the pool's authority and the key with which the broker's TLS has proven itself on
this very connection. (Python's `ssl` exports no keying material of TLS 1.3. The server's key identifies the channel as
in RFC 5929, `tls-server-end-point`.) A machine in the middle has another TLS key. It ends up with other keys than both
sides, whatever it forwards.

`spake2` computes on Ed25519 in plain Python, not in constant time. The broker therefore computes its shares in advance.
Only a proof, which is counted, starts a computation with the code that can be timed.

`broker.code_door` and `transport.enrolment` exchange the messages.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fusionai.coordination.broker.join_code import CODE_DIGITS
from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PeerId
from fusionai.transport.security.identity import public_key_of

if TYPE_CHECKING:
    from spake2 import SPAKE2_A, SPAKE2_B

_LABEL: Final = b"fusionai join code 1 "
_KEY_BYTES: Final = 32
_NONCE: Final = bytes(12)
"""Each key seals one text, so the nonce need not differ."""


def draw_code() -> str:
    return f"{secrets.randbelow(10**CODE_DIGITS):0{CODE_DIGITS}}"


class CodeKey:
    """The key that both sides have if they know the same code and speak over the same channel."""

    def __init__(self, key: bytes) -> None:
        derive = HKDF(SHA256(), 2 * _KEY_BYTES, salt=None, info=_LABEL + b"keys")
        keys = derive.derive(key)
        self._proving, self._sealing = keys[:_KEY_BYTES], keys[_KEY_BYTES:]

    def proof(self) -> bytes:
        """Return the newcomer's proof that it has this key."""
        return hmac.digest(self._proving, _LABEL + b"newcomer", "sha256")

    def is_proof(self, shown: bytes) -> bool:
        return hmac.compare_digest(self.proof(), shown)

    def seal(self, text: bytes) -> bytes:
        """Encrypt the one text that this key protects."""
        return ChaCha20Poly1305(self._sealing).encrypt(_NONCE, text, _LABEL + b"invitation")

    def unseal(self, sealed: bytes) -> bytes:
        """Raises `TrustError` unless the text was sealed with this key."""
        try:
            return ChaCha20Poly1305(self._sealing).decrypt(_NONCE, sealed, _LABEL + b"invitation")
        except InvalidTag as error:
            raise TrustError("the broker does not know the code that was given here.") from error


class NewcomerExchange:
    """The side of the machine that joins. `authority_key`: of the announced pool; `broker`: its key, proven by TLS."""

    def __init__(self, code: str, authority_key: bytes, broker: PeerId) -> None:
        from spake2 import SPAKE2_A

        newcomer, other = _identities(authority_key, broker)
        self._spake: SPAKE2_A = SPAKE2_A(code.encode(), idA=newcomer, idB=other)
        self.share: bytes = self._spake.start()

    def key(self, share: bytes) -> CodeKey:
        """Return the key. May be called once. Raises `TrustError` for a share that is none."""
        return _key(self._spake, share)


class BrokerExchange:
    """The broker's side."""

    def __init__(self, code: str, authority_key: bytes, broker: PeerId) -> None:
        from spake2 import SPAKE2_B

        newcomer, other = _identities(authority_key, broker)
        self._spake: SPAKE2_B = SPAKE2_B(code.encode(), idA=newcomer, idB=other)
        self.share: bytes = self._spake.start()

    def key(self, share: bytes) -> CodeKey:
        """Return the key. May be called once. Raises `TrustError` for a share that is none."""
        return _key(self._spake, share)


def _identities(authority_key: bytes, broker: PeerId) -> tuple[bytes, bytes]:
    return _LABEL + b"newcomer", _LABEL + b"broker" + authority_key + public_key_of(broker)


def _key(side: SPAKE2_A | SPAKE2_B, share: bytes) -> CodeKey:
    from spake2 import SPAKEError
    from spake2.ed25519_basic import NotOnCurve

    try:
        return CodeKey(side.finish(share))
    except (SPAKEError, NotOnCurve, ValueError) as error:
        raise TrustError("expected the other side's share of a key, got other bytes.") from error
