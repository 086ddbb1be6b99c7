"""Numbers of quantised files: those of the library that wrote them; whatever contradicts itself is refused."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusionai.ir import packed
from fusionai.ir.packed import check_packing, packed_bytes, unpacked
from fusionai.ir.schema import Graph, PackedPart, Packing
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError

FLOAT8 = Packing(
    form="float8",
    shape=(4, 6),
    parts=(PackedPart("float8_e4m3fn", (4, 6)), PackedPart("float32", (2, 2))),
    block=(3, 4),
)


def float8_bytes() -> bytes:
    codes = np.arange(24, dtype=np.uint8).tobytes()
    return codes + np.array([[1, 2], [3, 4]], np.float32).tobytes()


def test_blocks_at_the_edge_are_smaller():
    values = torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).float().reshape(4, 6)
    scales = torch.tensor([[1.0] * 4 + [2.0] * 2] * 3 + [[3.0] * 4 + [4.0] * 2])
    made = unpacked((FLOAT8,), memoryview(float8_bytes()))
    assert torch.equal(torch.from_numpy(made).reshape(4, 6), values * scales)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_each_code_of_an_8_bit_float_has_its_value(dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    part = PackedPart(str(dtype).removeprefix("torch."), (256,))
    made = packed._floats(part, codes.numpy())
    assert torch.equal(torch.from_numpy(made).nan_to_num(nan=-1), codes.view(dtype).float().nan_to_num(nan=-1))


@pytest.mark.parametrize("form", ["gptq", "packed_int"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_pieces_change_no_number(form: str, bits: int, monkeypatch: pytest.MonkeyPatch):
    """Large matrices are unpacked in pieces; here of 32 rows."""
    generator = np.random.default_rng(bits)
    rows, columns = (96, 64) if form == "gptq" else (64, 96)
    words = generator.integers(0, 2**31, rows * columns * bits // 32, dtype=np.int32)
    scales = generator.normal(size=3 * 64 if form == "gptq" else rows).astype(np.float32)
    zeros = generator.integers(0, 2**31, 3 * 64 * bits // 32, dtype=np.int32)
    if form == "gptq":
        parts = [("int32", words), ("int32", zeros), ("float32", scales), ("int32", np.zeros(0, np.int32))]
    else:
        empty = np.zeros(0, np.int32)
        parts = [("int32", words), ("float32", scales), ("int32", empty), ("int32", empty)]
    packing = Packing(
        form=form,  # pyright: ignore[reportArgumentType]
        shape=(64, 96),
        parts=tuple(PackedPart(dtype, array.shape) for dtype, array in parts),
        bits=bits,
        turned=form == "gptq",
    )
    data = memoryview(b"".join(array.tobytes() for _, array in parts))
    whole = unpacked((packing,), data)
    monkeypatch.setattr(packed, "_PIECE", 64)
    assert np.array_equal(unpacked((packing,), data), whole)


def test_packings_follow_one_another():
    twice = unpacked((FLOAT8, FLOAT8), memoryview(float8_bytes() * 2))
    once = unpacked((FLOAT8,), memoryview(float8_bytes()))
    assert np.array_equal(twice, np.concatenate([once, once]))


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused(change: int):
    data = (float8_bytes() + b"\0")[: packed_bytes((FLOAT8,)) + change]
    with pytest.raises(GraphError, match="takes 40 bytes, "):
        unpacked((FLOAT8,), memoryview(data))


def test_an_order_beyond_the_groups_is_refused():
    packing = Packing(
        form="packed_int",
        shape=(1, 8),
        parts=(
            PackedPart("int32", (1, 1)),
            PackedPart("float32", (1, 2)),
            PackedPart("int32", (0,)),
            PackedPart("int32", (8,)),
        ),
        bits=4,
    )
    data = np.array([1], np.int32).tobytes() + np.ones(2, np.float32).tobytes()
    good, bad = (np.array([0, 1, 1, 0, 1, 0, 1, last], np.int32).tobytes() for last in (1, 2))
    unpacked((packing,), memoryview(data + good))
    with pytest.raises(GraphError, match="names group 2 of 2"):
        unpacked((packing,), memoryview(data + bad))


sizes = st.integers(-1, 70)
shapes = st.lists(sizes, max_size=4).map(tuple)
parts = st.builds(PackedPart, st.sampled_from([*packed._ITEMSIZE_BYTES, "float64"]), shapes)
packings = st.builds(
    Packing,
    form=st.sampled_from(["gguf", "float8", "float4", "gptq", "awq", "packed_int", "int8", "codes4"]),
    shape=shapes,
    parts=st.lists(parts, max_size=5).map(tuple),
    kind=st.sampled_from(["", "Q8_0", "Q4_K", "F16", "none"]),
    bits=st.integers(-1, 9),
    group=st.integers(-1, 70),
    block=st.none() | st.tuples(sizes, sizes),
    turned=st.booleans(),
    heads=st.integers(-1, 5),
)


@given(packings, st.binary(max_size=64))
def test_a_received_packing_is_unpacked_or_refused(packing: Packing, data: bytes):
    """Nothing else happens: a graph is a stranger's."""
    again = msgspec.json.decode(msgspec.json.encode(packing), type=Packing)
    try:
        check_packing(again)
    except GraphError:
        return
    needed = packed_bytes((again,))
    if needed < 2**16 and prod(again.shape) < 2**18:
        try:
            made = unpacked((again,), memoryview((data * (needed // max(len(data), 1) + 1) + bytes(needed))[:needed]))
        except GraphError:
            return
        assert made.size == prod(again.shape)


def test_a_graph_with_a_false_packing_is_refused(model: Graph):
    value, spec = next((value, spec) for value, spec in model.params.items() if len(spec.shape) == 2)
    rows, columns = spec.shape
    fitting = msgspec.structs.replace(
        FLOAT8,
        shape=spec.shape,
        parts=(PackedPart("float8_e4m3fn", spec.shape), PackedPart("float32", (-(-rows // 3), -(-columns // 4)))),
    )

    def with_packing(packing: Packing, **changes: object) -> Graph:
        changed = msgspec.structs.replace(spec, **{"packed": (packing,), "trainable": False, **changes})
        return msgspec.structs.replace(model, params={**model.params, value: changed})

    validate(with_packing(fitting))
    with pytest.raises(GraphError, match="frozen"):
        validate(with_packing(fitting, trainable=True))
    with pytest.raises(GraphError, match="can't be packed as float8"):
        validate(with_packing(msgspec.structs.replace(fitting, block=(1, 1))))
    with pytest.raises(GraphError, match="can't come packed as 24 numbers"):
        validate(with_packing(FLOAT8))
