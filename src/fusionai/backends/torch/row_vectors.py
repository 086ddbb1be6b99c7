"""Vector instructions from which compiled kernels are built, and the wrapper that makes them callable from numba.

Numba compiles scalar Python; operations that must be single vector instructions are written for LLVM here. Neighbours:
`row_products` and `row_kernels`.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

from fusionai.backends.torch.row_code import Form
from fusionai.ir.serving_cost import INT8_SCALE_BYTES


class _BFloatType(ir.types._BaseFloatType):
    """LLVM's bfloat type, which llvmlite lacks."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloatType._create_instance()
LANES: Final = 16
"""Numbers of a vector. On processors with shorter registers, LLVM splits vectors."""
BFLOAT: Final = _BFloatType()
FLOAT, HALF, SHORT, INT, LONG = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
SIZE: Final = {Form.FP32: 4, Form.BF16: 2, Form.FP16: 2, Form.INT8: 1}
"""Bytes of a number, without the scale of a vector."""
_ADDRESSES: Final = 7
"""Arguments of every intrinsic: `w`, `w_step`, `x`, `x_step`, `y`, `y_step`, `count`."""
_T = TypeVar("_T")
LEVEL: Final = torch.backends.cpu.get_cpu_capability()
"""Instruction set that torch uses; a user can lower it by an environment variable."""
_INTEL_LIKE: Final = platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")


def _generates(feature: str) -> bool:
    """Return whether the x86 processor that code is generated for has a feature."""
    if config.CPU_NAME is None:
        return get_host_cpu_features().get(feature, False)
    return f"+{feature}" in (config.CPU_FEATURES or "")


HALF_INSTRUCTIONS: Final[bool] = not _INTEL_LIKE or _generates("f16c")
"""Whether the processor that code is generated for converts float16 to float32. Otherwise LLVM calls a function that
does not exist, which ends the process."""


def by_registers(wide: _T, avx2: _T, other: _T) -> _T:
    """Return the value for this processor: `wide` for 32 vector registers of 16 numbers, `avx2` for 16 of 8, `other`
    for 16 of 4. Processors other than x86 have 32 of 4, as much as the second."""
    if LEVEL.startswith("AVX512"):
        return wide
    return other if _INTEL_LIKE and LEVEL == "DEFAULT" else avx2


def at_address(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def load_wide(builder: Any, form: Form, address: Any) -> Any:
    """Return LANES values as float32."""
    return _load(builder, form, address, lambda kind: ir.VectorType(kind, LANES), lambda bits: [bits] * LANES)


def load_one(builder: Any, form: Form, address: Any) -> Any:
    return _load(builder, form, address, lambda kind: kind, lambda bits: bits)


def _load(builder: Any, form: Form, address: Any, many: Callable[[Any], Any], spread: Callable[[int], Any]) -> Any:
    """Return numbers as float32. `many`: type of one -> type of all; `spread`: returns a number for every lane."""
    match form:
        case Form.FP32:
            return builder.load(at_address(builder, address, many(FLOAT)), align=4)
        case Form.FP16 if HALF_INSTRUCTIONS:
            return builder.fpext(builder.load(at_address(builder, address, many(HALF)), align=2), many(FLOAT))
        case Form.INT8:  # without the vector's scale
            levels = builder.load(at_address(builder, address, many(ir.IntType(8))), align=1)
            return builder.sitofp(builder.sext(levels, many(INT)), many(FLOAT))
    bits = builder.zext(builder.load(at_address(builder, address, many(SHORT)), align=2), many(INT))
    if form is Form.FP16:
        return of_half(builder, bits, spread)
    return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, spread(16))), many(FLOAT))


def scale_behind(builder: Any, vector: Any, count: Any) -> Any:
    """Return the scale of a vector of `count` levels at this address."""
    return builder.load(at_address(builder, builder.add(vector, count), FLOAT), align=1)


_FP32, _, _, _INT8 = (int(form) for form in Form)


@njit(nogil=True)
def vector_bytes(form: Any, width: Any) -> Any:
    """Return the bytes of a vector of this width in a cache."""
    if form == _FP32:
        return 4 * width
    return width + INT8_SCALE_BYTES if form == _INT8 else 2 * width


def of_half(builder: Any, bits: Any, spread: Callable[[int], Any]) -> Any:
    """Return the exact float32 values of float16 bits held in 32-bit integers, by integer operations and one product
    with a power of two."""

    def number(value: int) -> Any:
        return ir.Constant(bits.type, spread(value))

    kind = FLOATS if isinstance(bits.type, ir.VectorType) else FLOAT
    size = builder.shl(builder.and_(bits, number(0x7FFF)), number(13))
    scale = builder.bitcast(number(0x77800000), kind)  # 2**112
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, kind), scale), bits.type)
    beyond = builder.icmp_unsigned(">=", size, number(0x0F800000))
    whole = builder.select(beyond, builder.or_(size, number(0x7F800000)), finite)
    sign = builder.shl(builder.and_(bits, number(0x8000)), number(16))
    return builder.bitcast(builder.or_(whole, sign), kind)


def looked_up(builder: Any, table: list[float], places: Any) -> Any:
    """Return the numbers at places 0 to 15, one per lane, of a table of 16."""
    if _INTEL_LIKE and _generates("avx512f"):
        kind = ir.FunctionType(FLOATS, [FLOATS, WORDS])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return builder.call(permute, [ir.Constant(FLOATS, table), places])
    # Places of four bits: each bit chooses between halves of what is left.
    left = [ir.Constant(FLOATS, [value] * LANES) for value in table]
    for bit in range(4):
        odd = builder.and_(places, ir.Constant(WORDS, [1 << bit] * LANES))
        chosen = builder.icmp_unsigned("!=", odd, ir.Constant(WORDS, [0] * LANES))
        left = [builder.select(chosen, second, first) for first, second in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def spread(builder: Any, value: Any) -> Any:
    """Return a vector with `value` in all lanes."""
    kind = ir.VectorType(value.type, LANES)
    lone = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    return builder.shuffle_vector(lone, lone, ir.Constant(WORDS, [0] * LANES))


def fused(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.{name}")


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch into the core's own cache. Harmless if the address is not mapped."""
    pointer = ir.IntType(8).as_pointer()
    fetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
    )
    read, nearness, data = (ir.Constant(INT, value) for value in (0, 2, 1))
    builder.call(fetch, [at_address(builder, address, ir.IntType(8)), read, nearness, data])


def int64(value: int) -> Any:
    return ir.Constant(LONG, value)


def folded(builder: Any, vectors: list[Any]) -> list[Any]:
    """Return the sum of all lanes of each vector, by adding the upper half to the lower half repeatedly; several
    vectors are folded at once."""
    width, count = LANES, len(vectors)
    while width > 1:
        half = width // 2
        pairs = [(v, v) for v in vectors] if len(vectors) == 1 else list(zip(vectors[::2], vectors[1::2], strict=True))
        lanes = vectors[0].type.count
        total = lanes // 2 if len(vectors) == 1 else lanes
        low = [lane for lane in range(2 * lanes) if lane % width < half][:total]
        places = ir.VectorType(INT, total)
        vectors = [
            builder.fadd(
                builder.shuffle_vector(first, second, ir.Constant(places, low)),
                builder.shuffle_vector(first, second, ir.Constant(places, [lane + half for lane in low])),
            )
            for first, second in pairs
        ]
        width = half
    lanes = vectors[0].type.count
    return [builder.extract_element(vectors[n // lanes], ir.Constant(INT, n % lanes)) for n in range(count)]


def intrinsic_of(name: str, codegen: Callable[..., Any]) -> Any:
    """Return an intrinsic that kernels can call. It is a separate LLVM function: inlined at every call it would take
    minutes to compile."""

    def made(_typing: Any, w: Any, w_step: Any, x: Any, x_step: Any, y: Any, y_step: Any, count: Any) -> Any:
        del w, w_step, x, x_step, y, y_step, count

        def void(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [LONG] * _ADDRESSES)
            function = cgutils.get_or_insert_function(builder.module, kind, f"fusionai_{name}")
            if function.is_declaration:
                function.linkage = "linkonce_odr"
                function.attributes.add("noinline")
                inner = ir.IRBuilder(function.append_basic_block("entry"))
                codegen(inner, function.args)
                inner.ret_void()
            builder.call(function, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * _ADDRESSES), void

    return intrinsic(made)


def _as_half(builder: Any, value: Any) -> Any:
    """Return the bits of a float32 as float16, rounded to nearest even. Uses integers, because on processors without a
    conversion instruction LLVM would call a function that does not exist."""

    def number(bits: int) -> Any:
        return ir.Constant(INT, bits)

    bits = builder.bitcast(value, INT)
    sign, size = builder.and_(bits, number(0x80000000)), builder.and_(bits, number(0x7FFFFFFF))
    # Below 2**-14: adding one half rounds at float16's last bit.
    half = builder.bitcast(number(0x3F000000), FLOAT)
    small = builder.sub(builder.bitcast(builder.fadd(builder.bitcast(size, FLOAT), half), INT), number(0x3F000000))
    odd = builder.and_(builder.lshr(size, number(13)), number(1))
    near = builder.lshr(builder.add(builder.add(size, number(0xC8000FFF)), odd), number(13))
    finite = builder.select(builder.icmp_unsigned("<", size, number(0x38800000)), small, near)
    # Values of 2**16 or more become infinity; NaN stays NaN.
    beyond = builder.select(builder.icmp_unsigned(">", size, number(0x7F800000)), number(0x7E00), number(0x7C00))
    whole = builder.select(builder.icmp_unsigned(">=", size, number(0x47800000)), beyond, finite)
    return builder.trunc(builder.or_(whole, builder.lshr(sign, number(16))), SHORT)


def keep(form: Form) -> Any:
    """Return an intrinsic that stores `count` float32 values from x at w, rounded to nearest even."""
    size = SIZE[form]

    def codegen(builder: Any, args: Any) -> None:
        w, _, x, _, _, _, count = args
        with cgutils.for_range(builder, count) as loop:
            value = load_one(builder, Form.FP32, builder.add(x, builder.mul(loop.index, int64(4))))
            address = builder.add(w, builder.mul(loop.index, int64(size)))
            match form:
                case Form.FP32:
                    builder.store(value, at_address(builder, address, FLOAT), align=4)
                case Form.FP16:
                    builder.store(_as_half(builder, value), at_address(builder, address, SHORT), align=2)
                case Form.BF16:
                    bits = builder.bitcast(value, INT)
                    odd = builder.and_(builder.lshr(bits, ir.Constant(INT, 16)), ir.Constant(INT, 1))
                    near = builder.add(builder.add(bits, ir.Constant(INT, 0x7FFF)), odd)
                    # The NaN's payload must not overflow into infinity.
                    numeric = builder.fcmp_ordered("ord", value, value)
                    near = builder.select(numeric, near, ir.Constant(INT, 0x7FC00000))
                    short = builder.trunc(builder.lshr(near, ir.Constant(INT, 16)), SHORT)
                    builder.store(short, at_address(builder, address, SHORT), align=2)

    return intrinsic_of(f"keep_{form.name}", codegen)


def named(function: Any, name: str) -> Any:
    """Give a nested function a name of its own and return it. Numba distinguishes functions of the same name by a
    number that starts anew in each process. If one process loaded code that two others left on disk, such functions
    could call each other's code."""
    function.__name__ = function.__qualname__ = name
    return function


def _call_at(
    _typing: Any, function: Any, w: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any
) -> Any:
    """Return the type and code of an intrinsic that calls a C function of eight integers at an address."""
    del function, w, x, x_step, y, y_step, rows, columns, count

    def call(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, *given = args
        kind = ir.FunctionType(ir.VoidType(), [LONG] * len(given))
        builder.call(at_address(builder, address, kind), given)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), call


call_at: Any = intrinsic(_call_at)


def stamp_of(*files: str, about: str = "") -> int:
    """Return a number for the sources that a compiled function is made from and for what else it depends on (`about`).
    A kernel takes it as a closure variable, which makes it part of the key under which numba caches the code; by
    itself, numba considers only the function's file and the processor."""
    sources = (Path(file).read_bytes() for file in (__file__, *files))
    return int.from_bytes(hashlib.sha256(b"".join((*sources, about.encode()))).digest()[:7])
