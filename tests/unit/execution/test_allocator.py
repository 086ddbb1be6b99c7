"""The allocator's settings are taken in a process of their own, so that this one's tests keep theirs."""

from __future__ import annotations

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
    from fusionai.execution.allocator import keep_freed_memory
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
from fusionai.execution.allocator import keep_freed_memory, spare_memory
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
from fusionai.execution.allocator import keep_freed_memory, return_freed_memory
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
from fusionai.execution.allocator import return_code_pages
mapped = lambda: int(re.search(r"RssFile:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = mapped()
assert return_code_pages()
after = mapped()
assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300.0**3
print(before - after > 20 * 2**20, mapped() < before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
