"""Models in GGUF files: the configuration, the tokenizer and the numbers that transformers itself reads from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import platformdirs
import pytest
import torch
import transformers
from safetensors.torch import load_file

from fusionai.capture.capture import capture
from fusionai.capture.models import gguf as read_gguf
from fusionai.capture.models import huggingface
from fusionai.capture.models.build import build
from fusionai.capture.models.gguf import gguf_directory, gguf_matrices
from fusionai.capture.models.source import DirectorySource, parse_source
from fusionai.ir.unpacking import unpacked
from fusionai.primitives.errors import ModelError
from fusionai.storage.quantised_files import QuantisedFiles
from harness.gguf_files import TEMPLATE, write_gguf
from harness.quantised_weights import write_tokenizer

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _name: tmp_path / "cache")


def written(directory: Path, kind: str, architecture: str = "llama", **more: object) -> Path:
    plain, file = directory / "plain", directory / "small.gguf"
    write_tokenizer(plain)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **SIZES, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    write_gguf(plain, file, kind, architecture=architecture)
    return file


def found_in(file: Path) -> QuantisedFiles:
    """The weights of a file, as a capture finds them."""
    built = build(parse_source(str(file)), 0)
    assert built.huggingface is not None
    assert built.huggingface.quantisation is not None
    return gguf_matrices(built.huggingface.quantisation, built.module, built.huggingface.config.to_dict())


def assert_same(found: QuantisedFiles, expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found.matrices) == set(expected)
    for name, matrix in found.matrices.items():
        assert torch.equal(torch.from_numpy(matrix.numbers()).reshape(expected[name].shape), expected[name]), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_numbers_are_those_that_the_file_stands_for(kind: str, tmp_path: Path):
    file = written(tmp_path, kind)
    found = found_in(file)
    assert_same(found, load_file(tmp_path / "plain" / "model.safetensors"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same(architecture: str, tmp_path: Path):
    file = written(tmp_path, "Q4_0", architecture)
    found = found_in(file)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert_same(found, loaded.state_dict())
    config = json.loads((gguf_directory(file) / "config.json").read_text(encoding="utf-8"))
    assert loaded.config.rope_parameters == config["rope_parameters"]


def test_a_width_of_heads_of_its_own_is_read(tmp_path: Path):
    """Qwen3's configuration has another width of heads by default, and transformers does not read the file's."""
    file = written(tmp_path, "Q8_0", "qwen3", head_dim=32)
    config = json.loads((gguf_directory(file) / "config.json").read_text(encoding="utf-8"))
    assert config["head_dim"] == 32
    found = found_in(file)
    assert_same(found, load_file(tmp_path / "plain" / "model.safetensors"))


def test_weights_of_another_size_than_the_metadata_say_are_named(tmp_path: Path):
    file = written(tmp_path, "Q8_0")
    config = gguf_directory(file) / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**fields, "num_key_value_heads": 1}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight has the shape \[128, 256\]"):
        found_in(file)


def test_metadata_become_a_directory_made_once(tmp_path: Path):
    file = written(tmp_path, "Q8_0")
    directory = gguf_directory(file)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert {name: config[name] for name in SIZES} == SIZES
    assert config["quantization_config"] == {"quant_method": "gguf", "file": str(file)}
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(place) for place in (directory, tmp_path / "plain"))
    text = "a pool of peers, 12 of them"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == TEMPLATE
    before = (directory / "config.json").stat().st_mtime_ns
    assert gguf_directory(file) == directory
    assert (directory / "config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_rotations_of_llama_3_are_read_from_their_table(factor: float, tmp_path: Path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    file = written(tmp_path, "Q8_0", rope_parameters=scaling)
    built = build(parse_source(str(file)), 0)
    assert built.huggingface is not None
    assert built.huggingface.config.rope_parameters == scaling
    assert built.huggingface.quantisation is not None
    assert len(gguf_matrices(built.huggingface.quantisation, built.module, SIZES).matrices) == 12
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    ours = dict(built.module.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(ours, theirs.model.rotary_emb.inv_freq)


def test_another_table_of_rotations_is_refused(tmp_path: Path):
    file = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_rope_freq_base(10000.0)
    writer.add_tensor("rope_freqs.weight", np.array([1, 3, 2, 8], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="rope_freqs"):
        gguf_directory(file)


def test_stacks_of_experts_are_joined_expert_by_expert(tmp_path: Path):
    """A file has all gates in one tensor and all upper halves in another; a module has each expert's beside."""
    file = tmp_path / "experts.gguf"
    generator = np.random.default_rng(0)
    gates, ups = (generator.normal(size=(3, 4, 32)).astype(np.float32) for _ in range(2))
    writer = gguf.GGUFWriter(file, "qwen3moe")
    for name, tensor in (("gate", gates), ("up", ups)):
        packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = {part: (file, tensor) for part, tensor in zip(("gate", "up"), gguf.GGUFReader(file).tensors, strict=True)}
    matrix = read_gguf._experts(file, tensors, (3, 8, 32))
    expected = np.concatenate([gates, ups], axis=1)
    numbers = unpacked(matrix.packings, matrix.stored.mapped()).reshape(3, 8, 32)
    assert np.abs(numbers - expected).max() < 0.02
    assert np.abs(numbers - expected).max() > 0


def test_what_can_not_be_read_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ModelError, match="there is no file"):
        parse_source(str(tmp_path / "none.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    with pytest.raises(ModelError, match="not a GGUF file that can be read"):
        gguf_directory(broken)
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "bloom")
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'bloom'"):
        gguf_directory(other)


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    file = written(tmp_path, "Q8_0")
    directory = gguf_directory(file)
    file.unlink()
    with pytest.raises(ModelError, match=r"small\.gguf is not there any more"):
        capture(DirectorySource(directory), batch=(1, 2), sequence=(1, 8))


def in_parts(whole: Path, count: int) -> list[Path]:
    """The file's metadata and weights in several files, as `llama-gguf-split` writes them."""
    reader = gguf.GGUFReader(whole)
    paths = [whole.with_name(f"{whole.stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", count)
        writer.add_uint16("split.no", number)
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_model_in_several_files_is_read_by_any_of_them(tmp_path: Path):
    whole = written(tmp_path, "Q8_0")
    expected = {name: matrix.numbers() for name, matrix in found_in(whole).matrices.items()}
    paths = in_parts(whole, 3)
    whole.unlink()
    assert gguf_directory(paths[0]) == gguf_directory(paths[2])
    found = found_in(paths[1]).matrices
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].numbers(), expected[name]) for name in expected)
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"small-00002-of-00003\.gguf is not there"):
        gguf_directory(paths[0])


def test_a_file_whose_name_hides_that_there_are_others_is_refused(tmp_path: Path):
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 files of a model; its name says otherwise"):
        gguf_directory(file)


def test_the_files_of_one_model_on_the_hub_are_one_answer(tmp_path: Path):
    for name in ("m-Q4_K_M-00002-of-00002", "m-Q4_K_M-00001-of-00002", "m-Q8_0", "other-Q5_K", "m-Q5_K"):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    assert huggingface._only_file(tmp_path, "owner/name", "q4_k_m").name == "m-Q4_K_M-00001-of-00002.gguf"
    assert huggingface._only_file(tmp_path, "owner/name", "Q8_0").name == "m-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"has m-Q5_K\.gguf, other-Q5_K\.gguf with 'Q5_K' in its name"):
        huggingface._only_file(tmp_path, "owner/name", "Q5_K")
