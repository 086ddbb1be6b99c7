"""Stages on a graphics card that is not there: no operand on another device, and no more waits, copies and kernels than
written down here.

Budgets are what stages did when this was written, for one layer: a number may fall, and is then lowered here. Which
kernel a card takes for an operator, what it costs and what it computes is not seen. Attention is counted as the formula
that PyTorch falls back to here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.fake_cuda import Counts, Examined, examined, unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]
FAMILIES = ("llama", "qwen3_moe", "gemma2")
"""Grouped queries; a mixture of experts; windows with soft-capped scores."""
LAYERS = 4
"""Of each model, in three stages."""


class Budget(NamedTuple):
    """Of one layer. `syncs`: times that the host waits for a value."""

    kernels: int
    syncs: int
    copies_in: int
    copies_out: int


TRAINING = {
    "llama": {"forward": Budget(55, 0, 2, 1), "backward": Budget(92, 0, 1, 1)},
    "qwen3_moe": {"forward": Budget(96, 4, 2, 1), "backward": Budget(155, 0, 1, 1)},
    "gemma2": {"forward": Budget(74, 0, 2, 1), "backward": Budget(118, 0, 1, 1)},
}
"""In float32: boundary values and rotary tables come in, one goes out. A mixture of experts checks its indices and
reads how many rows each expert has, for each of its two products."""
IN_BF16 = {
    "llama": {"forward": Budget(74, 0, 2, 1), "backward": Budget(181, 0, 1, 1)},
    "qwen3_moe": {"forward": Budget(127, 4, 2, 1), "backward": Budget(306, 4, 1, 1)},
    "gemma2": {"forward": Budget(94, 0, 2, 1), "backward": Budget(230, 0, 1, 1)},
}
"""In bfloat16, with activations that backward computes again."""
SERVING = {
    "llama": {"prompts": Budget(10, 0, 1, 1), "decode": Budget(10, 0, 1, 1)},
    "qwen3_moe": {"prompts": Budget(12, 0, 1, 1), "decode": Budget(12, 0, 1, 1)},
    "gemma2": {"prompts": Budget(10, 0, 1, 1), "decode": Budget(10, 0, 1, 1)},
}
"""Two sessions, weights in four bits, caches in eight, by the product's own kernels."""


@cache
def found() -> dict[str, Examined]:
    return examined(FAMILIES)


def within(counts: Counts, budget: Budget) -> bool:
    return all(getattr(counts, name) <= most for name, most in budget._asdict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_stage_has_operands_on_two_devices(family: str) -> None:
    one = found()[family]
    assert one.failures == {}
    assert {"forward", "backward in bf16, recompute", "update", "decode as int4, cache int8"} <= one.stages.keys()
    assert all(counts.kernels > 0 for of_stages in one.stages.values() for counts in of_stages)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_waits_copies_and_launches_no_more_than_its_budget(family: str) -> None:
    layer = found()[family].layer
    labels = {"": TRAINING, " in bf16, recompute": IN_BF16, " as int4, cache int8": SERVING}
    for label, budgets in labels.items():
        for what, budget in budgets[family].items():
            counts = layer[what + label]
            assert within(counts, budget), f"{what}{label}: {counts} exceeds {budget}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_decodes_with_few_kernels(family: str) -> None:
    """Its ends too, which look up tokens and make logits."""
    of_stages = found()[family].stages["decode as int4, cache int8"]
    assert sum(counts.kernels for counts in of_stages) <= 12 * LAYERS + 3
    assert [(counts.syncs, counts.copies_in, counts.copies_out) for counts in of_stages] == [(0, 1, 1)] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_train_with_deterministic_kernels_and_serve_without(family: str) -> None:
    for what, of_stages in found()[family].stages.items():
        if what.startswith(("forward", "backward")):
            assert [counts.loose for counts in of_stages] == [0] * len(of_stages), what
        elif what.startswith(("prompts", "decode")):
            assert all(counts.loose == counts.kernels for counts in of_stages), what


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_all_gradients_are_read_at_once_and_an_update_reads_nothing(family: str) -> None:
    stages = found()[family].stages
    assert {counts.syncs for counts in stages["norms"]} == {1}
    assert {counts.syncs for counts in stages["update"]} == {0}


_MODELS = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.long
@pytest.mark.parametrize("name", [row["name"] for row in _MODELS])
def test_every_model_of_the_table_runs_on_the_device(name: str) -> None:
    one = examined([name], "--thorough")[name]
    assert one.failures == {}
    served = any(what.startswith("decode") for what in one.stages)
    assert {"forward", "backward", "update"} <= one.stages.keys()
    assert served or name not in FAMILIES
