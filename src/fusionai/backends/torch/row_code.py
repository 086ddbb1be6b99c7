"""The instructions of a row program: what `row_plan` writes and `row_kernels` runs. Decides the layout of a line.

A line is `LINE` integers. Offsets count float32 elements: within a row's own part of memory, or (operands whose row
flag is 0) from the beginning, where constants are.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

LINE: Final = 24


class Op(IntEnum):
    """Up to `DIV` of two operands, up to `SIN` of one, element by element; from `MEAN` on over the last dimension."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    COPY = 4
    NEG = 5
    SQUARE = 6
    CUBE = 7
    SQRT = 8
    RSQRT = 9
    EXP = 10
    SILU = 11
    SIGMOID = 12
    RELU = 13
    TANH = 14
    GELU = 15
    GELU_TANH = 16
    COS = 17
    SIN = 18
    MEAN = 19
    TOTAL = 20
    LAYER_NORM = 21
    LINEAR = 22
    ATTENTION = 23


class Form(IntEnum):
    """How numbers are kept in memory that isn't the program's own."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class Factor(IntEnum):
    """How a matrix is kept, and what multiplies it: rows of float32, but of bfloat16 for HALVES. Four bits by how many
    weights share a scale."""

    FP32 = 0
    BF16 = 1
    HALVES = 2
    FP16 = 3
    INT8 = 4
    INT4_32 = 5
    INT4_64 = 6
    INT4_128 = 7


class Field(IntEnum):
    """Places in a line; place 0 is the `Op`. Strides belong to `DIMS`, of which the last is the innermost.

    `DIMS`: element-wise three; reductions groups and length; LINEAR columns and summands; ATTENTION query heads, key
    heads, key width. `A` is x or q, `B` k. `EXTRA`: LAYER_NORM eps, weight, bias; LINEAR factor, address, bias, address
    of the product; ATTENTION value width, v, scale, softcap, sinks, number of the cache. Offsets of constants, -1 where
    there is none."""

    DIMS = 1
    OUT = 4
    A = 5
    A_ROW = 6
    B = 7
    B_ROW = 8
    A_STRIDES = 9
    B_STRIDES = 12
    EXTRA = 15
