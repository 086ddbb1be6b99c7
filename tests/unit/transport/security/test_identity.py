"""The machine's key: made once, private, its peer id one spelling only."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from fusionai.primitives.errors import StorageError, TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH
from fusionai.transport.security.identity import (
    create_private,
    load_identity,
    peer_of,
    public_key_of,
    read_private,
    write_private,
)

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")


def test_a_key_is_made_once_and_kept(tmp_path: Path):
    home = tmp_path / "deep" / "home"
    first, second = load_identity(home), load_identity(home)
    assert first.peer == second.peer
    assert first.public_key == second.public_key
    assert load_identity(tmp_path / "other").peer != first.peer
    assert list(home.iterdir()) == [home / "identity.pem"]


@posix
def test_only_the_owner_may_read_the_key(tmp_path: Path):
    home = tmp_path / "home"
    load_identity(home)
    assert stat.S_IMODE((home / "identity.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (home / "identity.pem").chmod(0o640)
    with pytest.raises(TrustError, match=r"readable by its owner only.*chmod 600"):
        load_identity(home)


def test_the_private_key_never_shows(tmp_path: Path):
    assert "key=" not in repr(load_identity(tmp_path)).replace("public_key=", "")


def test_peer_ids_and_public_keys_are_the_same_thing(tmp_path: Path):
    identity = load_identity(tmp_path)
    assert len(identity.peer) == PEER_ID_LENGTH
    assert identity.peer == identity.peer.lower()
    assert public_key_of(identity.peer) == identity.public_key
    assert peer_of(bytes(32)) == "a" * 52


@pytest.mark.parametrize("text", ["", "a" * 51, "a" * 53, "A" * 52, "1" * 52, "é" * 52, "a" * 51 + "b"])
def test_a_text_that_is_no_peer_id_is_refused(text: str):
    with pytest.raises(TrustError, match="peer id"):
        public_key_of(text)


def test_a_public_key_of_another_length_is_refused():
    with pytest.raises(TrustError, match="32 bytes, got 31"):
        peer_of(bytes(31))


def other_key() -> bytes:
    return generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize("content", [b"", b"not a key", other_key()], ids=["empty", "text", "elliptic curve"])
def test_a_file_that_is_no_ed25519_key_is_named(content: bytes, tmp_path: Path):
    write_private(tmp_path / "identity.pem", content)
    with pytest.raises(TrustError, match=r"Ed25519.*identity\.pem"):
        load_identity(tmp_path)


def test_of_two_creators_the_first_wins(tmp_path: Path):
    path = tmp_path / "file"
    assert create_private(path, b"first")
    assert not create_private(path, b"second")
    assert read_private(path) == b"first"
    write_private(path, b"third")
    assert read_private(path) == b"third"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"could not (read|write)"):
        load_identity(tmp_path / "file" / "home")
    (tmp_path / "folder" / "identity.pem").mkdir(parents=True)
    with pytest.raises((StorageError, TrustError)):
        load_identity(tmp_path / "folder")
