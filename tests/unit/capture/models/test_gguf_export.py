"""Models written as GGUF: transformers and this project read back the same numbers, tokens and settings."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import peft
import platformdirs
import pytest
import torch
import transformers

from fusionai.capture.models.gguf import gguf_matrices
from fusionai.capture.models.gguf_export import GgufType, export_gguf
from fusionai.primitives.errors import ModelError
from fusionai.storage.adapter_files import read_adapter
from harness.quantised_weights import write_tokenizer

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
IDS = torch.arange(20)[None]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _name: tmp_path / "cache")


def saved(directory: Path, architecture: str = "llama", **more: object) -> transformers.PreTrainedModel:
    write_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def read_back(file: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_numbers_and_settings_come_back(architecture: str, tied: bool, tmp_path: Path):
    settings = {"sliding_window": None} if architecture == "mistral" else {}
    model = saved(tmp_path / "model", architecture, tie_word_embeddings=tied, **settings)
    file = tmp_path / "small.gguf"
    written = export_gguf(tmp_path / "model", file, "f32")
    assert written.size_bytes == file.stat().st_size
    assert written.kept_wider == ()
    assert torch.equal(logits(read_back(file)), logits(model))
    assert not list(tmp_path.glob("*.partial"))


def test_biases_of_rotated_rows_are_in_the_same_order(tmp_path: Path):
    model = saved(tmp_path / "model", attention_bias=True)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    model.save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "small.gguf", "f32")
    found = gguf_matrices({"file": str(tmp_path / "small.gguf")}, model, SIZES)
    assert len(found.matrices) == 9 * 2 + 3 + 8
    for name, matrix in found.matrices.items():
        ours = model.state_dict()[name]
        assert torch.equal(torch.from_numpy(matrix.numbers()).reshape(ours.shape), ours), name


@pytest.mark.parametrize(
    ("kind", "error", "bytes_per_number"), [("f16", 1e-3, 2.0), ("q8_0", 0.02, 1.07), ("q4_0", 0.3, 0.57)]
)
def test_matrices_are_quantised_and_vectors_are_not(
    kind: GgufType, error: float, bytes_per_number: float, tmp_path: Path
):
    model = saved(tmp_path / "model")
    file = tmp_path / "small.gguf"
    export_gguf(tmp_path / "model", file, kind)
    ours = logits(model)
    assert 0 < (logits(read_back(file)) - ours).norm() < error * ours.norm()
    for tensor in gguf.GGUFReader(file).tensors:
        assert tensor.tensor_type.name == ("F32" if len(tensor.shape) == 1 else kind.upper())
        if len(tensor.shape) == 2:
            assert tensor.n_bytes <= bytes_per_number * tensor.n_elements


def test_rows_that_no_block_divides_stay_in_half_precision(tmp_path: Path):
    saved(tmp_path / "model", intermediate_size=40)
    written = export_gguf(tmp_path / "model", tmp_path / "small.gguf", "q8_0")
    assert written.kept_wider == ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_an_adapter_is_merged(tmp_path: Path):
    model = saved(tmp_path / "model")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted.merge_and_unload())
    file = tmp_path / "small.gguf"
    export_gguf(tmp_path / "model", file, "f32", adapter=read_adapter(tmp_path / "adapter"))
    torch.testing.assert_close(logits(read_back(file)), expected, rtol=1e-4, atol=1e-5)


def test_scaled_rotations_of_llama_3_are_a_table(tmp_path: Path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = saved(tmp_path / "model", rope_parameters=scaling, head_dim=32)
    export_gguf(tmp_path / "model", tmp_path / "small.gguf", "f32")
    table = next(one for one in gguf.GGUFReader(tmp_path / "small.gguf").tensors if one.name == "rope_freqs.weight")
    plain = 500000.0 ** (-np.arange(0, 32, 2) / 32)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(np.asarray(table.data), plain / scaled, rtol=1e-5)


def test_settings_under_their_older_names_are_read(tmp_path: Path):
    """Most files on the hub were written by an earlier transformers, and leave defaults out."""
    saved(tmp_path / "model", head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("rope_parameters", "rms_norm_eps", "hidden_act"):
        del config[name]
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    path.write_text(json.dumps({**config, "rope_theta": 500000.0, "rope_scaling": scaling}), encoding="utf-8")
    export_gguf(tmp_path / "model", tmp_path / "small.gguf", "f16")
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    theta = reader.get_field("llama.rope.freq_base")
    assert theta is not None
    assert theta.contents() == 500000.0
    table = next(one for one in reader.tensors if one.name == "rope_freqs.weight")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(np.asarray(table.data), 500000.0 ** (-np.arange(0, 32, 2) / 32) / ours, rtol=1e-5)


def test_tokens_and_template_come_back(tmp_path: Path):
    saved(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    export_gguf(tmp_path / "model", tmp_path / "small.gguf", "q8_0")
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    for text in ("a pool of peers", "12 of 345, serves!", "Grüße\n\n  an alle"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False)
    assert theirs.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bloom"}, "bloom models can't be written"),
        ({"quantization_config": {"quant_method": "fp8"}}, "are quantised"),
        ({"sliding_window": 64}, "sliding window of 64"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "type 'linear'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"vocab_size": 200}, "has token 277, but the model's vocabulary has 200"),
    ],
)
def test_what_llama_cpp_would_run_otherwise_is_refused(change: dict[str, object], message: str, tmp_path: Path):
    saved(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        export_gguf(tmp_path / "model", tmp_path / "small.gguf", "f16")
    assert not list(tmp_path.glob("small.gguf*"))


def test_other_tokenizers_are_refused(tmp_path: Path):
    saved(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}
    path.write_text(json.dumps({**tokenizer, "pre_tokenizer": steps}), encoding="utf-8")
    with pytest.raises(ModelError, match="splits texts by"):
        export_gguf(tmp_path / "model", tmp_path / "small.gguf", "f16")
    path.write_text(json.dumps({**tokenizer, "pre_tokenizer": {"type": "Metaspace"}}), encoding="utf-8")
    with pytest.raises(ModelError, match="expected a byte-level BPE"):
        export_gguf(tmp_path / "model", tmp_path / "small.gguf", "f16")
