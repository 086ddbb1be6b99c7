"""The pool's certificates: its authority issues them at join, and TLS shows and checks them.

A certificate says that this Ed25519 key (common name = peer id) belongs to a `member` or to the `broker`
(organisational unit) of this pool (organisation). The broker's owner holds the authority's key. Decides what a valid
certificate contains, and protocol version, verification and roles of TLS. Whether a member is still welcome (leaving,
expiry of tickets) is decided by the broker. Host names are not checked: a machine's identity is its key.

A member shows its certificate and accepts certificates of the same pool. A stranger shows none and accepts only a
broker whose certificate the invitation's authority signed. `enrolment` makes a stranger a member; the tickets of
`signed` are signed with the authority's key under another domain.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args
from weakref import WeakSet

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, SignatureAlgorithmOID

from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Remote, Role
from fusionai.transport.security.identity import Identity, keep_private, load_key, peer_of, public_bytes
from fusionai.transport.security.revocation import RevokedPeers

KEY_FILE: Final = "authority.pem"
CERTIFICATE_FILE: Final = "authority.der"
CLOCK_SKEW_S: Final = 86_400.0
"""Tolerated error of a member's clock: one day."""
AUTHORITY_LIFETIME_S: Final = 20 * 365 * 86_400.0
CERTIFICATE_LIFETIME_S: Final = 30 * 86_400.0
"""Lifetime of members' and the broker's certificates: 30 days. Chosen: a key that was stolen, or a member that the
broker can't reach, is shut out after that. Members renew their own (`enrolment.renew_if_due`)."""
RENEWED_BEFORE_S: Final = CERTIFICATE_LIFETIME_S / 3
"""A certificate is renewed from this time before its end on."""
MAX_POOL_NAME_LENGTH: Final = 64

CertifiedRole = Literal["broker", "member"]


@dataclass(frozen=True, slots=True)
class Authority:
    """A pool's signing key and its self-signed certificate (DER)."""

    pool: str
    certificate: bytes
    public_key: bytes
    key: Ed25519PrivateKey = field(repr=False, compare=False)

    def issue(self, public_key: bytes, role: CertifiedRole, *, now_wall_s: float) -> bytes:
        """Return a certificate (DER) for a public key of 32 bytes, valid for `CERTIFICATE_LIFETIME_S`."""
        peer = peer_of(public_key)
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, peer),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.pool),
            ]
        )
        subject_key = Ed25519PublicKey.from_public_bytes(public_key)
        builder = (
            _builder(subject, x509.load_der_x509_certificate(self.certificate).subject, subject_key)
            .not_valid_before(_date(now_wall_s - CLOCK_SKEW_S))
            .not_valid_after(_date(now_wall_s + CERTIFICATE_LIFETIME_S))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return builder.sign(self.key, algorithm=None).public_bytes(serialization.Encoding.DER)


@dataclass(frozen=True, slots=True)
class Certified:
    """Content of a verified certificate."""

    peer: PeerId
    role: CertifiedRole
    pool: str
    expires_at_s: float


def load_authority(home: Path, pool: str, *, now_wall_s: float) -> Authority:
    """Return the authority kept in `home`, created there at the first call. Raises `UsageError` if the directory holds
    another pool's authority."""
    if not 0 < len(pool) <= MAX_POOL_NAME_LENGTH:
        raise UsageError(f"expected a pool name of 1 to {MAX_POOL_NAME_LENGTH} characters, got {len(pool)}.")
    key = load_key(home / KEY_FILE)
    certificate = keep_private(home / CERTIFICATE_FILE, lambda: _self_signed(key, pool, now_wall_s))
    kept_pool = pool_of(certificate)
    if kept_pool != pool:
        raise UsageError(
            f"expected the authority of pool {pool!r} in {home}, found that of {kept_pool!r}.",
            hint="Use that pool name, or another directory for the new pool.",
        )
    return Authority(pool, certificate, public_bytes(key.public_key()), key)


def verify_certificate(certificate: bytes, authority_key: bytes, *, now_wall_s: float) -> Certified:
    """Verify a certificate (DER) without OpenSSL: signed by `authority_key` (32 bytes), in date, name equal to the
    key's peer id. Raises `TrustError` saying which check failed."""
    parsed = _parse(certificate)
    if parsed.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
        raise TrustError("expected a certificate signed by this pool's authority, got another kind of signature.")
    try:
        Ed25519PublicKey.from_public_bytes(authority_key).verify(parsed.signature, parsed.tbs_certificate_bytes)
    except (InvalidSignature, ValueError) as error:
        raise TrustError(
            "expected a certificate signed by this pool's authority, got one signed by another key."
        ) from error
    if not parsed.not_valid_before_utc.timestamp() <= now_wall_s <= parsed.not_valid_after_utc.timestamp():
        raise TrustError(
            f"expected a certificate valid now, got one valid from {parsed.not_valid_before_utc:%Y-%m-%d} to "
            f"{parsed.not_valid_after_utc:%Y-%m-%d}.",
            hint="Check this machine's clock; if it is right, join the pool again with a new invitation.",
        )
    return read_certificate(certificate)


def read_certificate(certificate: bytes) -> Certified:
    """Return peer and role of a certificate whose signature OpenSSL has already checked. Raises `TrustError` if its
    name and its key disagree or its role is unknown."""
    parsed = _parse(certificate)
    peer = peer_of(_key_of(parsed))
    if _name_part(parsed.subject, NameOID.COMMON_NAME) != peer:
        raise TrustError("expected a certificate whose name is its key's peer id, got another name.")
    role = _name_part(parsed.subject, NameOID.ORGANIZATIONAL_UNIT_NAME)
    pool = _name_part(parsed.subject, NameOID.ORGANIZATION_NAME)
    if role not in get_args(CertifiedRole):
        raise TrustError(f"expected a certificate of a broker or member, got the role {role!r}.")
    return Certified(peer, cast("CertifiedRole", role), pool, parsed.not_valid_after_utc.timestamp())


def authority_key_of(certificate: bytes) -> bytes:
    """The 32-byte public key of an authority's certificate (DER)."""
    return _key_of(_parse(certificate))


def pool_of(certificate: bytes) -> str:
    """The pool's name in its authority's certificate."""
    return _name_part(_parse(certificate).subject, NameOID.ORGANIZATION_NAME)


def pem_of(certificate: bytes) -> str:
    return _parse(certificate).public_bytes(serialization.Encoding.PEM).decode()


def _self_signed(key: Ed25519PrivateKey, pool: str, now_wall_s: float) -> bytes:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "FusionAI pool authority"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, pool),
        ]
    )
    builder = (
        _builder(name, name, key.public_key())
        .not_valid_before(_date(now_wall_s - CLOCK_SKEW_S))
        .not_valid_after(_date(now_wall_s + AUTHORITY_LIFETIME_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return builder.sign(key, algorithm=None).public_bytes(serialization.Encoding.DER)


def _builder(subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _parse(certificate: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(certificate)
    except (ValueError, x509.InvalidVersion) as error:
        raise TrustError("expected a certificate as DER, got bytes that can't be parsed.") from error


def _key_of(certificate: x509.Certificate) -> bytes:
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TrustError("expected a certificate with an Ed25519 key, got an unknown kind.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise TrustError("expected a certificate with an Ed25519 key, got another kind.")
    return public_bytes(key)


def _name_part(name: x509.Name, oid: x509.ObjectIdentifier) -> str:
    parts = name.get_attributes_for_oid(oid)
    if len(parts) != 1:
        raise TrustError(f"expected one {oid._name} in the certificate's name, got {len(parts)}.")
    return str(parts[0].value)


def _date(wall_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(wall_s, datetime.UTC)


@dataclass(slots=True)
class MemberCredentials:
    """A certified machine: its key, its certificate and its pool's authority certificate (both DER). The certificate is
    renewed while it is in use; connections that are opened later show the new one."""

    identity: Identity
    certificate: bytes
    authority: bytes
    revoked: RevokedPeers = field(default_factory=RevokedPeers, compare=False, repr=False)
    """Evicted members, as far as this process knows."""
    _contexts: WeakSet[ssl.SSLContext] = field(
        default_factory=WeakSet[ssl.SSLContext], init=False, compare=False, repr=False
    )

    @property
    def role(self) -> Role:
        return read_certificate(self.certificate).role

    @property
    def authority_key(self) -> bytes:
        """The 32-byte public key that verifies tickets."""
        return authority_key_of(self.authority)

    def is_renewal_due(self, now_wall_s: float) -> bool:
        return now_wall_s >= read_certificate(self.certificate).expires_at_s - RENEWED_BEFORE_S

    def renew(self, certificate: bytes) -> None:
        """Show this certificate from now on."""
        self.certificate = certificate
        for context in list(self._contexts):
            self._load(context)

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

    def remote(self, certificate: bytes | None, end: Callable[[], None]) -> Remote:
        """Return the peer at the other end, from the certificate that OpenSSL has verified. Raises `TrustError`, also
        for an evicted member; `end`, a bound method, is called if it is evicted later."""
        return Remote(None, "stranger") if certificate is None else self.admitted(read_certificate(certificate), end)

    def admitted(self, certified: Certified, end: Callable[[], None]) -> Remote:
        """Return the peer of a verified certificate. Raises as `remote`."""
        self.revoked.check(certified.peer)
        self.revoked.watch(certified.peer, end)
        return Remote(certified.peer, certified.role, expires_at_s=certified.expires_at_s)

    def take_revocations(self, signed: bytes) -> None:
        """Adopt a list of evicted members. Raises as `RevokedPeers.take`."""
        self.revoked.take(signed, self.authority_key)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_verify_locations(cadata=pem_of(self.authority))
            with tempfile.TemporaryDirectory() as directory:
                # Python's ssl reads certificates from files only. The key stays in its own file.
                path = Path(directory) / "certificate.pem"
                path.write_text(pem_of(self.certificate))
                context.load_cert_chain(path, self.identity.path)
            self._contexts.add(context)
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

    def remote(self, certificate: bytes | None, end: Callable[[], None]) -> Remote:
        if certificate is None:
            raise TrustError("expected the broker's certificate, got none.")
        return self.admitted(verify_certificate(certificate, self.authority_key, now_wall_s=time.time()), end)

    def admitted(self, certified: Certified, _end: Callable[[], None]) -> Remote:
        return Remote(certified.peer, certified.role)


Credentials = MemberCredentials | StrangerCredentials


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context
