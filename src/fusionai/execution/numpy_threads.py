"""Limits numpy's matrix products to one thread in a process that computes. Set once per process.

numpy's OpenBLAS starts a thread per core, and these threads busy-wait for the next product. Small products (mostly
marks) beside a model's own threads took twice the time on all cores. Only numpy's own library is limited; PyTorch and
other frameworks have theirs. Called by `execution.compute` before its thread exists.
"""

from __future__ import annotations

from functools import cache
from pathlib import PurePath

import numpy as np
from threadpoolctl import ThreadpoolController


@cache
def numpy_computes_alone() -> int:
    """Return the number of libraries limited: 0 if numpy uses a system library (Accelerate on macOS)."""
    near = PurePath(np.__file__).parent
    told = 0
    for library in ThreadpoolController().lib_controllers:
        path = PurePath(library.filepath)
        if library.internal_api == "openblas" and (path.is_relative_to(near) or path.parent.name == "numpy.libs"):
            library.set_num_threads(1)
            told += 1
    return told
