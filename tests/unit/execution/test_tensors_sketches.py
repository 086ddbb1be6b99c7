"""Marks: what they say of two tensors' difference, and that nothing but key and content goes into them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.execution.tensors import SIZE, as_bytes, sketch, step_key
from fusionai.primitives.tensors import HostTensor, host_tensor
from harness.pool import tensor

KEY = step_key(b"k" * 32, 3)
SHAPE = (4, 16, 64)


def made(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def of(array: np.ndarray, key: bytes = KEY, what: str = "0>1/0") -> np.ndarray:
    return np.array(sketch({"x": tensor(array)}, key, what=what))


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """As marks see it."""
    return float(np.linalg.norm(of(one) - of(other)) / np.linalg.norm(of(other)))


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([1e-6, 1e-3, 0.1, 1.0]))
def test_the_distance_of_marks_is_about_that_of_the_tensors(seed: int, size: float):
    x, noise = made(seed), made(seed + 1) * np.float32(size)
    true = np.linalg.norm(noise) / np.linalg.norm(x)
    assert true / 2.5 / 1.6 < apart(x + noise, x) < true * 2.5 * 1.6  # of two marks, each within its factor


def test_the_square_of_a_projection_is_that_of_the_norm_in_the_mean():
    x = made()
    squares = [np.mean(of(x, what=f"{number}") ** 2) for number in range(400)]
    assert np.mean(squares) == pytest.approx(float(np.sum(x.astype(np.float64) ** 2)), rel=0.05)


LIES = {
    "scaled by 1.01": lambda x: x * np.float32(1.01),
    "another's": lambda x: made(1),
    "zeros": np.zeros_like,
    "one row of 64 left out": lambda x: x * (np.arange(64).reshape(4, 16, 1) != 5),
    "one number off by its own size": lambda x: x + np.float32(3) * (np.arange(x.size).reshape(x.shape) == 777),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_show(lie: str):
    assert apart(LIES[lie](made()).astype(np.float32), made()) > 0.005


def test_key_step_message_and_name_are_part_of_it():
    x = made()
    others = [
        of(x, step_key(b"k" * 32, 4)),
        of(x, step_key(b"l" * 32, 3)),
        of(x, what="0>1/1"),
        np.array(sketch({"y": tensor(x)}, KEY, what="0>1/0")),
    ]
    assert all(not np.array_equal(of(x), other) for other in others)


def test_several_values_are_marked_together_in_whatever_order_they_come():
    x, y = tensor(made()), tensor(made(1))
    assert sketch({"x": x, "y": y}, KEY, what="w") == sketch({"y": y, "x": x}, KEY, what="w")
    assert sketch({"x": x, "y": y}, KEY, what="w") != sketch({"x": y, "y": x}, KEY, what="w")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "bool", "uint8"])
def test_every_dtype_has_marks(dtype: str):
    values = (np.arange(24) % 2).astype(dtype).reshape(4, 6)
    same = sketch({"x": tensor(values.astype(np.float64))}, KEY, what="w")
    assert sketch({"x": tensor(values)}, KEY, what="w") == same


def test_bfloat16_is_marked_as_the_numbers_it_holds():
    x = np.array([1.0, -2.5, 0.0, 3.0], np.float32)
    half = host_tensor("bfloat16", (4,), as_bytes(x, "bfloat16"))
    assert sketch({"x": half}, KEY, what="w") == sketch({"x": tensor(x)}, KEY, what="w")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,)])
def test_small_and_empty_tensors_have_marks(shape: tuple[int, ...]):
    made = sketch({"x": tensor(np.ones(shape, np.float32))}, KEY, what="w")
    assert len(made) == SIZE
    assert any(made) == (0 not in shape)


def test_what_is_not_finite_shows():
    x = made()
    x[0, 0, 0] = np.nan
    assert not all(math.isfinite(value) for value in of(x))


def test_nothing_at_all_is_zeros():
    assert sketch(dict[str, HostTensor](), KEY, what="w") == (0.0,) * SIZE


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_marks_of_many_rows_are_exact_whatever_the_order_of_sums(offset: float):
    """Against sums in float64; library by library, orders of float32 sums differ by more than that."""
    rows = (np.random.default_rng(6).standard_normal((40_000, 3)) + offset).astype(np.float32)
    tensor = host_tensor("float32", rows.shape, rows.tobytes())
    wide = host_tensor("float64", rows.shape, rows.astype(np.float64).tobytes())
    made, exact = (np.array(sketch({"x": one}, KEY, what="m")) for one in (tensor, wide))
    assert np.linalg.norm(made - exact) <= 3e-6 * np.linalg.norm(exact)
