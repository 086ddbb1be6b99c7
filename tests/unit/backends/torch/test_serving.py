"""The memory that a stage of the pool needs is the memory that plans count for it."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.torch.serving import TorchServingProgram
from fusionai.capture.models.source import ConfigSource
from fusionai.capture.served import capture_served
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph
from fusionai.ir.serving import serving_graph
from fusionai.ir.serving_cost import DECODING_BYTES, WeightFormat, serving_costs
from fusionai.ir.validate import validate
from fusionai.primitives.errors import ExecutionError
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.scheduling.serving.pipeline import stage_bytes
from fusionai.wire.serving import ServeOptions

LAYERS = 2


@pytest.fixture(scope="module")
def captured() -> Graph:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    }
    return validate(serving_graph(capture_served(ConfigSource(config)).graph))


@pytest.mark.parametrize("pass_tokens", [64, 256])
@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_a_stage_fits_into_the_planned_memory_and_not_into_much_less(
    captured: Graph, weights: WeightFormat, pass_tokens: int
) -> None:
    """Stacked matrices are in memory twice during their import, which is half as much again as small weights take."""
    blocks = serving_costs(captured, weights=weights, cache="fp32", pass_tokens=pass_tokens)
    needs = ServingNeeds(context_tokens=256, sessions=4, cache_tokens=1024, pass_tokens=pass_tokens, weights=weights)
    planned = stage_bytes(blocks[1 : 1 + LAYERS], needs, 0, 1040)
    stage = cut_blocks(captured, [(0, 1), (1, 1 + LAYERS), (1 + LAYERS, len(blocks))]).stages[1]
    options = ServeOptions(pages=65, sessions=5, pass_tokens=pass_tokens, page_tokens=16, weights=weights, cache="fp32")

    def program(limit_bytes: int) -> None:
        TorchServingProgram(stage.graph, options=options, device=torch.device("cpu"), memory_limit_bytes=limit_bytes)

    program(planned)
    with pytest.raises(ExecutionError, match=r"the limit is"):
        program(planned - DECODING_BYTES - 1_000_000)
