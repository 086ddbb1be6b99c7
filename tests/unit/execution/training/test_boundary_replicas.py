"""Boundaries of replicas: numbered on, one's ports lead to nobody else, and who holds a parameter shares it."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.execution.training.boundary import FEED, boundaries, replicated
from fusionai.ir.partition import cut_blocks
from fusionai.primitives.errors import GraphError, PlanError

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def tied() -> Captured:
    return capture(ConfigSource({**LLAMA, "tie_word_embeddings": True}), batch=(1, 4), sequence=(1, 16))


def test_one_replica_is_what_it_was(tied: Captured) -> None:
    partition = cut_blocks(tied.graph, ((0, 2), (2, 4), (4, 5)))
    assert replicated([partition]) == boundaries(partition)


def test_replicas_may_be_cut_differently_and_share_by_key(tied: Captured) -> None:
    graph = tied.graph
    partitions = [cut_blocks(graph, ((0, 2), (2, 4), (4, 5))), cut_blocks(graph, ((0, 3), (3, 5)))]
    made = replicated(partitions)
    graphs = [stage.graph for partition in partitions for stage in partition.stages]
    assert [boundary.stage for boundary in made] == list(range(5))
    assert [boundary.replica for boundary in made] == [0, 0, 0, 1, 1]
    for boundary, graph_of in zip(made, graphs, strict=True):
        boundary.check(graph_of)
        own = range(3) if boundary.replica == 0 else range(3, 5)
        assert {port.other for port in (*boundary.receives, *boundary.sends)} <= {FEED, *own}
    held: dict[str, list[int]] = {}
    for stage, graph_of in enumerate(graphs):
        for spec in graph_of.params.values():
            if spec.trainable:
                held.setdefault(spec.key, []).append(stage)
    shared = {one.key: one.stages for boundary in made for one in boundary.shared}
    assert shared == {key: tuple(stages) for key, stages in held.items()}
    embedding = "model.embed_tokens.weight"
    assert shared[embedding] == (0, 1, 3, 4), "tied to the head in both"
    assert made[1].summed_by == {0}
    assert made[1].sums_of == {3, 4}
    assert made[4].summed_by == {0, 1}
    assert embedding in made[0].shared_keys(0, 4)
    assert embedding not in made[1].shared_keys(1, 4)
    assert made[0].shared_keys(0, 4) == made[4].shared_keys(0, 4)


def test_microbatches_are_dealt_in_turn(tied: Captured) -> None:
    partition = cut_blocks(tied.graph, ((0, 4), (4, 5)))
    made = replicated([partition] * 3)
    shapes = [boundary.shape(microbatches=7, in_flight=1) for boundary in made]
    assert [shape.microbatches for shape in shapes] == [3, 3, 2, 2, 2, 2]
    crossing = [[number for number in range(7) if boundary.crosses(number)] for boundary in made]
    for shape, numbers in zip(shapes, crossing, strict=True):
        assert [shape.microbatch(index) for index in range(shape.microbatches)] == numbers
        assert [shape.local_index(number) for number in numbers] == list(range(shape.microbatches))
        assert all(shape.local_index(number) is None for number in {*range(9)} - {*numbers})
    with pytest.raises(PlanError, match="a microbatch for each of 3 replicas"):
        made[0].shape(microbatches=2, in_flight=1)
    odd = msgspec.structs.replace(made[0], replica=3)
    with pytest.raises(GraphError, match="replica 3 of 3"):
        odd.check(partition.stages[0].graph)
