"""Parameters that stay in a file until an operator reads them, so that a module larger than memory can run.

An `OffloadedTensor` has the shape of a parameter and no memory. Every torch operator reads the values of such arguments
first; a view of one is another `OffloadedTensor`. So autograd saves no values, and the module's code needs no change.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from fusionai.backends.torch.slots import DiskSlots
from fusionai.primitives.environment import scratch_directory
from fusionai.primitives.errors import ModelError

KEPT_BYTES: Final = 2**28
"""Values that stay in memory, most recently read first: successive operators often read parts of one parameter."""
SAVED_BYTES: Final = 2**29
"""Tensors saved for backward that stay in memory; those saved later go to a file."""
_SMALL_BYTES: Final = 2**16
"""Smaller tensors are never moved to the file."""
_VALUE: Final = "value"
_GRADIENT: Final = "gradient"
_UNMARKED_VIEWS: Final = frozenset({torch.ops.aten._unsafe_view.default})
"""Views whose schema does not mark them as views."""


class OffloadedTensor(torch.Tensor):
    """A tensor on the CPU whose values `read` returns whenever an operator needs them. `like`: its meta tensor."""

    like: torch.Tensor
    read: Callable[[], torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls: type[OffloadedTensor], like: torch.Tensor, read: Callable[[], torch.Tensor]) -> OffloadedTensor:
        made: OffloadedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=torch.device("cpu"),
        )
        made.like = like
        made.read = read
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return _view(func, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, OffloadedTensor):
                raise ModelError(
                    f"the module's forward writes to a parameter of shape {list(value.shape)} by {func}.",
                    hint="Register values that forward changes as buffers.",
                )
        read: tuple[tuple[Any, ...], dict[str, Any]]
        read = pytree.tree_map_only(OffloadedTensor, lambda tensor: tensor.read(), (args, kwargs))
        return func(*read[0], **read[1])


def _is_view(func: Any) -> bool:
    if func in _UNMARKED_VIEWS:
        return True
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, *rest = args
    likes = func(source.like, *rest, **kwargs)
    if isinstance(likes, torch.Tensor):
        return OffloadedTensor(likes, lambda: func(source.read(), *rest, **kwargs))
    return [
        OffloadedTensor(like, lambda place=place: func(source.read(), *rest, **kwargs)[place])
        for place, like in enumerate(likes)
    ]


class ParameterFile:
    """Values and gradients by key, in an unnamed file. `specs`: key -> (dtype, shape, whether it is trained). Raises
    `ExecutionError` if the disk has no room for all of it."""

    def __init__(self, specs: Mapping[str, tuple[str, tuple[int, ...], bool]]) -> None:
        layout: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for key, (dtype, shape, trained) in specs.items():
            layout[key, _VALUE] = (dtype, shape)
            if trained:
                layout[key, _GRADIENT] = (dtype, shape)
        self._slots = DiskSlots(layout, None, torch.device("cpu"), "parameters of the self-check")
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._kept_bytes = 0

    def write(self, key: str, value: torch.Tensor) -> None:
        self._slots.write(key, _VALUE, value)

    def read(self, key: str) -> torch.Tensor:
        """Return the values. Callers must not write to them, because other readers may share them."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        value = self._slots.read(key, _VALUE)
        assert value is not None, "every parameter is written before the first is read"
        self._kept[key] = value
        self._kept_bytes += value.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes
        return value

    def write_gradient(self, key: str, value: torch.Tensor) -> None:
        self._slots.write(key, _GRADIENT, value)

    def read_gradient(self, key: str) -> torch.Tensor | None:
        """Return the gradient; None if none was written."""
        return self._slots.read(key, _GRADIENT)


@dataclass(frozen=True, slots=True)
class _InFile:
    """Position of a saved tensor in the file: its sizes in memory order, and the dimension that each of them is."""

    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    dims: tuple[int, ...]


class SavedTensors:
    """Tensors that autograd saves for one backward: in memory up to `SAVED_BYTES`, then in a file."""

    def __init__(self, limit_bytes: int = SAVED_BYTES) -> None:
        self._room_bytes = limit_bytes
        self._file: Any = None
        self._end = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _InFile:
        if isinstance(saved, OffloadedTensor) or saved.layout != torch.strided or saved.nbytes < _SMALL_BYTES:
            return saved
        if saved.nbytes <= self._room_bytes:
            self._room_bytes -= saved.nbytes
            return saved
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=scratch_directory(), buffering=0)  # noqa: SIM115  see `close`
        # Strides are kept: a product of transposed operands may round differently.
        strides = saved.stride()
        dims = tuple(sorted(range(saved.ndim), key=lambda dim: -strides[dim]))
        plain = saved.detach().resolve_conj().resolve_neg().permute(dims).contiguous()
        place = _InFile(self._end, saved.dtype, tuple(plain.shape), dims)
        data = plain.view(-1).view(torch.uint8).numpy().data
        self._file.seek(self._end)
        while data:
            data = data[self._file.write(data) :]
        self._end += plain.nbytes
        return place

    def _unpack(self, saved: torch.Tensor | _InFile) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        plain = torch.empty(saved.sizes, dtype=saved.dtype)
        into = plain.view(-1).view(torch.uint8).numpy().data
        self._file.seek(saved.offset)
        while into:
            read = self._file.readinto(into)
            if not read:
                raise OSError("the file of saved tensors ended early")
            into = into[read:]
        return plain.permute([saved.dims.index(dim) for dim in range(len(saved.dims))])
