"""What is promised about bits, tried on other processors than this one: below AVX-512, below AVX2, of another vendor.

Levels count only before a process starts, so each is a process of its own that runs the tests of the promises. A few
seconds of them are in `make test`; `make test-levels` runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from harness.levels import LEVELS, PROCESSORS, Unavailable, run_as, variables_of

ROOT: Final = Path(__file__).parents[2]
FEW: Final = (
    "tests/conformance/test_bits_of_rows.py",
    "tests/conformance/test_serving_backend.py::test_a_row_of_a_product_is_the_same_among_any_number",
    "tests/unit/execution/serving/test_sketches.py",
)
"""Nothing that compiles large kernels: a fresh clone would wait for the compiler at every level."""
ALL: Final = (
    "tests/conformance",
    "tests/unit/backends",
    "tests/unit/execution",
    "tests/unit/ir",
    "tests/integration/test_job_in_memory.py",
    "tests/integration/test_torch_equals_transformers.py",
)
NOT_THESE: Final = "not long"
SPARE: Final = "amd-avx2"
"""The processor that is tried in `make test`: a gaming PC's."""
FEW_S: Final = 900.0
ALL_S: Final = 3500.0
"""Both for a machine that has other work."""


def passes(level: str, tests: tuple[str, ...], timeout_s: float) -> None:
    try:
        variables_of(level)
    except Unavailable as reason:
        pytest.skip(str(reason))
    # A preloaded handler of SIGSEGV must not be replaced by pytest's.
    command = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-p", "no:xdist", "-q", "--timeout", "0"]
    chosen = [*tests, "-m", NOT_THESE, "--deselect", "tests/conformance/test_levels.py"]
    done = run_as(level, [*command, *chosen], timeout_s=timeout_s, directory=ROOT)
    assert done.returncode == 0, f"at level {level}, which sets {variables_of(level)}:\n{done.stdout[-6000:]}"
    assert " passed" in done.stdout or "100%]" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("level", [*LEVELS, SPARE])
def test_rows_and_elements_keep_their_bits_at_every_level(level: str) -> None:
    passes(level, FEW, FEW_S)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", [*LEVELS, *PROCESSORS])
def test_every_promise_holds_at_every_level(level: str) -> None:
    passes(level, ALL, ALL_S)


FINGERPRINT: Final = (
    "import torch; from fusionai.backends.torch.backend import fingerprint; torch.set_num_threads(1);"
    "print(torch.backends.cpu.get_cpu_capability(), fingerprint(torch.device('cpu')))"
)


@cache
def own_fingerprint() -> str:
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FINGERPRINT]
    done = subprocess.run(
        command, env={**os.environ, **single}, cwd=ROOT, capture_output=True, text=True, timeout=FEW_S, check=True
    )
    return done.stdout.split()[1]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("level", ["sse", SPARE])
def test_a_level_is_another_machine_to_the_fingerprint(level: str) -> None:
    """And libraries really compute by it: torch says so."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("this process is of a lower level itself, and so is what it starts")
    try:
        done = run_as(level, [sys.executable, "-c", FINGERPRINT], timeout_s=FEW_S, directory=ROOT)
    except Unavailable as reason:
        pytest.skip(str(reason))
    capability, fingerprint = done.stdout.split()
    assert capability == ("DEFAULT" if level == "sse" else "AVX2")
    assert fingerprint != own_fingerprint()
