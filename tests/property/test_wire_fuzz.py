"""Whatever arrives, the reader answers with frames or `WireError`, never with anything else, and takes little memory.

`hostile_inputs` makes the inputs from a seed: garbage, frames of every message with bits flipped, lengths changed,
parts cut, doubled, spliced and replayed, and msgpack bombs. A failing input is printed with its seed and number.
The same inputs go to a live listener on loopback, before TLS, after TLS and after the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.cli.running import run
from fusionai.primitives.errors import ChannelClosed, WireError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, host_tensor
from fusionai.transport.channels.accepting import AcceptLimits
from fusionai.transport.interface import Channel
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import MemberCredentials
from fusionai.wire import messages
from fusionai.wire.frame import (
    GREETING_LIMITS,
    HEADER_BYTES,
    STRANGER_LIMITS,
    STREAM_LIMITS,
    FrameReader,
    decode_message,
    describe,
    encode_frame_head,
    encode_header,
    parse_header,
    tensor_layout,
)
from fusionai.wire.messages import Hello, Ping
from harness.credentials import CertifiedPool
from harness.examples import examples

MIB = 2**20
LIMITS = [GREETING_LIMITS, STRANGER_LIMITS, *STREAM_LIMITS.values()]
FENCE = messages.Fence(1, 2, 3)


def example(kind: Any) -> Any:
    """A value of an annotated field type, however the schema spells it."""
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.StructType() as info:
            return info.cls(**{field.name: example_of(field.type) for field in info.fields})
        case info:
            return example_of(info)


def example_of(info: Any) -> Any:
    match info:
        case msgspec.inspect.StructType():
            return info.cls(**{field.name: example_of(field.type) for field in info.fields})
        case msgspec.inspect.UnionType():
            return example_of(next(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType)))
        case msgspec.inspect.VarTupleType():
            headers = getattr(info.item_type, "cls", None) is messages.TensorHeader
            return () if headers else (example_of(info.item_type),)
        case msgspec.inspect.TupleType():
            return tuple(example_of(one) for one in info.item_types)
        case msgspec.inspect.DictType():
            return {example_of(info.key_type): example_of(info.value_type)}
        case msgspec.inspect.LiteralType():
            return info.values[0]
        case msgspec.inspect.StrType():
            return "job-1" if re.search(info.pattern or "", "job-1") else "123456"
        case msgspec.inspect.BytesType():
            return bytes(max(32, info.min_length or 0))
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode({"any": [1, 2]}))
        case _:
            raise AssertionError(f"no example for {info}")


ALL_MESSAGES = [example(kind) for kind in messages.MESSAGES]


def valid_frames() -> list[bytes]:
    """A frame of every message, and with tensors of every dtype where a message carries tensors."""
    frames = []
    tensors = [host_tensor(dtype, (2, 3), bytes(6 * size)) for dtype, size in ITEMSIZE_BYTES.items()]
    headers = tuple(describe(tensor.dtype, tensor) for tensor in tensors)
    for message in ALL_MESSAGES:
        data = messages.encode(message)
        frames.append(encode_header(len(data), 0) + data)
        if "tensors" in message.__struct_fields__ and not isinstance(
            message, messages.Probe | messages.Pong | messages.WeightPieces
        ):
            (meta,) = get_type_hints(type(message), include_extras=True)["tensors"].__metadata__
            for first in range(0, len(tensors), most := min(meta.max_length, len(tensors))):
                some = tensors[first : first + most]
                full = msgspec.structs.replace(message, tensors=headers[first : first + most])
                head = encode_frame_head(full, some, STREAM_LIMITS["control"])
                frames.append(head + b"".join(tensor.data for tensor in some))
    return frames


FRAMES = valid_frames()
OPENINGS = [b"\x91", b"\x81\xa1x", b"\x82\xa1m", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
SIZES = [0, 1, 15, 16, 255, 2**16, 2**24, 2**26, 2**31, 2**32 - 1]


def hostile_inputs(seed: int, count: int) -> Iterator[bytes]:
    """`count` inputs, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        frame = bytearray(rng.choice(FRAMES))
        match rng.randrange(10):
            case 0:
                yield rng.randbytes(rng.randrange(200))
            case 1:
                for _ in range(rng.randrange(1, 8)):
                    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                yield bytes(frame)
            case 2:
                yield bytes(frame[: rng.randrange(len(frame))])
            case 3:
                struct.pack_into("<I", frame, 4, rng.choice(SIZES))
                yield bytes(frame)
            case 4:
                struct.pack_into("<Q", frame, 8, rng.choice([*SIZES, 2**40, 2**63, 2**64 - 1]))
                yield bytes(frame)
            case 5:
                other = rng.choice(FRAMES)
                yield bytes(frame[: rng.randrange(len(frame))]) + other[rng.randrange(len(other)) :]
            case 6:
                yield bytes(frame) * rng.randrange(2, 5)
            case 7:
                at = rng.randrange(HEADER_BYTES, len(frame) + 1)
                yield bytes(frame[:at]) + rng.randbytes(rng.randrange(1, 40)) + bytes(frame[at:])
            case 8:
                # The message itself is changed under a header that fits it.
                body = frame[HEADER_BYTES:]
                for _ in range(rng.randrange(1, 6)):
                    body[rng.randrange(len(body))] = rng.choice(b"\x00\x7f\x80\x90\xc0\xc4\xcf\xd3\xdb\xdd\xdf\xff")
                yield encode_header(len(body), 0) + bytes(body)
            case _:
                bomb = rng.choice(OPENINGS) * rng.randrange(1, 3000)
                yield encode_header(len(bomb), 0) + bomb


def survives(data: bytes, rng: random.Random) -> int:
    """Feed one input in random pieces, under random limits; the number of frames that came out."""
    reader = FrameReader(rng.choice(LIMITS))
    frames = 0
    start = 0
    try:
        while start < len(data):
            step = rng.choice([1, 7, 100, len(data)])
            for frame in reader.feed(data[start : start + step]):
                frames += 1
                assert sum(tensor.nbytes for tensor in frame.tensors.values()) <= len(data)
            start += step
    except WireError:
        pass
    return frames


def fuzz_reader(seed: int, count: int) -> int:
    rng = random.Random(seed + 1)
    frames = 0
    for number, data in enumerate(hostile_inputs(seed, count)):
        try:
            frames += survives(data, rng)
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {number} ({data[:64].hex()}...): {error!r}") from error
    return frames


def test_every_message_of_the_protocol_is_among_the_seeds():
    decoded = {type(next(FrameReader(STREAM_LIMITS["control"]).feed(frame)).message) for frame in FRAMES}
    assert decoded == set(messages.MESSAGES)


def check_reader(count: int) -> None:
    tracemalloc.start()
    try:
        frames = fuzz_reader(20_240_601, count)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Replayed and lightly changed frames do come through; nothing else would show that the inputs get far enough.
    assert frames > count // 50
    # One message of the largest size a member may announce, and nothing for bodies: no input's shapes and length that
    # agree are above a few hundred bytes.
    assert peak_bytes < max(limits.message_bytes for limits in LIMITS) + 2 * MIB


def test_the_reader_survives_hostile_bytes():
    check_reader(4000)


@pytest.mark.long
def test_the_reader_survives_a_hundred_thousand_hostile_inputs():
    check_reader(100_000)


@given(st.binary(max_size=64))
@settings(max_examples=examples(300), deadline=None)
def test_any_bytes_as_header_or_message(data: bytes):
    for limits in LIMITS:
        try:
            header = parse_header(data, limits)
            assert header.message_bytes <= limits.message_bytes
            assert header.body_bytes <= limits.body_bytes
        except WireError:
            pass
        with contextlib.suppress(WireError):
            tensor_layout(decode_message(data, limits), len(data))


SHAPES = st.lists(st.integers(min_value=0, max_value=2**62), max_size=16).map(tuple)
NAMES = st.sampled_from(["a", "b", ""])
DTYPES = st.sampled_from([*ITEMSIZE_BYTES, "object", "float8", ""])


@given(st.lists(st.tuples(NAMES, DTYPES, SHAPES), max_size=4), st.integers(min_value=0, max_value=2**64 - 1))
@settings(max_examples=examples(300), deadline=None)
def test_a_layout_adds_up_or_is_refused(tensors: list[tuple[str, str, tuple[int, ...]]], body_bytes: int):
    headers = tuple(messages.TensorHeader(*tensor) for tensor in tensors)
    chunk = messages.StateChunk(fence=FENCE, stage=0, step=0, last=True, tensors=headers)
    try:
        slots = tensor_layout(chunk, body_bytes)
    except WireError:
        return
    assert sum(slot.nbytes for slot in slots) == body_bytes
    end = 0
    for slot in slots:
        assert slot.offset_bytes == end
        end += slot.nbytes


class Victim:
    """A live listener that echoes, and counts what its channels end with."""

    def __init__(self, home: Path) -> None:
        self._pool = CertifiedPool(home)
        self.unexpected: list[BaseException] = []

    def credentials(self, name: str) -> MemberCredentials:
        return self._pool.credentials(name, "broker")

    async def accept(self, channel: Channel) -> None:
        try:
            while True:
                envelope = await channel.receive()
                await channel.send(envelope.message, list(envelope.tensors.values()))
        except (WireError, ChannelClosed):
            pass
        except Exception as error:  # noqa: BLE001 - that there is none is what is tested
            self.unexpected.append(error)

    async def attack(self, target: tuple[str, int], data: bytes, depth: int, context: ssl.SSLContext) -> None:
        """`depth` 0: before TLS; 1: instead of hello; 2: after hello."""
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(*target, ssl=context if depth else None)
                if depth == 2:
                    writer.write(encode_frame_head(Hello(stream="state"), (), GREETING_LIMITS))
                writer.write(data)
                if writer.can_write_eof():
                    writer.write_eof()
                else:
                    writer.close()
                while await reader.read(65_536):
                    pass
                writer.close()
        except (OSError, ssl.SSLError):
            pass


def fuzz_listener(home: Path, count: int) -> None:
    victim = Victim(home)

    async def main() -> None:
        loop_errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        door = TcpTransport(victim.credentials("victim"), accept_limits=AcceptLimits(greeting_s=2.0))
        listener = await door.listen(victim.accept, host="127.0.0.1", port=0, strangers=True)
        target = parse_address(listener.addresses[0])
        assert target is not None
        context = victim.credentials("attacker").dialling_context()
        process = psutil.Process()
        rss_before = 0
        waiting: set[asyncio.Task[None]] = set()
        for number, data in enumerate(hostile_inputs(7, count)):
            if number == count // 4:
                # By now buffers and the allocator have found their size; a leak would go on growing.
                rss_before = process.memory_info().rss
            waiting.add(asyncio.create_task(victim.attack(target, data, number % 3, context)))
            if len(waiting) >= 16:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*waiting)
        assert process.memory_info().rss - rss_before < 32 * MIB
        # It still serves who behaves.
        channel = await TcpTransport(victim.credentials("friend")).dial(
            listener.addresses, expect=None, stream="control"
        )
        await channel.send(Ping(sequence=1, sent_at_s=0.0))
        assert (await channel.receive()).message == Ping(sequence=1, sent_at_s=0.0)
        await channel.close()
        await listener.close()
        assert not victim.unexpected
        assert not loop_errors

    run(main())


@pytest.mark.slow
def test_a_live_listener_survives_hostile_bytes(tmp_path: Path):
    fuzz_listener(tmp_path, 300)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_live_listener_survives_thousands_of_hostile_connections(tmp_path: Path):
    fuzz_listener(tmp_path, 20_000)
