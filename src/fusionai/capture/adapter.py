"""Low-rank adapters (LoRA, arXiv 2106.09685) that `peft` puts into a module before it is captured.

Chooses the layers that take an adapter, names the parameters of the adapted module, and checks whether an existing
adapter directory fits the module. Base parameters are frozen and keep the names that they have without an adapter. An
adapter's parameters are `<layer>.lora_A.weight` and `<layer>.lora_B.weight`; PEFT's files have the same names after the
prefix `base_model.model.`.

Neighbours: `capture.build` applies the adapter while a module is built, `storage.adapter_files` reads and writes the
files.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from torch import nn

from fusionai.primitives.errors import ModelError
from fusionai.storage.adapter_files import PREFIX, AdapterConfig, AdapterFiles, read_adapter

ADAPTER: Final = "default"
"""peft's name for the only adapter of a module."""
_ADAPTER_NAME: Final = re.compile(rf"(lora_[AB])\.{ADAPTER}(?=\.)")
_BASE: Final = ".base_layer."


@dataclass(frozen=True, slots=True)
class Lora:
    """A new adapter. `targets`: ends of the names of the layers that take one, or every linear layer except the head.
    The adapter's output is multiplied by `alpha / rank`, or by `alpha / sqrt(rank)` if `rank_stabilised` (arXiv
    2312.03732)."""

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
    """Put adapters into the layers of `module`, freeze everything else and return the same object. Raises
    `ModelError`."""
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
                f"peft can't put this adapter into {type(module).__name__}: {str(error).splitlines()[0]}",
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
    """Return the graph's key for a parameter called `name` in an adapted module: its name without the adapter's
    wrapping."""
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
            return replace(found, dropout=adapter.dropout, targets=chosen, fan_in_fan_out=_turned(module, chosen))
        case Lora():
            chosen = tuple(sorted(_chosen(module, adapter.targets) if layers is None else layers))
            return AdapterConfig(
                rank=adapter.rank,
                alpha=adapter.alpha,
                dropout=adapter.dropout,
                targets=chosen,
                rank_stabilised=adapter.rank_stabilised,
                fan_in_fan_out=_turned(module, chosen),
            )


def _chosen(module: nn.Module, targets: tuple[str, ...] | Literal["all-linear"]) -> set[str]:
    """Return the names of the layers that `targets` mean. Raises `ModelError` for a target that matches no linear
    layer."""
    layers = linear_layers(module)
    if isinstance(targets, str):
        head = _head(module)
        found = {name for name, child in layers.items() if child is not head}
        if not found:
            raise ModelError(f"{type(module).__name__} has no linear layer that could take an adapter.")
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


def _turned(module: nn.Module, layers: Collection[str]) -> bool:
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
