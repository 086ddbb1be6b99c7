"""Files that only their owner may read: keys, the membership, the trust list. Decides permissions and atomicity.

`identity`, `authority`, `enrolment`, `endorsements` and `circle` store their files through this module.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fusionai.primitives.errors import StorageError, TrustError


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically.

    The file has mode 0600 from its first byte and is on disk before it gets its name. Raises `StorageError`.
    """
    try:
        with _temporary(path, data) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}.") from error


def create_private(path: Path, data: bytes) -> bool:
    """Like `write_private`, but return False and keep an existing file: the first of two processes wins."""
    try:
        with _temporary(path, data) as temporary:
            # A hard link fails if the name exists; a rename would silently replace the file.
            os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}.") from error
    return True


def read_private(path: Path, *, limit_bytes: int = 2**20) -> bytes | None:
    """Return at most `limit_bytes` of the content, or None if there is no file.

    Raises `TrustError` if others may read it.
    """
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
