"""Several low-rank adapters beside one base model in one graph: a mask input selects the adapter of each position.

The adapters' matrices are concatenated, `A` along its rows and `B` along its columns, with each adapter's scale folded
in. Between the two products the mask keeps the columns of the position's own adapter and sets all others to exactly
zero. So positions of different adapters, and of none, share one pass, the base model exists once, and any backend
computes it with plain products. If an adapter does not change a layer, its part there is zero.

Neighbours: `capture.adapter` handles adapters that are trained, `storage.adapter_files` reads the files, `ir.serving`
names the mask, `backends.serving_base` makes it from the adapters' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.tolerance import numbers
from fusionai.capture.adapter import layer_sizes, linear_layers, require_fit
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.adapter_files import AdapterFiles
from fusionai.storage.safetensors_file import SafetensorsFile

DOWN: Final = "adapters_a"
"""Parameter name of the concatenated `A` matrices, [sum of ranks, in]."""
UP: Final = "adapters_b"
"""Parameter name of the concatenated `B` matrices, [out, sum of ranks]."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The adapters of one deployment, in the order of their numbers, which start at 1."""

    adapters: tuple[AdapterFiles, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(adapter.rank for adapter in self.adapters)

    @property
    def layers(self) -> tuple[str, ...]:
        """Sorted names of the layers that at least one adapter changes."""
        return tuple(sorted({name for adapter in self.adapters for name in adapter.layers}))

    @property
    def keys(self) -> frozenset[str]:
        """Keys in the graph of all parameters of the adapters."""
        return frozenset(f"{layer}.{part}" for layer in self.layers for part in (DOWN, UP))

    def tensor(self, key: str) -> HostTensor:
        """Return the concatenated matrix of all adapters for `key`, in float32.

        Raises `ModelError` if a weight is not finite: NaN and infinity times a mask of zero would still reach other
        adapters' positions.
        """
        layer, _, part = key.rpartition(".")
        pieces = [_piece(adapter, layer, is_up=part == UP) for adapter in self.adapters]
        inputs, outputs = next(
            (one.inputs, one.outputs) for adapter in self.adapters if (one := adapter.layers.get(layer)) is not None
        )
        whole = np.zeros((outputs, sum(self.ranks)) if part == UP else (sum(self.ranks), inputs), np.float32)
        start = 0
        for piece, rank in zip(pieces, self.ranks, strict=True):
            if piece is not None and part == UP:
                whole[:, start : start + piece.shape[1]] = piece
            elif piece is not None:
                whole[start : start + piece.shape[0]] = piece
            start += rank
        return host_tensor("float32", whole.shape, whole.tobytes())


def _piece(adapter: AdapterFiles, layer: str, *, is_up: bool) -> Any:
    """Return one adapter's matrix of a layer, `B` multiplied by the adapter's scale; None if the adapter lacks the
    layer."""
    found = adapter.layers.get(layer)
    if found is None:
        return None
    values = np.asarray(numbers(SafetensorsFile(adapter.weights).read(found.b if is_up else found.a)), np.float32)
    if not np.isfinite(values).all():
        raise ModelError(f"the adapter {adapter.directory} has weights at {layer!r} that are not finite.")
    return values * np.float32(adapter.config.scale(layer, found.rank)) if is_up else values


class Chosen:
    """Holds the mask of one module while it is traced; its layers read it. [b, s, sum of ranks]."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None


class _Slotted(nn.Module):
    """Base class put before a linear layer's own class: adds the adapters' output to the layer's output."""

    chosen: Chosen
    adapters_a: nn.Parameter
    adapters_b: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        mask = self.chosen.mask
        assert mask is not None
        if mask.ndim != x.ndim:  # experts get the positions of all rows concatenated
            mask = mask.reshape(*x.shape[:-1], mask.shape[-1])
        return result + F.linear(F.linear(x, self.adapters_a) * mask, self.adapters_b)


@cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Slotted{kind.__name__}", (_Slotted, kind), {})


def slotted(module: nn.Module, slots: Slots) -> nn.Module:
    """Put the adapters into the layers of `module`, whose names stay the same, and return the same object. Raises
    `ModelError` if an adapter does not fit."""
    layers = linear_layers(module)
    for adapter in slots.adapters:
        require_fit(module, adapter)
    chosen = Chosen()
    total = sum(slots.ranks)
    for name in slots.layers:
        layer: Any = layers[name]
        inputs, outputs = layer_sizes(layer)
        layer.register_parameter(DOWN, nn.Parameter(torch.empty(total, inputs), requires_grad=False))
        layer.register_parameter(UP, nn.Parameter(torch.empty(outputs, total), requires_grad=False))
        layer.chosen = chosen
        layer.__class__ = _class_of(type(layer))
    return module


def chosen_of(module: nn.Module) -> Chosen | None:
    """Return the holder of the module's mask; None for a module without adapters."""
    return next((child.chosen for child in module.modules() if isinstance(child, _Slotted)), None)


def slots_of(adapters: Sequence[AdapterFiles]) -> Slots | None:
    return Slots(tuple(adapters)) if adapters else None
