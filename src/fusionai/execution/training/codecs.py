"""Lossy codecs for boundary tensors, from 8 bits down to 1 bit per number.

`int8`: each 64 numbers of a row share a scale; the largest magnitude gets level 127. `topk` (FusionLLM, arXiv
2410.12707, and earlier work) keeps the largest numbers of each group in that format and drops the others. The other
codecs first multiply each group by a Hadamard matrix with fixed signs. This spreads a single large number over the
group (QuIP#, arXiv 2402.04396, does the same with weights), and every group becomes nearly normally distributed. `int4`
then uses levels -7 to 7; `senary`, `int2`, `ternary` and `sign` use the six, four, three and two values with the least
quantisation error for that distribution. `subspace` keeps the first quarter of the transformed numbers, with the same
signs in every row. It is a projection whose gradient is the same projection, so gradients lose nothing more (the idea
of protocol models, arXiv 2506.01260, with a fixed instead of a learned subspace).

Rows of activations have most of their energy in common. Codecs with few bits therefore predict rows (`following`): they
pack the difference from the mean of the earlier rows as the receiver decodes them, so both sides know that mean
(closed-loop predictive coding). A row never depends on later rows.

The same tensor gives the same bits on every machine, so a replay sends the same bytes again. If a group contains a
number that is not finite, the whole group decodes to NaN, so that the error stays visible.

`wire.codecs` defines the packed sizes, `execution.training.codec_kernels` does the Hadamard transforms, and
`execution.training.work` packs and unpacks in the compute thread."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from fusionai.execution.tensors import as_array, as_bytes
from fusionai.execution.training import codec_kernels as kernels
from fusionai.execution.training.codec_kernels import starts_of, turned, turned_back
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.wire.codecs import (
    PER_BYTE,
    PackedTensor,
    Packing,
    follows,
    group_of,
    kept,
    level_bytes,
    packed_bytes,
    packs,
)

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Name = TypeVar("Name", bound=Hashable)

_NAN: Final = np.uint32(0x7FC0)
"""bfloat16 bits of NaN, the scale of a group that contains a number that is not finite."""
_NOT_FINITE: Final = np.uint32(0x7F800000)
"""float32 bits of infinity; magnitudes with these bits or higher are infinite or NaN."""
_TINY: Final = np.uint32(0x03800000)
"""Bits of 2**-120: the inverse of a smaller scale would be infinite. Groups below it are packed as zeros."""
_MOST: Final[dict[Packing, int]] = {"int8": 127, "int4": 7, "topk": 127, "subspace": 127}
"""Largest level of each codec with evenly spaced levels."""


@dataclass(frozen=True, slots=True)
class _Few:
    """Magnitudes of the levels and the borders between them, in standard deviations: the ones with the least squared
    error for a normal distribution (Max 1960, table I). A level of 0 has no sign."""

    levels: tuple[float, ...]
    borders: tuple[float, ...]

    @property
    def signless(self) -> int:
        return int(self.levels[0] == 0)

    @property
    def values(self) -> Floats:
        """Values by code: the magnitudes in ascending order, then their negatives."""
        return np.array([*self.levels, *(-level for level in self.levels[self.signless :])], np.float32)


_FEW: Final[dict[Packing, _Few]] = {
    "int2": _Few((0.4528, 1.5104), (0.9816,)),
    "ternary": _Few((0.0, 1.2240), (0.6120,)),
    "senary": _Few((0.3177, 1.0, 1.8936), (0.6589, 1.4468)),
    "sign": _Few((0.7979,), ()),
}
"""Levels of the codecs with few unevenly spaced levels."""
_PIECE: Final = 8
"""Largest number of rows that are packed together if rows are predicted from earlier ones (chosen)."""
_REMEMBERED: Final = 64
"""Rows over which the running mean extends; older rows count less and less (chosen)."""
_CHUNK: Final = 2**16
"""Numbers processed at a time without compiled loops, so that they stay in the processor's cache (chosen)."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed tensor. `was` describes the original tensor; `data` is `uint8` [bytes]."""

    was: PackedTensor
    data: HostTensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Carried = HostTensor | Packed
"""A tensor as it arrives: unpacked or packed."""


def pack(name: str, tensor: HostTensor, codec: Packing, *, following: bool = False) -> Carried:
    """Pack a tensor, or return it unchanged if the codec does not pack tensors of its dtype and shape. `following`:
    predict each row (along the second-to-last dimension) from earlier ones. It is meant for activations and is ignored
    by codecs that do not predict."""
    if not packs(codec, tensor.dtype, tensor.shape):
        return tensor
    following = following and follows(codec, tensor.shape)
    data = _encoded(as_array(tensor), codec, tensor.shape, following=following)
    assert tensor.dtype in ("float32", "bfloat16")
    was = PackedTensor(name, codec, tensor.dtype, tensor.shape, following)
    return Packed(was, host_tensor("uint8", (data.size,), data.data))


def unpack(carried: Carried) -> HostTensor:
    if isinstance(carried, HostTensor):
        return carried
    was = carried.was
    x = _decoded(np.frombuffer(carried.data.data, np.uint8), was.codec, was.shape, following=was.following)
    if was.dtype == "bfloat16":
        return host_tensor("bfloat16", was.shape, as_bytes(x, "bfloat16"))
    return host_tensor("float32", was.shape, x.data)


def unpack_all(carried: Mapping[Name, Carried]) -> dict[Name, HostTensor]:
    return {name: one if isinstance(one, HostTensor) else unpack(one) for name, one in carried.items()}


def split(carried: Mapping[str, Carried]) -> tuple[dict[str, HostTensor], tuple[PackedTensor, ...]]:
    """Split tensors into the two parts of a message: its body tensors, and descriptions of the packed ones."""
    body = {name: one.data if isinstance(one, Packed) else one for name, one in carried.items()}
    return body, tuple(one.was for one in carried.values() if isinstance(one, Packed))


def joined(body: Mapping[str, HostTensor], packed: Sequence[PackedTensor]) -> dict[str, Carried]:
    """Reverse `split`. Raises `ExecutionError` for descriptions and bodies that `pack` can't have made."""
    carried: dict[str, Carried] = dict(body)
    for was in packed:
        data = carried.get(was.name)
        if not isinstance(data, HostTensor):
            raise ExecutionError(
                f"{was.name!r} is described as packed {'twice' if data is not None else 'but is missing'}."
            )
        packable = packs(was.codec, was.dtype, was.shape) and not (was.following and not follows(was.codec, was.shape))
        expected_bytes = packed_bytes(was.codec, was.shape) if packable else 0
        if not packable or data.dtype != "uint8" or data.nbytes != expected_bytes:
            raise ExecutionError(
                f"expected {was.dtype}{list(was.shape)} as {was.codec} in {expected_bytes} bytes for {was.name!r}, got "
                f"{data.dtype}{list(data.shape)}."
            )
        if was.codec == "topk":
            _check_places(was, data)
        carried[was.name] = Packed(was, data)
    return carried


def _check_places(was: PackedTensor, data: HostTensor) -> None:
    layout = _Layout.of(was.codec, was.shape)
    levels, _ = layout.parts(np.frombuffer(data.data, np.uint8))
    largest = int(levels[..., kept(layout.group) :].max())
    if largest >= layout.group:
        raise ExecutionError(f"expected positions below {layout.group} in topk-packed {was.name!r}, got {largest}.")


# ------------------------------------------------------------------------------------------------------------- codecs


@dataclass(frozen=True, slots=True)
class _Layout:
    """Groups of a tensor `[lead, rows, width]`: `group` numbers each, `per_row` of them in a row padded with zeros."""

    codec: Packing
    lead: int
    rows: int
    width: int
    group: int

    @classmethod
    def of(cls, codec: Packing, shape: tuple[int, ...]) -> _Layout:
        width, rows = shape[-1] if shape else 1, shape[-2] if len(shape) > 1 else 1
        return cls(codec, prod(shape[:-2]), rows, width, group_of(codec, width))

    @property
    def per_row(self) -> int:
        return -(-self.width // self.group)

    @property
    def groups(self) -> int:
        return self.lead * self.rows * self.per_row

    def parts(self, packed: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
        """Split packed bytes into levels [lead, rows, per_row, bytes] and scales [lead, rows, per_row]."""
        split = self.groups * level_bytes(self.codec, self.group)
        rows = (self.lead, self.rows, self.per_row)
        # Levels may end at an odd byte offset; the scales follow there unaligned.
        return packed[:split].reshape(*rows, -1), packed[split:].view(np.uint16).reshape(rows)


def _encoded(x: Floats, codec: Packing, shape: tuple[int, ...], *, following: bool) -> npt.NDArray[np.uint8]:
    layout = _Layout.of(codec, shape)
    rows = x.reshape(layout.lead, layout.rows, layout.width)
    if missing := -layout.width % layout.group:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, missing)))
    out = np.empty(packed_bytes(codec, shape), np.uint8)
    levels, scales = layout.parts(out)
    starts = _starts(layout)
    before = _Before(layout.lead, rows.shape[2])
    for some in _pieces(layout.rows) if following else (slice(None),):
        pseudo_gradients = before.taken_off(rows[:, some]) if following else rows[:, some]
        groups = np.ascontiguousarray(pseudo_gradients).reshape(-1, layout.group)
        own = starts[:, some].reshape(-1)
        made, scale = _quantised(groups, codec, own)
        levels[:, some], scales[:, some] = made.reshape(levels[:, some].shape), scale.reshape(scales[:, some].shape)
        if following:
            before.see(_restored(made, scale, codec, layout.group, own).reshape(pseudo_gradients.shape))
    return out


def _decoded(packed: npt.NDArray[np.uint8], codec: Packing, shape: tuple[int, ...], *, following: bool) -> Floats:
    layout = _Layout.of(codec, shape)
    levels, scales = layout.parts(packed)
    starts = _starts(layout)
    rows = np.empty((layout.lead, layout.rows, layout.per_row * layout.group), np.float32)
    before = _Before(layout.lead, rows.shape[2])
    for some in _pieces(layout.rows) if following else (slice(None),):
        made = np.ascontiguousarray(levels[:, some]).reshape(-1, levels.shape[3])
        scale = np.ascontiguousarray(scales[:, some]).reshape(-1)
        back = _restored(made, scale, codec, layout.group, starts[:, some].reshape(-1))
        pseudo_gradients = back.reshape(rows[:, some].shape)
        rows[:, some] = before.see(pseudo_gradients) if following else pseudo_gradients
    return np.ascontiguousarray(rows[:, :, : layout.width]).reshape(-1)


def _starts(layout: _Layout) -> npt.NDArray[np.int64]:
    """Return where each group's signs start, [lead, rows, per_row]. `subspace` uses the same signs for all rows."""
    shape = (layout.lead, layout.rows, layout.per_row)
    if layout.codec == "subspace":
        return np.tile(starts_of(layout.per_row), layout.lead * layout.rows).reshape(shape)
    return starts_of(layout.groups).reshape(shape)


def _pieces(rows: int) -> Iterator[slice]:
    """Yield row slices that are packed together and predicted from the same earlier rows: one row first, then more."""
    start, most = 0, 1
    while start < rows:
        stop = min(start + most, rows)
        yield slice(start, stop)
        start, most = stop, min(stop, _PIECE)


class _Before:
    """Running mean of the earlier rows as the receiver decodes them. Older rows count less."""

    def __init__(self, lead: int, width: int) -> None:
        self._mean = np.zeros((lead, 1, width), np.float32)
        self._seen = 0

    def taken_off(self, rows: Floats) -> Floats:
        return rows - self._mean

    def see(self, pseudo_gradients: Floats) -> Floats:
        """Return the rows [lead, some, width] with these differences from the mean, and add them to the mean. Numbers
        that are not finite do not enter the mean, because they would spoil all later rows."""
        rows = pseudo_gradients + self._mean
        total = rows[:, 0]
        for place in range(1, rows.shape[1]):  # this order on every machine, for equal bits
            total = total + rows[:, place]
        self._seen += rows.shape[1]
        share = np.float32(rows.shape[1] / min(self._seen, _REMEMBERED))
        mean = self._mean[:, 0]
        with np.errstate(invalid="ignore"):
            moved = mean + (total * np.float32(1 / rows.shape[1]) - mean) * share
        self._mean = np.where(np.isfinite(moved), moved, mean)[:, None]
        return rows


def _quantised(
    groups: Floats, codec: Packing, starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Return levels [groups, bytes] and scales [groups], which are bfloat16 bits."""
    levels = np.empty((len(groups), level_bytes(codec, groups.shape[1])), np.uint8)
    scales = np.empty(len(groups), np.uint16)
    match codec:
        case "int8":
            _to_levels(groups, _MOST[codec], levels.view(np.int8), scales)
        case "int4":
            signed = np.empty(groups.shape, np.int8)
            _to_levels(turned(groups, starts), _MOST[codec], signed, scales)
            nibbles = (signed + np.int8(8)).view(np.uint8)
            np.bitwise_or(nibbles[:, ::2], nibbles[:, 1::2] << np.uint8(4), out=levels)
        case "topk":
            chosen = _largest(groups)
            some = chosen.shape[1]
            signed = np.empty(chosen.shape, np.int8)
            _to_levels(np.take_along_axis(groups, chosen, axis=1), _MOST[codec], signed, scales)
            levels[:, :some], levels[:, some:] = signed.view(np.uint8), chosen.astype(np.uint8)
        case "subspace":
            inside = np.ascontiguousarray(turned(groups, starts)[:, : levels.shape[1]])
            _to_levels(inside, _MOST[codec], levels.view(np.int8), scales)
        case _:
            _digits(_to_few(turned(groups, starts), _FEW[codec], scales), codec, levels)
    return levels, scales


def _restored(
    levels: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint16],
    codec: Packing,
    group: int,
    starts: npt.NDArray[np.int64],
) -> Floats:
    """Return the decoded numbers, [groups, group]."""
    scale = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    match codec:
        case "int8":
            return _from_levels(levels.view(np.int8), scale)
        case "int4":
            signed = np.empty((len(levels), group), np.int8)
            signed[:, ::2] = (levels & np.uint8(15)).view(np.int8) - np.int8(8)
            signed[:, 1::2] = (levels >> np.uint8(4)).view(np.int8) - np.int8(8)
            return turned_back(_from_levels(signed, scale), starts)
        case "topk":
            some = levels.shape[1] // 2
            places = levels[:, some:].astype(np.int64)
            x = np.zeros((len(levels), group), np.float32)
            x[~np.isfinite(scale)] = np.nan
            np.put_along_axis(
                x, places, _from_levels(np.ascontiguousarray(levels[:, :some]).view(np.int8), scale), axis=1
            )
            return x
        case "subspace":
            x = np.zeros((len(levels), group), np.float32)
            x[:, : levels.shape[1]] = _from_levels(levels.view(np.int8), scale)
            return turned_back(x, starts)
        case _:
            return turned_back(np.ascontiguousarray(_from_digits(levels, codec, scale, group)), starts)


def _to_levels(x: Floats, most: int, levels: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16]) -> None:
    """Quantise each group to levels from -most to most. The scale is rounded up, so the largest number's level exceeds
    `most` only by rounding errors, which clipping removes."""
    largest = _largest_bits(x)
    finite = largest < _NOT_FINITE
    scaled = largest.view(np.float32) * np.float32(1 / most)
    short = np.where(largest < _TINY, np.uint32(0), (scaled.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16))
    scales[:] = np.where(finite, short, _NAN)
    scale = (short << np.uint32(16)).view(np.float32)
    usable = finite & (scale > 0)
    inverse = np.zeros(len(x), np.float32)
    np.divide(np.float32(1), scale, out=inverse, where=usable)
    if available():
        compiled(kernels.to_levels)(x, inverse, np.float32(most), levels)
    else:
        rows = _CHUNK // x.shape[1]
        with np.errstate(invalid="ignore"):
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                rounded = np.rint(x[part] * inverse[part, None])
                levels[part] = np.clip(rounded, -most, most, out=rounded)
    if not finite.all():
        levels[~finite] = 0  # casting NaN to an integer gives arbitrary levels


def _largest(x: Floats) -> npt.NDArray[np.int64]:
    """Return the positions of the largest magnitudes of each group in ascending order; the first of equal ones wins.
    NaN counts as the largest magnitude, so that it is kept."""
    size = np.where(np.isnan(x), np.float32(np.inf), np.abs(x))
    places = np.argsort(-size, axis=1, kind="stable")[:, : kept(x.shape[1])]
    return np.sort(places, axis=1).astype(np.int64)


def _from_levels(levels: npt.NDArray[np.int8], scales: Floats) -> Floats:
    x = np.empty(levels.shape, np.float32)
    if available():
        compiled(kernels.from_levels)(levels, scales, x)
    else:
        np.multiply(levels, scales[:, None], out=x)
    return x


def _largest_bits(x: Floats) -> Words:
    bits = x.view(np.uint32)
    if not available():
        return (bits & np.uint32(0x7FFFFFFF)).max(axis=1)
    largest = np.empty(len(x), np.uint32)
    compiled(kernels.largest_bits)(bits, largest)
    return largest


def _to_few(x: Floats, few: _Few, scales: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """Return the code of each number, and write the scales. A group dominated by one number has nearly equal magnitudes
    after the Hadamard transform instead of a normal distribution. A second scale that puts all of them at the outermost
    level is therefore tried as well."""
    largest = _largest_bits(x)
    usable = (largest < _NOT_FINITE) & (largest >= _TINY)
    # Scaled by a power of two, so that squares do not underflow or overflow.
    power = np.where(usable, largest & _NOT_FINITE, np.uint32(0x3F800000)).astype(np.uint32).view(np.float32)
    x = x / power[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        deviation = np.sqrt(_summed(x * x) * np.float32(1 / x.shape[1]))
        factors = np.float32(1), np.float32(1) / np.float32(few.levels[-1])
        usual, even = (_tried(x, few, deviation * factor) for factor in factors)
        better = even.lost < usual.lost
        scale = np.where(better, even.scale, usual.scale) * power
    scales[:] = np.where(usable, scale.view(np.uint32) >> np.uint32(16), np.where(largest < _TINY, np.uint32(0), _NAN))
    place = np.where(better[:, None], even.place, usual.place)
    signed = x < 0
    if few.signless:
        signed &= place > 0
    return place + np.where(signed, np.uint8(len(few.levels) - few.signless), np.uint8(0))


@dataclass(frozen=True, slots=True)
class _Try:
    """Result of quantising with one scale. `place` [groups, width]: index of each number's magnitude level. `lost`
    [groups]: squared error. `scale` [groups]: bfloat16 values in float32."""

    scale: Floats
    place: npt.NDArray[np.uint8]
    lost: Floats


def _tried(x: Floats, few: _Few, deviation: Floats) -> _Try:
    short = (deviation.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
    scale = (short << np.uint32(16)).view(np.float32)
    size = np.abs(x)
    place = np.zeros(x.shape, np.uint8)
    for border in few.borders:
        place += size > (scale * np.float32(border))[:, None]
    missed: Floats = size - few.values[place] * scale[:, None]
    return _Try(scale, place, _summed(missed * missed))


def _summed(x: Floats) -> Floats:
    """Return each row's sum, added pairwise by halves, which gives the same order of sums on every machine."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _digits(codes: npt.NDArray[np.uint8], codec: Packing, levels: npt.NDArray[np.uint8]) -> None:
    """Pack several codes into each byte as digits, the first as the lowest digit."""
    per_byte, base = PER_BYTE[codec], len(_FEW[codec].values)
    if missing := levels.shape[1] * per_byte - codes.shape[1]:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    digits = codes.reshape(len(levels), -1, per_byte)
    levels[:] = digits[:, :, -1]
    for place in range(per_byte - 2, -1, -1):
        levels *= np.uint8(base)
        levels += digits[:, :, place]


def _from_digits(levels: npt.NDArray[np.uint8], codec: Packing, scales: Floats, width: int) -> Floats:
    values, per_byte = _FEW[codec].values, PER_BYTE[codec]
    table = values[np.arange(256)[:, None] // len(values) ** np.arange(per_byte) % len(values)]
    return table[levels].reshape(len(levels), -1)[:, :width] * scales[:, None]
