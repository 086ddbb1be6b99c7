"""The manifest of captured models: tied names, a file's own dtype, computed buffers, models without any file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource, DirectorySource
from fusionai.storage.weight_manifest import ModelWeights, manifest
from fusionai.storage.weight_store import WeightStore

pytestmark = pytest.mark.slow

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def described(captured: Captured, store: WeightStore) -> ModelWeights:
    keys = [spec.key for spec in captured.graph.params.values()]
    checkpoint = captured.source.checkpoint
    return manifest(
        keys,
        captured.state,
        store,
        located=None if checkpoint is None else checkpoint.entries,
        assembled=None if checkpoint is None else checkpoint.assembled,
        files=None if checkpoint is None else checkpoint.files,
    )


def as_torch(weights: ModelWeights) -> Mapping[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for spec in weights.specs:
        data = torch.frombuffer(bytearray(weights.read(spec).data), dtype=getattr(torch, spec.dtype))
        tensors[spec.key] = data.reshape(spec.shape)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_pretrained_model_lies_in_its_files(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)).to(dtype)
    model.save_pretrained(tmp_path / "model")
    captured = capture(DirectorySource(tmp_path / "model"), train=False)
    store = WeightStore(tmp_path / "weights")
    weights = described(captured, store)
    got = as_torch(weights)
    assert got.keys() == {spec.key for spec in captured.graph.params.values()}
    for key, value in model.named_parameters():
        assert got[key].dtype == dtype, "as it lies in the file"
        assert torch.equal(got[key], value)
    for key, value in captured.state(got):
        like = got[key].to(getattr(torch, value.dtype))
        assert bytes(like.contiguous().view(torch.uint8).numpy()) == bytes(value.data)
    made = [key for key in got if key not in dict(model.named_parameters())]
    kept_bytes = sum(path.stat().st_size for path in (tmp_path / "weights").iterdir())
    assert kept_bytes == sum(got[key].nbytes for key in made) < 1000


def test_a_model_from_its_configuration_is_made_once(tmp_path: Path) -> None:
    captured = capture(ConfigSource(LLAMA), train=False)
    weights = described(captured, WeightStore(tmp_path / "weights"))
    again = described(captured, WeightStore(tmp_path / "again"))
    assert weights.specs == again.specs
    assert as_torch(weights).keys() == {spec.key for spec in captured.graph.params.values()}
