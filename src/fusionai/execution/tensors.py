"""Host tensors on their way: chunks of limited size, numpy arrays and back, and sketches to compare tensors by.

With sketches, two machines can check that they computed the same tensor. A sketch is `SIZE` random projections. Each
projection is the sum of all elements with random signs (the product of a row sign and a column sign) that a
counter-based generator draws from a key. For a difference D between two tensors, the expected square of the difference
of one projection is the squared Euclidean norm of D. The distance of two sketches divided by the length of one is
therefore about |D| / |X|, within a factor of 2.5 (16 projections) in all but one of ten thousand cases. Without the key
it is not possible to make a difference that cancels in all projections; with the key it is, so a key is revealed only
after the work it covers is finished.

Rows are first summed under `ROWS` sign patterns, as one matrix product in the tensor's own dtype; a sketch costs 16
operations per element. Sketches of bitwise equal tensors differ by less than 1e-5 of their length, whatever library
computes the sums. A tensor that contains a number that is not finite gives a sketch that is not finite.

Source: activation fingerprints of DiFR (arXiv 2511.20621), which sketches each row; here one sketch covers a whole
microbatch, in 128 bytes whatever its size. `training.inspection` compares them; `execution.serving.sketches` sketches
each row of served models separately.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor

CHUNK_BYTES: Final = 32 * 2**20
"""Bytes per chunk: large enough to amortise a message, small enough to bound memory. A larger tensor travels alone."""


class Sized(Protocol):
    """A tensor, packed or not."""

    @property
    def nbytes(self) -> int: ...


Some = TypeVar("Some", bound=Sized)


def chunks(entries: Iterable[tuple[str, Some]]) -> Iterator[list[tuple[str, Some]]]:
    """Group entries in order. Every chunk stays below `CHUNK_BYTES`, except one with a single larger tensor."""
    chunk: list[tuple[str, Some]] = []
    size_bytes = 0
    for name, tensor in entries:
        if chunk and size_bytes + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append((name, tensor))
        size_bytes += tensor.nbytes
    if chunk:
        yield chunk


_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


def as_array(tensor: HostTensor) -> np.ndarray:
    """Return the values as a flat array. bfloat16 is widened to float32, which numpy has no type for."""
    if tensor.dtype == "bfloat16":
        widened = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype])


def is_finite(tensor: HostTensor, *, masks: bool = False) -> bool:
    """Return whether all values are finite. `masks`: minus infinity is allowed too, as additive masks contain it."""
    if tensor.dtype not in FLOAT_DTYPES:
        return True
    values = as_array(tensor)
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(values.sum()):  # one pass without an array of answers; a sum may also overflow
            return True
    return bool((values < np.inf).all() if masks else np.isfinite(values).all())


def as_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of `array` as `dtype`, rounded half to even if `dtype` is narrower."""
    if dtype != "bfloat16":
        return array.astype(_NUMPY[dtype], copy=False).tobytes()
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(array)
    return np.where(nan, np.uint16(0x7FC0), (rounded >> np.uint32(16)).astype(np.uint16)).tobytes()


SIZE: Final = 16
"""Number of random projections in a sketch."""
ROWS: Final = 8
"""Number of sign patterns over rows. Each is combined with `SIZE / ROWS` patterns over columns."""
KEY_BYTES: Final = 32
"""Bytes of a sketch key."""


def step_key(secret: bytes, step: int) -> bytes:
    """Return the key for a stage's sketches of `step`. Revealing it reveals the key of no other step."""
    return hashlib.blake2b(str(step).encode(), key=secret, digest_size=KEY_BYTES, person=b"marks of a step").digest()


def sketch(tensors: Mapping[str, HostTensor], key: bytes, *, what: str) -> tuple[float, ...]:
    """Return one sketch of all these values together, in the order of their names. `what` is part of the key, so the
    signs differ between two messages of one step."""
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
    """Return `count` random values of 1 and -1, float64."""
    bits = np.unpackbits(np.frombuffer(generator.bytes(-(-count // 8)), np.uint8), count=count)
    return bits.astype(np.float64) * 2 - 1


def _values(tensor: HostTensor) -> npt.NDArray[np.float64] | npt.NDArray[np.float32]:
    if tensor.dtype in FLOAT_DTYPES:
        return as_array(tensor)
    return np.frombuffer(tensor.data, tensor.dtype).astype(np.float64)
