"""What a peer loads before its first stage, and what it never does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FRAMEWORK = ("torch", "sympy")
NEVER = (
    *("transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets", "pyarrow", "matplotlib", "PIL"),
    *("jinja2", "starlette", "uvicorn", "prometheus_client", "tensorboardX", "llguidance", "numba", "llvmlite"),
    *("scipy", "pandas", "torch._dynamo", "torch._inductor", "triton", "sqlite3"),
    *("fusionai.capture", "fusionai.corpus", "fusionai.client", "fusionai.broker", "fusionai.dashboard"),
    *("fusionai.gateway", "fusionai.simulator", "fusionai.scheduling.planner"),
)
COMMAND = """
from fusionai.cli.main import COMMANDS
COMMANDS["join"].load()
import fusionai.peer.daemon
"""
DEVICE = """
import gc
from fusionai.backends.interface import Speeds
from fusionai.backends.registry import open_backend
backend = open_backend("torch", device="cpu", threads=1)
backend.probe(Speeds(1.0, 1.0))
backend.warm_up()
"""


def loaded_by(code: str) -> tuple[set[str], dict[str, int]]:
    """Of the heavy modules those a fresh interpreter has after `code`; what its collector has done and set aside."""
    tail = f"""
import gc, json, sys
print(json.dumps([
    sorted(set({(*FRAMEWORK, *NEVER)!r}) & set(sys.modules)),
    {{"aside": gc.get_freeze_count(), "looked at": len(gc.get_objects()), "enabled": gc.isenabled(),
      "old": gc.get_stats()[2]["collections"]}},
]))
"""
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True)
    loaded, collector = json.loads(done.stdout)
    return set(loaded), collector


@pytest.mark.slow
def test_joining_loads_no_framework_until_there_is_a_membership() -> None:
    loaded, _ = loaded_by(COMMAND)
    assert loaded == set()


@pytest.mark.slow
def test_ready_for_a_stage_it_has_its_framework_and_nothing_else() -> None:
    loaded, collector = loaded_by(COMMAND + DEVICE)
    assert loaded == set(FRAMEWORK)
    assert collector["enabled"]
    assert collector["aside"] > 100_000, "later collections do not look at them"
    assert collector["looked at"] < collector["aside"] / 10
