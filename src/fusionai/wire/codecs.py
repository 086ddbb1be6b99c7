"""Codecs that compress boundary tensors for slow links: names, layouts and exact packed sizes. Pure functions.

Planner, sender and receiver compute the packed size of a tensor here, so that they agree before memory is allocated.
Neighbours: `execution.training.codecs` does the arithmetic, `wire.messages` describes packed tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Packing = Literal["none", "int8", "int4", "int2", "ternary", "senary", "sign", "topk", "subspace"]
"""Packing of one tensor. `int8`, `int4`, `int2`: 8, 4 or 2 bits per number. `ternary`, `senary`: one of three or six
levels. `sign`: the sign alone. `topk`: the largest eighth of the numbers, 8 bits each, with their places. `subspace`: a
quarter of the dimensions of a rotated group, the same quarter in every row, 8 bits each."""
Exchanged = Literal["none", "int8", "int4", "int2", "ternary", "topk"]
"""Packings for the parameters exchanged in local updates. The packing error is added to the next exchange."""
Codec = Literal["none", "int8", "int4", "uneven", "int2", "ternary", "topk", "subspace"]
"""Codec of the boundary between two stages. `uneven` packs activations as senary and gradients as signs: packing errors
of gradients cancel out in the sums over rows, errors of activations do not. `topk` is there for comparison with other
systems. `subspace` keeps a quarter of each row's dimensions, the same for all rows: a model trained with it from the
start adapts, a model trained without it loses what the other dimensions held."""
Compression = Literal["none", "int8", "int4", "uneven", "int2", "ternary", "topk", "subspace", "adaptive"]
"""Compression that a job asks for. With `adaptive` its plan chooses a codec for each link."""
LADDER: Final[tuple[Codec, ...]] = ("none", "int8", "int4", "uneven", "int2", "ternary")
"""Codecs from exact to most lossy. Codecs that lose more than another one of the same size are left out."""
FOR_PLANS: Final = LADDER[: LADDER.index("uneven") + 1]
"""Codecs that a plan may choose or recommend. Smaller codecs either cost more than one percent of the loss in
measurements, or have no measurement."""
SCALE_BYTES: Final = 2
"""Bytes of a group's scale, a bfloat16."""
GROUPS: Final[dict[Packing, tuple[int, ...]]] = {
    "int8": (64, 32),
    "int4": (64, 32),
    "int2": (256, 128, 64, 32),
    "ternary": (256, 128, 64, 32),
    "senary": (256, 128, 64, 32),
    "sign": (256, 128, 64, 32),
    "topk": (256, 128, 64, 32),
    "subspace": (256, 128, 64, 32),
}
"""Possible group sizes, in numbers that share a scale. The size that makes a tensor's rows smallest is used. A group
never spans rows, because a row belongs to one token and must not depend on later tokens. The last group of a row is
padded with zeros."""
PER_BYTE: Final[dict[Packing, int]] = {"int2": 4, "ternary": 5, "senary": 3, "sign": 8}
"""Levels per byte, as digits of one number. The last byte of a group may hold fewer."""
SUBSPACE: Final = 4
"""`subspace` keeps one of this many dimensions."""
KEPT_PART: Final = 31 / 256
"""Fraction of a group that `topk` keeps. Each kept number takes a level and a place, so that with the scale 256 numbers
take 64 bytes."""
FEWEST: Final = 256
"""Fewest numbers of a tensor that is packed. Smaller tensors are sent unpacked."""


class PackedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Original name, dtype and shape of a tensor whose body is packed into `uint8`: levels, then scales. `following`:
    rows are packed as differences from what they share with the rows before them."""

    name: Annotated[str, Meta(max_length=1024)]
    codec: Packing
    dtype: Literal["float32", "bfloat16"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=16)]
    following: bool = False


def codec_between(codecs: Sequence[Codec], producer: int, consumer: int) -> Codec:
    """Return the codec between stages `producer` and `consumer`, in both directions. Stage -1 is the data feed."""
    return codecs[consumer - 1] if producer >= 0 and codecs else "none"


def packing(codec: Codec, *, forward: bool) -> Packing:
    """Return the packing of activations (`forward`) or of their gradients."""
    if codec == "uneven":
        return "senary" if forward else "sign"
    return codec


def gently(codec: Codec) -> Codec:
    """Return the codec for logits in a job whose stages use `codec`. Gradients of logits are large at one class and
    small at thousands; with fewer than 8 bits per number nothing is learned from them."""
    return codec if codec in ("none", "int8") else "int8"


def packs(codec: Packing, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this dtype and shape is packed under `codec`: floats, at least `FEWEST` of them."""
    return codec != "none" and dtype in ("float32", "bfloat16") and prod(shape) >= FEWEST


def follows(codec: Packing, shape: tuple[int, ...]) -> bool:
    """Return whether activations of this shape are packed as differences between rows (`PackedTensor.following`). Used
    by codecs with few bits per number."""
    return codec not in ("none", "int8", "topk", "subspace") and len(shape) > 1 and shape[-2] > 1


def group_of(codec: Packing, width: int) -> int:
    """Return the group size for rows of `width` numbers that makes them smallest; of two equal ones the larger."""
    return min(GROUPS[codec], key=lambda group: (_row_bytes(codec, width, group), -group))


def level_bytes(codec: Packing, group: int) -> int:
    """Return the bytes of one group's levels. For `topk` these include the places."""
    match codec:
        case "int8":
            return group
        case "int4":
            return group // 2
        case "topk":
            return 2 * kept(group)
        case "subspace":
            return group // SUBSPACE
        case _:
            return -(-group // PER_BYTE[codec])


def kept(group: int) -> int:
    """Return how many numbers of a group `topk` keeps."""
    return int(group * KEPT_PART)


def packed_bytes(codec: Packing, shape: tuple[int, ...]) -> int:
    """Return the bytes of a packed tensor: the levels of all groups, then their scales."""
    width = shape[-1] if shape else 1
    return prod(shape[:-1]) * _row_bytes(codec, width, group_of(codec, width))


def bytes_on_link(codec: Packing, nbytes: float) -> float:
    """Return the approximate packed size of `nbytes` bytes of float32 in long rows."""
    if codec == "none":
        return nbytes
    group = GROUPS[codec][0]
    return nbytes / (4 * group) * (level_bytes(codec, group) + SCALE_BYTES)


def _row_bytes(codec: Packing, width: int, group: int) -> int:
    return -(-width // group) * (level_bytes(codec, group) + SCALE_BYTES)
