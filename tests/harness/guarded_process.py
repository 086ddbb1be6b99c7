"""Starts `operand_fuzz` with `guard_pages.c` preloaded, and again behind each case that ends its process.

Needs a C compiler and Linux; `unavailable` says what is missing.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PER_PROCESS: Final = {"torch": 20_000, "onnxruntime": 5_000, "jax": 100}
"""Cases of one process. JAX keeps what it compiled."""
_SOURCE: Final = Path(__file__).with_name("guard_pages.c")


def unavailable() -> str | None:
    """Why no guarded process can run here; None if one can."""
    if platform.system() != "Linux":
        return "guard pages are laid by a library that needs Linux"
    return None if shutil.which("cc") else "no C compiler (cc) to build the library that lays guard pages"


@cache
def library() -> Path:
    source = _SOURCE.read_bytes()
    built = Path(gettempdir()) / f"fusionai-guard-pages-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not built.exists():
        made = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", made, _SOURCE, "-ldl"], check=True)
        made.replace(built)
    return built


@dataclass
class Findings:
    """`escapes`: one line per case that crashed, left its operands or ended with an error of another kind."""

    escapes: list[str] = field(default_factory=list[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])


def run_cases(backend: str, seed: int, first: int, last: int, prefix: str = "", *, broken_rule: str = "") -> Findings:
    """Run cases [first, last) of operators whose names begin with `prefix`. `broken_rule`: an operator whose rule is
    taken away first."""
    found = Findings()
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library())}
    while first < last:
        end = min(last, first + PER_PROCESS[backend])
        command = [sys.executable, "-m", "harness.operand_fuzz", backend, str(seed), str(first), str(end)]
        ended = subprocess.run(
            [*command, prefix, broken_rule],
            env=environment,
            capture_output=True,
            check=False,
        )
        lines = ended.stdout.decode(errors="replace").splitlines()
        found.escapes += [line[2:] for line in lines if line.startswith("! ")]
        if lines and lines[-1].startswith("= "):
            found.outcomes.update(ast.literal_eval(lines[-1][2:]))
            first = end
            continue
        begun = [line for line in lines if line[:1].isdigit()]
        if not begun:
            raise RuntimeError(f"the process did not begin: {ended.stderr.decode(errors='replace')[-2000:]}")
        reason = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"exit status {ended.returncode}"
        found.escapes.append(f"{begun[-1]} CRASHED with {reason}")
        first = int(begun[-1].split()[0]) + 1
    return found
