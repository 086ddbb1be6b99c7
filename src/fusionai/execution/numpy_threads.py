"""How many threads numpy's matrix products take in a process that computes: the one that asks for them.

Decides it once per process. OpenBLAS, which numpy brings along, starts a thread per core, and they wait for the next
product by asking for it over and over: small products beside a model's own threads (marks, mostly) took twice the time
of all cores. Only numpy's own library is told; PyTorch and others have theirs.

Neighbour: `execution.compute`, before its thread exists.
"""

from __future__ import annotations

from functools import cache
from pathlib import PurePath

import numpy as np
from threadpoolctl import ThreadpoolController


@cache
def numpy_computes_alone() -> int:
    """The number of libraries told; none where numpy computes with what the system has (Accelerate on macOS)."""
    near = PurePath(np.__file__).parent
    told = 0
    for library in ThreadpoolController().lib_controllers:
        path = PurePath(library.filepath)
        if library.internal_api == "openblas" and (path.is_relative_to(near) or path.parent.name == "numpy.libs"):
            library.set_num_threads(1)
            told += 1
    return told
