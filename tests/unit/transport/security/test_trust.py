"""The trust_list of trust fails closed: whatever is wrong with the file, the key or the time, nobody is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.primitives.errors import FusionError, StorageError, TrustError
from fusionai.primitives.ids import PeerId
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.trust import (
    MAX_CARRIED,
    Revoked,
    Signer,
    TrustList,
    TrustListFile,
    carried_endorsements,
    carry,
    endorse,
    key_text,
    load_trust_list,
    save_trust_list,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEER = peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(b"p" * 32).public_key()))
OTHER = peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(b"o" * 32).public_key()))
NOW_S = 1_000_000.0
SIGNER = Signer(key_text(public_bytes(KEY.public_key())), "me")


def endorsement(peer: PeerId = PEER, key: Ed25519PrivateKey = KEY, serial: int = 0) -> bytes:
    return endorse(key, peer, name="", now_wall_s=NOW_S, lifetime_s=1000, serial=serial.to_bytes(16))


def test_who_is_endorsed_by_a_trusted_key_is_in():
    here = TrustList(signers=(SIGNER,), endorsements=(endorsement(),))
    assert here.endorsement_of(PEER, (), NOW_S).peer == PEER
    shown = TrustList(signers=(SIGNER,))
    assert shown.endorsement_of(PEER, (endorsement(OTHER), endorsement()), NOW_S).peer == PEER


@pytest.mark.parametrize(
    ("trust_list", "carried", "reason"),
    [
        (TrustList(), (endorsement(),), "trusts no signing key"),
        (TrustList(signers=(SIGNER,)), (), "no key that this machine trusts has endorsed it"),
        (TrustList(signers=(SIGNER,)), (endorsement(OTHER),), "endorsement it shows is for another key"),
        (TrustList(signers=(SIGNER,)), (b"",), "bytes, got 0"),
        (
            TrustList(signers=(SIGNER,)),
            (endorsement(key=Ed25519PrivateKey.from_private_bytes(b"x" * 32)),),
            "not a key trusted here",
        ),
        (
            TrustList(signers=(SIGNER,), endorsements=(endorsement(),), revoked=(Revoked(PEER, 0),)),
            (endorsement(serial=1),),
            "revoked",
        ),
        (TrustList(signers=(SIGNER,)), (*[b"x" * 80] * MAX_CARRIED, endorsement()), "content that can't be decoded"),
    ],
)
def test_nobody_else_is_in(trust_list: TrustList, carried: tuple[bytes, ...], reason: str):
    with pytest.raises(TrustError, match=reason):
        trust_list.endorsement_of(PEER, carried, NOW_S)


def test_the_circle_is_kept_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "trust.json"
    trust_list = TrustList(signers=(SIGNER,), endorsements=(endorsement(),), revoked=(Revoked(OTHER, 5),))
    save_trust_list(path, trust_list)
    assert load_trust_list(path) == trust_list
    path.chmod(0o644)
    with pytest.raises(TrustError, match="readable by its owner only"):
        load_trust_list(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}garbage",
        b'{"schema": "fusionai.trust/2"}',
        b'{"schema": "fusionai.trust/1", "signers": [{"key": "tower"}]}',
        b'{"schema": "fusionai.trust/1", "trusted": []}',
        b'{"schema": "fusionai.trust/1", "endorsements": ["!"]}',
        b"[" * 100_000,
    ],
)
def test_a_broken_file_says_nothing_for_anybody(tmp_path: Path, content: bytes):
    path = tmp_path / "trust.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StorageError, match="expected a trust file"):
        load_trust_list(path)
    with pytest.raises(TrustError, match="expected a trust file"):
        TrustListFile(path, lambda: NOW_S).check(PEER, (endorsement(),))


def test_what_the_file_says_counts_at_once(tmp_path: Path):
    path = tmp_path / "trust.json"
    trust_list = TrustListFile(path, lambda: NOW_S)
    with pytest.raises(TrustError, match="has no trust list yet"):
        trust_list.check(PEER, (endorsement(),))
    save_trust_list(path, TrustList(signers=(SIGNER,)))
    assert trust_list.check(PEER, (endorsement(),)).peer == PEER
    save_trust_list(path, TrustList(signers=(SIGNER,), revoked=(Revoked(PEER, 0),)))
    with pytest.raises(TrustError, match="revoked"):
        trust_list.check(PEER, (endorsement(),))
    save_trust_list(path, TrustList(signers=(SIGNER,)))
    assert trust_list.check(PEER, (endorsement(),)).peer == PEER
    path.unlink()
    with pytest.raises(TrustError, match="has no trust list yet"):
        trust_list.check(PEER, (endorsement(),))
    path.mkdir()
    with pytest.raises(FusionError):
        trust_list.check(PEER, (endorsement(),))


def test_a_machine_carries_endorsements_of_its_own_key(tmp_path: Path):
    assert carried_endorsements(tmp_path) == ()
    for serial in range(MAX_CARRIED + 2):
        carry(tmp_path, endorsement(serial=serial), PEER)
    carry(tmp_path, endorsement(serial=MAX_CARRIED + 1), PEER)
    kept = carried_endorsements(tmp_path)
    assert len(kept) == MAX_CARRIED
    assert kept[0] == endorsement(serial=MAX_CARRIED + 1), "the newest first, each once"
    with pytest.raises(TrustError, match="this machine lends as"):
        carry(tmp_path, endorsement(OTHER), PEER)
    (tmp_path / "endorsements.json").write_text("{}")
    with pytest.raises(StorageError, match="expected this machine's endorsements"):
        carried_endorsements(tmp_path)
