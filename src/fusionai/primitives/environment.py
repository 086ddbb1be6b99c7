"""The only module that reads environment variables.

FUSION_HOME    this machine's key, pool membership, runs and captured graphs (default: the platform's data directory)
FUSION_INVITE  invitation to a pool, for `fusion join` on a machine that has not joined one
FUSION_LOG     level of the process log: debug, info, warning, error (default warning)
OTEL_*         OpenTelemetry's own variables, which its SDK reads; here only whether and where to spans are sent
XDG_CONFIG_HOME  directory that has systemd's units of this user (default: ~/.config)
USERDOMAIN, USERNAME  this user on Windows, for its Task Scheduler
TMPDIR         where large temporary files go (default: /var/tmp if it is writable, else the system's)

Variables that make libraries compute with other kernels are part of a machine's fingerprint (`arithmetic_limits`).
Others are set here: CUBLAS_WORKSPACE_CONFIG, without which matrix products on a GPU may differ from run to run,
PYTORCH_ALLOC_CONF, which lets the memory of PyTorch's allocator on a GPU grow without holes, and XLA_FLAGS, which
limits JAX to one thread. Workers get TRITON_CACHE_DIR and TRITON_MOCK_PTX_VERSION (`card_kernels_directory`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import platformdirs

_LIMITS: Final = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("DNNL_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE"),
    *("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"),
    *("GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
"""Variables that make libraries choose other kernels."""
_XLA_LIMITS: Final = "--xla_cpu_"


def fusion_home() -> Path:
    """Directory of this machine's identity and state. It is not created here."""
    configured = os.environ.get("FUSION_HOME")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_data_dir("fusionai"))


def invitation() -> str | None:
    """Invitation to a pool, for machines that have not joined one."""
    return os.environ.get("FUSION_INVITE") or None


def log_level() -> str:
    """Level name of the process log."""
    return os.environ.get("FUSION_LOG", "warning").upper()


def trace_endpoint() -> str | None:
    """URL that OpenTelemetry's variables give for spans, None if they turn spans off or have none."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None


def trace_protocol() -> str:
    """Protocol that OpenTelemetry's variables give for spans."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general


def scratch_directory() -> Path:
    """Directory for large temporary files: `TMPDIR` if set, else /var/tmp, which is on a disk, while `/tmp` may be in
    memory."""
    lasting = Path("/var/tmp")
    if "TMPDIR" not in os.environ and os.access(lasting, os.W_OK):
        return lasting
    return Path(tempfile.gettempdir())


def fix_cublas_workspace() -> None:
    """Give cuBLAS a workspace of fixed size, unless the user chose one. Takes effect only before the process uses
    CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def expand_card_segments(*, newer: bool) -> None:
    """Have PyTorch's allocator on a GPU map pages behind the ones it has instead of asking for separate pieces, whose
    holes fit no later tensor, unless the user chose settings. `newer`: PyTorch 2.9 or later, where the variable has
    another name. Windows' drivers lack it. Takes effect only before the process uses CUDA."""
    if sys.platform.startswith("linux") and not any(name in os.environ for name in _ALLOCATORS):
        os.environ[_ALLOCATORS[0] if newer else _ALLOCATORS[1]] = "expandable_segments:True"


def kernel_module_version() -> str:
    """Version of NVIDIA's kernel module on Linux; empty elsewhere, and without one."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def limit_xla_threads(threads: int | None) -> int:
    """Limit JAX's CPU threads and return how many it may use: one, or as many as this process has cores. JAX supports
    no other number, so for more than one thread the process is restricted to that many cores. Takes effect only before
    the process uses JAX."""
    if threads == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        alone = "--xla_cpu_multi_thread_eigen=false"
        if alone not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {alone} intra_op_parallelism_threads=1".strip()
        return 1
    if threads is not None and sys.platform == "linux":
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])
        return min(threads, len(allowed))
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def arithmetic_limits() -> dict[str, str]:
    """Return the variables that are set and make libraries use other kernels than the processor's default."""
    limits = {name: os.environ[name] for name in _LIMITS if name in os.environ}
    # What `limit_xla_threads` adds follows from the number of threads.
    flags = sorted(
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if flag.startswith(_XLA_LIMITS) and "thread" not in flag
    )
    return {**limits, **({"XLA_FLAGS": " ".join(flags)} if flags else {})}


_CARDS: Final = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("HSA_OVERRIDE_GFX_VERSION", *_ALLOCATORS),
)
"""Variables by which a user says how cards are used."""
_OF_USERS: Final = (
    *("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT"),
    # Which cards there are, in which order, and how AMD's are driven.
    *_CARDS,
    # Where compiled kernels are kept. Without a home directory none can be found or compiled.
    *("HOME", "USERPROFILE", "LOCALAPPDATA", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"),
)


def for_workers() -> dict[str, str]:
    """Return the environment of a worker process: what chooses libraries and kernels, and no word more. Threads of
    numpy's library are left out: they would begin before the worker is confined."""
    kept = (*_OF_USERS, *_LIMITS, "XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
    chosen = {name: os.environ[name] for name in kept if name in os.environ}
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return {
        **chosen,
        "PYTHONPATH": paths,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": str(card_kernels_directory()),
        # Part of the key of compiled kernels. Else Triton would start its assembler, which confined processes can't.
        "TRITON_MOCK_PTX_VERSION": "of the installed package",
    }


def card_kernels_directory() -> Path:
    """Directory in which this user's processes keep the compiled kernels for cards. FUSION_HOME does not move it."""
    return platformdirs.user_cache_path("fusionai") / "card-kernels"


_OF_SERVICES: Final = (
    *("FUSION_LOG", *_CARDS, "LD_LIBRARY_PATH", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", *_LIMITS),
)


def of_services() -> dict[str, str]:
    """Return the variables that a service keeps from the terminal where it is installed: at login they may be
    missing."""
    return {name: os.environ[name] for name in _OF_SERVICES if name in os.environ}


def services_directory() -> Path:
    """Directory of this user's services. FUSION_HOME does not move it."""
    return Path(platformdirs.user_data_dir("fusionai")) / "services"


def cards_directory() -> Path:
    """Directory in which this user's processes say what they have lent of each card. FUSION_HOME does not move it."""
    return Path(platformdirs.user_data_dir("fusionai")) / "cards"


def user_configuration() -> Path:
    """Directory of this user's configuration files, as the XDG specification has it."""
    configured = os.environ.get("XDG_CONFIG_HOME")
    return Path(configured) if configured else Path.home() / ".config"


def windows_user() -> str:
    """This user on Windows, as DOMAIN\\NAME."""
    return f"{os.environ.get('USERDOMAIN', '.')}\\{os.environ.get('USERNAME', '')}"


def inherited() -> dict[str, str]:
    """Return a copy of the environment, for child processes that this program starts."""
    return dict(os.environ)
