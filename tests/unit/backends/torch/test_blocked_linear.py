"""Processes that begin together compile a kernel once, and nothing waits for ever."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from fusionai.backends.torch import blocked_linear
from fusionai.backends.torch.blocked_linear import compiled_once
from fusionai.primitives.environment import inherited

PRODUCTS = """
from fusionai.backends.torch.row_code import Factor
from fusionai.backends.torch.row_products import products
products(Factor.FP32)
"""


@pytest.mark.slow
def test_processes_that_begin_together_compile_once(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="kernels are machine code, made by numba")
    environment = {**inherited(), "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DEBUG_CACHE": "1"}
    begun = [
        subprocess.Popen([sys.executable, "-c", PRODUCTS], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in begun]
    assert all(process.returncode == 0 for process in begun)
    saved = [line for text in said for line in text.splitlines() if "data saved to" in line]
    loaded = [line for text in said for line in text.splitlines() if "data loaded from" in line]
    assert len(saved) == len(loaded) == 2, "for few rows and for many"


def test_who_waits_too_long_compiles_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(blocked_linear, "LONGEST_S", 0.0)
    with caplog.at_level(logging.INFO), compiled_once("a test"), compiled_once("a test"):
        pass
    assert "without waiting" in caplog.text


def test_where_no_lock_can_be_had_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: tmp_path / "file" / "below")
    with compiled_once("a test"):
        pass
