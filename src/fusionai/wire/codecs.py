"""How boundary tensors are made smaller for slow links: the codecs' names, layouts and exact sizes. Pure.

Decides how many bytes a tensor of so many numbers becomes, which planner, sender and receiver must agree on before
anything is allocated. Neighbours: `execution.codecs` does the arithmetic, `wire.messages` names what was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Packing = Literal["none", "int8", "int4", "int2", "ternary", "senary", "sign", "topk", "subspace"]
"""Of one tensor: 8, 4 or 2 bits a number; one of three or of six values; its sign alone; the largest eighth, in 8 bits
each, and where they stood; a quarter of a turned group, the same quarter of every row, in 8 bits each."""
Exchanged = Literal["none", "int8", "int4", "int2", "ternary", "topk"]
"""What local updates may send parameters in; what packing loses is made up for the next time."""
Told = Literal["mean", "other", "all"]
"""How a stage is told what is agreed on: the mean of all differences, packed; the only other difference, as it came,
whose mean with one's own it is; or, for whoever missed an exchange, what is agreed on itself and the momentum."""
Codec = Literal["none", "int8", "int4", "uneven", "int2", "ternary", "topk", "subspace"]
"""Of what crosses between two stages. `uneven`: activations are senary and gradients signs, for what is lost of
gradients cancels out where they are summed over rows, and what is lost of activations does not. `topk` is what others
do, for comparison. `subspace` lets rows through in a quarter of their dimensions, which are fixed: a model that begins
with it learns to do with them, one that was trained without loses what stood in the others."""
Compression = Literal["none", "int8", "int4", "uneven", "int2", "ternary", "topk", "subspace", "adaptive"]
"""What a job asks for; `adaptive`: its plan chooses for each link."""
LADDER: Final[tuple[Codec, ...]] = ("none", "int8", "int4", "uneven", "int2", "ternary")
"""From exact to what loses most, of those that lose least at their size."""
FOR_PLANS: Final = LADDER[: LADDER.index("uneven") + 1]
"""What a plan may choose or recommend: of smaller ones it was measured that they cost more than a percent of the loss,
or nothing at all."""
SCALE_BYTES: Final = 2
"""A bfloat16 per group."""
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
"""Numbers that share a scale: what makes the rows of a tensor smallest, for no group reaches into the next row (a row
is a token's, and none may know of those behind it). The last group of a row is filled up with zeros."""
PER_BYTE: Final[dict[Packing, int]] = {"int2": 4, "ternary": 5, "senary": 3, "sign": 8}
"""Levels in a byte, as digits: the last byte of a group may have fewer."""
SUBSPACE: Final = 4
"""Of so many dimensions `subspace` keeps one."""
KEPT_PART: Final = 31 / 256
"""Of a group, by `topk`: a level and a place each, so that with its scale 256 numbers take 64 bytes."""
FEWEST: Final = 256
"""Smaller tensors travel as they are."""


class PackedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tensor of the body was before it was packed into `uint8`: levels, then scales. `following`: rows are
    packed as their differences from what rows before them have in common."""

    name: Annotated[str, Meta(max_length=1024)]
    codec: Packing
    dtype: Literal["float32", "bfloat16"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=16)]
    following: bool = False


def codec_between(codecs: Sequence[Codec], producer: int, consumer: int) -> Codec:
    """Of what stage `producer` sends to `consumer`, and gets back; stage -1 is the feed."""
    return codecs[consumer - 1] if producer >= 0 and codecs else "none"


def packing(codec: Codec, *, forward: bool) -> Packing:
    """Of activations, which go forward, or of their gradients."""
    if codec == "uneven":
        return "senary" if forward else "sign"
    return codec


def gently(codec: Codec) -> Codec:
    """What logits travel in where stages use `codec`: their gradients are large at one class and small at thousands;
    with fewer than 8 bits a number nothing is learned from them."""
    return codec if codec in ("none", "int8") else "int8"


def packs(codec: Packing, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether such a tensor is packed where `codec` is in force: floats of some size."""
    return codec != "none" and dtype in ("float32", "bfloat16") and prod(shape) >= FEWEST


def follows(codec: Packing, shape: tuple[int, ...]) -> bool:
    """Whether activations of this shape are packed following: where few bits are left for what rows differ in."""
    return codec not in ("none", "int8", "topk", "subspace") and len(shape) > 1 and shape[-2] > 1


def group_of(codec: Packing, width: int) -> int:
    """Numbers of a group in rows of `width`; the larger of two that make it as small."""
    return min(GROUPS[codec], key=lambda group: (_row_bytes(codec, width, group), -group))


def level_bytes(codec: Packing, group: int) -> int:
    """Of a group's levels: of `ternary` five in a byte, of `senary` three; of `topk` with their places."""
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
    """Numbers that `topk` keeps of a group."""
    return int(group * KEPT_PART)


def packed_bytes(codec: Packing, shape: tuple[int, ...]) -> int:
    """Of a tensor that is packed: the levels of all groups, then their scales."""
    width = shape[-1] if shape else 1
    return prod(shape[:-1]) * _row_bytes(codec, width, group_of(codec, width))


def bytes_on_link(codec: Packing, nbytes: float) -> float:
    """About what `nbytes` of float32 in long rows become."""
    if codec == "none":
        return nbytes
    group = GROUPS[codec][0]
    return nbytes / (4 * group) * (level_bytes(codec, group) + SCALE_BYTES)


def _row_bytes(codec: Packing, width: int, group: int) -> int:
    return -(-width // group) * (level_bytes(codec, group) + SCALE_BYTES)
