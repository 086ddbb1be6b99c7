"""How fast a stage's file of optimizer state or weights is read and written here, measured. Decides how much is tried.

As stages do it: pieces, plain writes and reads. But here the disk is waited for, and read from where the system can be
told to forget what it has of a file: who puts state or weights into one is short of memory, and the system will not
keep much of the file there.

Neighbours: backends' probes call this; `scheduling.levers` plans with it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from fusionai.primitives.environment import scratch_directory

TRIED_BYTES: Final = 64 * 2**20
PIECE_BYTES: Final = 512 * 2**10


def scratch_bytes_per_s(directory: Path | None = None) -> float:
    """Bytes read and bytes written, per second of both. 0.0 where there is no room to try."""
    piece = bytes(PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=directory or scratch_directory(), buffering=0) as file:
            started_s = time.perf_counter()
            for _ in range(TRIED_BYTES // PIECE_BYTES):
                file.write(piece)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(PIECE_BYTES):
                pass
            return 2 * TRIED_BYTES / max(time.perf_counter() - started_s, 1e-9)
    except OSError:
        return 0.0
