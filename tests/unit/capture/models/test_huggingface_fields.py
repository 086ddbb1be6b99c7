"""Fields of a configuration: those with an effect are taken without a word, others are reported."""

from __future__ import annotations

import pytest
import torch

from fusionai.capture.models.huggingface import resolve
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.errors import ModelError

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({"rope_theta": 500_000.0}, ()),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ()),
        ({"attention_dropout": 0.1, "torch_dtype": "bfloat16"}, ()),
        ({"colour": "red"}, ("The configuration's field 'colour' is unknown to llama and has no effect.",)),
    ],
)
def test_a_field_without_effect_is_reported_and_no_other(fields: dict[str, object], notes: tuple[str, ...]):
    made = resolve(ConfigSource({**LLAMA, **fields}))
    assert made.notes == notes
    if "rope_theta" in fields:
        assert made.config.rope_parameters["rope_theta"] == 500_000.0


def test_a_field_that_only_the_model_s_code_reads_has_an_effect():
    fields = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = resolve(ConfigSource({**fields, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 64}))
    assert made.notes == ()
    with torch.device("meta"):
        assert made.construct_plain().get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (128, 32)


def test_a_misspelt_field_is_refused_with_the_nearest():
    with pytest.raises(ModelError, match="rope_thetta") as refused:
        resolve(ConfigSource({**LLAMA, "rope_thetta": 1.0}))
    assert "rope_theta" in (refused.value.hint or "")
