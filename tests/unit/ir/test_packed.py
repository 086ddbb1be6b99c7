"""Numbers of quantised files: those of the library that wrote them; whatever contradicts itself is refused."""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fusionai.ir import packed, unpacking
from fusionai.ir.levels import level_layout, levels_of, numbers_of
from fusionai.ir.packed import check_packing, packed_bytes
from fusionai.ir.schema import Graph, PackedPart, Packing, ParamSpec
from fusionai.ir.unpacking import unpacked
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError
from fusionai.storage.quantised_files import quantised_files
from harness.quantised_weights import FORMS

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
    made = unpacking.floats_of(part, codes.numpy())
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
    monkeypatch.setattr(unpacking, "_PIECE", 64)
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
    kind=st.sampled_from(["", "Q8_0", "Q4_K", "F16", "0", "1", "nf4", "none"]),
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


@st.composite
def nearly_right(draw: st.DrawFn) -> Packing:
    """A packing that a real file has, with a few changes."""
    packing = draw(st.sampled_from(real_packings()))
    parts = list(packing.parts)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(parts) - 1))
        dtype = draw(st.sampled_from([*packed._ITEMSIZE_BYTES]))
        shape = draw(st.sampled_from([parts[place].shape, parts[place].shape[::-1], (0,), (1,), (7, 3)]))
        parts[place] = PackedPart(dtype, shape)
    changes = {
        "form": st.sampled_from(sorted(unpacking._READERS)),
        "bits": st.integers(-1, 40),
        "group": st.sampled_from([0, 1, 32, 64, 2**40]),
        "block": st.sampled_from([None, (1, 1), (64, 64), (2**40, 1)]),
        "turned": st.booleans(),
        "kind": st.sampled_from(["", "0", "1", "nf4", "fp4", "Q4_0"]),
        "offset": st.sampled_from([0.0, 1.0, -3.0, 1e300, float("nan"), float("inf")]),
        "factor": st.sampled_from([1.0, 1e300, float("nan")]),
        "heads": st.sampled_from([0, 1, 3, 2**40]),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(changes)), max_size=2))
    return msgspec.structs.replace(packing, parts=tuple(parts), **{name: draw(changes[name]) for name in chosen})


@cache
def real_packings() -> tuple[Packing, ...]:
    written = [*(Path(__file__).parents[2] / "data" / "quantised").glob("*.safetensors")]
    found: list[Packing] = []
    for path in sorted(written):
        with safe_open(path, framework="np") as file:
            scheme = json.loads(file.metadata()["quantization_config"])
        found += [packing for one in quantised_files(scheme, [path]).matrices.values() for packing in one.packings]
    with TemporaryDirectory() as directory:
        for form in FORMS.values():
            tensors, _ = form.write("a.weight", torch.ones(64, 128))
            path = Path(directory) / "model.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            matrices = quantised_files(form.scheme, [path]).matrices.values()
            found += [packing for one in matrices for packing in one.packings]
    return (*found, Packing(form="gguf", shape=(8, 256), parts=(PackedPart("uint8", (8, 144)),), kind="Q4_K", heads=2))


def assert_levels_are(numbers: np.ndarray[Any, Any], packing: Packing, data: memoryview) -> None:
    """A stage that keeps the matrix packed multiplies by the same numbers."""
    spec = ParamSpec(key="w", kind="parameter", shape=packing.shape, dtype="float32", packed=(packing,))
    layout = level_layout(spec)
    if layout is not None:
        read = numbers_of(levels_of(spec, layout, data)(np.arange(packing.shape[0])), layout)
        assert np.array_equal(read.reshape(-1), numbers, equal_nan=True)


@given(nearly_right(), st.binary(min_size=1, max_size=64))
def test_a_packing_that_is_nearly_right_is_unpacked_or_refused(packing: Packing, data: bytes):
    try:
        check_packing(packing)
    except GraphError:
        return
    needed = packed_bytes((packing,))
    try:
        made = unpacked((packing,), memoryview((data * (needed // len(data) + 1))[:needed]))
        assert_levels_are(made, packing, memoryview((data * (needed // len(data) + 1))[:needed]))
    except GraphError:
        return
    assert made.size == prod(packing.shape)


@pytest.mark.parametrize("place", [0, 1])
def test_parts_of_another_type_are_refused(place: int):
    for dtype in ("int8", "uint8", "float16", "int32"):
        part = FLOAT8.parts[place]
        if dtype == "float16" and place == 1:
            continue  # scales may be of half precision
        parts = [*FLOAT8.parts]
        parts[place] = PackedPart(dtype, part.shape)
        with pytest.raises(GraphError, match="can't be packed"):
            check_packing(msgspec.structs.replace(FLOAT8, parts=tuple(parts)))


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
