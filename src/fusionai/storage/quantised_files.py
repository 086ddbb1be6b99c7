"""Finds the matrices of a quantised model in its safetensors files: which tensors together hold which matrix, and how.

Decides by the `quantization_config` of the model's config.json and by the tensors' names. Reads headers only (and, for
4-bit codes of bitsandbytes, a short JSON text that lies in a tensor). Layers that the model's makers left unquantised
are plain tensors and are not mentioned here.

`ir.unpacking` says what the parts' bytes mean; `capture.models.state` matches the matrices with a module's parameters,
`storage.weight_manifest` hashes and sends them as they lie in the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fusionai.ir.packed import check_packing
from fusionai.ir.schema import PackedPart, Packing
from fusionai.ir.unpacking import TABLES, unpacked
from fusionai.primitives.errors import GraphError, ModelError
from fusionai.storage.safetensors_file import ByteRange, ByteRanges, SafetensorsFile

_NONE: Final = PackedPart("uint8", (0,))
"""A part that a form may have and this matrix has not."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor in a file. `dtype` may be an 8-bit float."""

    dtype: str
    shape: tuple[int, ...]
    range: ByteRange


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix of a quantised model: how its numbers are packed, and the ranges of files that hold the parts."""

    packings: tuple[Packing, ...]
    ranges: tuple[ByteRange, ...]

    @property
    def stored(self) -> ByteRanges:
        """All parts, one behind the other."""
        return ByteRanges(self.ranges)

    def numbers(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Return the numbers, flat, in float32. Raises `StorageError`, `GraphError`."""
        return unpacked(self.packings, self.stored.mapped())


@dataclass(frozen=True, slots=True)
class QuantisedFiles:
    """`matrices`: by the name that the matrix has in an unquantised checkpoint. `parts`: names of the tensors that hold
    them."""

    matrices: Mapping[str, PackedMatrix] = field(default_factory=dict[str, PackedMatrix])
    parts: frozenset[str] = frozenset()


def quantised_files(scheme: Mapping[str, Any], files: Iterable[Path]) -> QuantisedFiles:
    """Return the matrices of a model quantised as `scheme` (the `quantization_config` of its config.json) says. Raises
    `ModelError` for a form that can't be read, `StorageError` for a damaged file."""
    stored: dict[str, StoredPart] = {}
    for path in files:
        file = SafetensorsFile(path)
        stored |= {name: StoredPart(*file.raw(name)) for name in file.names}
    reader = _reader(scheme)
    matrices: dict[str, PackedMatrix] = {}
    taken: set[str] = set()
    for name in sorted(stored):
        try:
            found = reader(name, stored)
        except (ValueError, TypeError, AttributeError) as problem:
            raise ModelError(
                f"the tensor {name} and `quantization_config` in config.json do not fit together: {problem}.",
                hint="They belong to different models, or a file is damaged: fetch the model again.",
            ) from problem
        if found is None:
            continue
        matrix, packing, parts = found
        try:
            check_packing(packing)
        except GraphError as problem:
            raise ModelError(f"the weight {matrix}: {problem.message}", hint=problem.hint) from problem
        matrices[matrix] = PackedMatrix((packing,), tuple(stored[part].range for part in parts))
        taken |= set(parts)
    if not matrices:
        raise ModelError(
            f"its config.json says that the weights are quantised ({method_of(scheme)}), but none of them is.",
            hint="Remove `quantization_config` from config.json if the weights are plain, or fetch the files again.",
        )
    return QuantisedFiles(matrices, frozenset(taken))


def method_of(scheme: Mapping[str, Any]) -> str:
    """Return the name of a quantisation method."""
    return str(scheme.get("quant_method") or "no method named")


_Found = tuple[str, Packing, tuple[str, ...]]
"""Name of a matrix, its packing, and the names of its parts in the form's order."""
_Reader = Callable[[str, Mapping[str, StoredPart]], _Found | None]
"""Returns the matrix whose first part has this name; None if the tensor begins no packed matrix."""


def _reader(scheme: Mapping[str, Any]) -> _Reader:
    method = method_of(scheme)
    match method:
        case "fp8" | "fbgemm_fp8":
            return partial(_float8, scheme, ("weight_scale_inv", "weight_scale", "scale"))
        case "mxfp4":
            return _mxfp4
        case "gptq" | "gptqmodel":
            return partial(_gptq, scheme)
        case "awq" if scheme.get("version", "gemm").lower() == "gemm" and scheme.get("bits", 4) == 4:
            return partial(_awq, scheme)
        case "bitsandbytes":
            return _bitsandbytes
        case "compressed-tensors":
            return partial(_compressed, scheme)
        case "hqq":
            return _hqq
        case _:
            detail = f", version {scheme.get('version')}, {scheme.get('bits')} bits" if method == "awq" else ""
            raise ModelError(
                f"the weights are quantised by a method that can't be read ({method}{detail}).",
                hint="Use the model's files in another form (plain safetensors, FP8, GPTQ, AWQ, GGUF), or load it with "
                "transformers, dequantize() it and save_pretrained.",
            )


def _part(stored: Mapping[str, StoredPart], name: str) -> PackedPart:
    part = stored.get(name)
    return _NONE if part is None else PackedPart(part.dtype, part.shape)


def _beside(stored: Mapping[str, StoredPart], name: str, matrix: str) -> PackedPart:
    """The part `name` of a matrix. Raises `ModelError` if it is missing."""
    if name not in stored:
        raise ModelError(
            f"the quantised weight {matrix} lacks its part {name}.", hint="A file is missing: fetch the model again."
        )
    return _part(stored, name)


def _present(stored: Mapping[str, StoredPart], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in stored)


def _float8(
    scheme: Mapping[str, Any], scales: tuple[str, ...], name: str, stored: Mapping[str, StoredPart]
) -> _Found | None:
    codes = stored[name]
    if codes.dtype not in ("float8_e4m3fn", "float8_e5m2") or len(codes.shape) < 2:
        return None
    stem = name.removesuffix("weight")
    scale = next((one for end in scales if (one := f"{stem}{end}") in stored), f"{name}_scale_inv")
    factors = _beside(stored, scale, name)
    block: tuple[int, int] | None = None
    per_row = factors.shape[-1:] == (1,) and factors.shape[-2:-1] in ((1,), codes.shape[-2:-1])
    if len(factors.shape) == len(codes.shape) and not per_row:
        said = scheme.get("weight_block_size") or (None, None)
        high, wide = map(_block, codes.shape[-2:], factors.shape[-2:], said)
        block = (high, wide)
    packing = Packing(
        form="float8", shape=codes.shape, parts=(PackedPart(codes.dtype, codes.shape), factors), block=block
    )
    return name, packing, (name, scale)


def _block(size: int, groups: int, said: int | None) -> int:
    """Rows or columns that share a scale: as config.json says, else the power of two that gives this number of groups,
    else an equal share."""
    if said:
        return int(said)
    powers = (1 << exponent for exponent in range(3, 13))
    return next((power for power in powers if -(-size // power) == groups), -(-size // groups))


def _mxfp4(name: str, stored: Mapping[str, StoredPart]) -> _Found | None:
    if not name.endswith("_blocks"):
        return None
    matrix = name.removesuffix("_blocks")
    *outer, groups, half = stored[name].shape
    scale = f"{matrix}_scales"
    factors = _beside(stored, scale, matrix)
    packing = Packing(
        form="float4",
        shape=(*outer[:-1], groups * half * 2, outer[-1]),
        parts=(_part(stored, name), PackedPart("float8_e8m0fnu", factors.shape), _NONE),
        turned=True,
    )
    return matrix, packing, (name, scale)


def _gptq(scheme: Mapping[str, Any], name: str, stored: Mapping[str, StoredPart]) -> _Found | None:
    if not name.endswith(".qweight"):
        return None
    stem, names, parts = _by_columns(name, stored)
    bits = int(scheme.get("bits", 4))
    words, columns = stored[name].shape
    order = f"{stem}.g_idx"
    packing = Packing(
        form="gptq",
        shape=(columns, words * 32 // bits),
        parts=(*parts, _part(stored, order)),
        bits=bits,
        group=_group(scheme),
        turned=True,
        offset=0.0 if scheme.get("checkpoint_format") == "gptq_v2" else 1.0,
    )
    return f"{stem}.weight", *_without_plain_order(packing, stored, (*names, order))


def _without_plain_order(
    packing: Packing, stored: Mapping[str, StoredPart], names: tuple[str, ...]
) -> tuple[Packing, tuple[str, ...]]:
    """Leave out the last part, the group of each summand, if the groups are equal and in order: such matrices can be
    multiplied by as they are packed."""
    *others, order = packing.parts
    groups = stored[names[2]].shape[0] if packing.turned else prod(stored[names[1]].shape[1:])
    if names[-1] in stored and groups and order.dtype == "int32" and prod(order.shape) % groups == 0:
        given = np.frombuffer(stored[names[-1]].range.mapped(), "<i4")
        if np.array_equal(given, np.arange(given.size) // (given.size // groups)):
            packing = msgspec.structs.replace(packing, parts=(*others, _NONE))
            names = names[:-1]
    return packing, _present(stored, names)


def _by_columns(name: str, stored: Mapping[str, StoredPart]) -> tuple[str, tuple[str, ...], tuple[PackedPart, ...]]:
    """Return a layer's name, and codes, zero points and scales with their names."""
    stem = name.removesuffix(".qweight")
    names = tuple(f"{stem}.{end}" for end in ("qweight", "qzeros", "scales"))
    return stem, names, tuple(_beside(stored, one, f"{stem}.weight") for one in names)


def _group(scheme: Mapping[str, Any]) -> int:
    """Numbers of a column that share a scale; 0: not said, or all."""
    return max(0, int(scheme.get("group_size", 0)))


def _awq(scheme: Mapping[str, Any], name: str, stored: Mapping[str, StoredPart]) -> _Found | None:
    if not name.endswith(".qweight"):
        return None
    stem, names, parts = _by_columns(name, stored)
    rows, words = stored[name].shape
    packing = Packing(form="awq", shape=(words * 8, rows), parts=parts, bits=4, group=_group(scheme), turned=True)
    return f"{stem}.weight", packing, names


_STATES: Final = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def _bitsandbytes(name: str, stored: Mapping[str, StoredPart]) -> _Found | None:
    if name.endswith(".weight") and stored[name].dtype == "int8":
        scale = f"{name.removesuffix('.weight')}.SCB"
        shape = stored[name].shape
        parts = (_part(stored, name), _beside(stored, scale, name), _NONE)
        return name, Packing(form="int8", shape=shape, parts=parts, factor=1 / 127), (name, scale)
    state = next((one for end in _STATES if (one := f"{name}{end}") in stored), None)
    if state is None:
        return None
    try:
        written = json.loads(bytes(stored[state].range.mapped()))
        shape, group = tuple(int(size) for size in written["shape"]), int(written["blocksize"])
        offset = float(written.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError) as problem:
        raise ModelError(f"the description of the quantised weight {name} can't be read ({problem}).") from None
    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    names = (name, *(f"{name}.{end}" for end in ends))
    parts = (*(_beside(stored, one, name) for one in names[:3]), *(_part(stored, one) for one in names[3:]))
    kind = _table_kind(stored[f"{name}.quant_map"])
    packing = Packing(form="codes4", shape=shape, parts=parts, group=group, offset=offset, kind=kind)
    return name, packing, _present(stored, names)


def _table_kind(table: StoredPart) -> str:
    """Return the kind of 4-bit codes that has this table; an empty text for any other table."""
    if table.dtype != "float32":
        return ""
    values = np.frombuffer(table.range.mapped(), np.float32)
    return next((kind for kind, known in TABLES.items() if np.array_equal(values, known)), "")


def _hqq(name: str, stored: Mapping[str, StoredPart]) -> _Found | None:
    """HQQ's files have a small tensor for each of a matrix's settings."""
    if not name.endswith(".W_q"):
        return None
    stem = name.removesuffix(".W_q")
    matrix = f"{stem}.weight"

    def numbers(setting: str) -> list[int]:
        part = _beside(stored, f"{stem}.{setting}", matrix)
        kinds = {"int64": "<i8", "int32": "<i4", "uint8": "u1"}
        return [int(number) for number in np.frombuffer(stored[f"{stem}.{setting}"].range.mapped(), kinds[part.dtype])]

    for unread in ("quant_scale", "quant_zero", "view_as_float"):
        if f"{stem}.{unread}" in stored and any(numbers(unread)):
            raise ModelError(
                f"the weight {matrix} is quantised by HQQ with {unread}, which can't be read.",
                hint="Quantise it without, or use the model's files in another form.",
            )
    (bits,), (group,), (axis,) = (numbers(setting) for setting in ("nbits", "group_size", "axis"))
    names = (name, f"{stem}.scale", f"{stem}.zero")
    parts = (_part(stored, name), *(_beside(stored, one, matrix) for one in names[1:]))
    shape = tuple(numbers("shape"))
    return matrix, Packing(form="hqq", shape=shape, parts=parts, bits=bits, group=group, kind=str(axis)), names


def _compressed(scheme: Mapping[str, Any], name: str, stored: Mapping[str, StoredPart]) -> _Found | None:
    stem, dot, end = name.rpartition(".")
    if not dot or end not in ("weight", "weight_packed"):
        return None
    matrix = f"{stem}.weight"
    scale, zeros, order = (f"{stem}.{one}" for one in ("weight_scale", "weight_zero_point", "weight_g_idx"))
    codes = stored[name]
    if end == "weight" and codes.dtype == "int8":
        parts = (_part(stored, name), _beside(stored, scale, matrix), _part(stored, zeros))
        return matrix, Packing(form="int8", shape=codes.shape, parts=parts), _present(stored, (name, scale, zeros))
    if end == "weight":
        return _float8({}, ("weight_scale",), name, stored)
    if codes.dtype == "uint8":
        overall = f"{stem}.weight_global_scale"
        rows, half = codes.shape
        factors = _beside(stored, scale, matrix)
        if factors.dtype == "uint8":
            factors = PackedPart("float8_e8m0fnu", factors.shape)
        parts = (_part(stored, name), factors, _part(stored, overall))
        packing = Packing(form="float4", shape=(rows, 2 * half), parts=parts)
        return matrix, packing, _present(stored, (name, scale, overall))
    of_shape = _beside(stored, f"{stem}.weight_shape", matrix)
    sizes = stored[f"{stem}.weight_shape"].range.mapped()
    shape = tuple(int(size) for size in np.frombuffer(sizes, "<i4" if of_shape.dtype == "int32" else "<i8"))
    parts = (_part(stored, name), _beside(stored, scale, matrix), _part(stored, zeros), _part(stored, order))
    bits = _bits(scheme, stem)
    packing = Packing(form="packed_int", shape=shape, parts=parts, bits=bits)
    return matrix, *_without_plain_order(packing, stored, (name, scale, zeros, order))


def _bits(scheme: Mapping[str, Any], stem: str) -> int:
    """Bits of a layer's codes in a scheme of `compressed-tensors`; all groups of a readable model have the same."""
    groups = scheme.get("config_groups") or {}
    found = {int((group.get("weights") or {}).get("num_bits", 0)) for group in groups.values()}
    if len(found) != 1:
        raise ModelError(
            f"the bits of {stem} are not clear: `config_groups` has weights of {sorted(found)} bits.",
            hint="Use a model whose quantised layers all have the same number of bits.",
        )
    return found.pop()
