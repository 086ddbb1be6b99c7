"""Converts between host tensors and torch tensors. Copies bytes only where necessary and never changes them.

A received tensor is used in place if its memory is writable and aligned like torch's own. Otherwise it is copied,
because matrix kernels may round differently on unaligned memory and torch refuses read-only memory. Neighbours:
`program` calls these at its boundary, `primitives.tensors` defines host tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor, layout_fits

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEMSIZE_BYTES}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
PINNED_BYTES: Final = 64 << 20
"""Largest tensor that is copied to a card through pinned memory, in bytes (chosen): PyTorch keeps pinned memory for
good, in pieces of powers of two, and a large tensor is a weight that comes once. What leaves a card is never pinned,
because it may be retained for steps, and pinned memory can't be swapped out."""
ALIGNMENT_BYTES: Final = 64
"""Alignment of torch's CPU allocator."""


def to_torch(tensor: HostTensor, device: torch.device, *, own: bool = False) -> Tensor:
    """Return a torch tensor with these bytes. With `own` the result never shares memory with `tensor`. Without `own` it
    may share memory: the caller must keep the bytes unchanged as long as the result lives."""
    if tensor.layout:
        return _laid_out(to_torch(replace(tensor, layout=()), device, own=own), tensor.layout)
    dtype = DTYPES[tensor.dtype]
    if tensor.nbytes == 0:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    shared = None if tensor.data.readonly else torch.frombuffer(tensor.data, dtype=torch.uint8)
    if device.type == "cuda" and tensor.nbytes <= PINNED_BYTES:
        pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        _fill(pinned, tensor.data)
        return pinned.to(device, non_blocking=True).view(dtype).reshape(tensor.shape)
    if shared is None or own or shared.data_ptr() % ALIGNMENT_BYTES:
        shared = torch.empty(tensor.nbytes, dtype=torch.uint8)
        _fill(shared, tensor.data)
    return shared.view(dtype).reshape(tensor.shape).to(device)


def to_host(value: Tensor | int, *, own: bool = False, laid_out: bool = False) -> HostTensor:
    """Return the bytes of a tensor; a size computed in the graph becomes an int64 of shape (). With `own` the bytes are
    a copy. With `laid_out`, strides and offset are included if the tensor was not C-contiguous and aligned."""
    if isinstance(value, int):
        value = torch.tensor(value, dtype=torch.int64)
    name = DTYPE_NAMES.get(value.dtype)
    if name is None:
        raise ExecutionError(f"a tensor of dtype {value.dtype} can't leave the backend; known: {', '.join(DTYPES)}.")
    shape = tuple(value.shape)
    flat = value.detach()
    if own and flat.device.type == "cpu":
        flat = flat.clone(memory_format=torch.contiguous_format)
    layout = _layout(value) if laid_out else ()
    flat = flat.cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # a single element counts as contiguous whatever its stride
    if flat.numel() == 0:
        return host_tensor(name, shape, b"")
    return host_tensor(name, shape, flat.view(torch.uint8).numpy().data, layout)


def _layout(value: Tensor) -> tuple[int, ...]:
    """Return strides and offset, or () for a plain layout. Kernels order sums by strides and alignment, so the next
    stage needs the layout that a single process would have."""
    offset = value.data_ptr() % ALIGNMENT_BYTES // value.element_size() if value.device.type == "cpu" else 0
    if (value.is_contiguous() and not offset) or value.numel() == 0:
        return ()
    layout = (*value.stride(), offset)
    return layout if layout_fits(tuple(value.shape), layout) else _without_gaps(value)


def _without_gaps(value: Tensor) -> tuple[int, ...]:
    """Return strides with the same order of dimensions and no gaps between elements, and offset 0."""
    strides = [0] * value.dim()
    extent = 1
    for dim in sorted(range(value.dim()), key=value.stride, reverse=False):
        if value.stride(dim):
            strides[dim] = extent
            extent *= value.shape[dim]
    return (*strides, 0)


def _laid_out(value: Tensor, layout: tuple[int, ...]) -> Tensor:
    """Return the same numbers with these strides, beginning at this offset from an aligned address."""
    *strides, offset = layout
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    made = torch.empty(offset + extent, dtype=value.dtype, device=value.device).as_strided(value.shape, strides, offset)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    made[once].copy_(value[once])
    return made


def _fill(target: Tensor, data: memoryview) -> None:
    target.numpy().data[:] = data
