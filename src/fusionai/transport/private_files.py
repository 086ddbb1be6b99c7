"""Files only their owner may read: this machine's key and its membership. Decides permissions and atomicity.

Neighbours: `identity`, `authority` and `enrolment` keep their files through this.
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
    """Replace `path` by `data` in one step: mode 0600 from its first byte, on disk before it gets its name."""
    try:
        with _temporary(path, data) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}.") from error


def create_private(path: Path, data: bytes) -> bool:
    """Like `write_private`, but leaves an existing file alone and returns False: the first of two processes wins."""
    try:
        with _temporary(path, data) as temporary:
            # A hard link fails where the name exists already; a rename would silently replace it.
            os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}.") from error
    return True


def read_private(path: Path, *, limit_bytes: int = 2**20) -> bytes | None:
    """The content, or None where there is no such file. Raises `TrustError` when others may read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise TrustError(
                    f"expected {path} to be readable by its owner only, its mode is {stat.S_IMODE(mode):o}.",
                    hint=f"If nobody else had access, run `chmod 600 {path}`; otherwise delete it and join again.",
                )
            return file.read(limit_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror}.") from error


def make_private_directory(path: Path) -> None:
    """Create `path` with mode 0700 where it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _temporary(path: Path, data: bytes) -> Generator[Path, None, None]:
    """`data` under another name in the same directory; mkstemp gives it mode 0600."""
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
