"""No kernel of any backend leaves its operands, whatever a graph says of them.

Operators run with operands that disagree, in a process whose tensors lie before inaccessible pages
(`harness.operand_fuzz`): forward and, where the backend trains, backward. A crash, a write beside a tensor, a result
that shows memory which nobody wrote, and an error that is not one of ours are escapes.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from fusionai.ir.operators import OPERATORS
from harness import operand_fuzz
from harness.guarded_process import run_cases, unavailable
from harness.operator_cases import Case

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SEED = int(os.environ.get("FUSION_FUZZ_SEED", "77"))
MANY = {"torch": 900_000, "onnxruntime": 90_000, "jax": 10_000}


def needs(backend: str) -> None:
    pytest.importorskip(backend, reason=f"the extra fusionai[{backend}] is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "cases"), [("torch", 1500), ("onnxruntime", 150), ("jax", 40)])
def test_operands_that_disagree_are_refused_or_harmless(backend: str, cases: int) -> None:
    needs(backend)
    found = run_cases(backend, SEED, 0, cases)
    assert found.escapes == []
    assert found.outcomes["ran"] > cases / 10
    assert found.outcomes["refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["fusion.attention", "aten._native_batch_norm_legit_no_training.default", "aten.grid_sampler_3d.default"]
)
def test_a_rule_that_is_missing_is_noticed(rule: str) -> None:
    found = run_cases("torch", SEED, 0, 400, rule, broken_rule=rule)
    assert found.escapes, f"400 cases without the rule of {rule} did no harm: is the rule needed?"


FOUND = [
    ("jax", 702, "refused"),
    ("jax", 1604, "refused"),
    ("jax", 9329, "refused"),
    ("onnxruntime", 12_969, "refused"),
    ("onnxruntime", 14_379, "refused"),
    ("onnxruntime", 50_721, "ran"),
    ("onnxruntime", 86_059, "refused"),
]
"""Cases that once ended the process, or with an error of another kind."""


def _is_newer(case: Case) -> bool:
    """Whether a starting point was added since: the numbers above count without it."""
    decay = case.kwargs.get("decay")
    return case.op == "fusion.linear_attention" and isinstance(decay, np.ndarray) and decay.ndim == 4


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "number", "outcome"), FOUND)
def test_what_was_found_stays_mended(backend: str, number: int, outcome: str) -> None:
    needs(backend)
    opened = operand_fuzz.opened(backend)
    missing = set(opened.unsupported(sorted(OPERATORS)))
    case = operand_fuzz.case_number(number, 77, lambda one: one.op not in missing and not _is_newer(one))
    assert operand_fuzz.attempt(opened, case, trains=backend != "onnxruntime") == outcome


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "jax"])
def test_a_million_cases_find_no_way_out(backend: str) -> None:
    needs(backend)
    found = run_cases(backend, SEED, 1_000_000, 1_000_000 + MANY[backend])
    assert not found.escapes, "\n".join(map(str, found.escapes))
