"""Endorsements: bound to one key and a time, not forgeable by anybody without a trusted signing key."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.security import trust as endorsements
from fusionai.transport.security.identity import load_identity, peer_of, public_bytes
from fusionai.transport.security.trust import (
    MAX_ENDORSEMENT_BYTES,
    endorse,
    format_endorsement,
    key_text,
    parse_endorsement,
    parse_key,
    read_endorsement,
    signing_key,
    verify_endorsement,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SIGNER = public_bytes(KEY.public_key())
PEER = peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(b"p" * 32).public_key()))
OTHER = peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(b"o" * 32).public_key()))
DATA = endorse(KEY, PEER, name="tower", now_wall_s=1_000_000.0, lifetime_s=1000, serial=bytes(16))
DOMAIN = b"fusionai endorsement 1\x00"


def test_an_endorsement_holds_for_its_key_until_it_expires():
    statement = verify_endorsement(DATA, [SIGNER], peer=PEER, now_wall_s=1_000_999.0)
    assert (statement.peer, statement.name, statement.purpose) == (PEER, "tower", "lend")
    with pytest.raises(TrustError, match="expired"):
        verify_endorsement(DATA, [SIGNER], peer=PEER, now_wall_s=1_001_000.0)
    with pytest.raises(TrustError, match="not valid yet"):
        verify_endorsement(DATA, [SIGNER], peer=PEER, now_wall_s=1_000_000.0 - 90_000)
    with pytest.raises(TrustError, match="for another key"):
        verify_endorsement(DATA, [SIGNER], peer=OTHER, now_wall_s=1_000_000.0)


def test_only_a_trusted_key_endorses():
    with pytest.raises(TrustError, match="not a key trusted here"):
        verify_endorsement(DATA, [], peer=PEER, now_wall_s=1_000_000.0)
    stranger = endorse(
        Ed25519PrivateKey.generate(), PEER, name="", now_wall_s=1_000_000.0, lifetime_s=10, serial=bytes(16)
    )
    with pytest.raises(TrustError, match="not a key trusted here"):
        verify_endorsement(stranger, [SIGNER], peer=PEER, now_wall_s=1_000_000.0)
    # It says that it is the trusted key's, and is not.
    claimed = stranger[:64] + DATA[64:]
    with pytest.raises(TrustError, match="signed by signing-"):
        verify_endorsement(claimed, [SIGNER], peer=PEER, now_wall_s=1_000_000.0)


def test_a_signature_over_something_else_is_no_endorsement():
    for domain in (b"", b"fusionai ticket 1\x00", b"fusionai placement 1\x00"):
        forged = KEY.sign(domain + DATA[64:]) + DATA[64:]
        with pytest.raises(TrustError, match="signed by signing-"):
            verify_endorsement(forged, [SIGNER], peer=PEER, now_wall_s=1_000_000.0)


@pytest.mark.parametrize("size", [0, 64, MAX_ENDORSEMENT_BYTES + 1, 2**20])
def test_an_endorsement_has_a_size(size: int):
    with pytest.raises(TrustError, match="65 to 512 bytes"):
        read_endorsement(bytes(size))


@pytest.mark.parametrize(
    "change",
    [
        {0: 2},
        {3: "root"},
        {1: b"short"},
        {2: "a" * 51},
        {2: "b" * 52},
        {5: -1},
        {7: b""},
        {4: "n" * 65},
        {4: "two", 8: "more"},
    ],
    ids=str,
)
def test_signed_content_must_still_be_an_endorsement_of_this_version(change: dict[int, object]):
    fields: list[object] = list(msgspec.msgpack.decode(DATA[64:]))
    for index, value in change.items():
        fields[index : index + 1] = [value]
    content = msgspec.msgpack.encode(fields)
    with pytest.raises(TrustError):
        verify_endorsement(KEY.sign(DOMAIN + content) + content, [SIGNER], peer=None, now_wall_s=1_000_000.0)


def test_an_endorsement_has_one_spelling():
    """The same fields as a longer array header: equal once decoded."""
    content = DATA[64:]
    assert content[0] == 0x98
    longer = b"\xdc\x00\x08" + content[1:]
    with pytest.raises(TrustError, match="canonical encoding"):
        verify_endorsement(KEY.sign(DOMAIN + longer) + longer, [SIGNER], peer=PEER, now_wall_s=1_000_000.0)


def test_it_is_handed_over_as_a_line():
    assert parse_endorsement(f" {format_endorsement(DATA)}\n") == DATA
    for wrong in (
        "",
        "endorsement-1:",
        "endorsement-2:" + format_endorsement(DATA)[14:],
        format_endorsement(DATA) + "!",
        "x" * 10**6,
    ):
        with pytest.raises(UsageError, match="begins with endorsement-1:"):
            parse_endorsement(wrong)


def test_a_signing_key_is_not_taken_for_a_peer():
    assert parse_key(key_text(SIGNER)) == SIGNER
    for wrong in (peer_of(SIGNER), "signing-", "signing-" + "a" * 51, "signing-" + "b" * 52, ""):
        with pytest.raises(UsageError, match="expected a signing key"):
            parse_key(wrong)


def test_a_machines_signing_key_is_made_once_and_is_not_its_identity(tmp_path: Path):
    assert signing_key(tmp_path, make=False) is None
    made = signing_key(tmp_path, make=True)
    again = signing_key(tmp_path, make=True)
    assert made is not None
    assert again is not None
    assert public_bytes(made.public_key()) == public_bytes(again.public_key())
    assert public_bytes(made.public_key()) != load_identity(tmp_path).public_key
    assert (tmp_path / endorsements.SIGNING_KEY_FILE).stat().st_mode & 0o077 == 0


def test_nobody_endorses_for_no_time_or_what_is_no_key():
    with pytest.raises(TrustError, match="at least a second"):
        endorse(KEY, PEER, name="", now_wall_s=0.0, lifetime_s=0, serial=bytes(16))
    with pytest.raises(TrustError, match="peer id"):
        endorse(KEY, PeerId("tower"), name="", now_wall_s=0.0, lifetime_s=1, serial=bytes(16))
