"""`--json FILE`: whole or not at all, refused before the work begins."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fusionai.cli.options import json_option, write_json
from fusionai.primitives.errors import StorageError, UsageError


@click.command()
@json_option
def example(json_file: Path | None) -> None:
    if json_file is not None:
        write_json(json_file, "example", {"loss": 0.1 + 0.2, "where": Path("a/b"), "bad": math.nan})


def test_one_object_with_its_schema_and_exact_floats(tmp_path: Path):
    target = tmp_path / "out.json"
    assert CliRunner().invoke(example, ["--json", str(target)]).exit_code == 0
    written = json.loads(target.read_text())
    assert written == {"schema": "fusionai.example/1", "loss": 0.1 + 0.2, "where": "a/b", "bad": None}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_missing_directory_is_refused_first(tmp_path: Path):
    result = CliRunner().invoke(example, ["--json", str(tmp_path / "no" / "out.json")])
    assert isinstance(result.exception, UsageError)
    assert "there is no directory" in str(result.exception)


def test_a_directory_is_no_file(tmp_path: Path):
    result = CliRunner().invoke(example, ["--json", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a directory" in result.output


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "out.json"
    target.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="space"):
        write_json(target, "example", {"x": 1})
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
