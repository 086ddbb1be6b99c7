"""What backends compute with in place of a packed weight, in numpy: what they are held to."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from fusionai.ir.schema import Stored
from fusionai.ir.weights import Bytes, Floats, group_of


def unpack_stored(data: Bytes, shape: tuple[int, ...], form: Stored) -> Floats:
    """The float32 values of `pack_stored`'s bytes; backends find the same to the bit but for fused multiply-add."""
    count, rows = prod(shape), prod(shape[:-1])
    match form:
        case "int8":
            scales = _floats(data[count:].view(np.uint16))
            found = data[:count].view(np.int8).reshape(rows, -1).astype(np.float32) * scales[:, None]
        case "int4":
            group = group_of(shape)
            assert group is not None, "or it had no size"
            codes = data[: count // 2]
            levels = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, group).astype(np.float32)
            pairs = _floats(data[count // 2 :].view(np.uint16)).reshape(-1, 2)
            found = (levels - np.float32(8)) * pairs[:, :1] + pairs[:, 1:]
        case _:
            found = _floats(data.view(np.uint16))
    return found.reshape(shape)


def _floats(halves: npt.NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
