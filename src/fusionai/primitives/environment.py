"""The one file that reads environment variables.

FUSION_HOME    where this machine keeps its key, pool membership and runs (default: the platform's data directory)
FUSION_LOG     level of the process log: debug, info, warning, error (default warning)
TMPDIR         where large temporary files go (default: /var/tmp where there is one, else the system's)

One variable of a library is set here: CUBLAS_WORKSPACE_CONFIG, without which matrix products on a GPU may differ from
run to run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs


def fusion_home() -> Path:
    """The directory of this machine's identity and state; not created here."""
    configured = os.environ.get("FUSION_HOME")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_data_dir("fusionai"))


def log_level() -> str:
    """Level name for the process log."""
    return os.environ.get("FUSION_LOG", "warning").upper()


def scratch_directory() -> Path:
    """For large temporary files: `TMPDIR` if it is set, else a place that is on a disk, as `/tmp` need not be."""
    lasting = Path("/var/tmp")
    if "TMPDIR" not in os.environ and os.access(lasting, os.W_OK):
        return lasting
    return Path(tempfile.gettempdir())


def fix_cublas_workspace() -> None:
    """Give cuBLAS a workspace of fixed size, unless the user chose one. Only counts before the process uses CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def inherited() -> dict[str, str]:
    """A copy of the environment, for child processes this program starts."""
    return dict(os.environ)
