"""Frozen weights in fewer bits: sizes, what comes back, and who may be kept so."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.ir.schema import ParamSpec, Stored
from fusionai.ir.weights import form_of, group_of, pack_stored, stored_bytes
from fusionai.primitives.errors import GraphError
from harness.opened_weights import unpack_stored

WEIGHTS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([32, 64, 96])),
    elements=st.floats(-1e3, 1e3, width=32),
)


@given(WEIGHTS, st.sampled_from(["bf16", "int8", "int4"]))
def test_what_comes_back_is_within_half_a_level(weight: np.ndarray, form: Stored):
    data = pack_stored(weight, form)
    assert data.size == stored_bytes(weight.shape, form)
    back = unpack_stored(data, weight.shape, form)
    rows = weight.reshape(-1, weight.shape[-1])
    match form:
        case "bf16":
            allowed = np.abs(rows) * 2.0**-8
        case "int8":
            # Half a level, and what rounding the scale to 8 bits may cut off at the ends.
            allowed = np.abs(rows).max(axis=1, keepdims=True) * (0.5 / 127 + 2.0**-8)
        case _:
            group = group_of(weight.shape)
            assert group is not None
            rows = weight.reshape(-1, group)
            spread = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
            # Half a level; scale and middle are rounded to 8 bits.
            allowed = spread * (0.5 / 15 + 15 * 2.0**-9) + np.abs(rows).max(axis=1, keepdims=True) * 2.0**-7
    assert (np.abs(back.reshape(rows.shape) - rows) <= allowed + 1e-6).all()


def test_four_bits_take_four_and_a_half():
    assert stored_bytes((4096, 4096), "int4") == 4096 * 4096 * 4.5 / 8
    assert stored_bytes((4096, 4096), "int8") == 4096 * 4096 + 2 * 4096
    assert stored_bytes((4096, 4096), "bf16") == 2 * 4096 * 4096


def spec(**changes: object) -> ParamSpec:
    fields: dict[str, object] = {"key": "w", "kind": "parameter", "shape": (64, 64), "dtype": "float32"}
    return ParamSpec(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, "int4"),
        ({"shape": (100, 50)}, "int8"),
        ({"trainable": True}, ""),
        ({"kind": "buffer"}, ""),
        ({"dtype": "float16"}, ""),
        ({"shape": (4096,)}, ""),
        ({"shape": (8, 64)}, ""),
    ],
)
def test_who_may_be_kept_in_four_bits(changes: dict[str, object], form: Stored):
    assert form_of(spec(**changes), "int4") == form


def test_what_is_not_a_number_is_refused():
    with pytest.raises(GraphError, match="not finite"):
        pack_stored(np.full((64, 64), np.nan, np.float32), "int8")
