"""The exact search runs as it stands or compiled: both must find the same pipeline, over the same extensions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from fusionai.scheduling.kernels.compiled import available
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.problem.types import Problem
from fusionai.scheduling.training.pipeline import Pipeline
from fusionai.scheduling.training.search import search
from harness.examples import examples
from harness.problems import problems

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not available(), reason="numba is not installed")
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(most_peers=6, most_blocks=8))
def test_compiled_search_takes_the_same_steps(problem: Problem) -> None:
    pipeline = Pipeline(problem, problem.peers)
    limits = PipelineLimits(fewest=1, most=min(len(problem.peers), pipeline.chain.length))
    slow = search(pipeline, limits, known=None, budget=10**6, glance=10**6)
    fast = search(pipeline, limits, known=None, budget=10**6, glance=0)
    assert slow == fast
    assert slow.complete


def test_planning_a_small_pool_does_not_load_numba() -> None:
    """It would cost each job's start more than the plan."""
    code = (
        "import sys, random\n"
        "from planner import random_problem\n"
        "from fusionai.scheduling.planner import plan\n"
        "assert plan(random_problem(4, 'roomy', random.Random(1))).certificate.exact\n"
        "assert not [name for name in sys.modules if name.startswith('numba')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "benchmarks")


def test_without_numba_kernels_run_as_they_stand() -> None:
    code = (
        "import sys, random\n"
        "sys.modules['numba'] = None\n"
        "from planner import random_problem\n"
        "from fusionai.scheduling.kernels import compiled\n"
        "from fusionai.scheduling.planner import plan\n"
        "from fusionai.scheduling.training import search\n"
        "search.GLANCE_BUDGET = 0\n"
        "assert plan(random_problem(4, 'roomy', random.Random(1))).certificate.exact\n"
        "assert not compiled.available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "benchmarks")
