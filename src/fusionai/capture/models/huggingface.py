"""Hugging Face models by their configuration, through transformers' own classes. Reads no weights.

Chooses the auto class of an architecture and finds the safetensors of a directory or hub model. Never loads remote code
or a pickle."""

from __future__ import annotations

import copy
import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from fusionai.capture.models.gguf import METHOD, gguf_directory
from fusionai.capture.models.source import SPLIT, Architecture, ConfigSource, DirectorySource, GgufSource, HubSource
from fusionai.capture.tracing.attention import ATTENTION, register
from fusionai.primitives.errors import ModelError
from fusionai.storage.adapter_files import WEIGHTS_FILE as ADAPTER_FILE
from fusionai.storage.quantised_files import method_of
from fusionai.storage.safetensors_file import INDEX_FILE, SINGLE_FILE, WeightIndex

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_STORED_KEYS = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"}
    | {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
)
"""Keys in files that are not fields of the configuration class."""
_EARLIER_KEYS = frozenset({"rope_theta", "rope_scaling"})
"""Fields of earlier versions that classes still read; candidates for what a misspelt field meant."""


_HEADS: Mapping[Architecture, tuple[str, ...]] = {
    "causal_lm": ("AutoModelForCausalLM", "AutoModelForImageTextToText"),
    "image_text": ("AutoModelForImageTextToText",),
    "masked_lm": ("AutoModelForMaskedLM",),
    "seq2seq_lm": ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
    "classification": (
        "AutoModelForSequenceClassification",
        "AutoModelForImageClassification",
        "AutoModelForAudioClassification",
    ),
    "plain": ("AutoModel",),
    "text_encoder": ("AutoModelForTextEncoding",),
}
"""Transformers' auto classes, tried in this order."""


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A configuration and its weights. `weights`: safetensors files of a pretrained model, empty for a new one.
    `quantisation`: how they are quantised, as config.json says; None: they are not. `own_attention`: keep the attention
    that transformers chooses, also where the semantic one could replace it."""

    config: PreTrainedConfig
    architecture: Architecture
    weights: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    quantisation: Mapping[str, Any] | None = None
    own_attention: bool = False

    def construct(self) -> nn.Module:
        """Construct the module in float32, with the semantic attention if its class allows replacing attention."""
        register()
        model_class = self.model_class
        # Some classes use the interface without declaring it: if their file imports it, they use it.
        replaceable = getattr(model_class, "_supports_attention_backend", False) or hasattr(
            sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"
        )
        # The default form of mixtures of experts sorts tokens by the data and calls an operator that only transformers
        # has. `batched_mm` gathers each token's expert weights: slower, but plain operations, which `tracing.layers`
        # replaces by grouped products.
        semantic = replaceable and not self.own_attention
        return self._from_config(ATTENTION if semantic else self._own_way(), experts_implementation="batched_mm")

    def construct_plain(self) -> nn.Module:
        """Construct the module in float32 as transformers itself would run it."""
        return self._from_config(self._own_way())

    def _own_way(self) -> str:
        """Return the attention that transformers chooses. Falcon with ALiBi gives other results with the other one."""
        return "sdpa" if getattr(self.model_class, "_supports_sdpa", False) else "eager"

    def _from_config(self, attention: str, **choices: str) -> nn.Module:
        config = copy.deepcopy(self.config)
        if self.architecture == "masked_lm":
            config.is_decoder = False
        # If several classes have the head, transformers takes the class named here.
        config.architectures = config.architectures or [self.model_class.__name__]
        return self._auto().from_config(config, attn_implementation=attention, dtype=torch.float32, **choices)

    def _auto(self) -> Any:
        """Return the first auto class of the architecture that knows such a configuration."""
        import transformers

        for name in _HEADS[self.architecture]:
            auto = getattr(transformers, name)
            if type(self.config) in auto._model_mapping:
                return auto
        raise ModelError(
            f"transformers has no {self.architecture} model for {self.config.model_type!r}.",
            hint="Choose another task or another model.",
        )

    @property
    def model_class(self) -> type[nn.Module]:
        """The class of the module. Raises `ModelError` if transformers has none."""
        classes = self._auto()._model_mapping[type(self.config)]
        return classes[0] if isinstance(classes, list | tuple) else classes


def resolve(source: ConfigSource | DirectorySource | GgufSource | HubSource) -> HuggingFaceModel:
    """Read the configuration and find the weights. Raises `ModelError`."""
    if isinstance(source, ConfigSource):
        made, notes = _from_fields(source.config)
        return HuggingFaceModel(made, source.architecture, notes=notes)
    return _from_directory(model_directory(source), source.architecture)


def has_image_input(directory: Path) -> bool:
    """Return whether the model in `directory` belongs to transformers' models of images and text, and has an encoder of
    its own. Raises `ModelError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = _from_directory(directory, "image_text").config
    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and hasattr(config, "vision_config")


def model_directory(source: DirectorySource | GgufSource | HubSource) -> Path:
    """Return the directory of the model's files on this machine, downloading a hub model first. Raises `ModelError`."""
    match source:
        case DirectorySource(path=path):
            return path
        case GgufSource(path=path):
            return gguf_directory(path)
        case HubSource(repository=repository, revision=revision, gguf=""):
            return _download(repository, revision, _HUB_FILES)
        case HubSource(repository=repository, revision=revision, gguf=name):
            found = _download(repository, revision, [f"*{name}*.gguf", f"*{name.upper()}*.gguf"])
            return gguf_directory(_only_file(found, repository, name))


def _from_fields(fields: Mapping[str, Any]) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    from transformers import CONFIG_MAPPING

    model_type = str(fields.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "See the list of models in the documentation of transformers."
        raise ModelError(f"transformers has no model_type {model_type!r}.", hint=hint)
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | _STORED_KEYS
    notes: list[str] = []
    for key in sorted(set(fields) - known):
        if _has_effect(config_class, fields, key) or _is_named_by_the_model(config_class, key):
            continue
        near = difflib.get_close_matches(key, sorted(known | _EARLIER_KEYS), n=1, cutoff=0.8)
        if near:
            raise ModelError(
                f"the configuration of {model_type} has no field {key!r}.", hint=f"Did you mean {near[0]!r}?"
            )
        notes.append(f"The configuration's field {key!r} is unknown to {model_type} and has no effect.")
    try:
        return config_class(**{key: value for key, value in fields.items() if key != "model_type"}), tuple(notes)
    except Exception as error:
        raise ModelError(
            f"the configuration of {model_type} is not valid: {last_line(error)}.",
            hint="Correct this field of the configuration.",
        ) from error


def _has_effect(config_class: type[PreTrainedConfig], fields: Mapping[str, Any], key: str) -> bool:
    """Return whether the class reads a field that it does not list, such as `rope_theta`, which becomes part of
    `rope_parameters`. Also False if no configuration can be made with these fields."""
    try:
        with_it, without = (
            config_class(**{name: value for name, value in fields.items() if name not in ("model_type", left_out)})
            for left_out in ("", key)
        )
    except Exception:  # noqa: BLE001 - the error is reported where the configuration is made
        return False
    read = {name: value for name, value in with_it.to_dict().items() if name != key}
    return read != {name: value for name, value in without.to_dict().items() if name != key}


def _is_named_by_the_model(config_class: type[PreTrainedConfig], key: str) -> bool:
    """Return whether the model's own code, or that of rotary embeddings, names a field that its configuration does not
    list, such as Qwen3-MoE's `head_dim`."""
    model = config_class.__module__.replace(".configuration_", ".modeling_")
    for module in (model, "transformers.modeling_rope_utils"):
        found = find_spec(module)
        if found is not None and found.origin is not None:
            code = Path(found.origin).read_text(encoding="utf-8")
            if re.search(rf"\b{re.escape(key)}\b", code):
                return True
    return False


def _from_directory(path: Path, architecture: Architecture) -> HuggingFaceModel:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"the configuration in {path} can't be used: {last_line(error)}.",
            hint="Correct its config.json, or fetch or save the model again.",
        ) from error
    weights = _weights(path)
    scheme = getattr(config, "quantization_config", None)
    if scheme is not None:
        # Transformers' classes are built plain: the numbers are unpacked where they are used.
        delattr(config, "quantization_config")
    quantisation = scheme if scheme is None or isinstance(scheme, Mapping) else scheme.to_dict()
    if quantisation is not None and method_of(quantisation) == METHOD:
        return HuggingFaceModel(config, architecture, quantisation=quantisation)
    notes: tuple[str, ...] = ()
    if not weights:
        if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
            raise ModelError(
                f"{path} holds weights only as pickles, which are never loaded.",
                hint="Save the model with save_pretrained of a recent transformers, which writes safetensors.",
            )
        notes = (f"{path} has no weights: the model starts from new weights, initialised from the seed.",)
    return HuggingFaceModel(config, architecture, weights, notes, quantisation if weights else None)


def _weights(path: Path) -> tuple[Path, ...]:
    """Return the files that transformers would read; files in other layouts beside them hold the same weights again.
    Raises `ModelError` if a file is missing."""
    single = path / SINGLE_FILE
    if single.is_file():
        return (single,)
    index = path / INDEX_FILE
    if not index.is_file():
        return tuple(sorted(set(path.glob("*.safetensors")) - {path / ADAPTER_FILE}))
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=WeightIndex).weight_map.values()))
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{index} can't be read: {error}.", hint="Fetch or save the model again.") from error
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"{path} lacks a part of its weights: {name}.", hint="Fetch or copy the model again.")
    return tuple(path / name for name in names)


def last_line(error: Exception) -> str:
    """Return the last line, which states the problem; the lines before name the check of transformers that found it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).removeprefix("ValueError: ").rstrip(".")


def _only_file(directory: Path, repository: str, name: str) -> Path:
    """Return the one GGUF file with `name` in its own, or the first of the files of one model. Raises `ModelError` if
    there is none, or several."""
    files = [path for path in sorted(directory.rglob("*.gguf")) if name.lower() in path.name.lower()]
    models = {(path.parent, split["name"] if (split := SPLIT.fullmatch(path.name)) else path.name) for path in files}
    if len(models) == 1:
        return files[0]
    listed = ", ".join(sorted(path.name for path in files)[:4]) or "no file"
    raise ModelError(
        f"{repository} has {listed} with {name!r} in its name; expected one GGUF file.",
        hint="Name more of the file, as in owner/name:model-Q4_K_M.",
    )


def _download(repository: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=files))
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repository!r}, or this machine may not read it.",
            hint="Check the spelling; a gated model needs `hf auth login` first.",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"the model {repository!r} is not on this machine and the hub can't be reached.",
            hint="Connect to the network, or give a local directory or a configuration file instead.",
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"the model {repository!r} could not be fetched from the hub: {error}",
            hint="Check the name and the network, or give a local directory.",
        ) from error
