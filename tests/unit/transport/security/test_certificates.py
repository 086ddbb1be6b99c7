"""Certificates: what is issued, and every way one can fail to hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from fusionai.primitives.errors import TrustError, UsageError
from fusionai.transport.security.certificates import (
    CERTIFICATE_LIFETIME_S,
    CLOCK_SKEW_S,
    RENEWED_BEFORE_S,
    authority_key_of,
    load_authority,
    pool_of,
    read_certificate,
    verify_certificate,
)
from fusionai.transport.security.identity import load_identity
from harness.credentials import CertifiedPool

NOW_S = 1_800_000_000.0


def test_an_authority_is_made_once(tmp_path: Path):
    first = load_authority(tmp_path, "friends", now_wall_s=NOW_S)
    second = load_authority(tmp_path, "friends", now_wall_s=NOW_S + 1000)
    assert (first.public_key, first.certificate) == (second.public_key, second.certificate)
    assert authority_key_of(first.certificate) == first.public_key
    assert pool_of(first.certificate) == "friends"


def test_another_pools_directory_is_the_users_mistake(tmp_path: Path):
    load_authority(tmp_path, "friends", now_wall_s=NOW_S)
    with pytest.raises(UsageError, match=r"pool 'others' .* found that of 'friends'"):
        load_authority(tmp_path, "others", now_wall_s=NOW_S)


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_pools_name_has_a_length(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match="1 to 64 characters"):
        load_authority(tmp_path, name, now_wall_s=NOW_S)


@pytest.mark.parametrize("role", ["member", "broker"])
def test_a_certificate_says_who_and_what(role: str, tmp_path: Path):
    authority = load_authority(tmp_path / "a", "friends", now_wall_s=NOW_S)
    identity = load_identity(tmp_path / "b")
    certificate = authority.issue(identity.public_key, role, now_wall_s=NOW_S)
    certified = verify_certificate(certificate, authority.public_key, now_wall_s=NOW_S)
    assert (certified.peer, certified.role, certified.pool) == (identity.peer, role, "friends")
    assert certified.expires_at_s == NOW_S + CERTIFICATE_LIFETIME_S


def test_a_certificate_has_its_dates_with_room_for_wrong_clocks(tmp_path: Path):
    authority = load_authority(tmp_path / "a", "friends", now_wall_s=NOW_S)
    certificate = authority.issue(load_identity(tmp_path / "b").public_key, "member", now_wall_s=NOW_S)
    for good_s in (NOW_S - CLOCK_SKEW_S, NOW_S + CERTIFICATE_LIFETIME_S):
        verify_certificate(certificate, authority.public_key, now_wall_s=good_s)
    for bad_s in (NOW_S - CLOCK_SKEW_S - 1, NOW_S + CERTIFICATE_LIFETIME_S + 1):
        with pytest.raises(TrustError, match="valid now"):
            verify_certificate(certificate, authority.public_key, now_wall_s=bad_s)


def test_another_authoritys_certificate_does_not_hold(tmp_path: Path):
    authority = load_authority(tmp_path / "a", "friends", now_wall_s=NOW_S)
    namesake = load_authority(tmp_path / "c", "friends", now_wall_s=NOW_S)
    certificate = namesake.issue(load_identity(tmp_path / "b").public_key, "broker", now_wall_s=NOW_S)
    with pytest.raises(TrustError, match="signed by this pool's authority"):
        verify_certificate(certificate, authority.public_key, now_wall_s=NOW_S)


def test_no_changed_byte_goes_unnoticed(tmp_path: Path):
    authority = load_authority(tmp_path / "a", "friends", now_wall_s=NOW_S)
    certificate = authority.issue(load_identity(tmp_path / "b").public_key, "member", now_wall_s=NOW_S)
    # The count of unused bits in front of the signature carries nothing: the same signature is read either way.
    unused_bits = len(certificate) - 64 - 1
    for index in set(range(len(certificate))) - {unused_bits}:
        changed = bytearray(certificate)
        changed[index] ^= 1
        with pytest.raises(TrustError):
            verify_certificate(bytes(changed), authority.public_key, now_wall_s=NOW_S)


def test_the_authority_itself_is_no_member(tmp_path: Path):
    authority = load_authority(tmp_path, "friends", now_wall_s=NOW_S)
    with pytest.raises(TrustError, match="peer id, got another name"):
        verify_certificate(authority.certificate, authority.public_key, now_wall_s=NOW_S)


def test_a_name_of_another_key_does_not_hold(tmp_path: Path, issue_named: Callable[..., bytes]):
    other = load_identity(tmp_path / "other")
    with pytest.raises(TrustError, match="another name"):
        read_certificate(issue_named(common_name=other.peer))


def test_an_unknown_role_does_not_hold(issue_named: Callable[..., bytes]):
    with pytest.raises(TrustError, match="role 'admin'"):
        read_certificate(issue_named(role="admin"))


@pytest.fixture
def issue_named(tmp_path: Path) -> Callable[..., bytes]:
    """A certificate the authority would never issue, signed by it all the same."""
    authority = load_authority(tmp_path / "a", "friends", now_wall_s=NOW_S)
    identity = load_identity(tmp_path / "b")

    def issue(common_name: str = identity.peer, role: str = "member") -> bytes:
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, common_name),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "friends"),
            ]
        )
        model = x509.load_der_x509_certificate(authority.issue(identity.public_key, "member", now_wall_s=NOW_S))
        builder = x509.CertificateBuilder(
            model.issuer,
            subject,
            model.public_key(),
            model.serial_number,
            model.not_valid_before_utc.replace(tzinfo=None),
            model.not_valid_after_utc.replace(tzinfo=None),
        )
        return builder.sign(authority.key, algorithm=None).public_bytes(serialization.Encoding.DER)

    return issue


def test_bytes_that_are_no_certificate():
    with pytest.raises(TrustError, match="as DER"):
        read_certificate(b"certificate")


def test_a_renewed_certificate_is_shown_from_then_on(tmp_path: Path):
    pool = CertifiedPool(tmp_path)
    now_s = time.time()
    member = pool.credentials("member", issued_at_s=now_s - CERTIFICATE_LIFETIME_S + RENEWED_BEFORE_S + 60.0)
    assert not member.is_renewal_due(now_s)
    assert member.is_renewal_due(now_s + 61.0)
    context = member.dialling_context()
    before = member.certificate
    member.renew(pool.authority.issue(member.identity.public_key, "member", now_wall_s=now_s))
    assert member.certificate != before
    assert not member.is_renewal_due(now_s + 61.0)
    assert context in member._contexts
    del context
    gc.collect()
    assert not member._contexts, "contexts that are gone are not kept"
