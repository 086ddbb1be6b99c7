"""What a model's files for sentence-transformers say, and which of them are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import host_tensor
from fusionai.serving.pooling import Dense
from fusionai.serving.sentences import NO_FILES, SentenceFiles
from fusionai.storage.safetensors_file import write_safetensors


def written(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = directory / name.replace("__", "/")
        path = path.with_name(f"{path.name}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


def modules(*kinds: str, paths: tuple[str, ...] = ()) -> list[dict[str, str]]:
    places = paths or ("", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1)))
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in zip(kinds, places, strict=True)
    ]


def test_without_files_vectors_are_the_mean_of_length_1(tmp_path: Path) -> None:
    assert SentenceFiles.load(tmp_path) == NO_FILES
    assert (NO_FILES.pooling.modes, NO_FILES.pooling.normalises) == (("mean",), True)
    assert NO_FILES.activation == "sigmoid"


def test_modules_say_how_vectors_are_made(tmp_path: Path) -> None:
    switches = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    written(tmp_path, modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": switches})
    files = SentenceFiles.load(tmp_path)
    assert (files.pooling.modes, files.pooling.normalises) == (("cls", "max"), False)
    written(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Normalize"),
        **{"1_Pooling__config": {"pooling_mode": ["weightedmean", "mean_sqrt_len_tokens"], "include_prompt": False}},
    )
    files = SentenceFiles.load(tmp_path)
    assert files.pooling.modes == ("weightedmean", "mean_sqrt_len_tokens")
    assert (files.pooling.normalises, files.pooling.excludes_prompt) == (True, True)


def test_texts_and_prompts(tmp_path: Path) -> None:
    written(
        tmp_path,
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: ", "passage": ""}, "default_prompt_name": "query"},
    )
    files = SentenceFiles.load(tmp_path)
    assert (files.longest_tokens, files.lowers, files.default_prompt) == (256, True, "query")
    assert files.prompts == {"query": "q: ", "passage": ""}
    written(tmp_path, config_sentence_transformers={"prompts": {}, "default_prompt_name": "query"})
    with pytest.raises(ModelError, match="there is no prompt 'query'"):
        SentenceFiles.load(tmp_path)
    written(tmp_path, config_sentence_transformers={"prompts": {"query": 3}})
    with pytest.raises(ModelError, match="expected prompts as texts by name"):
        SentenceFiles.load(tmp_path)


def test_a_layer_behind_the_pooling(tmp_path: Path) -> None:
    shape = {
        "in_features": 3,
        "out_features": 2,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    written(tmp_path, modules=modules("Transformer", "Pooling", "Dense"), **{"2_Dense__config": shape})
    with pytest.raises(ModelError, match=r"2_Dense holds no model.safetensors; pickles are never loaded"):
        SentenceFiles.load(tmp_path)
    weight, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, -1], np.float32)
    tensors = {
        "linear.weight": host_tensor("float32", (2, 3), weight.tobytes()),
        "linear.bias": host_tensor("float32", (2,), bias.tobytes()),
    }
    write_safetensors(tmp_path / "2_Dense" / "model.safetensors", tensors)
    (dense,) = SentenceFiles.load(tmp_path).pooling.steps
    assert isinstance(dense, Dense)
    np.testing.assert_allclose(dense(np.array([1.0, 0.5, -1.0])), weight @ [1, 0.5, -1] + bias)
    for wrong, said in (
        ({"in_features": 4}, r"expected linear.weight of shape \[2, 4\], got \[2, 3\]"),
        ({"activation_function": "my.Own"}, r"can't compute the layer \(my.Own\)"),
        ({"use_residual": True}, "can't compute the layer"),
        ({"module_input_name": "token_embeddings"}, "can't compute the layer"),
        ({"later": 1}, r"can't compute the layer \(later\)"),
    ):
        written(tmp_path, **{"2_Dense__config": shape | wrong})
        with pytest.raises(ModelError, match=said):
            SentenceFiles.load(tmp_path)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (modules("Transformer", "Pooling", "LayerNorm"), "vectors pass the module LayerNorm in 2_LayerNorm"),
        (modules("WordEmbeddings"), "vectors pass the module WordEmbeddings"),
        (modules("Transformer", paths=("0_Transformer",)), "vectors pass the module Transformer in 0_Transformer"),
        (modules("Transformer", "Pooling", paths=("", "../other")), "'../other' is not in the model's directory"),
        ({"Transformer": 1}, "expected a list of JSON objects"),
    ],
)
def test_modules_that_are_not_known_are_refused_by_name(listed: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        SentenceFiles.load(written(tmp_path, modules=listed))


def test_the_activation_of_scores(tmp_path: Path) -> None:
    written(tmp_path, config={"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}})
    assert SentenceFiles.load(tmp_path).activation == "identity"
    written(tmp_path, config={"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"})
    assert SentenceFiles.load(tmp_path).activation == "identity"
    written(tmp_path, config={"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}})
    assert SentenceFiles.load(tmp_path).activation == "sigmoid"
    written(tmp_path, config={"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}})
    with pytest.raises(ModelError, match=r"scores pass the activation torch.nn.modules.activation.Tanh"):
        SentenceFiles.load(tmp_path)
