"""Values of parameters: the initial ones from (seed, key), and storage formats of frozen ones. Independent of
frameworks.

A parameter's program (`ParamSpec.init`) runs over Philox4x64 words. The Philox key is the first 16 bytes of SHA-256 of
`<seed>\\0<key>`; after a step `shared`, the number of that step stands for the key. Step i of the program starts at the
counter whose last word is i. So any peer computes the same bytes in any order. Normal numbers come from the inverse
distribution function (Wichura, Algorithm AS 241, routine PPND16) and not from numpy's own sampler, whose stream may
change between releases. Work is done in chunks, so the peak memory is one tensor and a few hundred kilobytes.

A frozen weight may be stored in bfloat16, in 8 bits (a scale per row) or in 4 bits (a scale and a middle per group of a
row, so that the group's smallest and largest value are representable up to rounding). Only the packed bytes are stored,
sent and put into snapshots; backends unpack them to float32 where they are used. QLoRA (T. Dettmers et al. 2023, arXiv
2305.14314) uses a table of 16 normal quantiles instead; here levels are evenly spaced and every group has its own
middle. A row is everything along the last dimension. Layout in 8 bits: the codes, row by row, then a bfloat16 scale per
row. In 4 bits: two codes per byte, the first in the low half, then scale and middle in bfloat16 per group. In bfloat16:
the upper halves of the numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.ir.schema import Graph, InitOp, ParamSpec, Stored
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import FLOAT_DTYPES, ITEMSIZE_BYTES

CHUNK: Final = 1 << 14
"""Elements per chunk, so that the float64 temporaries stay in a core's cache."""

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


def initialise(
    key: str, shape: tuple[int, ...], dtype: str, init: Sequence[InitOp], seed: int
) -> npt.NDArray[np.generic]:
    """Return a new array of `shape`: values computed in float32, then converted to numpy's `dtype`. numpy has no
    bfloat16: for that the array holds the raw bits as uint16. Raises `GraphError` for an unknown dtype or step."""
    if dtype not in ITEMSIZE_BYTES:
        raise GraphError(f"parameter {key!r}: can't initialise dtype {dtype!r}.")
    values = np.zeros(shape, dtype=np.float32)
    flat = values.reshape(-1)
    source = key
    for step, op in enumerate(init):
        match op.op, op.args:
            case "fill", (value,):
                flat.fill(value)
            case "shared", (number,):
                source = f"\0{int(number)}"
            case "normal", (mean, std):
                _draw(flat, source, seed, step, lambda words, m=mean, s=std: m + s * _quantile(_uniform(words) - 0.5))
            case "uniform", (low, high):
                _draw(flat, source, seed, step, lambda words, a=low, b=high: a + (b - a) * _uniform(words))
            case "mul", (factor,):
                np.multiply(flat, np.float32(factor), out=flat)
            case "add", (term,):
                np.add(flat, np.float32(term), out=flat)
            case "erfinv", ():
                for start in range(0, flat.size, CHUNK):
                    part = flat[start : start + CHUNK]
                    part[:] = _erfinv(part.astype(np.float64))
            case "clamp", (low, high):
                np.clip(flat, np.float32(low), np.float32(high), out=flat)
            case "fill_row", (row, value) if shape and 0 <= row < shape[0]:
                values[int(row)] = value
            case _:
                raise GraphError(f"parameter {key!r}: initialisation step {op.op} does not take {op.args}.")
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    if dtype == "float32":
        return values
    return (values if dtype in FLOAT_DTYPES else np.trunc(values)).astype(np.dtype(dtype))


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even, and return the upper 16 bits. Overwrites `values`."""
    bits = values.view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits >> np.uint32(16)).astype(np.uint16)


def _draw(flat: npt.NDArray[np.float32], key: str, seed: int, step: int, sample: Callable[[Words], Floats]) -> None:
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    words: Any = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=step << 192)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        part[:] = sample(words.random_raw(part.size))


def _uniform(words: Words) -> Floats:
    """Numbers in (0, 1): midpoints of 2**52 equal cells, so that 0 and 1 are never reached."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _erfinv(x: Floats) -> Floats:
    """Inverse error function; -1 and 1 give the infinities, as in torch."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = _quantile(x / 2) / math.sqrt(2.0)
    return np.where(np.abs(x) == 1.0, np.copysign(np.inf, x), found)


def _quantile(q: Floats) -> Floats:
    """Standard normal quantile of 0.5 + q; relative accuracy about 1e-16 (AS 241, 1988)."""
    r = 0.180625 - q * q
    found = q * _ratio(r, _CENTRE)
    tail = np.flatnonzero(np.abs(q) > 0.425)
    if tail.size:
        q_tail = q[tail]
        r_tail = np.sqrt(-np.log(0.5 - np.abs(q_tail)))
        near = _ratio(r_tail - 1.6, _NEAR)
        if (r_tail > 5.0).any():
            near = np.where(r_tail <= 5.0, near, _ratio(r_tail - 5.0, _FAR))
        found[tail] = np.copysign(near, q_tail)
    return found


def _ratio(x: Floats, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Floats:
    above, below = coefficients
    return _polynomial(x, above) / _polynomial(x, below)


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    found = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        found *= x
        found += coefficient
    return found


# Coefficients of PPND16, highest power first: |q| <= 0.425, then r <= 5, then r > 5.
_CENTRE: Final = (
    (
        2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
        1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
        5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
    ),
)  # fmt: skip
_NEAR: Final = (
    (
        7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
        3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
        6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
    ),
)  # fmt: skip
_FAR: Final = (
    (
        2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
        2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
        1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
    ),
)  # fmt: skip


GROUPS: Final = (64, 32)
"""Weights that share a scale: the first size that divides a row is used."""
SMALLEST: Final = 4096
"""Elements below which a tensor stays as it is: packing norms, biases and short rows saves too little."""
_PAIR: Final = 4
"""Bytes of a group's scale and middle."""
_TINY: Final = np.float32(2.0**-126)

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def with_stored(graph: Graph, form: Stored) -> Graph:
    """Return the graph with every frozen float32 weight stored as `form`, where possible."""
    if form == "":
        return graph
    params = {value: msgspec.structs.replace(spec, stored=form_of(spec, form)) for value, spec in graph.params.items()}
    return msgspec.structs.replace(graph, params=params)


def form_of(spec: ParamSpec, wanted: Stored) -> Stored:
    """Return the format in which this parameter can be stored; "" if it stays as it is."""
    frozen = spec.kind == "parameter" and not spec.trainable and spec.dtype == "float32"
    if wanted == "" or not frozen or len(spec.shape) < 2 or prod(spec.shape) < SMALLEST:
        return ""
    return "int8" if wanted == "int4" and group_of(spec.shape) is None else wanted


def group_of(shape: tuple[int, ...]) -> int | None:
    """Return the weights per group of the 4-bit format; None if a row can't be divided into groups."""
    return next((group for group in GROUPS if shape[-1] % group == 0), None)


def stored_bytes(shape: tuple[int, ...], form: Stored) -> int:
    """Return the bytes of a weight stored in a format (not ""). Raises `GraphError` if its shape does not fit."""
    count, rows = prod(shape), prod(shape[:-1])
    match form:
        case "bf16":
            return 2 * count
        case "int8":
            return count + 2 * rows
        case "int4" if (group := group_of(shape)) is not None:
            return count // 2 + _PAIR * count // group
        case _:
            raise GraphError(
                f"a weight of shape {list(shape)} can't be kept as {form!r}: expected rows of a multiple of 32."
            )


def pack_stored(values: npt.NDArray[Any], form: Stored) -> Bytes:
    """Pack float32 [..., columns] into `stored_bytes` bytes. Raises `GraphError` for numbers that are not finite."""
    weight = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(weight).all():
        raise GraphError(
            f"a weight of shape {list(weight.shape)} has numbers that are not finite, so it can't be packed.",
            hint="Fetch or save the weights again.",
        )
    rows = weight.reshape(-1, weight.shape[-1])
    match form:
        case "bf16":
            return bfloat16_bits(rows.copy()).view(np.uint8).reshape(-1)
        case "int8":
            scales = bfloat16_bits(np.maximum(np.abs(rows).max(axis=1) / np.float32(127), _TINY))
            codes = np.clip(np.rint(rows / floats_of_bfloat16(scales)[:, None]), -127, 127).astype(np.int8)
            return np.concatenate([codes.view(np.uint8).reshape(-1), scales.view(np.uint8)])
        case "int4" if (group := group_of(weight.shape)) is not None:
            return _pack_groups(rows, group)
        case _:
            raise GraphError(f"a weight of shape {list(weight.shape)} can't be packed as {form!r}.")


def _pack_groups(rows: Float32s, group: int) -> Bytes:
    """Pack in groups: a value is (level - 8) * scale + middle with level 0..15, rounded against the stored scale and
    middle."""
    grouped = rows.reshape(-1, group)
    low, high = grouped.min(axis=1), grouped.max(axis=1)
    scales = bfloat16_bits(np.maximum((high - low) / np.float32(15), _TINY))
    middles = bfloat16_bits(low + np.float32(8) * floats_of_bfloat16(scales))
    steps = (grouped - floats_of_bfloat16(middles)[:, None]) / floats_of_bfloat16(scales)[:, None] + np.float32(8)
    levels = np.clip(np.rint(steps), 0, 15).astype(np.uint8).reshape(-1, 2)
    codes = levels[:, 0] | (levels[:, 1] << np.uint8(4))
    return np.concatenate([codes, np.stack([scales, middles], axis=1).reshape(-1).view(np.uint8)])


def floats_of_bfloat16(halves: npt.NDArray[np.uint16]) -> Float32s:
    """Return the numbers whose upper 16 bits these are."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
