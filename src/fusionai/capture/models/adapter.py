"""Low-rank adapters (LoRA, arXiv 2106.09685) that `peft` puts into a module before it is captured.

Chooses the layers that take an adapter, names the parameters of the adapted module, and checks whether an existing
adapter directory fits the module. Base parameters are frozen and keep the names that they have without an adapter. An
adapter's parameters are `<layer>.lora_A.weight` and `<layer>.lora_B.weight`; PEFT's files have the same names after the
prefix `base_model.model.`.

Several adapters beside one base model (`AdapterSlots`) share one graph for serving: their matrices are concatenated,
`A` along its rows and `B` along its columns, with each adapter's scale folded in. Between the two products a mask input
keeps the columns of the position's own adapter and sets all others to exactly zero. So positions of different adapters,
and of none, share one pass, and any backend computes it with plain products. If an adapter does not change a layer, its
part there is zero.

Neighbours: `capture.models.build` applies the adapter while a module is built, `storage.adapter_files` reads and writes
the files.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.tolerance import numbers
from fusionai.capture.tracing import code_lines
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.adapter_files import PREFIX, AdapterConfig, AdapterFiles, read_adapter
from fusionai.storage.safetensors_file import SafetensorsFile

ADAPTER: Final = "default"
"""peft's name for the only adapter of a module."""
_ADAPTER_NAME: Final = re.compile(rf"(lora_[AB])\.{ADAPTER}(?=\.)")
_BASE: Final = ".base_layer."


@dataclass(frozen=True, slots=True)
class Lora:
    """A new adapter. `targets`: ends of the names of the layers that take one, or every linear layer except the head.
    Its scale is `alpha / rank`, or `alpha / sqrt(rank)` if `rank_stabilised` (arXiv 2312.03732)."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    rank_stabilised: bool = False


@dataclass(frozen=True, slots=True)
class StartedLora:
    """An existing adapter, in a directory in PEFT layout, whose training continues."""

    directory: Path
    dropout: float = 0.0


Adapter = Lora | StartedLora


def adapted(module: nn.Module, adapter: Adapter) -> nn.Module:
    """Put adapters into the layers of `module`, freeze everything else, return the same object. Raises `ModelError`."""
    from peft import LoraConfig, get_peft_model

    config = _config(module, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns about settings that it infers from a layer's class
        try:
            settings = LoraConfig(
                r=config.rank,
                lora_alpha=_whole(config.alpha),
                lora_dropout=config.dropout,
                target_modules=list(config.targets),
                use_rslora=config.rank_stabilised,
                rank_pattern=dict(config.rank_pattern),
                alpha_pattern=dict(config.alpha_pattern),
                fan_in_fan_out=config.fan_in_fan_out,
            )
            model: Any = get_peft_model(module, settings, ADAPTER)
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"peft can't put this adapter into {type(module).__name__}: {code_lines.reason(error)}.",
                hint="Name other layers in `targets` of [adapter].",
            ) from error
    inner = model.get_base_model()
    assert isinstance(inner, nn.Module)
    return inner


def adapter_config(module: nn.Module, adapter: Adapter) -> AdapterConfig:
    """Return the contents of `adapter_config.json` for a module that `adapted` returned."""
    layers = {name for name, child in module.named_modules() if hasattr(child, "lora_A")}
    return _config(module, adapter, layers)


def plain_name(name: str) -> str:
    """Return the graph's key for a parameter called `name` in an adapted module: without the adapter's wrapping."""
    return _ADAPTER_NAME.sub(r"\1", name).replace(_BASE, ".")


def is_adapter(key: str) -> bool:
    """Return whether a key belongs to an adapter rather than to the base model."""
    return ".lora_A." in key or ".lora_B." in key


def located(adapter: object) -> dict[str, tuple[Path, str]]:
    """Return key -> (file, name in it) of the adapter's starting values. Empty for a new adapter."""
    if not isinstance(adapter, StartedLora):
        return {}
    files = read_adapter(adapter.directory)
    return {
        name.removeprefix(PREFIX): (files.weights, name)
        for layer in files.layers.values()
        for name in (layer.a, layer.b)
    }


def linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can take an adapter, by name."""
    from transformers.pytorch_utils import Conv1D

    return {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear | Conv1D)}


def _config(module: nn.Module, adapter: Adapter, layers: Collection[str] | None = None) -> AdapterConfig:
    """Return the configuration of `adapter`. `layers`: layers that take it, if they are known already."""
    match adapter:
        case StartedLora(directory=directory):
            files = read_adapter(directory)
            found = files.config
            chosen = tuple(sorted(files.layers)) if layers is None else tuple(sorted(layers))
            if layers is None:
                require_fit(module, files)
            return replace(
                found, dropout=adapter.dropout, targets=chosen, fan_in_fan_out=_stores_transposed(module, chosen)
            )
        case Lora():
            chosen = tuple(sorted(_chosen(module, adapter.targets) if layers is None else layers))
            return AdapterConfig(
                rank=adapter.rank,
                alpha=adapter.alpha,
                dropout=adapter.dropout,
                targets=chosen,
                rank_stabilised=adapter.rank_stabilised,
                fan_in_fan_out=_stores_transposed(module, chosen),
            )


def _chosen(module: nn.Module, targets: tuple[str, ...] | Literal["all-linear"]) -> set[str]:
    """Return the names of the layers that `targets` mean. Raises `ModelError` for a target without a layer."""
    layers = linear_layers(module)
    head = _head(module) if isinstance(targets, str) else None
    found = {name for name, child in layers.items() if child is not head}
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no linear layer that could take an adapter.",
            hint="Train the whole model: leave out [adapter].",
        )
    if isinstance(targets, str):
        return found
    chosen: set[str] = set()
    for target in targets:
        named = {name for name in layers if name == target or name.endswith("." + target)}
        if not named:
            ends = sorted({name.rsplit(".", 1)[-1] for name in layers})
            near = difflib.get_close_matches(target, ends, n=1)
            raise ModelError(
                f"no linear layer of {type(module).__name__} is called {target!r}.",
                hint=f"Did you mean {near[0]!r}?" if near else f"Its linear layers are: {', '.join(ends)}.",
            )
        chosen |= named
    return chosen


def require_fit(module: nn.Module, files: AdapterFiles) -> None:
    """Raise `ModelError` unless the module has every layer of the adapter, with the same sizes."""
    layers = linear_layers(module)
    for name, part in files.layers.items():
        layer = layers.get(name)
        if layer is None:
            raise ModelError(
                f"the adapter {files.directory} is for a layer {name!r}, which {type(module).__name__} does not have.",
                hint="The adapter belongs to another base model; use it with that one.",
            )
        sizes = layer_sizes(layer)
        if sizes != (part.inputs, part.outputs):
            raise ModelError(
                f"the adapter {files.directory} has {part.inputs} inputs and {part.outputs} outputs at {name!r}, but "
                f"the model's layer has {sizes[0]} and {sizes[1]}.",
                hint="The adapter belongs to another base model; use it with that one.",
            )


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the input and output size of one of the `linear_layers`."""
    weight: Any = layer.weight
    first, second = weight.shape
    return (second, first) if isinstance(layer, nn.Linear) else (first, second)


def _head(module: nn.Module) -> nn.Module | None:
    """Return the layer that computes logits, which gets no adapter: its `B` would have a row per vocabulary entry."""
    find = getattr(module, "get_output_embeddings", None)
    return find() if find is not None else None


def _stores_transposed(module: nn.Module, layers: Collection[str]) -> bool:
    """Return whether these layers store their weights as [in, out]. Raises `ModelError` if some do and others don't."""
    children = dict(module.named_modules())
    kinds = {not isinstance(getattr(children[name], "base_layer", children[name]), nn.Linear) for name in layers}
    if len(kinds) > 1:
        raise ModelError(
            f"{type(module).__name__} has linear layers of two kinds; an adapter in PEFT layout holds only one kind.",
            hint="Name layers of one kind in `targets` of [adapter].",
        )
    return kinds == {True}


def _whole(alpha: float) -> Any:
    """Return a whole `alpha` as an int, the type that peft declares; peft accepts floats too."""
    return int(alpha) if alpha == int(alpha) else alpha


DOWN: Final = "adapters_a"
"""Parameter name of the concatenated `A` matrices, [sum of ranks, in]."""
UP: Final = "adapters_b"
"""Parameter name of the concatenated `B` matrices, [out, sum of ranks]."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapters of one deployment, in the order of their numbers, which start at 1. `sizes`: inputs and outputs of
    the layers that every slot covers, also those that no adapter changes yet."""

    adapters: tuple[AdapterFiles | None, ...]
    """None: an empty slot."""
    ranks: tuple[int, ...]
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @classmethod
    def of(
        cls, adapters: Sequence[AdapterFiles], room: Sequence[int] = (), module: nn.Module | None = None
    ) -> AdapterSlots:
        """Return slots for the adapters, and empty ones of the ranks `room` for all linear layers of `module` except
        its head."""
        sizes: dict[str, tuple[int, int]] = {}
        if room:
            assert module is not None
            layers = linear_layers(module)
            sizes = {name: layer_sizes(layers[name]) for name in sorted(_chosen(module, "all-linear"))}
        return cls((*adapters, *(None for _ in room)), (*(one.rank for one in adapters), *room), sizes)

    def with_adapter(self, number: int, adapter: AdapterFiles) -> AdapterSlots:
        """Return the slots with `adapter` in slot `number`. Raises `ModelError` if it does not fit."""
        if adapter.rank > self.ranks[number - 1]:
            raise ModelError(
                f"the adapter {adapter.directory} has rank {adapter.rank}, its place has {self.ranks[number - 1]}.",
                hint="Start the server with a larger --adapter-rank.",
            )
        known = {name: self._sizes(name) for name in self.layers}
        for name, part in adapter.layers.items():
            if known.get(name) != (part.inputs, part.outputs):
                have = f"{known[name]} inputs and outputs" if name in known else "no place"
                raise ModelError(
                    f"the adapter {adapter.directory} changes {name!r} of {(part.inputs, part.outputs)} inputs and "
                    f"outputs, for which the served model has {have}.",
                    hint="The adapter belongs to another base model; use it with that one.",
                )
        adapters = (*self.adapters[: number - 1], adapter, *self.adapters[number:])
        return replace(self, adapters=adapters)

    @property
    def layers(self) -> tuple[str, ...]:
        """Sorted names of the layers that at least one adapter changes, or has room to."""
        named = {name for adapter in self.adapters if adapter is not None for name in adapter.layers}
        return tuple(sorted(named | self.sizes.keys()))

    @property
    def keys(self) -> frozenset[str]:
        """Keys in the graph of all parameters of the adapters."""
        return frozenset(f"{layer}.{part}" for layer in self.layers for part in (DOWN, UP))

    def tensor(self, key: str) -> HostTensor:
        """Return the concatenated matrix of all adapters for `key`, in float32. Raises `ModelError` if a weight is not
        finite: NaN and infinity times a mask of zero would still reach other adapters' positions."""
        layer, _, part = key.rpartition(".")
        pieces = [_piece(adapter, layer, is_up=part == UP) for adapter in self.adapters]
        inputs, outputs = self._sizes(layer)
        whole = np.zeros((outputs, sum(self.ranks)) if part == UP else (sum(self.ranks), inputs), np.float32)
        start = 0
        for piece, rank in zip(pieces, self.ranks, strict=True):
            if piece is not None and part == UP:
                whole[:, start : start + piece.shape[1]] = piece
            elif piece is not None:
                whole[start : start + piece.shape[0]] = piece
            start += rank
        return host_tensor("float32", whole.shape, whole.tobytes())

    def _sizes(self, layer: str) -> tuple[int, int]:
        if layer in self.sizes:
            return self.sizes[layer]
        parts = (adapter.layers.get(layer) for adapter in self.adapters if adapter is not None)
        return next((one.inputs, one.outputs) for one in parts if one is not None)


def _piece(adapter: AdapterFiles | None, layer: str, *, is_up: bool) -> Any:
    """Return one adapter's matrix of a layer, `B` times the adapter's scale; None if it lacks the layer."""
    found = None if adapter is None else adapter.layers.get(layer)
    if found is None or adapter is None:
        return None
    values = np.asarray(numbers(SafetensorsFile(adapter.weights).read(found.b if is_up else found.a)), np.float32)
    if not np.isfinite(values).all():
        raise ModelError(
            f"the adapter {adapter.directory} has weights at {layer!r} that are not finite.",
            hint="Serve an earlier checkpoint of the adapter.",
        )
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


def slotted(module: nn.Module, slots: AdapterSlots) -> nn.Module:
    """Put the adapters into the layers of `module`, which keep their names, and return the same object. Raises
    `ModelError`."""
    layers = linear_layers(module)
    for adapter in slots.adapters:
        if adapter is not None:
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
