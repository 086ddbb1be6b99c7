"""Which functions are compiled."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.scheduling.kernels import compiled as compiled_module
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.scheduling.kernels.training_pipeline import by_start, ones


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="numba is not installed")
def test_compiled_once_and_equal():
    assert compiled(ones) is compiled(ones)
    assert compiled(ones)(0b1011) == ones(0b1011) == 3


def test_without_numba_a_kernel_is_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_module, "available", lambda: False)
    assert compiled(by_start) is by_start


def test_labels_are_sorted_by_what_is_left():
    starts = np.array([9, 4, 2, 4, 1], dtype=np.int64)
    assert by_start(starts, 1, 5, 9).tolist() == [4, 2, 1, 3]
