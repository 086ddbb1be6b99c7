"""What is promised about bits, tried on other processors than this one: below AVX-512, below AVX2, of another vendor.

Levels count only before a process starts, so each is a process of its own that runs the tests of the promises. A few
seconds of them are in `make test`; `make test-levels` runs all of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

from fusionai.backends.torch.backend import fingerprint
from harness.levels import LEVELS, PROCESSORS, Unavailable, run_as, variables_of

ROOT: Final = Path(__file__).parents[2]
ROWS: Final = (
    "tests/conformance/test_bits_of_rows.py",
    "tests/conformance/test_serving_backend.py::test_a_row_of_a_product_is_the_same_among_any_number",
    "tests/unit/execution/serving/test_sketches.py",
)
"""Nothing that compiles large kernels: a fresh clone would wait for the compiler at every level."""
ATTENTION: Final = "tests/unit/backends/torch/test_paged_attention_compiled.py"
PRODUCTS: Final = "tests/unit/backends/torch/test_row_products.py"
SPARE: Final = "amd-avx2"
"""The processor that is tried in `make test`: a gaming PC's."""
FEW: Final = {"avx2": (*ROWS, ATTENTION, PRODUCTS), "sse": (*ROWS, ATTENTION), SPARE: ROWS}
"""Of `ATTENTION` and `PRODUCTS` those that are marked `levels`."""
ALL: Final = (
    "tests/conformance",
    "tests/unit/backends",
    "tests/unit/execution",
    "tests/unit/ir",
    "tests/integration/test_job_in_memory.py",
    "tests/integration/test_torch_equals_transformers.py",
)
NOT_THESE: Final = "not long"
FEW_S: Final = 900.0
ALL_S: Final = 3500.0
"""Both for a machine that has other work."""


FINGERPRINT: Final = (
    "import torch; from fusionai.backends.torch.backend import fingerprint; torch.set_num_threads(1);"
    "print(torch.backends.cpu.get_cpu_capability(), fingerprint(torch.device('cpu')))"
)
PROGRAM: Final = f"import sys, pytest; code = pytest.main(sys.argv[1:]); {FINGERPRINT}; sys.exit(code)"


def passes(level: str, tests: tuple[str, ...], marked: str, timeout_s: float) -> tuple[str, str]:
    """The capability that torch reports at that level, and the fingerprint."""
    try:
        variables_of(level)
    except Unavailable as reason:
        pytest.skip(str(reason))
    # A preloaded handler of SIGSEGV must not be replaced by pytest's.
    command = [sys.executable, "-c", PROGRAM, "-p", "no:faulthandler", "-p", "no:xdist", "-q", "--timeout", "0"]
    chosen = [*tests, "-m", marked, "--deselect", "tests/conformance/test_levels.py"]
    done = run_as(level, [*command, *chosen], timeout_s=timeout_s, directory=ROOT)
    assert done.returncode == 0, f"at level {level}, which sets {variables_of(level)}:\n{done.stdout[-6000:]}"
    assert " passed" in done.stdout or "100%]" in done.stdout
    capability, fingerprint = done.stdout.split()[-2:]
    return capability, fingerprint


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("level", FEW)
def test_rows_and_elements_keep_their_bits_at_every_level(level: str) -> None:
    """And a level is another machine to the fingerprint; libraries really compute by it: torch says so."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("this process is of a lower level itself, and so is what it starts")
    capability, fingerprint = passes(level, FEW[level], f"levels and {NOT_THESE}", FEW_S)
    assert capability == ("DEFAULT" if level == "sse" else "AVX2")
    assert fingerprint != own_fingerprint()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", [*LEVELS, *PROCESSORS])
def test_every_promise_holds_at_every_level(level: str) -> None:
    passes(level, ALL, NOT_THESE, ALL_S)


def own_fingerprint() -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fingerprint(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
