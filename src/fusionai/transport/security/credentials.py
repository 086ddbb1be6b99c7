"""This machine's identity in TLS and the identities it accepts. Decides protocol version, verification and roles.

A member shows the certificate that the pool's authority issued and accepts certificates of the same pool. A stranger
shows none and accepts only a broker whose certificate the invitation's authority signed. Host names are not checked:
a machine's identity is its Ed25519 key.

`tcp` opens connections with these credentials, `authority` reads certificates, `enrolment` makes a stranger a member.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fusionai.primitives.errors import TrustError
from fusionai.transport.interface import Remote, Role
from fusionai.transport.security.authority import authority_key_of, pem_of, read_certificate, verify_certificate
from fusionai.transport.security.identity import Identity


@dataclass(frozen=True, slots=True)
class MemberCredentials:
    """A certified machine: its key, its certificate and its pool's authority certificate (both DER)."""

    identity: Identity
    certificate: bytes
    authority: bytes

    @property
    def role(self) -> Role:
        return read_certificate(self.certificate).role

    @property
    def authority_key(self) -> bytes:
        """The 32-byte public key that verifies tickets."""
        return authority_key_of(self.authority)

    def dialling_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def listening_context(self, *, strangers: bool) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED
        # No session tickets: a resumed session shows no certificate, and connections here are long-lived.
        context.num_tickets = 0
        self._load(context)
        return context

    def remote(self, certificate: bytes | None) -> Remote:
        """Return the peer at the other end, from the certificate that OpenSSL has verified. Raises `TrustError`."""
        if certificate is None:
            return Remote(None, "stranger")
        certified = read_certificate(certificate)
        return Remote(certified.peer, certified.role)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_verify_locations(cadata=pem_of(self.authority))
            with tempfile.TemporaryDirectory() as directory:
                # Python's ssl reads certificates from files only. The key stays in its own file.
                path = Path(directory) / "certificate.pem"
                path.write_text(pem_of(self.certificate))
                context.load_cert_chain(path, self.identity.path)
        except ssl.SSLError as error:
            raise TrustError(
                f"expected this machine's certificate and key to belong together: {error.reason or error}.",
                hint="Join the pool again with a new invitation.",
            ) from error


@dataclass(frozen=True, slots=True)
class StrangerCredentials:
    """A machine that has nothing but an invitation. It can only dial, and only its pool's broker."""

    authority_key: bytes

    @property
    def role(self) -> Role:
        return "stranger"

    def dialling_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # The invitation holds the authority's key, not its certificate, so `remote` verifies the certificate itself.
        # OpenSSL still checks that the other side holds the key of the certificate it shows.
        context.verify_mode = ssl.CERT_NONE
        return context

    def remote(self, certificate: bytes | None) -> Remote:
        if certificate is None:
            raise TrustError("expected the broker's certificate, got none.")
        certified = verify_certificate(certificate, self.authority_key, now_wall_s=time.time())
        return Remote(certified.peer, certified.role)


Credentials = MemberCredentials | StrangerCredentials


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context
