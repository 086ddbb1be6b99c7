"""One Ed25519 key per machine is its identity everywhere. Decides how a key becomes a peer id and where it is stored.

The private key never leaves this machine and is never part of a message. `certificates` certifies public
keys and presents the certificate in TLS.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fusionai.primitives.errors import StorageError, TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId

T = TypeVar("T", bound=msgspec.Struct)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically. The file has mode 0600 from its first byte and is on disk before it gets its
    name. Raises `StorageError`."""
    try:
        with _temporary(path, data) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        raise _not_written(path, error) from error


def create_private(path: Path, data: bytes) -> bool:
    """Like `write_private`, but return False and keep an existing file: the first of two processes wins."""
    try:
        with _temporary(path, data) as temporary:
            # A hard link fails if the name exists; a rename would silently replace the file.
            os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise _not_written(path, error) from error
    return True


def _not_written(path: Path, error: OSError) -> StorageError:
    hint = "Free some space, or choose another directory with --home or FUSION_HOME."
    return StorageError(f"could not write {path}: {error.strerror}.", hint=hint)


def read_private(path: Path, *, limit_bytes: int = 2**20) -> bytes | None:
    """Return at most `limit_bytes` of the content, or None if there is no file. Raises `TrustError` if others may read
    it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise TrustError(
                    f"expected {path} to be readable by its owner only, its mode is {stat.S_IMODE(mode):o}.",
                    hint=f"If no other user had access, run `chmod 600 {path}`; otherwise delete it and join again.",
                )
            return file.read(limit_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror}.") from error


def keep_private(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of `path`, which the first call creates from `make`. The first of two processes wins."""
    data = read_private(path)
    if data is None:
        create_private(path, make())
        data = read_private(path) or b""
    return data


def read_private_json(path: Path, kind: type[T], *, what: str, hint: str, limit_bytes: int = 2**20) -> T | None:
    """Return the JSON in `path` checked against `kind`, or None if there is no file. Raises `StorageError` with `hint`
    for other content, `TrustError` if others may read the file."""
    data = read_private(path, limit_bytes=limit_bytes)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"expected {what} in {path}, got something else: {error}.", hint=hint) from error


def write_private_json(path: Path, content: msgspec.Struct) -> None:
    """Replace `path` by the content as indented JSON. Raises `StorageError`."""
    write_private(path, msgspec.json.format(msgspec.json.encode(content)))


def make_private_directory(path: Path) -> None:
    """Create `path` with mode 0700 if it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _temporary(path: Path, data: bytes) -> Generator[Path, None, None]:
    """Write `data` under a temporary name in the same directory and yield its path; mkstemp sets mode 0600."""
    make_private_directory(path.parent)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


KEY_FILE: Final = "identity.pem"
PUBLIC_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """This machine's key. `path` is the PEM file (PKCS8) it was read from."""

    peer: PeerId
    public_key: bytes
    path: Path
    key: Ed25519PrivateKey = field(repr=False, compare=False)


def load_identity(home: Path) -> Identity:
    """Return the key in `home/identity.pem`, created there (mode 0600) at the first call. Raises `TrustError` if others
    may read the file or it holds no Ed25519 key, `StorageError` if it can't be written."""
    path = home / KEY_FILE
    key = load_key(path)
    public = public_bytes(key.public_key())
    return Identity(peer_of(public), public, path, key)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in the PEM file `path`, created (mode 0600) at the first call. Raises `TrustError` if others may
    read the file or it holds no Ed25519 key, `StorageError` if it can't be written."""
    return parse_private_pem(keep_private(path, lambda: private_pem(Ed25519PrivateKey.generate())), path)


def peer_of(public_key: bytes) -> PeerId:
    """Lower-case base32 of the 32 bytes of the public key. Raises `TrustError` for another length."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise TrustError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(public_key)}.")
    return PeerId(base64.b32encode(public_key).decode().rstrip("=").lower())


def public_key_of(peer: str) -> bytes:
    """Return the 32 bytes of a peer id. Raises `TrustError` if it is no peer id."""
    try:
        if len(peer) != PEER_ID_LENGTH or peer != peer.lower():
            raise ValueError
        public_key = base64.b32decode(peer.upper() + "====")
    except (ValueError, binascii.Error) as error:
        raise TrustError(f"expected a peer id of {PEER_ID_LENGTH} base32 characters, got {peer[:64]!r}.") from error
    if peer_of(public_key) != peer:
        raise TrustError(f"expected a peer id in its canonical encoding, got {peer!r}.")
    return public_key


def public_bytes(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def parse_private_pem(data: bytes, path: Path) -> Ed25519PrivateKey:
    """Return the key. Raises `TrustError` naming `path` if `data` is no Ed25519 key."""
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise TrustError(
            f"expected an Ed25519 key as PEM in {path}, got something else.",
            hint="Restore it from a backup, or delete it and join the pool again under a new identity.",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise TrustError(f"expected an Ed25519 key in {path}, got another kind of key.")
    return key
