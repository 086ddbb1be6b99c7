"""What a model's files for sentence-transformers say: how vectors are made, the longest text, prompts before texts.

A module that is not known is refused by name. Neighbours: `serving.pooling` computes the vectors, `serving.model_text`
reads the model's other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np

from fusionai.backends.tolerance import numbers
from fusionai.primitives.errors import ModelError
from fusionai.serving.pooling import ACTIVATIONS, MEAN, MODES, Dense, Pooling, PoolingMode, Rows
from fusionai.serving.text import read_json
from fusionai.storage.safetensors_file import SINGLE_FILE, SafetensorsFile

_MODULES_FILE: Final = "modules.json"
_POOLING: Final = "1_Pooling"
"""Directory of the pooling's configuration where no `modules.json` names it."""
_TEXT_FILES: Final = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json")
"""Files of a model's longest text: the present name, and those of earlier versions."""
Activation = Literal["sigmoid", "identity"]
_SCORES: Final[Mapping[str, Activation]] = {"sigmoid": "sigmoid", "identity": "identity"}
_EARLIER_ACTIVATION: Final = "sbert_ce_default_activation_function"
_DENSE_KEYS: Final = frozenset(
    {"in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name"}
    | {"use_residual"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """`longest_tokens`: longest text, the tokens around it included. `prompts`: texts that a request may name to be put
    before its own, `default_prompt` the name that applies to requests without one."""

    pooling: Pooling = MEAN
    longest_tokens: int | None = None
    lowers: bool = False
    """Whether texts are changed to lower case."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    activation: Activation = "sigmoid"
    """What turns a cross-encoder's logit into its score."""

    @classmethod
    def load(cls, directory: Path) -> SentenceFiles:
        """Read the files that there are. Raises `ModelError`."""
        texts = next((found for name in _TEXT_FILES if (found := read_json(directory / name))), {})
        longest = texts.get("max_seq_length")
        file = directory / "config_sentence_transformers.json"
        config = read_json(file)
        prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise ModelError(f"{file}: expected prompts as texts by name.")
        if default is not None and default not in prompts:
            raise ModelError(f"{file}: there is no prompt {default!r}, which is named as the default.")
        return cls(
            pooling=_pooling(directory),
            longest_tokens=longest if isinstance(longest, int) and longest > 0 else None,
            lowers=texts.get("do_lower_case") is True,
            prompts=prompts,
            default_prompt=default,
            activation=_activation(directory / "config.json"),
        )


NO_FILES: Final = SentenceFiles()


def _pooling(directory: Path) -> Pooling:
    """Return what the model's modules say; the mean, scaled to length 1, if there are none."""
    listed = _listed(directory / _MODULES_FILE)
    if not listed:
        modes, excludes = _modes(directory / _POOLING / "config.json")
        return Pooling(modes, excludes_prompt=excludes)
    modes: tuple[PoolingMode, ...] = ("mean",)
    excludes = False
    steps: list[Dense | Literal["normalise"]] = []
    for entry in listed:
        kind = str(entry.get("type", "")).rpartition(".")[2]
        place = (directory / str(entry.get("path", ""))).resolve()
        if not place.is_relative_to(directory.resolve()):
            raise ModelError(f"{directory / _MODULES_FILE}: {entry.get('path')!r} is not in the model's directory.")
        match kind:
            case "Transformer" if place == directory.resolve():
                pass
            case "Pooling":
                modes, excludes = _modes(place / "config.json")
            case "Normalize":
                steps.append("normalise")
            case "Dense":
                steps.append(_dense(place))
            case _:
                raise ModelError(
                    f"{directory / _MODULES_FILE}: vectors pass the module {kind or 'without a type'} in "
                    f"{place.name}, which this version can't compute.",
                    hint="Known are Transformer (in the model's own directory), Pooling, Dense and Normalize.",
                )
    return Pooling(modes, tuple(steps), excludes)


def _activation(file: Path) -> Activation:
    """Return the activation of a cross-encoder's score: what its configuration names, else the sigmoid."""
    config = read_json(file)
    own = config.get("sentence_transformers")
    named = (own if isinstance(own, dict) else {}).get("activation_fn") or config.get(_EARLIER_ACTIVATION)
    if named is None:
        return "sigmoid"
    kind = str(named).rpartition(".")[2].lower()
    if kind not in _SCORES:
        raise ModelError(f"{file}: scores pass the activation {named}, which this version can't compute.")
    return _SCORES[kind]


def _listed(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON list; none if there is no such file."""
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ModelError(f"{file}: can't be read: {problem}") from problem
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ModelError(f"{file}: expected a list of JSON objects.")
    return content


def _modes(file: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    """Return the modes that a pooling's configuration names, and whether it leaves out prompts."""
    config = read_json(file)
    given = config.get("pooling_mode")
    named: Sequence[object] = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if not named:
        # Earlier versions have one switch per mode.
        switched = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
        named = [name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in switched]
        named = ["mean_sqrt_len_tokens" if name == "mean_sqrt_len" else name for name in named]
        named = [mode for mode in MODES if mode in named] + [name for name in named if name not in MODES]
    if unknown := [str(mode) for mode in named if mode not in MODES]:
        raise ModelError(
            f"{file}: vectors of texts are pooled by {', '.join(unknown)}, which this version can't do.",
            hint=f"Vectors can be pooled by {', '.join(MODES)}. To generate text only, remove the file.",
        )
    excludes = config.get("include_prompt") is False
    return cast("tuple[PoolingMode, ...]", tuple(named)) or ("mean",), excludes


def _dense(directory: Path) -> Dense:
    file = directory / "config.json"
    config = read_json(file)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    named = {str(config.get(key) or "sentence_embedding") for key in ("module_input_name", "module_output_name")}
    unknown = sorted(set(config) - _DENSE_KEYS)
    if activation not in ACTIVATIONS or named != {"sentence_embedding"} or config.get("use_residual") or unknown:
        raise ModelError(
            f"{file}: this version can't compute the layer ({', '.join(unknown) or activation}).",
            hint=f"A layer takes and gives the text's vector; its activation is one of {', '.join(ACTIVATIONS)}.",
        )
    weights = directory / SINGLE_FILE
    if not weights.is_file():
        raise ModelError(
            f"{directory} holds no {SINGLE_FILE}; pickles are never loaded.",
            hint="Save the model with save_pretrained of a recent sentence-transformers, which writes safetensors.",
        )
    opened = SafetensorsFile(weights)

    def read(name: str, shape: tuple[Any, ...]) -> Rows:
        if name not in opened.names:
            raise ModelError(f"{weights} has no tensor {name!r}.")
        tensor = opened.read(name)
        if tensor.shape != shape:
            raise ModelError(f"{weights}: expected {name} of shape {list(shape)}, got {list(tensor.shape)}.")
        return np.array(numbers(tensor), np.float32)

    width, inner = config.get("out_features"), config.get("in_features")
    bias = read("linear.bias", (width,)) if config.get("bias", True) else None
    return Dense(read("linear.weight", (width, inner)), bias, activation)
