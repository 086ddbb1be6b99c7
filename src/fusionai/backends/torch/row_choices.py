"""Kernels of `row_kernels` for mixtures of experts: which experts a row takes, and products with their matrices.

A row's bits depend on that row alone: each product of a row with an expert's matrix is summed as `row_products` sums
it, whichever other rows take the same expert. Indices are checked before memory is read at them. Neighbours:
`row_experts` writes the lines, `row_kernels` calls the functions.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from fusionai.backends.torch import row_vectors as vec
from fusionai.backends.torch.row_code import Factor, Field, Form
from fusionai.backends.torch.row_vectors import call_at

_DIMS, _OUT, _A, _A_ROW, _B, _B_ROW, _A_STRIDES, _B_STRIDES, _EXTRA = (int(field) for field in Field)
_HALVES = int(Factor.HALVES)
_KEEP_BF16 = vec.keep(Form.BF16)


@njit(nogil=True)
def softmax(line: Any, mem: Any, base: Any, width: Any, rows: Any) -> Any:
    """Divide the exponentials of a group by their sum, in float64, so that a larger number never becomes a smaller
    one."""
    groups, n = line[_DIMS], line[_DIMS + 1]
    for row in range(rows):
        for group in range(groups):
            a = base + row * width + line[_A] + group * n
            out = base + row * width + line[_OUT] + group * n
            top = np.float64(mem[a])
            for i in range(n):
                top = max(top, np.float64(mem[a + i]))
            total = 0.0
            for i in range(n):
                total += math.exp(np.float64(mem[a + i]) - top)
            for i in range(n):
                mem[out + i] = np.float32(math.exp(np.float64(mem[a + i]) - top) / total)


# ------------------------------------------------------------------------------------------------- the largest elements
#
# PyTorch takes the largest elements with the algorithms of the C++ library, which also decide which of several equal
# elements are taken and in which order they come. Here are those of GCC's library, which PyTorch uses on Linux. The
# elements are in `mem` from `at` on, their indices from `at + n` on.


@njit(nogil=True)
def _before(x: Any, y: Any) -> Any:
    """Return whether x comes before y: NaN comes before all numbers."""
    return (x != x and y == y) or x > y


@njit(nogil=True)
def _swap(mem: Any, n: Any, x: Any, y: Any) -> Any:
    mem[x], mem[y] = mem[y], mem[x]
    mem[n + x], mem[n + y] = mem[n + y], mem[n + x]


@njit(nogil=True)
def _median_first(mem: Any, n: Any, first: Any, a: Any, b: Any, c: Any) -> Any:
    if _before(mem[a], mem[b]):
        if _before(mem[b], mem[c]):
            _swap(mem, n, first, b)
        elif _before(mem[a], mem[c]):
            _swap(mem, n, first, c)
        else:
            _swap(mem, n, first, a)
    elif _before(mem[a], mem[c]):
        _swap(mem, n, first, a)
    elif _before(mem[b], mem[c]):
        _swap(mem, n, first, c)
    else:
        _swap(mem, n, first, b)


@njit(nogil=True)
def _divided(mem: Any, n: Any, first: Any, last: Any) -> Any:
    """Move the elements that come before the pivot to the front, and return where the others begin."""
    _median_first(mem, n, first, first + 1, first + (last - first) // 2, last - 1)
    pivot = mem[first]
    low, high = first + 1, last
    while True:
        while _before(mem[low], pivot):
            low += 1
        high -= 1
        while _before(pivot, mem[high]):
            high -= 1
        if low >= high:
            return low
        _swap(mem, n, low, high)
        low += 1


@njit(nogil=True)
def _sift(mem: Any, n: Any, first: Any, hole: Any, length: Any, value: Any, index: Any) -> Any:
    """Put an element into the heap whose place `hole` is free."""
    top = second = hole
    while second < (length - 1) // 2:
        second = 2 * (second + 1)
        if _before(mem[first + second], mem[first + second - 1]):
            second -= 1
        mem[first + hole], mem[n + first + hole] = mem[first + second], mem[n + first + second]
        hole = second
    if length % 2 == 0 and second == (length - 2) // 2:
        second = 2 * (second + 1)
        mem[first + hole], mem[n + first + hole] = mem[first + second - 1], mem[n + first + second - 1]
        hole = second - 1
    parent = (hole - 1) // 2
    while hole > top and _before(mem[first + parent], value):
        mem[first + hole], mem[n + first + hole] = mem[first + parent], mem[n + first + parent]
        hole = parent
        parent = (hole - 1) // 2
    mem[first + hole], mem[n + first + hole] = value, index


@njit(nogil=True)
def _pop(mem: Any, n: Any, first: Any, last: Any, place: Any) -> Any:
    """Exchange the element at `place` for the heap's first."""
    value, index = mem[place], mem[n + place]
    mem[place], mem[n + place] = mem[first], mem[n + first]
    _sift(mem, n, first, 0, last - first, value, index)


@njit(nogil=True)
def _heap_select(mem: Any, n: Any, first: Any, middle: Any, last: Any) -> Any:
    """Make a heap of those elements that come first, from `first` to `middle`."""
    length = middle - first
    for parent in range((length - 2) // 2, -1, -1):
        _sift(mem, n, first, parent, length, mem[first + parent], mem[n + first + parent])
    for place in range(middle, last):
        if _before(mem[place], mem[first]):
            _pop(mem, n, first, middle, place)


@njit(nogil=True)
def _inserted(mem: Any, n: Any, first: Any, last: Any) -> Any:
    """Sort by insertion; elements that are equal keep their order."""
    for place in range(first + 1, last):
        value, index = mem[place], mem[n + place]
        hole = place
        while hole > first and _before(value, mem[hole - 1]):
            mem[hole], mem[n + hole] = mem[hole - 1], mem[n + hole - 1]
            hole -= 1
        mem[hole], mem[n + hole] = value, index


@njit(nogil=True)
def _select(mem: Any, n: Any, first: Any, nth: Any, last: Any) -> Any:
    """Move the elements that come first to the places before `nth`, and the next one to `nth`."""
    depth = 0
    while (last - first) >> (depth + 1):
        depth += 1
    depth *= 2
    while last - first > 3:
        if depth == 0:
            _heap_select(mem, n, first, nth + 1, last)
            _swap(mem, n, first, nth)
            return
        depth -= 1
        cut = _divided(mem, n, first, last)
        if cut <= nth:
            first = cut
        else:
            last = cut
    _inserted(mem, n, first, last)


@njit(nogil=True)
def top(line: Any, mem: Any, base: Any, width: Any, rows: Any) -> Any:
    """Take the largest elements of each group, and their indices."""
    groups, n, chosen = line[_DIMS], line[_DIMS + 1], line[_DIMS + 2]
    for row in range(rows):
        own = base + row * width
        at = own + line[_EXTRA + 1]
        for group in range(groups):
            for i in range(n):
                mem[at + i] = mem[own + line[_A] + group * n + i]
                mem[at + n + i] = np.float32(i)
            if chosen * 64 <= n:
                _heap_select(mem, n, at, at + chosen, at + n)
                for last in range(at + chosen - 1, at, -1):
                    _pop(mem, n, at, last, last)
            else:
                _select(mem, n, at, at + chosen - 1, at + n)
                if line[_EXTRA + 2]:
                    _inserted(mem, n, at, at + chosen - 1)
            for i in range(chosen):
                mem[own + line[_OUT] + group * chosen + i] = mem[at + i]
                mem[own + line[_EXTRA] + group * chosen + i] = mem[at + n + i]


# ----------------------------------------------------------------------------------------------------- by their indices


@njit(nogil=True)
def _index(value: Any, length: Any) -> Any:
    """Return a value as an index of `length` elements; -1 if it is none."""
    return np.int64(value) if value >= 0 and value < length else np.int64(-1)


@njit(nogil=True)
def lookup(line: Any, mem: Any, base: Any, width: Any, rows: Any) -> Any:
    """Copy the chosen elements of each group; NaN for an index that is out of range."""
    groups, chosen, floats, length = line[_DIMS], line[_DIMS + 1], line[_DIMS + 2], line[_EXTRA]
    for row in range(rows):
        own = base + row * width
        for group in range(groups):
            source = line[_A] + line[_A_ROW] * own + group * length * floats
            for number in range(group * chosen, (group + 1) * chosen):
                index = _index(mem[own + line[_B] + number], length)
                out = own + line[_OUT] + number * floats
                for i in range(floats):
                    mem[out + i] = mem[source + index * floats + i] if index >= 0 else np.float32(np.nan)


@njit(nogil=True)
def scatter(line: Any, mem: Any, base: Any, width: Any, rows: Any) -> Any:
    """Write a number in place of the chosen elements of each group; an index that is out of range chooses none."""
    groups, chosen, length = line[_DIMS], line[_DIMS + 1], line[_DIMS + 2]
    for row in range(rows):
        own = base + row * width
        for group in range(groups):
            for number in range(group * chosen, (group + 1) * chosen):
                index = _index(mem[own + line[_B] + number], length)
                if index >= 0:
                    mem[own + line[_OUT] + group * length + index] = mem[line[_EXTRA]]


@njit(nogil=True)
def experts(
    line: Any, mem: Any, address: Any, base: Any, width: Any, rows: Any, matrices: Any, scratch: Any, scratch_at: Any
) -> Any:
    """Multiply each operand by the matrix of its expert; NaN for an expert that does not exist. Operands of one expert
    are multiplied together, at most 16, so that a matrix is read once for several rows."""
    columns, count, chosen = line[_DIMS], line[_DIMS + 1], line[_DIMS + 2]
    factor, first, known = line[_EXTRA], line[_EXTRA + 1], line[_EXTRA + 2]
    padded = columns + -columns % 16
    words = (count + 1) // 2 if factor == _HALVES else count
    results = 16 * count
    for pair in range(rows * chosen):
        own = base + pair // chosen * width
        expert = _index(mem[own + line[_B] + pair % chosen], known)
        if expert < 0:
            out = own + line[_OUT] + pair % chosen * columns
            for i in range(columns):
                mem[out + i] = np.float32(np.nan)
            continue
        earlier = 0
        for other in range(pair):
            earlier += _expert_of(line, mem, base, width, other, known) == expert
        if earlier % 16:
            continue
        some = 0
        for other in range(pair, rows * chosen):
            if some < 16 and _expert_of(line, mem, base, width, other, known) == expert:
                x = base + other // chosen * width + line[_A] + other % chosen * line[_A_STRIDES]
                if factor == _HALVES:
                    scratch[(some + 1) * words - 1] = np.float32(0.0)
                    _KEEP_BF16(scratch_at + 4 * some * words, 0, address + 4 * x, 0, 0, 0, count)
                else:
                    for i in range(count):
                        scratch[some * words + i] = mem[x + i]
                some += 1
        call_at(
            line[_EXTRA + 3], matrices[first + expert], scratch_at, 4 * words, scratch_at + 4 * results, 4 * padded,
            some, columns, count,
        )  # fmt: skip
        number = 0
        for other in range(pair, rows * chosen):
            if number < some and _expert_of(line, mem, base, width, other, known) == expert:
                out = base + other // chosen * width + line[_OUT] + other % chosen * columns
                for i in range(columns):
                    mem[out + i] = scratch[results + number * padded + i]
                number += 1


@njit(nogil=True)
def _expert_of(line: Any, mem: Any, base: Any, width: Any, pair: Any, known: Any) -> Any:
    """Return the expert of a row's operand, both counted together as `pair`."""
    chosen = line[_DIMS + 2]
    return _index(mem[base + pair // chosen * width + line[_B] + pair % chosen], known)
