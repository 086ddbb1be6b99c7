"""Matrices of quantised models are found in their files, and have the numbers of the library that wrote them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fusionai.primitives.errors import ModelError
from fusionai.storage.quantised_files import QuantisedFiles, quantised_files
from harness.quantised_weights import FORMS, SETTINGS, Writer

WRITTEN = Path(__file__).parents[2] / "data" / "quantised"
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("path", sorted(WRITTEN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_numbers_are_those_of_the_library(path: Path):
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
        theirs = file.get_tensor("numbers").float() if "numbers" in file.keys() else None  # noqa: SIM118
    found = quantised_files(json.loads(said["quantization_config"]), [path])
    assert list(found.matrices) == [NAME]
    matrix = found.matrices[NAME]
    assert matrix.packings[0].shape == (96, 256)
    numbers = matrix.numbers()
    if theirs is None:
        assert hashlib.sha256(numbers.tobytes()).hexdigest() == said["numbers"]
    else:  # the library's own are rounded to bfloat16
        ours = torch.from_numpy(numbers).reshape(96, 256)
        assert ((ours - theirs).abs() <= 2**-7 * theirs.abs()).all()
        assert (ours - theirs).abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_the_layout(form: str, tmp_path: Path):
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * 0.1
    tensors, numbers = FORMS[form].write(NAME, weight)
    found = _found(form, tensors, tmp_path)
    assert list(found.matrices) == [NAME]
    matrix = found.matrices[NAME]
    assert torch.equal(torch.from_numpy(matrix.numbers()).reshape(128, 256), numbers)
    assert matrix.stored.nbytes <= FORMS[form].bytes_per_number * weight.numel()
    assert found.parts >= {name for name in tensors if not name.endswith(SETTINGS)}


def _found(form: str, tensors: dict[str, torch.Tensor], directory: Path) -> QuantisedFiles:
    path = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return quantised_files(FORMS[form].scheme, [path])


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_or_wrong_part_is_named(form: str, tmp_path: Path):
    tensors, _ = FORMS[form].write(NAME, torch.randn(128, 256))
    for name, tensor in tensors.items():
        if name.endswith(SETTINGS) or name == NAME:
            continue
        if not name.endswith(("qweight", "W_q")):
            with pytest.raises(ModelError, match="lacks its part"):
                _found(form, {other: tensors[other] for other in tensors if other != name}, tmp_path)
        wrong = {**tensors, name: torch.cat([tensor, tensor])}
        with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.down_proj\.weight: .* can't be packed"):
            _found(form, wrong, tmp_path)


def test_a_method_that_can_not_be_read_is_named_with_what_works(tmp_path: Path):
    with pytest.raises(ModelError, match=r"can't be read \(quip\)") as refused:
        quantised_files({"quant_method": "quip"}, [])
    assert "GPTQ, AWQ" in str(refused.value.hint)
    with pytest.raises(ModelError, match="awq, version gemv, 4 bits"):
        quantised_files({"quant_method": "awq", "version": "gemv", "bits": 4}, [])


def test_plain_weights_that_call_themselves_quantised_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="none of them is"):
        _found("fp8", {NAME: torch.randn(64, 64)}, tmp_path)


def test_experts_in_4_bit_floats_are_those_of_transformers(tmp_path: Path):
    """gpt-oss keeps a stack of experts in one tensor of blocks, its rows where the module has columns."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 134, (3, 40, 2), dtype=torch.uint8, generator=generator)
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, path)
    found = quantised_files({"quant_method": "mxfp4"}, [path])
    assert list(found.matrices) == [name]
    matrix = found.matrices[name]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert matrix.packings[0].shape == tuple(theirs.shape) == (3, 64, 40)
    assert torch.equal(torch.from_numpy(matrix.numbers()).reshape(theirs.shape), theirs)


@pytest.mark.parametrize(
    ("scheme", "tensors", "message"),
    [
        ({"quant_method": "gptq", "bits": "four"}, FORMS["gptq-4"].write, "do not fit together"),
        ({"quant_method": "gptq", "bits": 5}, FORMS["gptq-4"].write, "can't be packed as gptq"),
        ({"quant_method": "gptq", "group_size": 32}, FORMS["gptq-4"].write, "can't be packed as gptq"),
        ({"quant_method": "fp8", "weight_block_size": ["a", "b"]}, FORMS["fp8"].write, "do not fit together"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    scheme: dict[str, object], tensors: Writer, message: str, tmp_path: Path
):
    path = tmp_path / "model.safetensors"
    save_file({name: one.contiguous() for name, one in tensors(NAME, torch.randn(128, 256))[0].items()}, path)
    with pytest.raises(ModelError, match=message):
        quantised_files(scheme, [path])


def test_a_lost_shape_is_named(tmp_path: Path):
    with safe_open(WRITTEN / "ct-int4.safetensors", framework="pt") as file:
        scheme = json.loads(file.metadata()["quantization_config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["model.layers.0.mlp.down_proj.weight_shape"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks its part model\.layers\.0\.mlp\.down_proj\.weight_shape"):
        quantised_files(scheme, [tmp_path / "model.safetensors"])


@pytest.mark.parametrize("shape", [(128, 64), (64, 256), (64, 64)])
def test_blocks_in_one_row_or_column_are_blocks(shape: tuple[int, int], tmp_path: Path):
    torch.manual_seed(0)
    tensors, numbers = FORMS["fp8"].write(NAME, torch.randn(shape))
    matrix = _found("fp8", tensors, tmp_path).matrices[NAME]
    assert torch.equal(torch.from_numpy(matrix.numbers()).reshape(shape), numbers)


def test_settings_of_hqq_that_can_not_be_read_are_named(tmp_path: Path):
    tensors, _ = FORMS["hqq"].write(NAME, torch.randn(128, 256))
    stem = NAME.removesuffix("weight")
    for setting in ("quant_scale", "quant_zero", "view_as_float"):
        on, off = ({f"{stem}{setting}": torch.tensor(value, dtype=torch.uint8)} for value in (1, 0))
        assert list(_found("hqq", tensors | off, tmp_path).matrices) == [NAME]
        with pytest.raises(ModelError, match=f"HQQ with {setting}, which can't be read"):
            _found("hqq", tensors | on, tmp_path)
    with pytest.raises(ModelError, match=r"lacks its part model\.layers\.0\.mlp\.down_proj\.axis"):
        _found("hqq", {name: one for name, one in tensors.items() if not name.endswith("axis")}, tmp_path)
