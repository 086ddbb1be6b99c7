"""The best checkpoint: named beside the others, never removed with the old ones."""

from __future__ import annotations

import json
from pathlib import Path

from fusionai.coordination.training.evaluations import Evaluation
from fusionai.storage.reader import best_checkpoint, complete_checkpoints, name_best, prune, step_directory


def test_it_is_named_and_stays(tmp_path: Path) -> None:
    for step in range(1, 6):
        step_directory(tmp_path, step).mkdir()
    best = Evaluation(2, 0.5)
    assert name_best(tmp_path, best) == step_directory(tmp_path, 2)
    told = json.loads((tmp_path / "best.json").read_text())
    assert told == {"step": 2, "loss": 0.5, "checkpoint": "step-00000002"}
    assert [path.name for path in prune(tmp_path, 2, best=2)] == ["step-00000003", "step-00000001"]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000005", "step-00000004", "step-00000002"]
    assert [path.name for path in prune(tmp_path, 2, best=5)] == ["step-00000002"]


def test_what_an_interrupted_start_left_wrong_is_set_right(tmp_path: Path) -> None:
    assert best_checkpoint(tmp_path, None) is None
    assert best_checkpoint(tmp_path, Evaluation(3, 0.5)) is None, "its checkpoint is not complete"
    step_directory(tmp_path, 3).mkdir()
    name_best(tmp_path, Evaluation(1, 0.9))
    assert best_checkpoint(tmp_path, Evaluation(3, 0.5)) == step_directory(tmp_path, 3)
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 3
