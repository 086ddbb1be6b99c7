"""`fusion data`: what a job would be fed, before there is a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionai.cli.main import main

RECIPE = """
[job]
name = "t"
steps = 5
[model]
config = { model_type = "llama" }
[data]
files = ["rows.jsonl"]
format = "instructions"
sequence_length = 64
tokenizer = { train = 280 }
bad_rows = 1
shuffle = false
[train]
batch_size = 4
microbatches = 2
learning_rate = 0.1
"""


def test_rows_with_what_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"instruction": f"Say {n}.", "output": f"\u001b[31m{n}!"}) for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:2], "{}", *rows[2:]]))
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE)
    figures = tmp_path / "data.json"
    assert main(["data", str(recipe), "--rows", "3", "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "6 rows are 2 steps of 4 rows; the job has 5" in shown
    assert "rows.jsonl, line 3: expected the key 'instruction'" in shown
    for number in range(3):
        assert f"user: Say {number}.\n\nassistant:[[ \N{REPLACEMENT CHARACTER}[31m{number}!\n\n<|endoftext|>]]" in shown
    assert "row 4" not in shown
    assert "\u001b" not in shown
    told = json.loads(figures.read_text())
    assert (told["schema"], told["rows"], told["steps_per_epoch"], told["rows_read"]) == ("fusionai.data/1", 6, 2, 7)
    assert told["bad_rows"]["count"] == 1
    assert told["conversations"]["train"]["conversations"] == 6
    (first, *_) = told["preview"]
    assert [trained for _, trained in first["pieces"]] == [False, True]
    assert first["labels"] < first["tokens"]


def test_text_is_trained_on_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"line {n} of a text "}) + "\n" for n in range(60))
    )
    lines = RECIPE.replace('format = "instructions"', "").replace("bad_rows = 1", "")
    (tmp_path / "r.toml").write_text(lines)
    assert main(["data", str(tmp_path / "r.toml"), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "row 1: 64 tokens, 63 of them trained on" in shown
    assert (shown.count("[["), shown.count("]]")) == (1, 1), "all but the first token, which nothing foretells"


def test_a_bad_row_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "r.toml").write_text(RECIPE.replace("bad_rows = 1", ""))
    assert main(["data", str(tmp_path / "r.toml")]) == 2
    assert "rows.jsonl, line 1" in capsys.readouterr().err
