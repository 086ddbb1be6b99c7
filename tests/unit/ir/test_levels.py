"""Levels of packed matrices: the numbers that unpacking gives, bit for bit, in no more memory than is said."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fusionai.ir import levels
from fusionai.ir.levels import LAYOUTS, LevelLayout, level_layout, levels_of, numbers_of
from fusionai.ir.schema import PackedPart, Packing, ParamSpec
from fusionai.ir.unpacking import unpacked
from fusionai.primitives.errors import GraphError
from fusionai.storage.quantised_files import quantised_files
from harness.quantised_weights import FORMS

KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")


def spec_of(*packings: Packing) -> ParamSpec:
    return ParamSpec(key="w", kind="parameter", shape=packings[0].shape, dtype="float32", packed=packings)


def assert_equal(packing: Packing, data: bytes, layout: LevelLayout) -> None:
    assert level_layout(spec_of(packing)) == layout
    rows = packing.shape[0]
    read = levels_of(spec_of(packing), layout, memoryview(data))
    expected = unpacked((packing,), memoryview(data)).reshape(packing.shape)
    for first, last in ((0, rows), (rows // 2, rows), (rows - 1, rows)):
        made = read(np.arange(first, last))
        assert layout.bits == 8 or made.levels.max() < 16
        assert made.levels.dtype == (np.int8 if layout.bits == 8 and not layout.floats else np.uint8)
        assert np.array_equal(numbers_of(made, layout), expected[first:last])


def gguf_matrix(kind: str, rows: int, columns: int, seed: int, *, heads: int = 0) -> tuple[Packing, bytes]:
    """Random blocks of a GGUF type with finite scales."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    generator = np.random.default_rng(seed)
    width, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows * columns // width, block_bytes), dtype=np.uint8)
    fields = levels._FIELDS[kind]
    for where in (fields.factor, fields.base):
        if where is not None:
            halves = generator.normal(size=(len(blocks), 1)) * 10.0 ** generator.integers(-7, 3, (len(blocks), 1))
            blocks[:, where] = halves.astype(np.float16).view(np.uint8)
    part = PackedPart("uint8", (rows, columns // width * block_bytes))
    return Packing(form="gguf", shape=(rows, columns), parts=(part,), kind=kind, heads=heads), blocks.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), blocks=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_levels_of_gguf_are_its_numbers(kind: str, seed: int, blocks: int):
    packing, data = gguf_matrix(kind, 6, 256 * blocks, seed)
    layout = level_layout(spec_of(packing))
    assert layout is not None
    assert_equal(packing, data, layout)


def test_rows_come_in_the_order_of_the_model():
    """llama.cpp keeps the two halves of a head's rotation beside each other."""
    packing, data = gguf_matrix("Q4_K", 16, 256, 1, heads=2)
    assert_equal(packing, data, LevelLayout(4, 32, 8))


EXPECTED = {
    "gptq-4": LevelLayout(4, 64),
    "gptq-8": LevelLayout(8, 64),
    "awq": LevelLayout(4, 64),
    "nf4": LevelLayout(4, 64, floats="nf4"),
    "fp8": LevelLayout(8, 64, floats="e4m3"),
    "fp8-whole": LevelLayout(8, 128, floats="e4m3"),
}
WRITTEN = {
    "ct-int4": LevelLayout(4, 32),
    "ct-int4-zeros": LevelLayout(4, 64),
    "ct-int3": LevelLayout(4, 64),
    "ct-int8": LevelLayout(8, 128),
    "ct-fp8": LevelLayout(8, 128, floats="e4m3"),
    "ct-mxfp4": LevelLayout(4, 32, floats="e2m1"),
    "ct-nvfp4": LevelLayout(4, 16, floats="e2m1"),
    "nf4": LevelLayout(4, 64, floats="nf4"),
    "nf4-nested": LevelLayout(4, 64, floats="nf4"),
}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_form_has_levels_or_is_unpacked(name: str, tmp_path: Path):
    form = FORMS[name]
    tensors, expected = form.write("w.weight", torch.randn(64, 128, generator=torch.Generator().manual_seed(3)))
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
    (matrix,) = quantised_files(form.scheme, [tmp_path / "model.safetensors"]).matrices.values()
    (packing,) = matrix.packings
    if name not in EXPECTED:
        assert level_layout(spec_of(packing)) is None
        return
    assert_equal(packing, bytes(matrix.stored.mapped()), EXPECTED[name])
    assert torch.equal(torch.from_numpy(matrix.numbers()).reshape(64, 128), expected)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "data" / "quantised").glob("*.safetensors")))
def test_matrices_that_libraries_wrote_have_levels_or_are_unpacked(path: Path):
    with safe_open(path, framework="np") as file:
        scheme = json.loads(file.metadata()["quantization_config"])
    for matrix in quantised_files(scheme, [path]).matrices.values():
        layout = level_layout(spec_of(*matrix.packings))
        assert layout == WRITTEN.get(path.stem)
        if layout is not None:
            assert_equal(matrix.packings[0], bytes(matrix.stored.mapped()), layout)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_stack_has_its_matrices_rows_one_below_the_other(kind: str):
    """Experts of a GGUF file: for each of three, a matrix of gates and one of upper halves."""
    parts = [gguf_matrix(kind, 10, 256, seed) for seed in range(6)]
    spec = ParamSpec(
        key="w", kind="parameter", shape=(3, 20, 256), dtype="float32", packed=tuple(packing for packing, _ in parts)
    )
    layout, data = level_layout(spec), memoryview(b"".join(some for _, some in parts))
    assert layout == level_layout(spec_of(parts[0][0]))
    expected = unpacked(spec.packed, data).reshape(60, 256)
    read = levels_of(spec, layout, data)
    for rows in (np.arange(60), np.arange(8, 12), np.array([59, 0, 31, 30, 31])):
        assert np.array_equal(numbers_of(read(rows), layout), expected[rows])
    with pytest.raises(GraphError, match="bytes"):
        levels_of(spec, layout, memoryview(bytes(data) + b"0"))
    mixed = (*spec.packed[:5], gguf_matrix("Q4_0", 10, 256, 1)[0])
    assert level_layout(msgspec.structs.replace(spec, packed=mixed)) is None, "of two layouts"
    narrow = msgspec.structs.replace(spec, shape=(3, 40, 128))
    assert level_layout(narrow) is None, "a packed row is two rows"


def test_a_stack_that_products_read_turned_lies_in_the_file_as_they_read_it():
    """gpt-oss: the module has [experts, in, out], its file [experts, out, in / 32 blocks]."""
    generator = np.random.default_rng(2)
    codes, scales = (
        generator.integers(low, high, 3 * 48 * size, np.uint8) for low, high, size in ((0, 256, 32), (120, 130, 2))
    )
    parts = (
        PackedPart("uint8", (3, 48, 2, 16)), PackedPart("float8_e8m0fnu", (3, 48, 2)), PackedPart("float32", (0,)),
    )  # fmt: skip
    packing = Packing(form="float4", shape=(3, 64, 48), parts=parts, turned=True)
    spec = ParamSpec(key="w", kind="parameter", shape=packing.shape, dtype="float32", packed=(packing,))
    data = memoryview(codes.tobytes() + scales.tobytes())
    assert level_layout(spec) is None
    layout = level_layout(spec, transposed=True)
    assert layout == LevelLayout(4, 32, floats="e2m1")
    expected = unpacked((packing,), data).reshape(3, 64, 48).swapaxes(1, 2).reshape(144, 64)
    made = levels_of(spec, layout, data, transposed=True)(np.arange(144))
    assert np.array_equal(numbers_of(made, layout), expected)


def test_a_layout_says_its_bytes():
    assert LevelLayout(4, 128).shared_bytes == 4 + 1 + 64
    assert LevelLayout(4, 32, 8).shared_bytes == 8 + 2 * 8 + 128
    assert LevelLayout(8, 128, floats="e4m3").shared_bytes == 4 + 128
    assert len(set(LAYOUTS)) == len(LAYOUTS)


def test_codes_of_fp8_that_are_no_numbers_are_refused():
    parts = (PackedPart("float8_e4m3fn", (1, 128)), PackedPart("float32", (1,)))
    packing = Packing(form="float8", shape=(1, 128), parts=parts)
    layout = level_layout(spec_of(packing))
    assert layout == LevelLayout(8, 128, floats="e4m3")
    scale = np.ones(1, np.float32).tobytes()
    assert levels_of(spec_of(packing), layout, memoryview(b"\x7e" * 128 + scale))(np.arange(1)).levels.shape == (1, 128)
    for code in (b"\x7f", b"\xff"):
        with pytest.raises(GraphError, match="not finite"):
            levels_of(spec_of(packing), layout, memoryview(b"\x01" * 127 + code + scale))
