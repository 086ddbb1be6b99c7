"""What the probe finds out about serving: every format, both figures, and what they are counted from."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from fusionai.backends.torch import serving_pace
from fusionai.backends.torch.serving_pace import PROMPT_ROWS, READ_BYTES, measured_serving
from fusionai.wire.serving import WeightFormat


@pytest.mark.parametrize("compiled", [True, False])
def test_every_format_has_both_figures(monkeypatch: pytest.MonkeyPatch, *, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(serving_pace, "kernels", lambda: None)
    shapes: list[torch.Size] = []

    def calls_per_s(call: Callable[[], object], device: torch.device, measure_s: float) -> float:
        made = call()
        assert isinstance(made, torch.Tensor)
        assert device.type == "cpu"
        assert measure_s < 0.1
        shapes.append(made.shape)
        return 2.0

    found = measured_serving(torch.device("cpu"), calls_per_s)
    assert tuple(pace.form for pace in found) == get_args(WeightFormat)
    assert {pace.flops_per_s for pace in found} == {2 * 2.0 * PROMPT_ROWS * 1024 * 1024}
    assert [shape[0] for shape in shapes] == [PROMPT_ROWS, 1] * len(found)
    if compiled:
        assert all(READ_BYTES < pace.bytes_per_s <= 2 * READ_BYTES for pace in found), "more than caches hold, once"
