"""The bytes a capture owes: buffers and constants, pretrained weights, parameters without a declarative initialisation.

Decides where each key's bytes come from and streams them: a pretrained weight is read alone from its safetensors file,
a parameter without a program is made by constructing the module again with only a small group of parameters in real
memory. The groups are the same whatever is asked, so that values depend on (seed, model) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from fusionai.capture.adapter_slots import Slots
from fusionai.capture.build import Built, rebuild
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor, host_tensor

GROUP_BYTES: Final = 64 * 2**20
"""Parameters made in one construction of the module, unless a single one is larger."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which safetensors file holds which key: key -> (file, name in the file)."""

    entries: Mapping[str, tuple[Path, str]]


@dataclass(frozen=True, slots=True)
class StateSource:
    """Everything needed to answer `tensors`."""

    built: Built
    constants: Mapping[str, torch.Tensor]
    groups: tuple[frozenset[str], ...]
    checkpoint: Checkpoint | None

    def tensors(self, keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        """(key, bytes) of each key, in the module's dtypes, one at a time. Raises `ModelError` on an unknown key."""
        wanted = set(keys)
        buffers = self.built.buffers()
        stored: Mapping[str, tuple[Path, str]] = {} if self.checkpoint is None else self.checkpoint.entries
        parameters = self.built.parameters()
        unknown = wanted - set(self.constants) - set(stored) - set(buffers) - set(parameters)
        if unknown:
            raise ModelError(
                f"{self.built.name} has no state {min(unknown)!r}.", hint="Ask for keys of the captured graph."
            )
        if isinstance(self.built.adapter, Slots):
            own = wanted & self.built.adapter.keys
            wanted -= own
            for key in sorted(own):
                yield key, self.built.adapter.tensor(key)
        for key in sorted(wanted & set(self.constants)):
            yield key, to_host(self.constants[key])
        # Buffers in the checkpoint (statistics of a trained BatchNorm) are worth more than those just made.
        for key in sorted((wanted & set(buffers)) - set(stored)):
            yield key, to_host(buffers[key])
        for key in sorted(wanted & set(stored)):
            like = parameters[key] if key in parameters else buffers[key]
            yield key, to_host(_read(*stored[key], key, like))
        rest = (wanted & set(parameters)) - set(stored)
        # Those that have a program, too, are asked for where nobody runs programs: always in the same groups, whichever
        # of them are wanted, since what a module draws for one depends on what it makes beside it.
        programmed = [key for key in parameters if not any(key in group for group in self.groups)]
        for made in (*self.groups, *group(programmed, parameters)):
            if rest.isdisjoint(made):
                continue
            for key, tensor in rebuild(self.built, made):
                if key in rest:
                    yield key, to_host(tensor)


def to_host(tensor: torch.Tensor) -> HostTensor:
    """Copy a tensor to host bytes; bfloat16 as raw bits."""
    plain = tensor.detach().cpu().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    # A copy, because the tensor's memory may change or go; a flat byte view, because numpy has no bfloat16.
    data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
    return host_tensor(name, tuple(plain.shape), data)


def group(keys: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> tuple[frozenset[str], ...]:
    """Cut the parameters without a program into groups of at most `GROUP_BYTES`, in the order of the model."""
    groups: list[frozenset[str]] = []
    current: list[str] = []
    held_bytes = 0
    for key in keys:
        size_bytes = parameters[key].numel() * parameters[key].element_size()
        if current and held_bytes + size_bytes > GROUP_BYTES:
            groups.append(frozenset(current))
            current, held_bytes = [], 0
        current.append(key)
        held_bytes += size_bytes
    if current:
        groups.append(frozenset(current))
    return tuple(groups)


def index_checkpoint(
    files: Sequence[Path],
    built: Built,
    aliases: Mapping[str, tuple[str, ...]],
    elsewhere: Mapping[str, tuple[Path, str]],
) -> Checkpoint:
    """Match the names in safetensors files with the module's keys, reading only the files' headers. `elsewhere`: what
    other files have. An adapter's parameters may be missing: they are new then.

    Raises `ModelError` when a parameter is missing or has another shape, naming it.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  not a dictionary
                    found[name] = (path, name, tuple(handle.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"the weights in {path} can't be read: {error}", hint="Fetch or save the file again."
            ) from error
    prefix = str(getattr(built.module, "base_model_prefix", ""))
    entries = dict(elsewhere)
    missing: list[str] = []
    tensors: dict[str, torch.Tensor] = {
        **dict(built.module.named_buffers()),
        **dict(built.module.named_parameters()),
    }
    for own, tensor in tensors.items():
        key = built.key(own)
        if key in entries or built.is_adapter(key):
            continue
        named = [built.key(name) for name in (own, *aliases.get(own, ()))]
        names = [candidate for name in named for candidate in _spellings(name, prefix)]
        hit = next((found[name] for name in names if name in found), None)
        if hit is None:
            if isinstance(tensor, nn.Parameter):
                missing.append(key)
            continue
        path, name, shape = hit
        if shape != tuple(tensor.shape):
            raise ModelError(
                f"the weights' {name} has shape {list(shape)}, the model expects {list(tensor.shape)}.",
                hint="The configuration and the weights are not of one model.",
            )
        entries[key] = (path, name)
    if missing:
        raise ModelError(
            f"the weights lack {len(missing)} of the model's parameters, first {missing[0]!r}.",
            hint="The configuration, the architecture and the weights are not of one model.",
        )
    return Checkpoint(entries)


def _spellings(name: str, prefix: str) -> Iterator[str]:
    """A name as saved with or without a head around the base model, and as old BERT checkpoints spell norms."""
    yield name
    if prefix:
        yield f"{prefix}.{name}"
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")
    if "LayerNorm." in name:
        yield name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _read(path: Path, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            return handle.get_tensor(name).to(like.dtype)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the weight {key} in {path} can't be read: {error}") from error
