"""The serving benchmark counts what it says it counts."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PLACE = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(PLACE))
    return importlib.import_module("serving_streams"), importlib.import_module("serving_speculation")


def test_every_round_is_kept_as_soon_as_it_is_over(parts: tuple[ModuleType, ModuleType]):
    kept: list[dict[str, Any]] = []
    said: list[str] = []
    figures = parts[0].Figures(kept.append, said.append, goals={"speed": ">= 2"}, facts={"ways": 8})
    for number, value in enumerate((3.0, 1.0, 2.5), 1):
        figures.note("speed", value)
        figures.end_round(number)
    assert [len(one["speed"]["rounds"]) for one in kept] == [1, 2, 3]
    assert kept[-1]["ways"] == 8
    speed = kept[-1]["speed"]
    assert (speed["median"], speed["least"], speed["most"], speed["goal"]) == (2.5, 1.0, 3.0, ">= 2")
    assert said[1].startswith("round 2: speed 1")


def test_guesses_are_counted_per_pass_and_predicted_by_the_engines_formula(parts: tuple[ModuleType, ModuleType]):
    streams, speculation = parts
    names = ("accepted_tokens", "proposed_tokens", "guesses_tried", "guesses_held", "passes_with_2_guesses")
    before = dict.fromkeys(names, 7.0)
    # Ten tokens after the first in four passes of two guesses; six of the eight held, two that were tried did not.
    after = {name: before[name] + more for name, more in zip(names, (6.0, 8.0, 8.0, 6.0, 4.0), strict=True)}
    after |= {"pass_seconds": 0.2, "row_seconds": 0.01, "guess_seconds": 0.015}
    stream = streams.Stream(tuple(range(11)), 0.0, tuple(0.1 * n for n in range(11)))
    found = speculation._guessed(before, after, stream)
    assert (found.rate, found.sent, found.tokens_per_pass) == (0.75, 2.0, 2.5)
    assert found.tokens_per_s == pytest.approx((1 + 0.75 + 0.75**2) / (0.2 + 2 * 0.025))


def test_a_pass_that_had_nothing_to_guess_is_predicted_as_one(parts: tuple[ModuleType, ModuleType]):
    streams, speculation = parts
    # Nine tokens after the first: one pass with four guesses, all of which held, and four without.
    after = {"accepted_tokens": 4.0, "proposed_tokens": 4.0, "guesses_tried": 4.0, "guesses_held": 4.0}
    after |= {"passes_with_4_guesses": 1.0, "pass_seconds": 0.2, "row_seconds": 0.01, "guess_seconds": 0.0}
    stream = streams.Stream(tuple(range(10)), 0.0, tuple(0.1 * n for n in range(10)))
    found = speculation._guessed(dict.fromkeys(("accepted_tokens", "guesses_tried"), 0.0), after, stream)
    assert (found.rate, found.tokens_per_pass) == (1.0, 1.8)
    assert found.tokens_per_s == pytest.approx(9 / (5 * 0.2 + 4 * 0.01))


def test_an_answer_without_guesses_may_have_every_token(parts: tuple[ModuleType, ModuleType]):
    mask = np.asarray(parts[1].Anything(70).allowed())
    assert np.unpackbits(mask.view(np.uint8), bitorder="little")[:70].all()
