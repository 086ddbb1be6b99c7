"""The file of optimizer state is tried where it would lie; where there is no room, nothing is claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.backends import measurement as scratch
from fusionai.backends.measurement import scratch_bytes_per_s


def test_it_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "scratch_directory", lambda: tmp_path)
    assert scratch_bytes_per_s() > 0
    assert not any(tmp_path.iterdir())


def test_without_room_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch, "scratch_directory", lambda: tmp_path / "missing")
    assert scratch_bytes_per_s() == 0.0
    monkeypatch.setattr(scratch, "scratch_directory", lambda: tmp_path)
    monkeypatch.setattr(scratch.tempfile, "TemporaryFile", full)
    assert scratch_bytes_per_s() == 0.0
