"""Measures how fast a stage's file of optimizer state or weights is read and written on this machine.

The measurement writes and reads in pieces, as stages do. Unlike a stage, it waits for the disk, and drops the file from
the page cache where the system allows that: a machine that offloads state or weights is short of memory, so little of
the file would stay cached.

Neighbours: the backends' probes call this; `scheduling.problem.levers` plans with the result.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from fusionai.primitives.environment import scratch_directory

TRIED_BYTES: Final = 64 * 2**20
"""Bytes written and read back; chosen."""
PIECE_BYTES: Final = 512 * 2**10
"""Bytes per write and read."""


def scratch_bytes_per_s(directory: Path | None = None) -> float:
    """Return the bytes read and written per second of both together, or 0.0 if the file can't be written."""
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
