"""Directories that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.storage.atomic import PARTIAL_SUFFIX, whole_directory


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "made"
    left = place.with_name(f"made{PARTIAL_SUFFIX}")
    left.mkdir(parents=True)
    (left / "old").write_bytes(b"of a start before")
    with pytest.raises(RuntimeError, match="half way"):
        _half_filled(place)
    assert not place.exists()
    assert not left.exists()
    with whole_directory(place) as partial:
        (partial / "new").write_bytes(b"2")
        assert not place.exists()
    assert [one.name for one in place.iterdir()] == ["new"]
    assert not left.exists()


def _half_filled(place: Path) -> None:
    with whole_directory(place) as partial:
        (partial / "new").write_bytes(b"1")
        raise RuntimeError("half way")
