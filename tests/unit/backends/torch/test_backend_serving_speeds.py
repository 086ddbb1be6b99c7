"""What the probe finds out about serving: every format, both figures, and what they are counted from."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from fusionai.backends.torch import backend as serving_pace
from fusionai.backends.torch.backend import (
    ATTENDED,
    GROUPS,
    HEAD_WIDTH,
    PROMPT_ROWS,
    READ_BYTES,
    measured_attention,
    measured_serving,
)
from fusionai.wire.serving import WeightFormat


@pytest.mark.slow
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
    assert tuple(pace.form for pace in found) == tuple(
        form for form in get_args(WeightFormat) if compiled or form != "packed"
    )
    assert {pace.flops_per_s for pace in found} == {2 * 2.0 * PROMPT_ROWS * 1024 * 1024}
    assert [shape[0] for shape in shapes] == [PROMPT_ROWS, 1] * len(found)
    if compiled:
        assert all(READ_BYTES < pace.bytes_per_s <= 2 * READ_BYTES for pace in found), "more than caches hold, once"


def test_attention_is_counted_by_pairs_of_a_query_and_a_key_that_it_sees() -> None:
    shapes: list[torch.Size] = []

    def calls_per_s(call: Callable[[], object], device: torch.device, measure_s: float) -> float:
        made = call()
        assert isinstance(made, torch.Tensor)
        assert device.type == "cpu"
        assert measure_s < 0.1
        shapes.append(made.shape)
        return 2.0

    shared, positions = ATTENDED["cpu"]
    pairs = sum(range(positions - PROMPT_ROWS + 1, positions + 1))
    found = measured_attention(torch.device("cpu"), calls_per_s)
    assert found == 2.0 * 2 * 2 * HEAD_WIDTH * GROUPS * shared * pairs
    assert shapes == [torch.Size((1, GROUPS * shared, PROMPT_ROWS, HEAD_WIDTH))]
