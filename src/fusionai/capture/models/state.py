"""The values that a capture provides: buffers, constants, pretrained weights, and parameters without an initialisation
program.

Finds the source of each key's bytes and streams them. A pretrained weight is read alone from its safetensors file. A
parameter without a program is made by constructing the module again with only a small group of parameters in real
memory. The groups do not depend on the request, so values depend only on (seed, model).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from fusionai.backends.torch import host
from fusionai.backends.torch.packed_linear import rounded
from fusionai.capture.models.adapter import AdapterSlots
from fusionai.capture.models.build import Built, rebuild
from fusionai.capture.models.conversion import Computed, left_out, loading, made_anew, saving
from fusionai.capture.models.gguf import METHOD, gguf_matrices
from fusionai.ir.serving_cost import WeightFormat
from fusionai.ir.weights import initialise
from fusionai.primitives.errors import GraphError, ModelError, StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.assembly import Assembly, Extent, Shape, whole
from fusionai.storage.quantised_files import PackedMatrix, QuantisedFiles, method_of, quantised_files

GROUP_BYTES: Final = 64 * 2**20
"""Size of the parameters made in one construction of the module (64 MiB, chosen), unless one or a family is larger."""


_SHOWN: Final = 4
"""Most names listed in a message."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What safetensors files hold of a model. `entries`: key -> (file, name in the file) of tensors stored unchanged.
    `assembled`: keys that consist of parts of tensors in files; `files`: tensor name -> file. `computed`: keys that
    transformers' operations make from those tensors. `packed`: keys that consist of whole matrices of a quantised
    model; `matrices`: all of these, by the names of an unquantised checkpoint."""

    entries: Mapping[str, tuple[Path, str]]
    assembled: Mapping[str, Assembly] = field(default_factory=dict[str, Assembly])
    computed: Mapping[str, Computed] = field(default_factory=dict[str, Computed])
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict[str, PackedMatrix])
    matrices: Mapping[str, PackedMatrix] = field(default_factory=dict[str, PackedMatrix])

    @property
    def keys(self) -> frozenset[str]:
        return frozenset((*self.entries, *self.assembled, *self.computed, *self.packed))

    def tensor(self, key: str, like: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Return one key's values in the dtype of `like`. Raises `ModelError`."""
        if key in self.entries:
            path, name = self.entries[key]
            return read_tensor(path, name, key, like)
        if key in self.packed:
            return _numbers(self.packed[key], key).reshape(like.shape).to(like.dtype)
        if key in self.computed:
            return self.computed[key].tensor(module, lambda name: self._source(name, key, like))
        return self._joined(self.assembled[key], key, like)

    def _source(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of an unquantised checkpoint in the dtype of `like`."""
        matrix = self.matrices.get(name)
        if matrix is None:
            return read_tensor(self.files[name], name, key, like)
        return _numbers(matrix, key).reshape(matrix.packings[0].shape).to(like.dtype)

    def _joined(self, assembly: Assembly, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return the assembled tensor in the dtype of `like`. Reads only the tensors that it needs, one at a time."""
        made = torch.empty(prod(assembly.shape), dtype=like.dtype)
        start = 0
        for name, extents in groupby(assembly.extents, key=lambda extent: extent.tensor):
            source = self._source(name, key, like).reshape(-1)
            for extent in extents:
                made[start : start + extent.count] = source[extent.first : extent.first + extent.count]
                start += extent.count
        return made.reshape(assembly.shape)


@dataclass(frozen=True, slots=True)
class CapturedState:
    """Everything needed to answer `tensors`."""

    built: Built
    constants: Mapping[str, torch.Tensor]
    groups: tuple[frozenset[str], ...]
    checkpoint: Checkpoint | None

    def tensors(self, keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        """Yield (key, bytes) for each key, in the module's dtypes, one at a time. Raises `ModelError`."""
        wanted = set(keys)
        buffers = self.built.buffers()
        checkpoint = self.checkpoint or Checkpoint({})
        stored = checkpoint.keys
        parameters = self.built.parameters()
        unknown = wanted - set(self.constants) - stored - set(buffers) - set(parameters)
        if unknown:
            raise ModelError(
                f"{self.built.name} has no state {min(unknown)!r}.", hint="Ask for keys of the captured graph."
            )
        if isinstance(self.built.adapter, AdapterSlots):
            own = wanted & self.built.adapter.keys
            wanted -= own
            yield from ((key, self.built.adapter.tensor(key)) for key in sorted(own))
        yield from ((key, to_host(self.constants[key])) for key in sorted(wanted & set(self.constants)))
        # Buffers in the checkpoint (statistics of a trained BatchNorm) take precedence over newly made ones.
        yield from ((key, to_host(buffers[key])) for key in sorted((wanted & set(buffers)) - stored))
        for key in sorted(wanted & stored):
            like = parameters[key] if key in parameters else buffers[key]
            yield key, to_host(checkpoint.tensor(key, like, self.built.module))
        rest = (wanted & set(parameters)) - stored
        # Callers that can't run programs also ask for parameters that have one. Groups are the same whichever of them
        # are wanted, since what a module draws for one parameter depends on those built with it.
        programmed = [key for key in parameters if not any(key in group for group in self.groups)]
        for made in (*self.groups, *group(programmed, parameters, self.built.families)):
            if rest.isdisjoint(made):
                continue
            for key, tensor in rebuild(self.built, made):
                if key in rest:
                    yield key, to_host(tensor)

    def unread(self, held: Container[str]) -> tuple[str, ...]:
        """Return the names of the tensors in the module's state dict that are not in `held`, once for tied ones. No
        output depends on them, so training does not change them. Empty if the module has an adapter, because then the
        base is not saved."""
        if self.built.adapter is not None:
            return ()
        skipped, names = left_out(self.built.module), dict[int, str]()
        for name, tensor in self.built.module.state_dict(keep_vars=True).items():
            if name not in held and name not in skipped and isinstance(tensor, torch.Tensor):
                names.setdefault(id(tensor), name)
        return tuple(names.values())

    def initial(self, keys: Sequence[str], seed: int) -> Iterator[tuple[str, HostTensor]]:
        """Yield (key, bytes) of each key as a job of this seed begins with it, one at a time. Raises `ModelError`."""
        parameters, programs = self.built.parameters(), self.built.programs
        stored = frozenset[str]() if self.checkpoint is None else self.checkpoint.keys
        made_here = {key: program for key in keys if key not in stored and (program := programs.get(key)) is not None}
        for key, program in made_here.items():
            shape, dtype = tuple(parameters[key].shape), host.DTYPE_NAMES[parameters[key].dtype]
            made = np.ascontiguousarray(initialise(key, shape, dtype, program, seed))
            yield key, host_tensor(dtype, shape, made.tobytes())
        yield from self.tensors(key for key in keys if key not in made_here)

    def layout(self, keys: Iterable[str]) -> dict[str, Assembly]:
        """Return `Captured.layout` for these keys."""
        if self.built.huggingface is None:
            return {}
        tensors = {**self.built.buffers(), **self.built.parameters()}
        made = saving(self.built.module, {key: tuple(tensors[key].shape) for key in keys})
        return {name: one for name, one in made.items() if one != whole(name, one.shape)}


def rounding(source: CapturedState, keys: Sequence[str], form: WeightFormat) -> float:
    """Return by how much storing the matrices of `keys` [out, in] as `form` changes them: the root mean square of the
    changes, relative to that of the numbers. Reads them. Raises `ModelError`."""
    changes = numbers = 0.0
    for _, tensor in source.tensors(keys):
        weight = host.to_torch(tensor, torch.device("cpu")).to(torch.float32)
        changes += float((rounded(weight, form) - weight).square().sum())
        numbers += float(weight.square().sum())
    return (changes / numbers) ** 0.5 if numbers else 0.0


def to_host(tensor: torch.Tensor) -> HostTensor:
    """Copy a tensor to host bytes, a complex tensor as its parts in a last dimension of 2."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    return host.to_host(plain, own=True)


def group(
    keys: Sequence[str], parameters: Mapping[str, nn.Parameter], families: Mapping[str, str]
) -> tuple[frozenset[str], ...]:
    """Split the parameters into groups of at most `GROUP_BYTES`, in the order of the model. Those of a family stay
    together, however large they are."""
    groups: list[frozenset[str]] = []
    current: list[str] = []
    held_bytes = 0
    units: dict[str, list[str]] = {}
    for key in keys:
        units.setdefault(families.get(key, key), []).append(key)
    for unit in units.values():
        size_bytes = sum(parameters[key].numel() * parameters[key].element_size() for key in unit)
        if current and held_bytes + size_bytes > GROUP_BYTES:
            groups.append(frozenset(current))
            current, held_bytes = [], 0
        current += unit
        held_bytes += size_bytes
    if current:
        groups.append(frozenset(current))
    return tuple(groups)


def index_checkpoint(
    files: Sequence[Path],
    built: Built,
    aliases: Mapping[str, tuple[str, ...]],
    elsewhere: Mapping[str, tuple[Path, str]],
    *,
    shared: Container[str] = (),
    conversions: Sequence[Any] | None = None,
    holds: Callable[[str], bool] = lambda _name: True,
) -> Checkpoint:
    """Match the names in safetensors files with the module's keys, as transformers does when it loads them. Reads only
    the files' headers.

    `elsewhere`: tensors in other files. `shared`: parameters that are read with another model. `conversions`:
    transformers' conversions, by default those of the module. `holds`: which tensors may belong to it. Parameters of an
    adapter may be missing, and those that transformers initialises anew (computed positions); they are initialised like
    those of a new model. Raises `ModelError` that names the parameter if one is missing or has another shape.
    """
    found, shapes = _headers(files)
    quantised = _quantised(built, files)
    shapes = {name: shape for name, shape in shapes.items() if name not in quantised.parts}
    shapes |= {name: matrix.packings[0].shape for name, matrix in quantised.matrices.items()}
    wanted = {built.key(name): tensor for name, tensor in built.module.state_dict(keep_vars=True).items()}
    shapes = {name: shape for name, shape in shapes.items() if holds(name)}
    sources = loading(built.module, wanted, shapes, conversions)
    entries = dict(elsewhere)
    assembled: dict[str, Assembly] = {}
    computed: dict[str, Computed] = {}
    packed: dict[str, PackedMatrix] = {}
    missing: dict[str, Shape] = {}
    for own, tensor in {**dict(built.module.named_buffers()), **dict(built.module.named_parameters())}.items():
        key = built.key(own)
        if key in entries or key in shared or built.is_adapter(key):
            continue
        names = [built.key(name) for name in (own, *aliases.get(own, ()))]
        source = next((sources[name] for name in names if name in sources), None)
        if source is None:
            if isinstance(tensor, nn.Parameter) and not any(made_anew(built.module, name) for name in names):
                missing[key] = tuple(tensor.shape)
            continue
        if source.shape != tuple(tensor.shape):
            raise ModelError(
                f"{key!r} of the weights has the shape {list(source.shape)}, the model expects "
                f"{list(tensor.shape)}; it was made from {_listed(_names(source))}.",
                hint="The configuration and the weights belong to different models.",
            )
        match source:
            case Computed():
                computed[key] = source
            case Assembly() if (matrix := _whole_matrices(source, quantised.matrices)) is not None:
                packed[key] = matrix
            case Assembly(extents=(Extent(tensor=name),)) if shapes[name] == source.shape:
                entries[key] = (found[name], name)
            case Assembly():
                assembled[key] = source
    if missing:
        taken = {name for source in sources.values() for name in _names(source)}
        raise _lacking(missing, built, shapes.keys() - taken or shapes.keys())
    return Checkpoint(entries, assembled, computed, found, packed, quantised.matrices)


def _quantised(built: Built, files: Sequence[Path]) -> QuantisedFiles:
    """Return the matrices of a quantised model; none if it is not quantised. Raises `ModelError`."""
    if built.huggingface is None or (scheme := built.huggingface.quantisation) is None:
        return QuantisedFiles()
    if method_of(scheme) == METHOD:
        return gguf_matrices(scheme, built.module, built.huggingface.config.to_dict())
    return quantised_files(scheme, files)


def _whole_matrices(assembly: Assembly, matrices: Mapping[str, PackedMatrix]) -> PackedMatrix | None:
    """Return the packed matrices that follow one another in `assembly`; None if it has other parts."""
    some = [matrices.get(extent.tensor) for extent in assembly.extents]
    whole = [
        matrix
        for extent, matrix in zip(assembly.extents, some, strict=True)
        if matrix is not None and extent.first == 0 and extent.count == prod(matrix.packings[0].shape)
    ]
    if not whole or len(whole) != len(some):
        return None
    return PackedMatrix(
        tuple(packing for matrix in whole for packing in matrix.packings),
        tuple(part for matrix in whole for part in matrix.ranges),
    )


def _numbers(matrix: PackedMatrix, key: str) -> torch.Tensor:
    try:
        return torch.from_numpy(matrix.numbers())
    except (StorageError, GraphError) as error:
        raise ModelError(f"the weight {key} can't be read: {error.message}", hint=error.hint) from error


def tensor_shapes(files: Sequence[Path]) -> dict[str, tuple[Path, Shape]]:
    """Return the file and the shape of each tensor in safetensors files, by name. Raises `ModelError`."""
    places, shapes = _headers(files)
    return {name: (path, shapes[name]) for name, path in places.items()}


def _headers(files: Sequence[Path]) -> tuple[dict[str, Path], dict[str, Shape]]:
    """Return the file and the shape of each tensor."""
    from safetensors import SafetensorError, safe_open

    places: dict[str, Path] = {}
    shapes: dict[str, Shape] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  not a dictionary
                    places[name] = path
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"the weights in {path} can't be read: {error}", hint="Fetch or save the file again."
            ) from error
    return places, shapes


def _lacking(missing: Mapping[str, Shape], built: Built, found: Collection[str]) -> ModelError:
    """Return an error with the names that were looked for and the nearest names in `found`."""
    key, shape = next(iter(missing.items()))
    written = tuple(saving(built.module, {key: shape}))
    looked = "" if written == (key,) else f", which files hold as {_listed(written)}"
    near = difflib.get_close_matches(written[0], sorted(found), n=3, cutoff=0.4)
    nearest = f"; the nearest names in the files are {_listed(near)}" if near else ""
    return ModelError(
        f"the weights lack {len(missing)} of the model's parameters, first {key!r}{looked}{nearest}.",
        hint="The configuration, architecture and weights belong to different models, or a file is missing.",
    )


def _names(source: Assembly | Computed) -> tuple[str, ...]:
    if isinstance(source, Assembly):
        return source.sources
    return tuple(name for some in source.sources.values() for name in some)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def read_tensor(path: Path, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a file in the dtype of `like`. `key`: its name in messages. Raises `ModelError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            return handle.get_tensor(name).to(like.dtype)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"the weight {key} in {path} can't be read: {error}", hint="Fetch or save the file again."
        ) from error
