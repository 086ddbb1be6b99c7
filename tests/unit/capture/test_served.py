"""How a model is captured for serving, where its attention can't be replaced."""

from __future__ import annotations

import pytest

from fusionai.capture.capture import capture
from fusionai.capture.checking.check import require_causal
from fusionai.capture.models.source import ConfigSource
from fusionai.capture.served import LONGEST_PASS, capture_served
from fusionai.ir.serving import ATTENTION
from fusionai.primitives.errors import ModelError
from harness.families import family_source


@pytest.mark.slow
def test_a_model_that_reads_its_mask_keeps_its_own_attention_and_is_computed_anew():
    """Doge looks into the mask, which is a rule and no tensor where attention is the semantic operator."""
    source = family_source("doge")
    with pytest.raises(ModelError, match="'MaskRule' object has no attribute 'dtype'"):
        capture(source, batch=(1, 2), sequence=(1, LONGEST_PASS), train=False)
    captured = capture_served(source)
    assert not any(node.op == ATTENTION for node in captured.graph.nodes)
    assert captured.notes[-1].startswith("No cache can serve it: the model could not be traced at modeling_doge.py")
    require_causal(captured)


def test_the_first_reason_is_said_if_its_own_attention_does_not_help():
    source = family_source("llama")
    broken = ConfigSource({**source.config, "num_attention_heads": 5})
    with pytest.raises(ModelError, match=r"not valid|multiple|divisible"):
        capture_served(broken)
