"""Vectors of rows: however the rows come in parts, they are those of all rows at once."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.serving.pooling import MODES, Collector, Dense, Pooling

ROWS = np.random.default_rng(5).standard_normal((7, 4)).astype(np.float32)


def vector(pooling: Pooling, *parts: np.ndarray) -> np.ndarray:
    collector = Collector(pooling)
    for part in parts:
        collector.add(part)
    return np.array(collector.vector())


@pytest.mark.parametrize("mode", MODES)
def test_rows_in_parts_make_the_same_vector(mode: str) -> None:
    pooling = Pooling((mode,), ())  # pyright: ignore[reportArgumentType]
    whole = vector(pooling, ROWS)
    np.testing.assert_allclose(vector(pooling, ROWS[:3], ROWS[:0], ROWS[3:]), whole, rtol=1e-12)
    rows, count = ROWS.astype(np.float64), len(ROWS)
    places = np.arange(1, count + 1)[:, None]
    expected = {
        "cls": rows[0],
        "max": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "mean_sqrt_len_tokens": rows.sum(axis=0) / count**0.5,
        "weightedmean": (rows * places).sum(axis=0) / places.sum(),
        "lasttoken": rows[-1],
    }
    np.testing.assert_allclose(whole, expected[mode], rtol=1e-12)


def test_vectors_of_several_modes_are_joined_in_their_order() -> None:
    joined = vector(Pooling(("max", "cls"), ()), ROWS)
    np.testing.assert_allclose(joined, [*ROWS.max(axis=0), *ROWS[0]], rtol=1e-12)
    assert Pooling(("max", "cls")).single is None
    assert Pooling(("cls",)).single == "cls"


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("torch.nn.modules.linear.Identity", lambda x: x),
        ("torch.nn.modules.activation.Tanh", np.tanh),
        ("torch.nn.modules.activation.ReLU", lambda x: np.where(x > 0, x, 0)),
        ("torch.nn.modules.activation.Sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    ],
)
def test_steps_follow_in_their_order(activation: str, expected: object) -> None:
    weight, bias = ROWS[:3] * 2, np.array([0.5, -0.5, 1.0], np.float32)
    dense = Dense(weight, bias, activation)
    assert callable(expected)
    inner = expected(weight.astype(np.float64) @ ROWS[0] + bias)
    np.testing.assert_allclose(vector(Pooling(("cls",), (dense,)), ROWS), inner, rtol=1e-6)
    scaled = vector(Pooling(("cls",), (dense, "normalise")), ROWS)
    np.testing.assert_allclose(scaled, inner / np.linalg.norm(inner), rtol=1e-6)


def test_a_vector_of_zeros_stays_one() -> None:
    assert vector(Pooling(("mean",)), np.zeros((2, 3), np.float32)).tolist() == [0.0, 0.0, 0.0]
