"""SparseMixer's draws and its gradient, which no forward has, are those of transformers' own router."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import drawn_in_evaluation
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import ConfigSource
from fusionai.capture.tracing.layers import semantic_layers
from harness.zoo import models

pytestmark = pytest.mark.slow

PHI = next(model.source for model in models() if model.name == "phimoe")
JITTER = 0.2
"""So that several experts are nearly the best and the draws decide."""


def noisy() -> ConfigSource:
    assert isinstance(PHI, ConfigSource)
    return ConfigSource({**PHI.config, "router_jitter_noise": JITTER, "num_hidden_layers": 2})


@cache
def trained() -> Captured:
    return capture(noisy(), batch=(1, 8), sequence=(1, 32))


def test_a_router_that_draws_trains_as_its_own_module() -> None:
    made = trained()
    assert any(node.op == "fusion.uniform" for node in made.graph.nodes)
    result = self_check(made)
    assert result.gradient_diff is not None
    assert result.ok


def test_nothing_is_drawn_in_evaluation_and_in_serving() -> None:
    assert not drawn_in_evaluation(trained().graph)
    served = capture(noisy(), batch=(1, 8), sequence=(1, 32), train=False)
    assert not [node.op for node in served.graph.nodes if node.op in ("fusion.uniform", "fusion.in_training")]


def test_the_functions_of_transformers_come_back() -> None:
    from transformers.models.phimoe import modeling_phimoe

    own: Any = modeling_phimoe.sparsemixer
    layer = modeling_phimoe.PhimoeTopKRouter.__new__(modeling_phimoe.PhimoeTopKRouter)
    torch.nn.Module.__init__(layer)
    with semantic_layers(layer):
        assert modeling_phimoe.sparsemixer is not own
    assert modeling_phimoe.sparsemixer is own
