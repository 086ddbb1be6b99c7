"""Early rounds: when they are, and what a recipe may say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.corpus.schedule import early_rounds, usual_early_steps
from fusionai.primitives.errors import RecipeError


def recipe(steps: int = 1000, warmup: int = 100, model: str = "", **replicas: object) -> Recipe:
    table: dict[str, Any] = {
        "job": {"name": "t", "steps": steps},
        "model": {"hub": model} if model else {"config": {"model_type": "llama"}},
        "data": {"files": ["*.txt"], "sequence_length": 16, "tokenizer": {"train": 400}},
        "train": {"batch_size": 4, "learning_rate": 0.1, "warmup_steps": warmup},
        "replicas": {"count": 2, **replicas},
    }
    return recipe_from_table(table, Path("job.toml"))


@pytest.mark.parametrize(
    ("every", "steps", "overlap", "expected"),
    [
        (50, 1000, 0, 200),
        (50, 1600, 0, 320),
        (50, 100_000, 9, 320),
        (50, 200, 0, 40),
        (50, 30, 0, 0),
        (50, 1000, 10, 0),
        (52, 1000, 0, 0),
        (20, 1000, 0, 0),
        (500, 100_000, 5, 3200),
    ],
)
def test_unless_told(every: int, steps: int, overlap: int, expected: int):
    assert usual_early_steps(every, steps, overlap) == expected


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (recipe(), (100, 300, 10)),
        (recipe(warmup=0), (0, 200, 10)),
        (recipe(warmup=37), (30, 230, 10)),
        (recipe(warmup=1000), (1000, 1000, 10)),
        (recipe(early_steps=0), (0, 0, 0)),
        (recipe(model="some/model"), (0, 0, 0)),
        (recipe(model="some/model", early_steps=50), (100, 150, 10)),
        (recipe(early_steps=20, every=10), (100, 120, 2)),
    ],
)
def test_they_follow_the_warm_up(made: Recipe, expected: tuple[int, int, int]):
    assert made.replicas is not None
    assert early_rounds(made.replicas, made.train, made.job.steps) == expected


def test_a_recipe_says_them_in_words():
    assert "every 50 steps, every 10 during 200 early steps" in recipe().describe()
    assert "every 10" not in recipe(early_steps=0).describe()


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ({"every": 4, "early_steps": 4}, r"every = 4 can't be divided into 5 early rounds"),
        ({"early_steps": 15}, r"early_steps = 15 can't be divided into rounds of 10"),
        ({"early_steps": 20, "overlap": 10}, r"overlap = 10: expected fewer steps than an early round has \(10\)"),
        ({"gradients": "summed", "early_steps": 20}, "early_steps = 20 has no effect"),
    ],
)
def test_what_does_not_go_is_said(replicas: dict[str, object], message: str):
    with pytest.raises(RecipeError, match=message):
        recipe(**replicas)
