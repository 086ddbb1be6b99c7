"""float16 by integers, for processors without an instruction for it: exact one way, rounded to even the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="row kernels are machine code, made by numba")

from numba import njit
from numba.core import cgutils

from fusionai.backends.torch import row_vectors
from fusionai.backends.torch.row_code import Form
from fusionai.backends.torch.row_kernels import _KEEP_FP16  # pyright: ignore[reportPrivateUsage]
from fusionai.backends.torch.row_vectors import FLOAT, at_address, int64, intrinsic_of, load_one


@pytest.mark.slow
def test_every_float16_is_read_by_integers_as_by_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_vectors, "HALF_INSTRUCTIONS", False)

    def codegen(builder: Any, args: Any) -> None:
        y, _, x, _, _, _, count = args
        with cgutils.for_range(builder, count) as loop:
            value = load_one(builder, Form.FP16, builder.add(x, builder.mul(loop.index, int64(2))))
            builder.store(value, at_address(builder, builder.add(y, builder.mul(loop.index, int64(4))), FLOAT), align=4)

    read = intrinsic_of("read_halves_by_integers", codegen)

    @njit
    def run(y: Any, x: Any, count: Any) -> None:
        read(y, 0, x, 0, 0, 0, count)

    halves = np.arange(65536, dtype=np.uint16)
    got, expected = np.empty(65536, np.float32), halves.view(np.float16).astype(np.float32)
    run(got.ctypes.data, halves.ctypes.data, 65536)
    numbers = ~np.isnan(expected)
    assert np.array_equal(got.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    assert np.isnan(got[~numbers]).all()


@pytest.mark.slow
def test_float32_is_rounded_to_float16_as_numpy_does() -> None:
    @njit
    def run(y: Any, x: Any, count: Any) -> None:
        _KEEP_FP16(y, 0, x, 0, 0, 0, count)

    generator = np.random.default_rng(0)
    edges = [np.arange(at - 9000, at + 9000) for at in (0x33000000, 0x38800000, 0x477FF000, 0x47800000, 0x7F800000)]
    bits = np.concatenate([generator.integers(0, 2**32, 200_000), *edges, [0, 0x80000000, 0xFF800000]]).astype(
        np.uint32
    )
    given = bits.view(np.float32)
    got = np.empty(len(given), np.float16)
    run(got.ctypes.data, given.ctypes.data, len(given))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = given.astype(np.float16)
    numbers = ~np.isnan(expected)
    assert np.array_equal(got.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(got[~numbers]).all()
