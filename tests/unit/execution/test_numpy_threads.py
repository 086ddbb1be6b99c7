"""In a process of its own, so that this one's tests keep their threads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os
import torch
from threadpoolctl import threadpool_info
from fusionai.execution.compute import ComputeThread
torch.set_num_threads(2)
ComputeThread().close()
found = [(one["internal_api"], one["num_threads"]) for one in threadpool_info() if "numpy" in one["filepath"]]
print(json.dumps({"numpy": found, "torch": torch.get_num_threads()}))
"""


@pytest.mark.slow
def test_where_stages_compute_numpy_takes_one_thread_and_torch_what_it_was_given() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert all(threads == 1 for _, threads in found["numpy"])
    assert found["torch"] == 2
    assert found["numpy"] or sys.platform == "darwin"
