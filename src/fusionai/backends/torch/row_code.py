"""The instruction format of row programs, which `row_plan` writes and `row_kernels` runs.

A line is `LINE` integers. Offsets count float32 elements, from the start of a row's own part of memory or, for operands
whose row flag is 0, from the start of memory, where the constants are.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

LINE: Final = 24
"""Integers of a line."""


class Op(IntEnum):
    """Operators. Up to `DIV`: two operands, element by element; up to `SIN`: one operand, element by element; from
    `MEAN` on: over the last dimension."""

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
    """Storage format of numbers in caches and other memory outside the program."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class Factor(IntEnum):
    """Storage format of a matrix. Rows are multiplied in float32, or in bfloat16 for HALVES. The number behind INT4 is
    how many weights share a scale."""

    FP32 = 0
    BF16 = 1
    HALVES = 2
    FP16 = 3
    INT8 = 4
    INT4_32 = 5
    INT4_64 = 6
    INT4_128 = 7


class Field(IntEnum):
    """Positions in a line; position 0 is the `Op`. Strides belong to `DIMS`, whose last dimension is the innermost.

    `DIMS`: three for elementwise operators; groups and length for reductions; columns and summands for LINEAR; query
    heads, key heads and key width for ATTENTION. `A` is x or q, `B` is k. `EXTRA`: eps, weight, bias for LAYER_NORM;
    format, address, bias, address of the product for LINEAR; value width, v, scale, softcap, sinks, index of the cache
    for ATTENTION. Constants are offsets, -1 if absent.
    """

    DIMS = 1
    OUT = 4
    A = 5
    A_ROW = 6
    B = 7
    B_ROW = 8
    A_STRIDES = 9
    B_STRIDES = 12
    EXTRA = 15
