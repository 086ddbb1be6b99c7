"""Where large temporary files go: to the directory the user names, else to a disk rather than to memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fusionai.primitives.environment import arithmetic_limits, scratch_directory


def test_the_users_word_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert scratch_directory() == tmp_path


def test_without_one_it_is_a_lasting_place_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    expected = Path("/var/tmp") if os.access("/var/tmp", os.W_OK) else Path(tempfile.gettempdir())
    assert scratch_directory() == expected


def test_variables_that_choose_kernels_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKL_ENABLE_INSTRUCTIONS", "XLA_FLAGS", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(name, raising=False)
    before = arithmetic_limits()
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_cpu_max_isa=AVX2 --xla_dump_to=/x")
    assert arithmetic_limits() == {
        **before,
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_FEATURES": "",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    }
