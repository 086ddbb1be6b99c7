"""Weights that come and go: there for one segment, empty otherwise, and the bytes that were written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionai.backends.interface import Call, block_weights, movable_weights
from fusionai.backends.state import StateEntry
from fusionai.backends.torch.optimizers import WEIGHT
from fusionai.backends.torch.recomputation import RecomputedSegment
from fusionai.backends.torch.slots import DiskSlots, HostSlots, OffloadedWeights
from fusionai.ir.schema import ListArg
from fusionai.primitives.errors import ExecutionError

CPU = torch.device("cpu")
ENTRIES = {
    "a": StateEntry("a", "", "float32", (3, 4)),
    "b": StateEntry("b", "", "bfloat16", (5,)),
    "c": StateEntry("c", "", "float32", ()),
}
FIRST, SECOND = (RecomputedSegment(0, 1, (), frozenset(keys)) for keys in ({"a", "c"}, {"b", "c"}))


@pytest.fixture(params=["file", "host"])
def away(request: pytest.FixtureRequest) -> OffloadedWeights:
    made = OffloadedWeights(ENTRIES, CPU)
    assert isinstance(made.shelf, DiskSlots)
    if request.param == "host":  # as beside an accelerator
        made.shelf = HostSlots(CPU)
    return made


def held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_a_segments_weights_are_there_and_no_others(away: OffloadedWeights):
    values = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(2.5)}
    tensors = {key: away.tensor(key, trainable=key != "b") for key in ENTRIES}
    assert [tensors[key].requires_grad for key in "abc"] == [True, False, True]
    for key, value in values.items():
        away.write(key, value.clone())
    assert [held(tensor) for tensor in tensors.values()] == [0, 0, 0]
    for part, there in ((FIRST, "ac"), (SECOND, "bc"), (FIRST, "ac")):
        away.enter(part)
        assert away.present_bytes == sum(held(tensor) for tensor in tensors.values())
        for key, tensor in tensors.items():
            assert (held(tensor) > 0) == (key in there)
            if key in there:
                assert torch.equal(tensor.detach(), values[key])
    away.leave()
    assert away.present_bytes == 0
    assert torch.equal(away.read("a"), values["a"])


def test_what_is_written_counts_where_the_old_was_there(away: OffloadedWeights):
    tensor = away.tensor("a", trainable=True)
    away.tensor("c", trainable=True)
    for value in (1.0, 2.0):
        away.write("a", torch.full((3, 4), value))
        away.write("c", torch.tensor(value))
        away.enter(FIRST)
        assert tensor.detach().unique().tolist() == [value]


def test_pieces_of_an_update_become_lasting(away: OffloadedWeights):
    tensor = away.tensor("a", trainable=True)
    away.tensor("c", trainable=True)
    away.write("a", torch.zeros(3, 4))
    away.write("c", torch.tensor(0.0))
    piece = away.shelf.piece("a", WEIGHT, 4, 6)
    piece += 3
    away.shelf.keep("a", WEIGHT, 4, piece)
    away.enter(FIRST)
    assert tensor.detach().view(-1).tolist() == [0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0]


def test_a_device_that_can_not_is_said():
    with pytest.raises(ExecutionError, match="weights can't be offloaded on mps"):
        OffloadedWeights(ENTRIES, torch.device("mps"))


def test_what_shares_a_weights_memory_is_read_with_it_and_what_leaves_with_it_stays(kit):
    stage = kit.Stage(b=(1, 8))
    x = stage.input("x", "b", 4)
    weight, told, mean = stage.param("w", 4, 4), stage.param("told", 4, 4), stage.param("mean", 4, kind="buffer")
    turned = stage.node("aten.t.default", weight, shape=(4, 4))
    product = stage.node("aten.mm.default", x, turned, shape=("b", 4))
    moved = stage.node("aten.add.Tensor", product, mean, shape=("b", 4))
    flat = stage.node("aten.reshape.default", told, ListArg((16,)), shape=(16,))
    graph = stage.graph(y=moved, told=flat)
    assert movable_weights(graph) == {"p_w": {"w"}, turned.name: {"w"}}
    assert block_weights(graph) == {0: {"w"}}


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_stage_gives_a_weight_that_it_tells_and_has_others_come_and_go(kit, load, kind):
    stage = kit.Stage(b=(1, 8))
    x = stage.input("x", "b", 4)
    weight, told = stage.param("w", 4, 4), stage.param("told", 4, 4)
    graph = stage.graph(
        y=stage.node("aten.mm.default", x, stage.node("aten.t.default", weight, shape=(4, 4)), shape=("b", 4)),
        told=stage.node("aten.reshape.default", told, ListArg((16,)), shape=(16,)),
    )
    program = load(graph, recompute=True, offload_weights=kind == "file", seed=1)
    whole = load(graph, seed=1)
    given = {"x": kit.host(np.ones((2, 4), np.float32))}
    found, expected = (one.forward(Call("eval", 0, 0), given) for one in (program, whole))
    assert {name: bytes(value.data) for name, value in found.items()} == {
        name: bytes(value.data) for name, value in expected.items()
    }
