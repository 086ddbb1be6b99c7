"""A stage takes only values packed as agreed, and holds them. Shared gradients count once all their parts are there."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.training.arrivals import Arrivals, WaitingTensors
from fusionai.execution.training.boundary import FEED, boundaries
from fusionai.execution.training.codecs import Carried, pack
from fusionai.ir.partition import cut_blocks
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Codec
from fusionai.wire.messages import Fence
from harness.stand import layers

ROWS, WIDTH = 8, 64
VALUE = host_tensor("float32", (ROWS, WIDTH), np.ones((ROWS, WIDTH), np.float32).tobytes())
STAGES = ((0, 2), (2, 3), (3, 4))


def arrivals(stage: int, codec: Codec) -> Arrivals:
    partition = cut_blocks(layers(WIDTH), STAGES)
    return Arrivals(partition.stages[stage].graph, boundaries(partition)[stage], (codec, codec))


def forward(producer: int, consumer: int) -> wire.Forward:
    return wire.Forward(
        fence=Fence(1, 0, 0), mode="train", step=0, replica=0, microbatch=0, producer=producer, consumer=consumer
    )


def backward(consumer: int, producer: int) -> wire.Backward:
    return wire.Backward(fence=Fence(1, 0, 0), step=0, replica=0, microbatch=0, consumer=consumer, producer=producer)


@pytest.mark.parametrize("agreed", ["none", "int8", "int2"])
@pytest.mark.parametrize("sent", ["none", "int8", "int2"])
def test_values_are_packed_as_agreed_or_refused(agreed: Codec, sent: Codec) -> None:
    there: dict[str, Carried] = {"y0": pack("y0", VALUE, sent, following=True)}
    back: dict[str, Carried] = {"y0": pack("y0", VALUE, sent)}
    for take in (
        lambda: arrivals(1, agreed).forward(forward(0, 1), there),
        lambda: arrivals(0, agreed).backward(backward(1, 0), back),
    ):
        if sent == agreed:
            take()
        else:
            with pytest.raises(ExecutionError, match=f"'y0' packed as {agreed}, got {sent}"):
                take()


def test_rows_follow_each_other_forward_and_nowhere_else() -> None:
    alone, follow = (pack("y0", VALUE, "int2", following=following) for following in (False, True))
    with pytest.raises(ExecutionError, match="expected rows of 'y0' predicted from earlier rows"):
        arrivals(1, "int2").forward(forward(0, 1), {"y0": alone})
    with pytest.raises(ExecutionError, match="expected rows of 'y0' packed independently"):
        arrivals(0, "int2").backward(backward(1, 0), {"y0": follow})


def test_what_the_owner_feeds_is_never_packed() -> None:
    arrivals(0, "int8").forward(forward(FEED, 0), {"x": VALUE})
    with pytest.raises(ExecutionError, match="'x' packed as none, got int8"):
        arrivals(0, "int8").forward(forward(FEED, 0), {"x": pack("x", VALUE, "int8")})


def test_small_values_travel_as_they_are_whatever_is_agreed() -> None:
    row = host_tensor("float32", (1, WIDTH), bytes(4 * WIDTH))
    arrivals(1, "int8").forward(forward(0, 1), {"y0": row})


def test_what_would_be_too_large_unpacked_is_refused_packed() -> None:
    large = host_tensor("float32", (ROWS * 4, WIDTH), bytes(16 * ROWS * WIDTH))
    with pytest.raises(ExecutionError, match="at most 2048 bytes of 'y0', got 8192"):
        arrivals(1, "int2").forward(forward(0, 1), {"y0": pack("y0", large, "int2", following=True)})


def test_a_packed_value_has_the_dtype_of_its_graph() -> None:
    half = host_tensor("bfloat16", (ROWS, WIDTH), bytes(2 * ROWS * WIDTH))
    arrivals(1, "int8").forward(forward(0, 1), {"y0": pack("y0", half, "int8")})
    arrived: dict[str, HostTensor] = {"y0": host_tensor("int64", (ROWS, WIDTH), bytes(8 * ROWS * WIDTH))}
    with pytest.raises(ExecutionError, match="expected 'y0' as float32, got int64"):
        arrivals(1, "int8").forward(forward(0, 1), arrived)


class Anything(Arrivals):
    """Takes whatever comes."""

    def __init__(self) -> None:
        return


def held(limit_bytes: int = 1000) -> WaitingTensors:
    return WaitingTensors(0, Anything(), MemoryBudget(limit_bytes))


def part(number: int, parts: int, *, sender: int = 2, phase: str = "partial") -> wire.SharedGradient:
    return wire.SharedGradient(
        fence=Fence(1, 1, 1), step=5, sender=sender, receiver=0, phase=phase, part=number, parts=parts
    )


def values(**named: float) -> dict[str, HostTensor]:
    return {
        name: host_tensor("float32", (1,), np.array([value], np.float32).tobytes()) for name, value in named.items()
    }


def number(tensor: HostTensor) -> float:
    return float(np.frombuffer(tensor.data, np.float32)[0])


def test_it_is_there_when_all_of_it_is() -> None:
    box = held()
    assert not box.keep(part(0, 2), values(a=1))
    assert box.keep(part(0, 1, sender=4), values(a=5, b=6)), "another sender's is whole by itself"
    assert box.keep(part(1, 2), values(b=2))
    taken = box.take_partials(5)
    assert [(sender, {key: number(value) for key, value in entries}) for sender, entries in taken] == [
        (2, {"a": 1, "b": 2}),
        (4, {"a": 5, "b": 6}),
    ]
    assert box.nbytes == 0


def test_what_is_sent_again_replaces_what_was_there() -> None:
    """The first sender died after a part of it; who stands in sends everything."""
    box = held()
    assert not box.keep(part(0, 2), values(a=1))
    assert not box.keep(part(0, 2), values(a=3))
    assert box.nbytes == 4
    assert box.keep(part(1, 2), values(b=4))
    assert {key: number(value) for _, entries in box.take_partials(5) for key, value in entries} == {"a": 3, "b": 4}


def test_sums_and_parts_are_told_apart() -> None:
    box = held()
    assert box.keep(part(0, 1, phase="total"), values(a=7))
    assert box.take_partials(5) == []
    assert len(box.take_totals(5)) == 1


def test_too_much_is_refused() -> None:
    box = held(limit_bytes=7)
    assert not box.keep(part(0, 2), values(a=1))
    with pytest.raises(ExecutionError, match="3 are left, expected at least 4"):
        box.keep(part(1, 2), values(b=1))
    assert box.nbytes == 4


def test_all_stores_of_a_machine_share_one_limit_as_long_as_they_live() -> None:
    limit = MemoryBudget(10)
    first, second = (WaitingTensors(stage, Anything(), limit) for stage in (0, 1))
    assert not first.keep(part(0, 2), values(a=1))
    assert not second.keep(part(0, 2), values(a=1))
    with pytest.raises(ExecutionError, match="tensors kept for later work 8; 2 are left"):
        second.keep(part(1, 2), values(b=1))
    assert (first.nbytes, second.nbytes, limit.stores_bytes) == (4, 4, 8)
    del first
    gc.collect()
    assert limit.stores_bytes == 4
    assert second.keep(part(1, 2), values(b=1))


def test_nothing_is_left() -> None:
    box = held()
    box.keep(part(0, 2), values(a=1))
    box.drop()
    assert box.nbytes == 0
    assert not box.keep(part(1, 2), values(b=1)), "what was dropped does not count"
