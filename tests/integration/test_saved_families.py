"""Models in files as transformers saves them, of every family: read, written and read again, bit for bit. And files as
they come otherwise: in several parts, under older names, in the layout of memory, damaged.

Transformers names and cuts weights otherwise in files than in memory; `docs/models.md` shows the same for every row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionai.capture.capture import aliases, capture
from fusionai.capture.models.build import build
from fusionai.capture.models.source import ConfigSource, DirectorySource
from fusionai.capture.models.state import CapturedState, index_checkpoint
from fusionai.primitives.errors import ModelError
from harness.saved import Saved, equal, saved, through_files
from harness.zoo import models, untraced

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")]

SAMPLE = ("mixtral", "qwen3_next", "hrm_text", "kimi_linear", "inkling2_text", "vit", "marian")
"""Experts renamed, stacked and joined; with tied heads; weights cut in four; joined convolutions; interleaved rows;
renamed layers; positions that are in no file."""
SOURCES: dict[str, ConfigSource] = {
    model.name: model.source for model in models() if isinstance(model.source, ConfigSource)
} | untraced()


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", marked(SOURCES))
def test_a_family_goes_through_files_as_transformers_has_it(tmp_path: Path, name: str) -> None:
    assert through_files(SOURCES[name], tmp_path) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_read_as_transformers_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    assert through_files(SOURCES["mixtral"], tmp_path, dtype) == ""


def opened(files: Saved) -> CapturedState:
    built = build(files.source, 0)
    assert built.huggingface is not None
    return CapturedState(
        built, {}, (), index_checkpoint(built.huggingface.weights, built, aliases(built.module), {})
    )  # fmt: skip


def as_transformers_reads_it(files: Saved) -> None:
    read = files.loaded().state_dict()
    state = opened(files)
    assert state.checkpoint is not None
    assert {*state.built.parameters()} <= state.checkpoint.keys
    assert all(equal(tensor, read[key]) for key, tensor in state.tensors(state.checkpoint.keys))


@pytest.fixture
def mixtral(tmp_path: Path) -> Saved:
    files = saved(SOURCES["mixtral"], tmp_path / "mixtral", wide=True)
    assert files is not None
    return files


def test_a_model_in_the_layout_of_memory_is_read(mixtral: Saved) -> None:
    model: Any = mixtral.loaded()
    model.save_pretrained(mixtral.directory, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(mixtral.directory / "model.safetensors"))
    as_transformers_reads_it(mixtral)


def test_experts_lie_in_several_files_and_others_beside_them_are_not_read(mixtral: Saved) -> None:
    model: Any = mixtral.loaded()
    (mixtral.directory / "model.safetensors").unlink()
    model.save_pretrained(mixtral.directory, max_shard_size="40KB")
    assert len(list(mixtral.directory.glob("model-*.safetensors"))) > 4
    save_file({"model.norm.weight": torch.zeros(32)}, mixtral.directory / "zz-consolidated.safetensors")
    as_transformers_reads_it(mixtral)


def test_old_spellings_and_a_base_model_without_its_prefix_are_read(tmp_path: Path) -> None:
    files = saved(SOURCES["bert"], tmp_path / "bert", wide=True)
    assert files is not None
    path = files.directory / "model.safetensors"
    old = {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma"): tensor
        for name, tensor in load_file(path).items()
    }
    assert "encoder.layer.0.output.LayerNorm.gamma" in old
    save_file(old, path, {"format": "pt"})
    as_transformers_reads_it(files)


def test_only_what_a_parameter_is_made_of_is_read(mixtral: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    read: list[str] = []

    class Watched:
        def __init__(self, path: Path, framework: str) -> None:
            self._opened = original(path, framework=framework)

        def __enter__(self) -> Watched:
            self._handle = self._opened.__enter__()
            return self

        def __exit__(self, *_: object) -> None:
            self._opened.__exit__(None, None, None)

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self._handle.get_tensor(name)

    state = opened(mixtral)
    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Watched)
    list(state.tensors(["model.layers.1.mlp.experts.down_proj"]))
    assert read == [f"model.layers.1.block_sparse_moe.experts.{number}.w2.weight" for number in range(4)]


def changed(files: Saved, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """What is said of files that were changed."""
    path = files.directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        opened(files)
    return refused.value.message


GATE = "model.layers.2.block_sparse_moe.experts.{}.w1.weight"


def test_a_lacking_expert_is_named_with_its_conversion(mixtral: Saved) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[GATE.format(3)]

    said = changed(mixtral, without)
    assert "model.layers.2.mlp.experts.gate_up_proj" in said
    assert "MergeModulelist" in said
    assert "3 of `.experts.*.w1.weight`" in said


def test_a_lacking_layer_is_named_as_files_name_it(mixtral: Saved) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.2.block_sparse_moe.experts" in name and "w2" in name]:
            tensors[name.replace("experts", "specialists")] = tensors.pop(name)

    said = changed(mixtral, without)
    assert "'model.layers.2.mlp.experts.down_proj'" in said
    assert "'model.layers.2.block_sparse_moe.experts.0.w2.weight'" in said
    assert "'model.layers.2.block_sparse_moe.specialists.0.w2.weight'" in said


def test_another_models_experts_are_named_with_their_shapes(mixtral: Saved) -> None:
    def narrower(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".w2.weight")]:
            tensors[name] = tensors[name][:, :-1].contiguous()

    said = changed(mixtral, narrower)
    assert "'model.layers.0.mlp.experts.down_proj' of the weights has the shape [4, 32, 47]" in said
    assert "expects [4, 32, 48]" in said


def test_weights_that_only_their_configuration_calls_quantised_are_refused(mixtral: Saved) -> None:
    path = mixtral.directory / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="are quantised \\(fp8\\), but none of them is"):
        capture(DirectorySource(mixtral.directory), batch=(1, 2), sequence=(1, 8))
