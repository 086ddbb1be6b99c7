"""Which functions are compiled, and that those they call are compiled with them."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.scheduling.kernels import compiled as compiled_module
from fusionai.scheduling.kernels.chain import by_start, ones
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.scheduling.kernels.coverage import Layout, Swarm, give, sweep


def swarm() -> Swarm:
    even = np.array([0.0, 1.0, 1.0, 0.0])
    return Swarm(
        work=np.arange(4.0), speed=np.array([1.0, 2.0]), up=np.array([4.0, 4.0]), down=np.array([4.0, 4.0]),
        forward_bytes=even, gradient_bytes=even, reach=np.array([[1, 2, 3], [3, 3, 3]]),
    )  # fmt: skip


def layout() -> Layout:
    return Layout(np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), np.zeros(2), np.zeros(3))


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="numba is not installed")
def test_compiled_once_and_equal():
    assert compiled(ones) is compiled(ones)
    assert compiled(ones)(0b1011) == ones(0b1011) == 3


def test_without_numba_a_kernel_is_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_module, "available", lambda: False)
    assert compiled(by_start) is by_start


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="numba is not installed")
def test_kernels_that_call_others_give_the_same_either_way():
    one, other = layout(), layout()
    order = np.arange(2)
    assert sweep(swarm(), one, order, 2.0) == compiled(sweep)(swarm(), other, order, 2.0)
    for mine, theirs in zip(one, other, strict=True):
        assert np.array_equal(mine, theirs)
    assert one.cover.min() > 0


def test_labels_are_sorted_by_what_is_left():
    starts = np.array([9, 4, 2, 4, 1], dtype=np.int64)
    assert by_start(starts, 1, 5, 9).tolist() == [4, 2, 1, 3]


def test_a_holding_covers_its_blocks():
    held = layout()
    give(swarm(), held, 1, 0, 2)
    assert held.cover.tolist() == [1.0, 1.0, 0.0]
