"""Describe where a model comes from: parse the text that names a model without loading a framework.

Recognises the five kinds of source that text can name and checks the form of a Hugging Face configuration. Builds and
downloads nothing; `capture.models.build` does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from fusionai.primitives.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

Architecture = Literal["causal_lm", "image_text", "masked_lm", "seq2seq_lm", "classification", "plain", "text_encoder"]
"""Head that a Hugging Face configuration is built with; `plain` is the bare model (`AutoModel`), `text_encoder` the
encoder of a model that also has a decoder, `image_text` a causal language model with an encoder for images."""

SPLIT: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one of several files of a GGUF model."""
SEEN_WHOLE: Final = ("attention_chunk_size", "index_topk")
"""Fields of configurations that limit how many positions attention sees. A text that is not longer is seen whole, which
is what a graph can hold."""
_CODE_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_GGUF = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>[\w.-]+)")


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A new model from a Hugging Face configuration: an object with `model_type` and the fields to set."""

    config: Mapping[str, Any]
    architecture: Architecture = "causal_lm"


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A directory in Hugging Face layout. With `*.safetensors` in it the model is pretrained, otherwise new."""

    path: Path
    architecture: Architecture = "causal_lm"


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file, which holds a whole model."""

    path: Path
    architecture: Architecture = "causal_lm"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model on the Hugging Face hub. Only JSON and safetensors files are fetched; code and pickles never are.
    `gguf`: a part of the name of the repository's GGUF file that holds the model, such as Q4_K_M."""

    repository: str
    revision: str | None = None
    architecture: Architecture = "causal_lm"
    gguf: str = ""


@dataclass(frozen=True, slots=True)
class CodeSource:
    """`module:function` in the job owner's own code, importable from the working directory. The function takes no
    argument and returns an `nn.Module`, or a pair of the module and its example inputs (name -> tensor)."""

    target: str


@dataclass(frozen=True, slots=True)
class FactorySource:
    """A callable in this process, under the same rules as the function of a `CodeSource`."""

    factory: Callable[[], nn.Module | tuple[nn.Module, Mapping[str, Any]]]
    name: str = "module"


ModelSource = ConfigSource | DirectorySource | GgufSource | HubSource | CodeSource | FactorySource


def architecture_of(task: str) -> Architecture:
    """Return the head that a task trains."""
    match task:
        case "causal_lm" | "masked_lm" | "seq2seq_lm" | "classification":
            return task
        case _:
            return "plain"


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest text: the positions that the configuration names, at most those that attention sees. None if
    it names none."""
    texts = config.get("text_config")
    for fields in (config, texts if isinstance(texts, Mapping) else {}):
        seen = [size for size in map(fields.get, SEEN_WHOLE) if isinstance(size, int) and size > 0]
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            size = fields.get(name)
            if isinstance(size, int) and size > 0:
                return min(size, *seen) if seen else size
    return None


def parse_source(text: str, architecture: Architecture = "causal_lm") -> ModelSource:
    """Return what `text` names: a directory, a `.json` file, a `.gguf` file, `module:function` or a hub id, tried in
    this order. Raises `ModelError` if it is none of them or if the JSON file does not hold a configuration."""
    path = Path(text).expanduser()
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"the directory {text} has no config.json, so it is not a model in Hugging Face layout.",
                hint="Save the model there with save_pretrained, or name a configuration file.",
            )
        return DirectorySource(path, architecture)
    if path.suffix == ".json":
        return ConfigSource(read_config(path), architecture)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {text}.", hint="Check the path.")
        return GgufSource(path, architecture)
    if _CODE_TARGET.fullmatch(text):
        return CodeSource(text)
    if (named := _HUB_GGUF.fullmatch(text)) is not None and ".." not in text:
        return HubSource(named["repository"], architecture=architecture, gguf=named["file"])
    if _HUB_ID.fullmatch(text) and not text.startswith(".") and ".." not in text and not path.is_file():
        return HubSource(text, architecture=architecture)
    raise ModelError(
        f"{text!r} is not a model: expected a configuration file (.json), a directory in Hugging Face layout, "
        "a GGUF file (.gguf), module:function of your own code, a hub id such as owner/name, or owner/name:Q4_K_M "
        "for a GGUF file there.",
        hint="Check the spelling; a path is taken relative to the working directory.",
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read a Hugging Face configuration file: an object with `model_type`. Raises `ModelError`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no configuration file {path}.", hint="Check the path.") from None
    except OSError as error:
        raise ModelError(f"the configuration file {path} can't be read: {error.strerror or error}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.", hint="Correct the file or save it again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path} is not a model configuration: expected an object with `model_type`.",
            hint='For example {"model_type": "llama", "hidden_size": 256, ...}.',
        )
    return config


def describe(source: ModelSource) -> str:
    """Return a short name for messages and for `Graph.name`."""
    match source:
        case ConfigSource(config=config):
            return str(config.get("model_type", "model"))
        case DirectorySource(path=path):
            return path.resolve().name
        case GgufSource(path=path):
            return path.stem
        case HubSource(repository=repository):
            return repository
        case CodeSource(target=target):
            return target
        case FactorySource(name=name):
            return name
