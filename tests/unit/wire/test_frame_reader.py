"""The frame reader: any division of the bytes gives the same frames, and nothing is allocated on a stranger's word."""

from __future__ import annotations

import pytest

from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.frame import (
    GREETING_LIMITS,
    SCRATCH_BYTES,
    STREAM_LIMITS,
    FrameLimits,
    FrameReader,
    describe,
    encode_frame_head,
    encode_header,
)
from fusionai.wire.messages import Fence, Hello, Message, Ping, StateChunk, encode

LIMITS = STREAM_LIMITS["state"]


def chunk(*tensors: HostTensor) -> StateChunk:
    headers = tuple(describe(f"t{number}", tensor) for number, tensor in enumerate(tensors))
    return StateChunk(fence=Fence(1, 0, 0), stage=0, step=0, last=False, tensors=headers)


def frame(message: Message, *tensors: HostTensor) -> bytes:
    return encode_frame_head(message, tensors, LIMITS) + b"".join(tensor.data for tensor in tensors)


def pattern(count: int) -> HostTensor:
    return host_tensor("uint8", (count,), bytes(index * 31 % 251 for index in range(count)))


@pytest.mark.parametrize("step", [1, 7, 16, 17, 1000, 65_536, 10**7])
def test_any_division_of_the_bytes_gives_the_same_frames(step: int):
    large = pattern(50_000 if step == 1 else 200_000)
    sent = [
        (Ping(sequence=1, sent_at_s=0.0), ()),
        (chunk(pattern(3), pattern(0), pattern(70_000)), (pattern(3), pattern(0), pattern(70_000))),
        (Hello(software="x" * 500), ()),
        (chunk(large), (large,)),
        (Ping(sequence=2, sent_at_s=0.0), ()),
    ]
    data = b"".join(frame(message, *tensors) for message, tensors in sent)
    reader = FrameReader(LIMITS)
    got = [f for start in range(0, len(data), step) for f in reader.feed(data[start : start + step])]
    assert [f.message for f in got] == [message for message, _ in sent]
    assert [[bytes(t.data) for t in f.tensors.values()] for f in got] == [
        [bytes(t.data) for t in tensors] for _, tensors in sent
    ]
    assert sum(f.nbytes for f in got) == len(data)
    assert not reader.midway


def test_a_message_larger_than_the_scratch_buffer():
    tensors = [pattern(1) for _ in range(5000)]
    reader = FrameReader(LIMITS)
    data = frame(chunk(*tensors), *tensors)
    assert len(data) > SCRATCH_BYTES
    (got,) = reader.feed(data)
    assert len(got.tensors) == 5000


def test_tensor_memory_is_the_receivers_own():
    reader = FrameReader(LIMITS)
    (first,) = reader.feed(frame(chunk(pattern(100)), pattern(100)))
    list(reader.feed(frame(chunk(host_tensor("uint8", (100,), bytes(100))), host_tensor("uint8", (100,), bytes(100)))))
    assert bytes(first.tensors["t0"].data) == bytes(pattern(100).data)


def test_bodies_land_directly_in_the_allocated_buffer():
    allocated: list[memoryview] = []

    def allocate(count: int) -> memoryview:
        allocated.append(memoryview(bytearray(count)))
        return allocated[-1]

    reader = FrameReader(LIMITS, allocate)
    tensor = pattern(100_000)
    data = frame(chunk(tensor), tensor)
    head = len(data) - tensor.nbytes
    list(reader.feed(data[:head]))
    target = reader.buffer()
    assert target.nbytes == 100_000
    assert target.obj is allocated[0].obj
    target[:] = data[head:]
    reader.advance(100_000)
    whole = reader.next()
    assert whole is not None
    assert whole.tensors["t0"].data.obj is allocated[0].obj


def refuse(count: int) -> memoryview:
    raise AssertionError(f"{count} bytes were allocated")


def test_nothing_is_allocated_before_every_check_has_passed():
    tensor = pattern(100)
    lying = encode_frame_head(chunk(tensor), [tensor], LIMITS)
    announced = encode_header(len(lying) - 16, 2**31) + lying[16:]
    with pytest.raises(WireError, match="from the shapes"):
        list(FrameReader(LIMITS, refuse).feed(announced))
    with pytest.raises(WireError, match="announced"):
        list(FrameReader(GREETING_LIMITS, refuse).feed(encode_header(2**31, 0)))


def test_no_memory_for_a_body_is_a_wire_error():
    def exhausted(count: int) -> memoryview:
        raise MemoryError

    tensor = pattern(100_000)
    with pytest.raises(WireError, match="allocate the 100000 bytes"):
        list(FrameReader(LIMITS, exhausted).feed(frame(chunk(tensor), tensor)))


def test_limits_may_change_between_two_frames_of_one_read():
    reader = FrameReader(FrameLimits(message_bytes=1024, body_bytes=0))
    tensor = pattern(1000)
    got = []
    for f in reader.feed(frame(Hello()) + frame(chunk(tensor), tensor)):
        got.append(f)
        reader.limits = LIMITS
    assert len(got) == 2


def test_midway_tells_a_clean_end_from_a_torn_frame():
    reader = FrameReader(LIMITS)
    data = frame(Ping(sequence=1, sent_at_s=0.0))
    assert not reader.midway
    for cut in (1, 16, len(data) - 1):
        torn = FrameReader(LIMITS)
        assert list(torn.feed(data[:cut])) == []
        assert torn.midway
    assert len(list(reader.feed(data))) == 1
    assert not reader.midway


def test_a_message_of_the_scratch_buffers_size_always_fits():
    # Filler frames shift the next message over every position of the scratch buffer's end.
    reader = FrameReader(LIMITS)
    big = Ping(sequence=9, sent_at_s=0.0)
    filler = frame(Hello(software="y" * 500))
    for _ in range(300):
        assert [f.message for f in reader.feed(filler + frame(big))][-1] == big


def test_an_empty_message_is_refused():
    with pytest.raises(WireError, match="msgpack"):
        list(FrameReader(LIMITS).feed(encode_header(0, 0)))
    assert encode(Ping(sequence=0, sent_at_s=0.0))
