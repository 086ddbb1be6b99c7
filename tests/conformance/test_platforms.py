"""No module needs a POSIX system to be imported, and no line reaches what Windows or macOS do not have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK = """
import importlib, os, pkgutil, signal, socket, sys
import fusionai

names = [found.name for found in pkgutil.walk_packages(fusionai.__path__, "fusionai.") if "__main__" not in found.name]
absent = []
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:  # an optional framework
        absent.append((name, missing.name))
# What these import of other packages stays; only the product is imported again.
kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "fusionai"}
sys.modules.clear()
sys.modules.update(kept)

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name in POSIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

POSIX = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt"}
for name in POSIX:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refused())
for module, only in (
    (os, "getuid geteuid getgid fork pread pwrite posix_fadvise posix_fallocate sched_getaffinity mkfifo killpg chown"),
    (signal, "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD setitimer pause"),
    (socket, "AF_UNIX TCP_CONGESTION SO_REUSEPORT socketpair"),
):
    for name in only.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"  # not `os.name`, by which pathlib chooses
for name in names:
    if name not in {one for one, _ in absent}:
        importlib.import_module(name)
print(len(names) - len(absent))
"""


@pytest.mark.long
def test_every_module_is_imported_where_nothing_of_posix_is():
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 400


@pytest.mark.long
@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_the_type_checker_finds_no_call_that_this_system_lacks(system: str):
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    assert checker is not None
    done = subprocess.run(
        [checker, "--pythonplatform", system, "src"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert "0 errors" in done.stdout, done.stdout[-3000:]
