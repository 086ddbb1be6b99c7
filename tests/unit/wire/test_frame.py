"""Frames: what is accepted, what is refused, and that refusal comes before allocation."""

from __future__ import annotations

import struct

import msgspec
import pytest

from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, host_tensor
from fusionai.wire import messages
from fusionai.wire.frame import (
    GREETING_LIMITS,
    HEADER_BYTES,
    STRANGER_LIMITS,
    STREAM_LIMITS,
    FrameHeader,
    FrameLimits,
    decode_message,
    describe,
    encode_frame_head,
    encode_header,
    parse_header,
    tensor_layout,
)
from fusionai.wire.messages import Hello, JoinRequest, Ping, Probe, StateChunk, TensorHeader

LIMITS = FrameLimits(message_bytes=1000, body_bytes=10_000)


def probe(*headers: TensorHeader) -> StateChunk:
    fence = messages.Fence(1, 2, 3)
    return StateChunk(fence=fence, stage=0, step=0, last=True, tensors=headers)


def test_a_header_is_16_bytes_as_documented():
    data = encode_header(258, 2**33)
    assert data == b"FA\x01\x00" + (258).to_bytes(4, "little") + (2**33).to_bytes(8, "little")
    assert parse_header(data, FrameLimits(258, 2**33)) == FrameHeader(258, 2**33)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "16 bytes, got 0"),
        (b"GET / HTTP/1.1\r\n", "another protocol"),
        (struct.pack("<2sBBIQ", b"FA", 2, 0, 1, 0), "frame version 1, got 2"),
        (struct.pack("<2sBBIQ", b"FA", 1, 128, 1, 0), "flags 0, got 128"),
        (struct.pack("<2sBBIQ", b"FA", 1, 0, 1001, 0), "at most 1000 bytes here, got 1001 announced"),
        (struct.pack("<2sBBIQ", b"FA", 1, 0, 0, 10_001), "at most 10000 bytes here, got 10001"),
        (struct.pack("<2sBBIQ", b"FA", 1, 0, 2**32 - 1, 2**64 - 1), "4294967295"),
    ],
)
def test_a_bad_header_is_refused_with_what_was_expected(data: bytes, said: str):
    with pytest.raises(WireError, match=said):
        parse_header(data, LIMITS)


def test_a_message_survives():
    message = Ping(sequence=3, sent_at_s=0.5)
    assert decode_message(messages.encode(message), LIMITS) == message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "as msgpack"),
        (b"\xff" * 9, "schema"),
        (msgspec.msgpack.encode({"m": "no_such_message"}), "schema"),
        (msgspec.msgpack.encode({"m": "ping", "sequence": 1, "sent_at_s": 0.0, "extra": 1}), "schema"),
        (msgspec.msgpack.encode({"m": "ping", "sequence": -1, "sent_at_s": 0.0}), "schema"),
        (msgspec.msgpack.encode({"m": "ping", "sequence": 1, "sent_at_s": 0.0}) + b"\x00", "as msgpack"),
        (b"\x82\xa1m\xa4ping\xa8sequence", "as msgpack"),
        (b"\x81\xa1m\xa4pin\xff", "as msgpack"),
    ],
)
def test_a_bad_message_is_refused(data: bytes, said: str):
    with pytest.raises(WireError, match=said):
        decode_message(data, LIMITS)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0", b"\xdd\x00\x00\x00\x01"])
def test_nesting_without_end_is_a_wire_error(opening: bytes):
    bomb = b"\x82\xa1m\xa4ping\xa1x" + opening * 100_000 + b"\xc0"
    with pytest.raises(WireError):
        decode_message(bomb, FrameLimits(2**20, 0))
    # Where the decoder skips what it does not know yet (the tag comes last) or keeps as it is (a profile), it recurses.
    tag_last = b"\x82\xa1x" + opening * 100_000 + b"\xc0\xa1m\xa4ping"
    register = b"\x84\xa1m\xa8register\xa4boot\x01\xa9addresses\x90\xa7profile" + opening * 100_000 + b"\xc0"
    for data in (tag_last, register):
        with pytest.raises(WireError, match="nested too deeply"):
            decode_message(data, FrameLimits(2**20, 0))


def test_a_message_longer_than_the_limit_is_not_even_decoded():
    data = messages.encode(Hello(software="x" * 500))
    with pytest.raises(WireError, match="at most 100 bytes"):
        decode_message(data, FrameLimits(100, 0))


def test_raw_fields_do_not_share_memory_with_the_receive_buffer():
    profile = msgspec.Raw(msgspec.msgpack.encode("profile"))
    buffer = bytearray(messages.encode(messages.Register(boot=1, profile=profile, addresses=())))
    message = decode_message(buffer, LIMITS)
    buffer[:] = bytes(len(buffer))
    assert isinstance(message, messages.Register)
    assert msgspec.msgpack.decode(message.profile, type=str) == "profile"


def test_tensors_lie_one_after_another():
    message = probe(
        TensorHeader("a", "float32", (2, 3)), TensorHeader("empty", "int64", (0, 5)), TensorHeader("b", "bfloat16", ())
    )
    layout = tensor_layout(message, 26)
    assert [(slot.header.name, slot.offset_bytes, slot.nbytes) for slot in layout] == [
        ("a", 0, 24),
        ("empty", 24, 0),
        ("b", 24, 2),
    ]


@pytest.mark.parametrize(
    ("headers", "body_bytes", "said"),
    [
        ((TensorHeader("a", "object", (1,)),), 8, "unknown dtype 'object'"),
        ((TensorHeader("a", "float32", (2,)),), 7, "8 bytes from the shapes"),
        ((TensorHeader("a", "float32", (2,), (1,)),), 8, "can't lie in memory"),
        ((TensorHeader("a", "float32", (2, 2), (1, 1, 0)),), 16, "can't lie in memory"),
        ((TensorHeader("a", "float32", (2,), (2**40, 0)),), 8, "can't lie in memory"),
        ((TensorHeader("a", "float32", (2,), (100, 0)),), 8, "can't lie in memory"),
        ((TensorHeader("a", "float32", (2,), (1, 64)),), 8, "can't lie in memory"),
        ((TensorHeader("a", "float32", (2,)), TensorHeader("a", "float32", (2,))), 16, "'a' twice"),
        ((TensorHeader("a", "float32", (2**62,) * 16),), 16, "from the shapes"),
        ((TensorHeader("a", "float32", (1,) * 17),), 4, "rank 17"),
        ((), 1, "0 bytes from the shapes"),
    ],
)
def test_a_layout_that_does_not_add_up_is_refused(headers: tuple[TensorHeader, ...], body_bytes: int, said: str):
    with pytest.raises(WireError, match=said):
        tensor_layout(probe(*headers), body_bytes)


def test_a_message_without_tensors_has_no_body():
    assert tensor_layout(Ping(sequence=1, sent_at_s=0.0), 0) == ()
    with pytest.raises(WireError, match="from the shapes in ping"):
        tensor_layout(Ping(sequence=1, sent_at_s=0.0), 4)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE_BYTES))
def test_every_dtype_crosses(dtype: str):
    tensor = host_tensor(dtype, (3,), bytes(3 * ITEMSIZE_BYTES[dtype]))
    head = encode_frame_head(probe(describe("x", tensor)), [tensor], LIMITS)
    header = parse_header(head[:HEADER_BYTES], LIMITS)
    assert header.body_bytes == tensor.nbytes
    message = decode_message(head[HEADER_BYTES:], LIMITS)
    assert tensor_layout(message, header.body_bytes)[0].nbytes == tensor.nbytes


def test_sending_checks_what_the_message_announces():
    tensor = host_tensor("float32", (2,), bytes(8))
    with pytest.raises(WireError, match="announces"):
        encode_frame_head(probe(), [tensor], LIMITS)
    with pytest.raises(WireError, match="announces"):
        encode_frame_head(probe(TensorHeader("x", "float32", (1, 2))), [tensor], LIMITS)
    with pytest.raises(WireError, match="announces"):
        encode_frame_head(probe(TensorHeader("x", "float32", (2,))), [], LIMITS)


def test_sending_more_than_the_receiver_takes_fails_here():
    tensor = host_tensor("uint8", (10_001,), bytes(10_001))
    with pytest.raises(WireError, match="fit 1000 bytes and its body 10000 bytes"):
        encode_frame_head(probe(describe("x", tensor)), [tensor], LIMITS)


def test_a_stranger_can_send_a_join_request_and_no_body():
    request = JoinRequest(token=bytes(64), public_key=bytes(32), purpose="provider")
    encode_frame_head(request, [], STRANGER_LIMITS)
    assert STRANGER_LIMITS.body_bytes == GREETING_LIMITS.body_bytes == 0
    assert max(STRANGER_LIMITS.message_bytes, GREETING_LIMITS.message_bytes) <= 4096
    assert all(limits.message_bytes <= 2**24 for limits in STREAM_LIMITS.values())


def test_every_message_with_tensors_names_the_field_so():
    with_tensors = [
        message
        for message in messages.MESSAGES
        if any("Tensor" in str(f.type) for f in msgspec.structs.fields(message))
    ]
    assert Probe in with_tensors
    assert all("tensors" in message.__struct_fields__ for message in with_tensors)
