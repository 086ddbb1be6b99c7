"""Packed boundary tensors: their sizes, how much is lost, the same bits with and without a compiler, bad input."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fusionai.execution.training import codec_kernels as turning
from fusionai.execution.training import codecs
from fusionai.execution.training.codecs import Packed, joined, pack, split, unpack, unpack_all
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.codecs import (
    FEWEST,
    PackedTensor,
    Packing,
    bytes_on_link,
    group_of,
    kept,
    packed_bytes,
    packing,
    packs,
)
from harness.examples import examples

LOSSY: tuple[Packing, ...] = get_args(Packing)[1:]
LOSS = {"int8": 2e-4, "int4": 0.02, "int2": 0.13, "ternary": 0.21, "senary": 0.065, "sign": 0.39, "topk": 0.6}
LOSS["subspace"] = 0.78
"""Part of the energy of normally distributed numbers that a codec may lose."""
SIGNS = "+--+++--++-++--+--++-+--+-++++++--++-++----+-++++-+++---+--++--+"

SMALLER = [3.88, 7.53, 15.52, 18.96, 11.64, 30.12, 16.0, 15.52]
STARTS = [12046, 63851, 7099, 57043]


def floats(array: np.ndarray) -> HostTensor:
    data = np.ascontiguousarray(array, dtype=np.float32)
    return host_tensor("float32", data.shape, data.tobytes())


def array(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(tensor: HostTensor, codec: Packing, *, following: bool = False) -> Packed:
    made = pack("v", tensor, codec, following=following)
    assert isinstance(made, Packed)
    return made


def there_and_back(values: np.ndarray, codec: Packing, *, following: bool = False) -> np.ndarray:
    return array(unpack(packed(floats(values), codec, following=following)))


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(codecs, "available", lambda: False)
        monkeypatch.setattr(turning, "available", lambda: False)
    return request.param


@pytest.mark.parametrize("codec", LOSSY)
def test_little_is_lost_of_normal_numbers_and_of_ones_with_outliers(codec: Packing, way: str) -> None:
    plain = drawn(3, 40, 96)
    spiked = plain.copy()
    spiked[:, :, 5] *= 30
    for values in (plain, spiked, plain * np.float32(1e-25), plain * np.float32(1e25)):
        back = there_and_back(values, codec)
        assert back.shape == values.shape
        most = 0.01 if values is spiked and codec == "int8" else LOSS[codec]
        assert np.square(back - values, dtype=np.float64).sum() <= most * np.square(values, dtype=np.float64).sum()


@pytest.mark.parametrize("codec", ["senary", "int2", "ternary", "sign", "topk"])
def test_one_number_that_rules_its_group_is_kept(codec: Packing, way: str) -> None:
    values = drawn(8, 256) * np.float32(0.01)
    values[:, 17] = 100.0
    assert np.abs(there_and_back(values, codec)[:, 17] - 100.0).max() < 1.0


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("shape", [(FEWEST,), (FEWEST + 1,), (2, 5, 96), (7, 100), (3, 1, 384), (400, 1), (90, 31)])
def test_sizes_are_those_announced(codec: Packing, shape: tuple[int, ...]) -> None:
    values = drawn(*shape)
    made = packed(floats(values), codec)
    assert made.data.shape == (packed_bytes(codec, shape),)
    assert made.data.dtype == "uint8"
    back = there_and_back(values, codec)
    assert back.shape == shape
    assert np.square(back - values).sum() <= {"topk": 0.6, "subspace": 0.9}.get(codec, 0.45) * np.square(values).sum()


@pytest.mark.parametrize(
    ("width", "expected"), [(4096, SMALLER), (384, [3.88, 7.53, 15.06, 18.29, 11.38, 28.44, 16.0, 15.06])]
)
def test_how_much_smaller(width: int, expected: list[float]) -> None:
    assert [round(4 * 8 * width / packed_bytes(codec, (8, width)), 2) for codec in LOSSY] == expected
    assert [round(4096 / bytes_on_link(codec, 4096), 2) for codec in LOSSY] == SMALLER
    both = [bytes_on_link(packing("uneven", forward=forward), 4096) for forward in (True, False)]
    assert round(2 * 4096 / sum(both), 1) == 16.8
    assert bytes_on_link("none", 4096) == 4096


def test_topk_keeps_the_largest_and_forgets_the_others() -> None:
    values = drawn(4, 256)
    back = there_and_back(values, "topk")
    for row, found in zip(values, back, strict=True):
        largest = set(np.argsort(-np.abs(row))[:31].tolist())
        assert set(np.flatnonzero(found).tolist()) <= largest
        places = sorted(largest)
        assert np.abs(found[places] - row[places]).max() <= np.abs(row).max() / 127


@pytest.mark.parametrize("width", [64, 256, 384])
def test_a_subspace_is_a_projection_and_its_own_gradient(width: int, way: str) -> None:
    """Twice is once, and what a gradient keeps is what the activation kept: a model can learn to do with it."""
    x, g = drawn(50, width), drawn(50, width, seed=2)
    kept_x, kept_g = (there_and_back(values, "subspace").astype(np.float64) for values in (x, g))
    again = there_and_back(kept_x.astype(np.float32), "subspace")
    assert np.square(again - kept_x).sum() < 1e-3 * np.square(kept_x).sum()
    assert abs((kept_x * g).sum() - (x * kept_g).sum()) < 0.02 * np.abs(kept_x * g).sum()
    assert np.linalg.matrix_rank(kept_x, tol=0.05 * np.linalg.norm(kept_x, 2)) <= width // 4


def test_places_outside_of_a_group_are_refused() -> None:
    made = packed(floats(drawn(4, 96)), "topk")
    group, some = group_of("topk", 96), kept(group_of("topk", 96))
    assert group < 256
    spoilt = bytearray(made.data.data)
    spoilt[some] = group
    with pytest.raises(ExecutionError, match="expected positions below"):
        joined({"v": host_tensor("uint8", made.data.shape, bytes(spoilt))}, [made.was])


@pytest.mark.parametrize("width", [64, 96, 100, 384, 768, 1000])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_row_s_bits_are_its_own(codec: Packing, width: int) -> None:
    """Rows are tokens: one that knew of the next would see what it is to predict."""
    values = drawn(9, width)
    alone = there_and_back(np.repeat(values[4:5], 9, axis=0), codec)[4]
    assert np.array_equal(there_and_back(values, codec)[4], alone)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    arrays.arrays(
        np.float32,
        st.integers(FEWEST, 700),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
        fill=st.just(np.float32(0)),
    ),
    st.sampled_from(LOSSY),
)
@example(np.concatenate([np.zeros(FEWEST, np.float32), np.array([3.4028235e38, 1.0141205e31], np.float32)]), "int2")
def test_bits_are_the_same_without_a_compiler(values: np.ndarray, codec: Packing) -> None:
    pytest.importorskip("numba", reason="without it there is one way only")
    fast = packed(floats(values), codec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "available", lambda: False)
        patch.setattr(turning, "available", lambda: False)
        slow = packed(floats(values), codec)
        back = unpack(slow)
    assert bytes(fast.data.data) == bytes(slow.data.data)
    assert np.array_equal(array(unpack(fast)), array(back), equal_nan=True)
    width = group_of(codec, values.size)
    for start in range(0, values.size, width):
        group, got = values[start : start + width], array(back)[start : start + width]
        if not np.isfinite(group).all():
            assert np.isnan(got).all(), "what is wrong stays to be seen"


@pytest.mark.parametrize("codec", LOSSY)
def test_zeros_stay_zeros(codec: Packing, way: str) -> None:
    assert not there_and_back(np.zeros((4, 256), np.float32), codec).any()
    tiny = np.full((2, 256), 1e-40, np.float32)
    assert not there_and_back(tiny, codec).any(), "smaller than any scale"


def test_int8_keeps_the_largest_and_is_never_a_level_off(way: str) -> None:
    values = drawn(64, 64)
    back = there_and_back(values, "int8")
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(back - values) <= largest * 1.01 / 254).all()


def test_bfloat16_comes_back_as_bfloat16() -> None:
    bits = (drawn(8, 64).view(np.uint32) >> 16).astype(np.uint16)
    back = unpack(packed(host_tensor("bfloat16", (8, 64), bits.tobytes()), "int8"))
    assert (back.dtype, back.shape) == ("bfloat16", (8, 64))
    wide = [
        (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        for data in (back.data, bits.tobytes())
    ]
    assert np.abs(wide[0] - wide[1]).max() < 0.03


@pytest.mark.parametrize(
    "tensor",
    [
        host_tensor("int64", (300,), bytes(2400)),
        host_tensor("bool", (300,), bytes(300)),
        host_tensor("float64", (300,), bytes(2400)),
        floats(drawn(FEWEST - 1)),
        floats(np.float32(3)),
    ],
)
def test_what_is_small_or_no_float_travels_as_it_is(tensor: HostTensor) -> None:
    assert all(pack("v", tensor, codec) is tensor for codec in get_args(Packing))
    assert unpack(tensor) is tensor


def test_a_message_s_two_halves() -> None:
    carried = {"a": pack("a", floats(drawn(300)), "int4"), "n": host_tensor("int64", (1,), bytes(8))}
    body, was = split(carried)
    assert [one.name for one in was] == ["a"]
    again = joined(body, was)
    assert unpack_all(again)["a"] == unpack(carried["a"])
    assert again["n"] is carried["n"]


@pytest.mark.parametrize(
    ("was", "said"),
    [
        (PackedTensor("b", "int8", "float32", (300,)), "is missing"),
        (PackedTensor("a", "int8", "float32", (301,)), None),
        (PackedTensor("a", "int8", "float32", (3, 100)), "expected float32"),
        (PackedTensor("a", "int8", "float32", (400,)), "expected float32"),
        (PackedTensor("a", "int4", "float32", (300,)), "expected float32"),
        (PackedTensor("a", "int8", "float32", (10, 2)), "expected float32"),
        (PackedTensor("a", "none", "float32", (82,)), "expected float32"),
        (PackedTensor("a", "int8", "float32", (2**40, 2**40)), "expected float32"),
    ],
)
def test_what_can_not_have_been_packed_is_refused_before_anything_is_allocated(
    was: PackedTensor, said: str | None
) -> None:
    body, _ = split({"a": pack("a", floats(drawn(300)), "int8")})
    if said is None:  # as many groups: nobody can tell, and the size is right
        assert joined(body, [was])["a"]
        return
    with pytest.raises(ExecutionError, match=said):
        joined(body, [was])


def test_nothing_is_packed_twice() -> None:
    body, was = split({"a": pack("a", floats(drawn(300)), "int8")})
    with pytest.raises(ExecutionError, match="packed twice"):
        joined(body, (*was, *was))


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_a_turn_spreads_what_stands_out_and_is_undone(width: int, way: str) -> None:
    values = drawn(20, width)
    starts = turning.starts_of(20)
    turned = turning.turned(values.copy(), starts)
    assert np.allclose(np.square(turned).sum(1) * 64 / width, np.square(values).sum(1), rtol=1e-5)
    assert np.allclose(turning.turned_back(turned.copy(), starts), values, atol=1e-5)
    lone = np.zeros((1, width), np.float32)
    lone[0, 3] = 1.0
    assert (np.abs(turning.turned(lone, starts[:1])) == 1 / 8).all()


def test_signs_are_everybodys_for_ever(way: str) -> None:
    assert "".join("-+"[int(sign > 0)] for sign in turning.sequence()[:64]) == SIGNS
    assert turning.starts_of(4).tolist() == STARTS
    assert np.array_equal(turning.starts_of(2**16 + 3)[: 2**16], turning.starts_of(2**16))
    one_each = np.eye(64, dtype=np.float32)
    for start in STARTS:  # the first row of a Hadamard matrix has only ones
        turned = turning.turned(one_each.copy(), np.full(64, start))
        assert np.array_equal(turned[:, 0] * 8, turning.sequence()[start : start + 64])
        assert np.array_equal(turning.turned_back(turned, np.full(64, start)), one_each)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4", "senary", "int2", "ternary", "sign"])
@pytest.mark.parametrize("width", [64, 256, 384])
def test_what_is_lost_of_rows_that_are_alike_cancels_out(codec: Packing, width: int, way: str) -> None:
    """Gradients of tokens have much in common; a weight's gradient is their sum. Were the loss of each row the same,
    the sum would keep it: with two bits a model then learned next to nothing."""
    common = drawn(1, width, seed=3)
    rows = np.repeat(common, 2048, axis=0) + np.float32(0.01) * drawn(2048, width, seed=4)
    back = there_and_back(rows, codec)
    lost = np.square(back - rows).sum(1).mean() / np.square(common).sum()
    mean = back.mean(0)
    # The best levels are shorter than what they stand for: that much is no direction of its own.
    along = float(mean @ common[0] / (common[0] @ common[0]))
    beside = np.square(mean - along * common[0]).sum() / np.square(common).sum()
    assert beside < lost / 100
    assert 1 - 1.5 * lost < along < 1.01


def test_packing_says_whom_it_concerns() -> None:
    assert packs("int8", "float32", (16, 16))
    assert not packs("none", "float32", (16, 16))
    assert not packs("int8", "int64", (16, 16))
    assert not packs("int8", "float32", (FEWEST - 1,))


# ------------------------------------------------------------------------------------------ rows that follow each other

FEW = ("int4", "senary", "int2", "ternary")


@pytest.mark.slow
@pytest.mark.parametrize("codec", FEW)
def test_of_rows_with_much_in_common_little_is_lost_of_what_they_differ_in(codec: Packing, way: str) -> None:
    """As activations are: alone, what they have in common takes the bits."""
    own = drawn(3, 80, 256)
    values = own + np.float32(3) * drawn(1, 1, 256, seed=2)
    alone, follow = (there_and_back(values, codec, following=following) for following in (False, True))
    lost = [
        np.square(back - values, dtype=np.float64)[:, 8:].sum() / np.square(own)[:, 8:].sum()
        for back in (alone, follow)
    ]
    assert lost[1] < 1.25 * LOSS[codec]
    assert lost[0] > 4 * lost[1]


@pytest.mark.parametrize("codec", FEW)
def test_of_rows_that_have_nothing_in_common_hardly_more_is_lost(codec: Packing) -> None:
    values = drawn(2, 256, 256)
    alone, follow = (
        np.square(there_and_back(values, codec, following=following) - values).sum() for following in (False, True)
    )
    assert follow < 1.12 * alone


@pytest.mark.parametrize("shape", [(2, 5, 96), (7, 100), (3, 40, 384), (90, 31), (2, 2, 9, 64)])
@pytest.mark.parametrize("codec", FEW)
def test_no_row_knows_of_those_behind_it(codec: Packing, shape: tuple[int, ...]) -> None:
    values = drawn(*shape)
    back = there_and_back(values, codec, following=True)
    assert back.shape == shape
    for place in {1, shape[-2] // 2, shape[-2] - 1}:
        changed = values.copy()
        changed[..., place:, :] = 7.0
        assert np.array_equal(there_and_back(changed, codec, following=True)[..., :place, :], back[..., :place, :])


@pytest.mark.parametrize("codec", FEW)
def test_following_rows_have_the_same_bits_without_a_compiler(codec: Packing) -> None:
    pytest.importorskip("numba", reason="without it there is one way only")
    values = drawn(2, 33, 100)
    fast = packed(floats(values), codec, following=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "available", lambda: False)
        patch.setattr(turning, "available", lambda: False)
        slow = packed(floats(values), codec, following=True)
        back = unpack(slow)
    assert bytes(fast.data.data) == bytes(slow.data.data)
    assert np.array_equal(array(unpack(fast)), array(back))


@pytest.mark.parametrize("codec", FEW)
def test_a_number_that_is_none_stays_in_its_row(codec: Packing) -> None:
    values = drawn(2, 40, 64)
    values[1, 5, 3] = np.nan
    values[0, 9, 0] = np.inf
    back = there_and_back(values, codec, following=True)
    bad = ~np.isfinite(back).all(2)
    assert np.argwhere(bad).tolist() == [[0, 9], [1, 5]]


def test_int8_does_not_follow() -> None:
    assert not packed(floats(drawn(4, 256)), "int8", following=True).was.following
    assert not packed(floats(drawn(1, 256)), "int2", following=True).was.following
    assert packed(floats(drawn(4, 256)), "int2", following=True).was.following
    with pytest.raises(ExecutionError):
        joined(
            {"a": host_tensor("uint8", (1056,), bytes(1056))}, (PackedTensor("a", "int8", "float32", (4, 256), True),)
        )
