"""Low-rank adapters (LoRA) in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`. Needs no peft.

Decides which adapters are supported: plain ones that add `B(A(x))` times a scale to linear layers. Any other option of
a configuration (replaced weights, trained biases, other computations) is refused by name, because ignoring it would
give another model. Weights are read from safetensors only.

`capture.models.adapter` puts an adapter into a module, `capture.models.adapter` into one that serves several adapters,
`checkpoint` writes these files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Final

import msgspec

from fusionai.primitives.errors import ModelError, StorageError
from fusionai.storage.atomic import storage_errors
from fusionai.storage.safetensors_file import SafetensorsFile

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""Prefix of the base model's names in PEFT's files."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_READ: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"}
)
_OF_NO_EFFECT: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"}
    | {"eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"}
    | {"layers_to_transform", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core", "peft_version"}
    | {"qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"}
)
"""Keys that say where an adapter came from or which layers it targets. The latter follows from the weights."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of initialisations that also change the base model's weights."""
_LITERAL: Final = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Configuration of an adapter. `targets`: names of layers, sorted by the writer. The patterns name layers (or
    suffixes of their names) with their own rank or alpha. `fan_in_fan_out`: weights are stored as [in, out]."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    rank_stabilised: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    fan_in_fan_out: bool = False

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of `B(A(x))` in this layer. Source: `LoraLayer.update_layer` of peft."""
        alpha = next((value for name, value in self.alpha_pattern.items() if _names(name, layer)), self.alpha)
        return alpha / sqrt(rank) if self.rank_stabilised else alpha / rank


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """An adapter's part for one layer. `a`, `b`: names in the file, of shapes [rank, in] and [out, rank]."""

    layer: str
    rank: int
    inputs: int
    outputs: int
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter in a directory."""

    directory: Path
    config: AdapterConfig
    layers: Mapping[str, LayerAdapter]
    """Keyed by the layer's name in the base model."""

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max(layer.rank for layer in self.layers.values())


class _Written(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that are used."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


def read_adapter(directory: Path) -> AdapterFiles:
    """Read the configuration and the header of the weights. Raises `ModelError` if the adapter is not plain LoRA."""
    config = read_adapter_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        pickled = " It holds adapter_model.bin, a pickle, which is never loaded." if _has_pickle(directory) else ""
        raise ModelError(
            f"the adapter {directory} has no {WEIGHTS_FILE}.{pickled}",
            hint="Save it with save_pretrained of a recent peft, which writes safetensors.",
        )
    try:
        file = SafetensorsFile(path)
    except StorageError as problem:
        raise ModelError(f"the adapter {directory}: {problem.message}", hint="Copy or save it again.") from problem
    layers: dict[str, LayerAdapter] = {}
    for name in file.names:
        if not (name.startswith(PREFIX) and name.endswith((_A, _B))):
            raise ModelError(
                f"the adapter {directory} holds {name!r}, which is not part of a low-rank adapter of a linear layer.",
                hint="Merge such an adapter into its base with peft, and use the merged model.",
            )
        layer = name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)
        layers.setdefault(layer, _layer(directory, file, layer))
    if not layers:
        raise ModelError(f"the adapter {directory} holds no weights.", hint="Save it again.")
    return AdapterFiles(directory, config, layers)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read `adapter_config.json`. Raises `ModelError` if it is missing or uses unsupported options."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ModelError(
            f"{directory} is no adapter in PEFT layout: it has no {CONFIG_FILE}.",
            hint="Give a directory that `fusion train` with [adapter] or save_pretrained of peft wrote.",
        )
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        written = msgspec.convert(fields, _Written, strict=True)
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise ModelError(f"{path} is no configuration of an adapter: {problem}.", hint="Save it again.") from None
    if written.peft_type != "LORA":
        raise ModelError(f"{path}: expected an adapter of type LORA, got {written.peft_type}.")
    _require_plain(fields, path)
    if written.r < 1:
        raise ModelError(f"{path}: expected a rank r of at least 1, got {written.r}.")
    return AdapterConfig(
        rank=written.r,
        alpha=written.lora_alpha,
        dropout=written.lora_dropout,
        rank_stabilised=written.use_rslora,
        rank_pattern=written.rank_pattern or {},
        alpha_pattern=written.alpha_pattern or {},
    )


def encode_adapter_config(config: AdapterConfig, *, base: str | None, task: str | None) -> bytes:
    """Return `adapter_config.json` as PEFT reads it. `base`: the base model's directory or hub id. `task`: PEFT's task
    type."""
    fields = {
        "base_model_name_or_path": base,
        "bias": "none",
        "alpha_pattern": dict(sorted(config.alpha_pattern.items())),
        "fan_in_fan_out": config.fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": dict(sorted(config.rank_pattern.items())),
        "target_modules": list(config.targets),
        "task_type": task,
        "use_dora": False,
        "use_rslora": config.rank_stabilised,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


def _require_plain(fields: Mapping[str, Any], path: Path) -> None:
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights = {start!r} changed the base's own weights.",
            hint="Convert it with peft (path_initial_model_for_weight_conversion), or use the merged model.",
        )
    for patterns in (fields.get("rank_pattern"), fields.get("alpha_pattern")):
        for name in patterns or ():
            if not _LITERAL.fullmatch(name):
                raise ModelError(f"{path}: expected names of layers as patterns, got {name!r}.")
    harmless: Mapping[str, tuple[object, ...]] = {"bias": ("none",)}
    for key, value in sorted(fields.items()):
        if key in _READ or key in _OF_NO_EFFECT or not value or value in harmless.get(key, ()):
            continue
        raise ModelError(
            f"{path}: {key} = {value!r} is not supported: only plain LoRA of linear layers is.",
            hint="Merge such an adapter into its base with peft, and use the merged model.",
        )


def _layer(directory: Path, file: SafetensorsFile, layer: str) -> LayerAdapter:
    a, b = PREFIX + layer + _A, PREFIX + layer + _B
    missing = next((name for name in (a, b) if name not in file.names), None)
    if missing is not None:
        raise ModelError(f"the adapter {directory} lacks {missing!r}.", hint="Copy or save it again.")
    (_, down, *_), (_, up, *_) = file.span(a), file.span(b)
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise ModelError(
            f"the adapter {directory}: expected {layer!r} as [rank, in] and [out, rank], got {list(down)} and "
            f"{list(up)}."
        )
    return LayerAdapter(layer, down[0], down[1], up[0], a, b)


def _names(pattern: str, layer: str) -> bool:
    return layer == pattern or layer.endswith("." + pattern)


def _has_pickle(directory: Path) -> bool:
    return (directory / "adapter_model.bin").is_file()
