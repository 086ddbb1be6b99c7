"""How kernels read the weights of each storage format: vectors of 16 columns in float32, one summand after the other.

Emits LLVM code. Neighbours: `row_blocks` defines the layouts, `row_products` multiplies, `row_vectors` has the
instructions.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from fusionai.backends.torch import row_vectors as vec
from fusionai.backends.torch.row_blocks import GROUPS, LAYOUT_OF, block_bytes
from fusionai.backends.torch.row_code import Factor, Form
from fusionai.ir.levels import LevelLayout
from fusionai.ir.unpacking import TABLES

_BYTES: Final = ir.VectorType(ir.IntType(8), vec.LANES)


def each_summand(
    builder: Any,
    kind: Factor,
    w_at: list[Any],
    count: Any,
    body: Callable[[list[Any], Any], None],
    ahead: Any | None = None,
) -> None:
    """Emit `body(weights of every block in float32, index of the summand)`, ascending. `ahead`: distance in bytes to
    the weights that are prefetched meanwhile."""

    def fetch(off: Any) -> None:
        if ahead is not None:
            for at in w_at:
                vec.prefetch(builder, builder.add(builder.add(at, ahead), off))

    def words_at(off: Any) -> list[Any]:
        return [builder.load(vec.at_address(builder, builder.add(at, off), vec.WORDS), align=4) for at in w_at]

    match kind:
        case Factor.FP32 | Factor.FP16 | Factor.INT8:
            size = {Factor.FP32: 4, Factor.FP16: 2, Factor.INT8: 1}[kind]
            with cgutils.for_range(builder, count) as loop:
                off = builder.mul(loop.index, vec.int64(size * vec.LANES))
                fetch(off)
                body([_loaded(builder, kind, builder.add(at, off)) for at in w_at], loop.index)
        case Factor.BF16:
            pairs = builder.sdiv(count, vec.int64(2))
            with cgutils.for_range(builder, pairs) as loop:
                off = builder.mul(loop.index, vec.int64(4 * vec.LANES))
                fetch(off)
                words, first = words_at(off), builder.mul(loop.index, vec.int64(2))
                body([_first(builder, word) for word in words], first)
                body([_second(builder, word) for word in words], builder.add(first, vec.int64(1)))
            with builder.if_then(builder.icmp_signed("!=", builder.and_(count, vec.int64(1)), vec.int64(0))):
                words = words_at(builder.mul(pairs, vec.int64(4 * vec.LANES)))
                body([_first(builder, word) for word in words], builder.mul(pairs, vec.int64(2)))
        case Factor.INT4_32 | Factor.INT4_64 | Factor.INT4_128:
            _each_grouped(builder, kind, w_at, count, body, fetch)
        case _:
            _each_level(builder, LAYOUT_OF[kind], w_at, count, body, fetch)


def _each_grouped(
    builder: Any,
    kind: Factor,
    w_at: list[Any],
    count: Any,
    body: Callable[[list[Any], Any], None],
    fetch: Callable[[Any], None],
) -> None:
    """Emit `body` for weights of 4 bits, of which a group shares a scale and an offset. `fetch`: prefetches the weights
    that many bytes on."""
    size = next(group for group, known in GROUPS.items() if known is kind)
    fma = vec.fused(builder, vec.FLOATS, "v16f32")
    eight = ir.Constant(vec.FLOATS, [-8.0] * vec.LANES)
    with cgutils.for_range(builder, builder.sdiv(count, vec.int64(size))) as group:
        start = builder.mul(group.index, vec.int64(block_bytes(kind, size)))
        words = [builder.load(vec.at_address(builder, builder.add(at, start), vec.WORDS), align=4) for at in w_at]
        scales = [_first(builder, word) for word in words]
        bases = [
            builder.call(fma, [eight, scale, _second(builder, word)]) for word, scale in zip(words, scales, strict=True)
        ]
        with cgutils.for_range(builder, vec.int64(size // 2)) as loop:
            off = builder.add(
                builder.add(start, vec.int64(4 * vec.LANES)), builder.mul(loop.index, vec.int64(vec.LANES))
            )
            fetch(off)
            first = builder.add(builder.mul(group.index, vec.int64(size)), builder.mul(loop.index, vec.int64(2)))
            for number, floats in enumerate(_halves_of_bytes(builder, [builder.add(at, off) for at in w_at])):
                weights = [builder.call(fma, list(given)) for given in zip(floats, scales, bases, strict=True)]
                body(weights, builder.add(first, vec.int64(number)))


def _each_level(
    builder: Any,
    layout: LevelLayout,
    w_at: list[Any],
    count: Any,
    body: Callable[[list[Any], Any], None],
    fetch: Callable[[Any], None],
) -> None:
    """Emit `body` for the levels of a quantised file, as `ir.levels.numbers_of` computes their numbers. Both products
    of a sum are exact, so that it does not matter whether it is fused with one of them."""
    fma = vec.fused(builder, vec.FLOATS, "v16f32")
    scaled, per_byte = layout.groups > 1, 8 // layout.bits
    head = 4 * vec.LANES * (2 if scaled else 1)
    beside = vec.LANES * (2 if scaled else 0 if layout.floats else 1)
    group_bytes = beside + vec.LANES * layout.group // per_byte

    def floats_at(off: Any) -> list[Any]:
        return [vec.load_wide(builder, Form.FP32, builder.add(at, off)) for at in w_at]

    def small_at(off: Any) -> list[Any]:
        return [builder.sitofp(_bytes(builder, builder.add(at, off), signed=True), vec.FLOATS) for at in w_at]

    def products(ones: list[Any], others: list[Any]) -> list[Any]:
        return [builder.fmul(one, other) for one, other in zip(ones, others, strict=True)]

    with cgutils.for_range(builder, builder.sdiv(count, vec.int64(layout.shared))) as share:
        start = builder.mul(share.index, vec.int64(vec.LANES * layout.shared_bytes))
        factors = floats_at(start)
        if layout.floats == "e4m3":
            factors = [builder.fmul(factor, ir.Constant(vec.FLOATS, [2.0**8] * vec.LANES)) for factor in factors]
        bases = floats_at(builder.add(start, vec.int64(4 * vec.LANES))) if scaled else []
        with cgutils.for_range(builder, vec.int64(layout.groups)) as group:
            at_group = builder.add(
                builder.add(start, vec.int64(head)), builder.mul(group.index, vec.int64(group_bytes))
            )
            scales = products(factors, small_at(at_group)) if scaled else factors
            middles: list[Any] = []
            if layout.floats is None:
                middles = small_at(builder.add(at_group, vec.int64(beside - vec.LANES)))
            offsets = [builder.fneg(offset) for offset in products(bases, middles)] if scaled else []
            before = builder.add(
                builder.mul(share.index, vec.int64(layout.shared)), builder.mul(group.index, vec.int64(layout.group))
            )
            with cgutils.for_range(builder, vec.int64(layout.group // per_byte)) as loop:
                off = builder.add(
                    builder.add(at_group, vec.int64(beside)), builder.mul(loop.index, vec.int64(vec.LANES))
                )
                fetch(off)
                first = builder.add(before, builder.mul(loop.index, vec.int64(per_byte)))
                places = [builder.add(at, off) for at in w_at]
                for number, floats in enumerate(_levels_at(builder, layout, places)):
                    if scaled:
                        weights = [builder.call(fma, list(one)) for one in zip(floats, scales, offsets, strict=True)]
                    elif layout.floats is None:
                        steps = [builder.fsub(one, middle) for one, middle in zip(floats, middles, strict=True)]
                        weights = products(steps, scales)
                    else:
                        weights = products(floats, scales)
                    body(weights, builder.add(first, vec.int64(number)))


def _levels_at(builder: Any, layout: LevelLayout, places: list[Any]) -> list[list[Any]]:
    """Return the values of the codes at each place in float32: of one summand, or of two that share bytes."""
    match layout.floats:
        case None if layout.bits == 8:
            return [[builder.sitofp(_bytes(builder, place, signed=True), vec.FLOATS) for place in places]]
        case None:
            return list(_halves_of_bytes(builder, places))
        case "e4m3" | "e5m2" as kind:
            value = _e4m3 if kind == "e4m3" else _e5m2
            return [[value(builder, place) for place in places]]
        case "e2m1":
            loaded = [_bytes(builder, place, signed=False) for place in places]
            return [
                [_e2m1(builder, codes) for codes in loaded],
                [_e2m1(builder, builder.lshr(codes, _all(4))) for codes in loaded],
            ]
        case "nf4" | "fp4" as kind:
            table = [float(value) for value in TABLES[kind]]
            loaded = [_bytes(builder, place, signed=False) for place in places]
            return [
                [vec.looked_up(builder, table, builder.and_(codes, _all(15))) for codes in loaded],
                [vec.looked_up(builder, table, builder.lshr(codes, _all(4))) for codes in loaded],
            ]


def _e4m3(builder: Any, address: Any) -> Any:
    """Return FP8 codes with 4 bits of exponent as float32, times 2**-8: read as float16 they lack that. The two codes
    that are no numbers are not told apart."""
    kind = ir.VectorType(ir.IntType(16), vec.LANES)
    codes = builder.sext(builder.load(vec.at_address(builder, address, _BYTES), align=1), kind)
    size = builder.and_(builder.shl(codes, _each(kind, 7)), _each(kind, 0x3F80))
    half = builder.or_(size, builder.and_(codes, _each(kind, -0x8000)))
    return _of_half(builder, half)


def _e5m2(builder: Any, address: Any) -> Any:
    """Return FP8 codes with 5 bits of exponent, which are upper halves of float16, as float32."""
    kind = ir.VectorType(ir.IntType(16), vec.LANES)
    codes = builder.zext(builder.load(vec.at_address(builder, address, _BYTES), align=1), kind)
    return _of_half(builder, builder.shl(codes, _each(kind, 8)))


def _of_half(builder: Any, bits: Any) -> Any:
    if vec.HALF_INSTRUCTIONS:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(vec.HALF, vec.LANES)), vec.FLOATS)
    return vec.of_half(builder, builder.zext(bits, vec.WORDS), lambda one: [one] * vec.LANES)


def _each(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * vec.LANES)


def _e2m1(builder: Any, codes: Any) -> Any:
    """Return the values of FP4 codes, in the lower four bits."""
    size = builder.shl(builder.and_(codes, _all(7)), _all(22))
    scale = ir.Constant(vec.FLOATS, [2.0**126] * vec.LANES)
    value = builder.fmul(builder.bitcast(size, vec.FLOATS), scale)
    sign = builder.shl(builder.and_(codes, _all(8)), _all(28))
    return builder.bitcast(builder.or_(builder.bitcast(value, vec.WORDS), sign), vec.FLOATS)


def _halves_of_bytes(builder: Any, places: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the lower and the upper four bits of the bytes at each place, as float32."""
    loaded = [_bytes(builder, place, signed=False) for place in places]
    mask, four = _all(15), _all(4)
    return (
        [builder.sitofp(builder.and_(both, mask), vec.FLOATS) for both in loaded],
        [builder.sitofp(builder.lshr(both, four), vec.FLOATS) for both in loaded],
    )


def _loaded(builder: Any, kind: Factor, address: Any) -> Any:
    if kind is Factor.FP32:
        return vec.load_wide(builder, Form.FP32, address)
    if kind is Factor.INT8:
        return builder.sitofp(_bytes(builder, address, signed=True), vec.FLOATS)
    return vec.load_wide(builder, Form.FP16, address)


def _bytes(builder: Any, address: Any, *, signed: bool) -> Any:
    loaded = builder.load(vec.at_address(builder, address, _BYTES), align=1)
    return builder.sext(loaded, vec.WORDS) if signed else builder.zext(loaded, vec.WORDS)


def _all(value: int) -> Any:
    return ir.Constant(vec.WORDS, [value] * vec.LANES)


def _first(builder: Any, words: Any) -> Any:
    """Return the first bfloat16 of each pair as float32; a bfloat16 is the upper half of its float32."""
    return builder.bitcast(builder.shl(words, _all(16)), vec.FLOATS)


def _second(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, _all(-65536)), vec.FLOATS)
