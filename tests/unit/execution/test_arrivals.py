"""What a stage takes from its neighbours: values as they were agreed on, packed as they were agreed to be."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.execution.training.arrivals import Arrivals
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
