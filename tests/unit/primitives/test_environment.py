"""Where large temporary files go: to the directory the user names, else to a disk rather than to memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fusionai.primitives.environment import arithmetic_limits, expand_card_segments, for_workers, scratch_directory


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


ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize(
    ("platform", "newer", "chosen", "expected"),
    [
        ("linux", True, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("linux", False, {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("linux", True, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
        ("win32", True, {}, {}),
    ],
    ids=["set", "older PyTorch", "the user's word counts", "Windows can't"],
)
def test_a_cards_memory_grows_without_holes_where_it_can(
    platform: str, newer: bool, chosen: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    expand_card_segments(newer=newer)
    assert {name: os.environ[name] for name in ALLOCATORS if name in os.environ} == expected
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)


def test_workers_know_how_the_user_drives_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION")
    for name in (*names, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert {*names, "PYTORCH_ALLOC_CONF"} <= for_workers().keys()
    assert "AWS_SECRET_ACCESS_KEY" not in for_workers()
