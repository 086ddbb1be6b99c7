"""Whether the values of host tensors are finite."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.execution.tensors import as_bytes, is_finite
from fusionai.primitives.tensors import HostTensor, host_tensor

FLOATS = ("float64", "float32", "float16", "bfloat16")


def tensor(values: np.ndarray, dtype: str) -> HostTensor:
    return host_tensor(dtype, values.shape, as_bytes(values, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 31, 1023])
def test_one_value_decides(dtype: str, place: int):
    values = np.linspace(-1, 1, 1024)
    assert is_finite(tensor(values, dtype))
    for broken in (np.nan, np.inf, -np.inf):
        values[place] = broken
        assert not is_finite(tensor(values, dtype))
        assert is_finite(tensor(values, dtype), masks=True) == (broken == -np.inf)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_overflows_is_not_a_value_that_is_infinite(dtype: str):
    largest = {"float16": 6e4, "float64": 1.7e308}.get(dtype, 3e38)
    for sign in (1, -1):
        values = np.full(1000, sign * largest)
        assert is_finite(tensor(values, dtype))
        assert is_finite(tensor(values, dtype), masks=True)


def test_infinities_of_both_signs_do_not_cancel():
    assert not is_finite(tensor(np.array([np.inf, -np.inf, 1.0]), "float32"), masks=True)


def test_integers_and_empty_tensors_are_finite():
    assert is_finite(host_tensor("int64", (1,), np.array([2**62], np.int64).tobytes()))
    assert is_finite(tensor(np.zeros(0), "float32"))
