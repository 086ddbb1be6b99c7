"""`fusion train` says what is wrong with a recipe before it imports PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusionai.cli.main import main


def test_a_wrong_recipe_is_refused_before_pytorch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "fusionai.cli.training.run", None)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[job]\nname = 'mine'\nstep = 3\n", encoding="utf-8")
    assert main(["train", str(recipe), "--home", str(tmp_path)]) == 2
    assert "'steps'" in capsys.readouterr().err
