"""Settings of a computing process, each tested in a process of its own, so that this one's tests keep theirs."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_glibc_takes_the_settings_and_stops_faulting_memory_in_anew() -> None:
    program = """
import resource, sys
import numpy as np
if sys.argv[1] == "keep":
    from fusionai.backends.memory import keep_freed_memory
    assert keep_freed_memory()
def work():
    for _ in range(40):
        np.empty(20 * 2**20, np.uint8).fill(1)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults: dict[str, int] = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["keep"] < 100
    assert faults["keep"] < faults["leave"] or faults["leave"] < 100


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_where_memory_is_spared_no_freed_tensor_stays() -> None:
    """Freed pieces between others are not kept, as they are otherwise."""
    program = """
import sys
import psutil
import numpy as np
from fusionai.backends.memory import keep_freed_memory, spare_memory
keep_freed_memory()
if sys.argv[1] == "spare":
    assert spare_memory()
held = [np.ones(4 * 2**20, np.uint8) for _ in range(50)]
full = psutil.Process().memory_info().rss
del held[::2]
print(full - psutil.Process().memory_info().rss)
"""
    gone: dict[str, int] = {}
    for how in ("spare", "keep"):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
        gone[how] = int(done.stdout)
    assert gone["spare"] > 90 * 2**20
    assert gone["keep"] < 30 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_goes_back_when_asked() -> None:
    program = """
import psutil
import numpy as np
from fusionai.backends.memory import keep_freed_memory, return_freed_memory
keep_freed_memory()
resident = lambda: psutil.Process().memory_info().rss
held = [np.ones(2**20, np.uint8) for _ in range(200)]
last = np.ones(2**20, np.uint8)
full = resident()
held.clear()
kept = resident()
assert return_freed_memory()
print(full - kept < 20 * 2**20, kept - resident() > 150 * 2**20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there a process sees what it has mapped")
def test_code_that_only_starting_needed_goes_back_and_the_rest_still_runs() -> None:
    program = """
import re
from pathlib import Path
import torch
from fusionai.backends.memory import return_code_pages
mapped = lambda: int(re.search(r"RssFile:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = mapped()
assert return_code_pages()
after = mapped()
assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300.0**3
print(before - after > 20 * 2**20, mapped() < before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


PROGRAM = """
import json, os
import torch
from threadpoolctl import threadpool_info
from fusionai.execution.host import ComputeThread
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
