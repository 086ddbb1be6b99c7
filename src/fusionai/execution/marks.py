"""Marks: a boundary tensor as a few numbers by which two machines can tell whether they mean the same one.

A mark is `SIZE` random projections: each the sum of all elements with signs of its own, products of a row's and a
column's, drawn by a counter-based generator from a key. For a difference D between two tensors, the expected square of
each projection's difference is the square of D's Euclidean norm, so the distance of two marks by the length of one is
about |D| / |X|, within a factor of two and a half (16 projections) but for one case in ten thousand. Who does not know
the key can't make a difference that shows in no projection; who knows it can: keys are told when what they are for is
over.

Rows are summed first, under `ROWS` patterns of signs, as one product of matrices in the tensor's own number format: a
mark costs 16 operations per element. Marks of equal bits differ by less than 1e-5 of their length, whatever library
does the sums. What is not finite makes a mark that is not.

Source: activation fingerprints of DiFR (arXiv 2511.20621), there of each row, here of a whole microbatch: 128 bytes
however large it is. Neighbours: `execution.work` and `execution.referee` make marks, `training.inspection` compares;
`execution.serving_marks` marks the rows of served models, each by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.execution.accumulate import as_array
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor

SIZE: Final = 16
ROWS: Final = 8
"""Patterns of signs over rows; each has `SIZE / ROWS` over columns."""
KEY_BYTES: Final = 32


def step_key(secret: bytes, step: int) -> bytes:
    """What a stage makes its marks of `step` under. Telling it gives away no other step's."""
    return hashlib.blake2b(str(step).encode(), key=secret, digest_size=KEY_BYTES, person=b"marks of a step").digest()


def mark(tensors: Mapping[str, HostTensor], key: bytes, *, what: str) -> tuple[float, ...]:
    """Of these values together, in the order of their names. `what` is part of the key: of two messages of one step,
    signs differ."""
    total = np.zeros(SIZE)
    with np.errstate(invalid="ignore", over="ignore"):
        for name in sorted(tensors):
            total += _projected(tensors[name], f"{what}/{name}".encode(), key)
    return tuple(total.tolist())


def _projected(tensor: HostTensor, what: bytes, key: bytes) -> npt.NDArray[np.float64]:
    values = _values(tensor)
    if not values.size:
        return np.zeros(SIZE)
    width = tensor.shape[-1] if tensor.shape else 1
    rows = values.size // width
    seed = hashlib.blake2b(what, key=key, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    over_rows = signs(generator, rows * ROWS).reshape(ROWS, rows).astype(values.dtype)
    over_columns = signs(generator, width * SIZE).reshape(ROWS, SIZE // ROWS, width)
    summed = (over_rows @ values.reshape(rows, width)).astype(np.float64)
    return np.einsum("rc,rkc->rk", summed, over_columns).reshape(SIZE)


def signs(generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """So many of 1 and -1, float64."""
    bits = np.unpackbits(np.frombuffer(generator.bytes(-(-count // 8)), np.uint8), count=count)
    return bits.astype(np.float64) * 2 - 1


def _values(tensor: HostTensor) -> npt.NDArray[np.float64] | npt.NDArray[np.float32]:
    if tensor.dtype in FLOAT_DTYPES:
        return as_array(tensor)
    return np.frombuffer(tensor.data, tensor.dtype).astype(np.float64)
