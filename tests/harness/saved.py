"""A model as people have it: written to a directory by `save_pretrained`, and read again by transformers itself.

Decides what is drawn into it, and what must be equal. Modules by hand have no such files and are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusionai.capture.capture import aliases
from fusionai.capture.models.build import build
from fusionai.capture.models.huggingface import HuggingFaceModel, resolve
from fusionai.capture.models.source import ConfigSource, DirectorySource, ModelSource
from fusionai.capture.models.state import CapturedState, index_checkpoint
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointReader, CheckpointWriter
from harness.model_files import model_tensors

SEED = 5
WIDE = 0.25
"""Of the weights of a model that is to answer: as initialised it would repeat one token."""
NARROW = 0.02
"""Of matrices that begin as zeros. A router of zeros (afmoe) gives all experts one score, and torch leaves open which
of equal scores `topk` takes: frameworks differ there."""


@dataclass(frozen=True)
class Saved:
    """`directory`: what `save_pretrained` left there."""

    directory: Path
    model: HuggingFaceModel

    @property
    def source(self) -> DirectorySource:
        return DirectorySource(self.directory, self.model.architecture)

    def loaded(self, directory: Path | None = None) -> nn.Module:
        """By `from_pretrained`, as transformers runs it; of another directory, if given. What the model's class keeps
        from training (Whisper's positions of sound) is kept from it: `from_pretrained` forgets that."""
        plain: Any = self.model.construct_plain()
        module = type(plain).from_pretrained(
            directory or self.directory,
            config=plain.config,
            attn_implementation=plain.config._attn_implementation,
            dtype=torch.float32,
        )
        trained = {name: parameter.requires_grad for name, parameter in plain.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained[name])
        return module


def saved(
    source: ModelSource, directory: Path, *, wide: bool = False, dtype: torch.dtype | None = None
) -> Saved | None:
    """Write a new model of `source`; None where it is no model of transformers. What training would have moved is drawn
    too: statistics, and matrices of zeros."""
    if not isinstance(source, ConfigSource):
        return None
    found = resolve(source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module: Any = found.construct_plain()
        with torch.no_grad():
            for parameter in module.parameters() if wide else ():
                parameter.normal_(std=WIDE)
            for parameter in module.parameters():
                if parameter.ndim > 1 and not parameter.any():
                    parameter.normal_(std=NARROW)
            kept = set(module.state_dict())
            for name, buffer in module.named_buffers():
                # Any others than constants are computed from the configuration, such as decays.
                if name in kept and buffer.is_floating_point() and (buffer == buffer.flatten()[:1]).all():
                    buffer.uniform_(0.5, 1.0)
    module.to(dtype).save_pretrained(directory)
    return Saved(directory, found)


def through_files(source: ModelSource, place: Path, dtype: torch.dtype = torch.float32) -> str | None:
    """What is odd about a model's way through files, "" for nothing, None where it has none.

    A model that `save_pretrained` wrote is read as `from_pretrained` reads it, bit for bit; a checkpoint of it has the
    same names and is read by both alike."""
    files = saved(source, place / "model", wide=True, dtype=dtype)
    if files is None:
        return None
    read = files.loaded().state_dict()
    built = build(files.source, 0)
    assert built.huggingface is not None
    checkpoint = index_checkpoint(built.huggingface.weights, built, aliases(built.module), {})
    state = CapturedState(built, {}, (), checkpoint)
    held: dict[str, HostTensor] = {}
    for key, tensor in state.tensors([*checkpoint.keys]):
        if not equal(tensor, read[key]):
            return f"{key} is read otherwise than transformers reads it"
        held[key] = tensor
    header = CheckpointHeader(graph_hash="", layout=state.layout(held))
    beside = {path.name: path.read_bytes() for path in files.directory.glob("*config.json")}
    with CheckpointWriter(place, 1, header, files=beside, shard_bytes=20_000) as writer:
        for key, tensor in held.items():
            writer.add(f"model/{key}", tensor)
        written = writer.finish()
    reader = CheckpointReader(written)
    if odd := [key for key, tensor in held.items() if reader.read(f"model/{key}") != tensor]:
        return f"{odd[0]} is another in a checkpoint"
    if odd := set(model_tensors(files.directory)) ^ set(model_tensors(written)):
        return f"only one of two files has {min(odd)}"
    again = files.loaded(written).state_dict()
    if odd := [key for key, tensor in held.items() if not equal(tensor, again[key])]:
        return f"transformers reads another {odd[0]} than a checkpoint has"
    return ""


def equal(tensor: HostTensor, value: torch.Tensor) -> bool:
    """Bit for bit."""
    if tensor.dtype != str(value.dtype).removeprefix("torch.") or tensor.shape != tuple(value.shape):
        return False
    return bytes(tensor.data) == bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
