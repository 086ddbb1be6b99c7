"""Optimizer state in memory and in a file: the same values, and no more memory than a piece for the latter."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
import torch

from fusionai.backends.torch import slots
from fusionai.backends.torch.slots import DiskSlots, HostSlots, MemorySlots, OptimizerSlots
from fusionai.primitives.errors import ExecutionError

LAYOUT = {("a", "m"): ("float32", (3, 4)), ("a", "q"): ("uint8", (5,)), ("b", "m"): ("float32", ())}
CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "disk", "host"])
def kept(request: pytest.FixtureRequest) -> OptimizerSlots:
    match request.param:
        case "memory":
            return MemorySlots()
        case "host":
            return HostSlots(CPU)
        case _:
            return DiskSlots(LAYOUT, CPU)


def test_what_is_written_is_read(kept: OptimizerSlots):
    assert kept.read("a", "m") is None
    assert not kept.holds("a", "m")
    values: dict[tuple[str, str], torch.Tensor] = {}
    for (key, slot), (dtype, shape) in LAYOUT.items():
        value = torch.arange(torch.Size(shape).numel(), dtype=getattr(torch, dtype)).reshape(shape)
        values[key, slot] = value
        kept.write(key, slot, value.clone())
    for (key, slot), value in values.items():
        found = kept.read(key, slot)
        assert found is not None
        assert torch.equal(found, value)
        assert found.dtype == value.dtype
    kept.clear()
    assert not kept.holds("a", "m")


def test_pieces_are_kept_where_they_came_from(kept: OptimizerSlots):
    kept.write("a", "m", torch.zeros(3, 4))
    kept.write("a", "q", torch.arange(5, dtype=torch.uint8))
    piece = kept.piece("a", "m", 5, 8)
    piece += torch.tensor([1.0, 2.0, 3.0])
    kept.keep("a", "m", 5, piece)
    found = kept.read("a", "m")
    assert found is not None
    assert found.view(-1).tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    kept.keep("a", "q", 1, torch.tensor([9, 8], dtype=torch.uint8))
    assert kept.piece("a", "q", 0, 5).tolist() == [0, 9, 8, 3, 4]


def test_a_file_takes_no_memory_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "scratch_directory", lambda: tmp_path)
    kept = DiskSlots(LAYOUT, CPU)
    kept.write("a", "m", torch.ones(3, 4))
    assert kept.resident_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_at_once(monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(slots.shutil, "disk_usage", lambda _: usage(100, 80, 20))
    with pytest.raises(ExecutionError, match=r"takes 57 B under .*, where 20 B are free: 37 B are missing"):
        DiskSlots(LAYOUT, CPU)


def test_a_directory_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "scratch_directory", lambda: tmp_path / "missing")
    with pytest.raises(ExecutionError, match="no room for 57 B"):
        DiskSlots(LAYOUT, CPU)
