"""Memory of the large frames that a machine has received: all connections together, as long as a tensor lives."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.channels.framed import LARGE_ALLOCATION_BYTES, ReceiveBuffers
from fusionai.wire.frame import STREAM_LIMITS, FrameReader, encode_frame_head, headers
from fusionai.wire.messages import Fence, StateChunk

LARGE = LARGE_ALLOCATION_BYTES


def test_buffers_count_until_the_last_tensor_in_them_is_dropped() -> None:
    buffers = ReceiveBuffers()
    buffers.limit_bytes = 3 * LARGE
    first = buffers.allocate(2 * LARGE)
    tensor = first[LARGE:]
    del first
    assert buffers.nbytes == 2 * LARGE
    with pytest.raises(MemoryError, match=f"{2 * LARGE} bytes of at most {3 * LARGE}"):
        buffers.allocate(LARGE + 1)
    numbers = np.frombuffer(tensor, np.uint8)
    del tensor
    assert buffers.nbytes == 2 * LARGE
    del numbers
    assert buffers.nbytes == 0
    assert buffers.allocate(3 * LARGE).nbytes == 3 * LARGE


def test_without_a_limit_and_for_small_frames_nothing_is_refused() -> None:
    buffers = ReceiveBuffers()
    kept = [buffers.allocate(LARGE) for _ in range(3)]
    assert buffers.nbytes == 3 * LARGE
    buffers.limit_bytes = 1
    assert buffers.allocate(LARGE - 1).nbytes == LARGE - 1
    assert len(kept) == 3


def test_a_frame_that_announces_more_than_is_left_ends_its_connection() -> None:
    limits, buffers = STREAM_LIMITS["state"], ReceiveBuffers()
    buffers.limit_bytes = 3 * LARGE
    kept = buffers.allocate(2 * LARGE)
    tensor = host_tensor("uint8", (LARGE + 1,), bytes(LARGE + 1))
    message = StateChunk(fence=Fence(1, 1, 0), stage=0, step=0, last=True, tensors=headers({"a": tensor}))
    reader = FrameReader(limits, buffers.allocate)
    with pytest.raises(WireError, match=f"can't allocate the {LARGE + 1} bytes that the other side announced: what "):
        list(reader.feed(encode_frame_head(message, (tensor,), limits)))
    assert kept.nbytes == buffers.nbytes
