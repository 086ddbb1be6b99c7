"""Other processors than this one, for processes that tests start: lower instruction sets, another vendor's.

Variables of libraries lower what each uses; they count only before a process starts. A preloaded `processor.c` answers
CPUID in the place of this machine's processor, which libraries without a variable and tests of the vendor see as well;
it needs a C compiler, Linux on x86-64 and a processor that can trap CPUID.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("processor.c")
_HIDDEN_BY_GLIBC: Final = ("AVX512F", "AVX512VL", "AVX512BW", "AVX512DQ", "AVX512CD")
_HIDDEN_BELOW_AVX2: Final = ("AVX2", "AVX", "FMA", "BMI1", "BMI2", "F16C")
_NUMPY_BASELINE: Final = "X86_V2"
_CANT_TRAP: Final = 97


@dataclass(frozen=True, slots=True)
class Level:
    """`variables`: of the libraries. `numpy`: the highest group of features that numpy keeps."""

    variables: dict[str, str]
    numpy: tuple[str, ...]


LEVELS: Final[dict[str, Level]] = {
    "avx2": Level(
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "OPENBLAS_CORETYPE": "Haswell",
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": "",
            "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        },
        (_NUMPY_BASELINE, "X86_V3"),
    ),
    "sse": Level(
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "OPENBLAS_CORETYPE": "Nehalem",
            "NUMBA_CPU_NAME": "nehalem",
            "NUMBA_CPU_FEATURES": "",
            # jaxlib refuses to start below AVX.
            "XLA_FLAGS": "--xla_cpu_max_isa=AVX",
        },
        (_NUMPY_BASELINE,),
    ),
}
"""Below this machine's own, by variables of the libraries."""
PROCESSORS: Final = ("amd-avx512", "amd-avx2", "amd-sse", "intel-avx2")
"""By answers to CPUID."""


def variables_of(level: str) -> dict[str, str]:
    """Environment variables of a level or processor, for a new process. Raises `Unavailable` where there is no such
    thing here."""
    if level in LEVELS:
        return {**LEVELS[level].variables, **_numpy_without(LEVELS[level].numpy)}
    library = _trap()
    kept = level.partition("-")[2]
    hidden = () if kept == "avx512" else (*_HIDDEN_BY_GLIBC, *(() if kept == "avx2" else _HIDDEN_BELOW_AVX2))
    tunables = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in hidden)} if hidden else {}
    lowered = {} if kept == "avx512" else _numpy_without(LEVELS[kept].numpy)
    return {"FUSION_TEST_PROCESSOR": level, "LD_PRELOAD": str(library), **tunables, **lowered}


class Unavailable(Exception):
    """This machine can't pass for such a processor: why."""


def run_as(
    level: str, command: Sequence[str], *, timeout_s: float, directory: Path
) -> subprocess.CompletedProcess[str]:
    """`command` on that processor, one thread per process, output in one text. Raises `Unavailable`."""
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        env={**os.environ, **single, **variables_of(level)},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@cache
def _numpy_features() -> tuple[str, ...]:
    """What numpy found, of what it can do without. It refuses names that it has no code for."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # pyright: ignore

    return tuple(name for name in __cpu_dispatch__ if __cpu_features__.get(name))


def _numpy_without(kept: Sequence[str]) -> dict[str, str]:
    hidden = [name for name in _numpy_features() if name not in kept]
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(hidden)} if hidden else {}


@cache
def _trap() -> Path:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if sys.platform != "linux" or platform.machine() != "x86_64" or compiler is None:
        raise Unavailable("answering CPUID needs Linux on x86-64 and a C compiler")
    digest = hashlib.blake2b(_SOURCE.read_bytes(), digest_size=6).hexdigest()
    target = Path(sys.prefix) / "levels" / f"processor-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several processes of the tests may build it at once.
        own = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", own, _SOURCE, "-ldl"], check=True)
        own.replace(target)
    tried = {**os.environ, "FUSION_TEST_PROCESSOR": "intel-avx2", "LD_PRELOAD": str(target)}
    if subprocess.run(["/bin/true"], env=tried, check=False).returncode == _CANT_TRAP:
        raise Unavailable("this processor or kernel can't trap CPUID")
    return target
