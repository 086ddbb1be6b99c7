"""`fusion export`: what is written is said, and nothing is replaced unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from fusionai.cli.export import export
from fusionai.primitives.errors import UsageError
from harness.quantised_weights import write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=320, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    write_tokenizer(tmp_path / "small")
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_a_file_is_written_and_not_replaced_unasked(model: Path, tmp_path: Path):
    file = tmp_path / "small.gguf"
    arguments = [str(model), str(file), "--type", "q8_0"]
    done = CliRunner().invoke(export, arguments, catch_exceptions=False)
    assert f"{file}: small as q8_0, 14 tensors" in done.output
    assert "blk.0.ffn_down.weight is in f16" in done.output
    before = file.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        CliRunner().invoke(export, [str(model), str(file)], catch_exceptions=False)
    assert file.read_bytes() == before
    CliRunner().invoke(export, [str(model), str(file), "--force"], catch_exceptions=False)
    assert file.stat().st_size > len(before)
    with pytest.raises(UsageError, match=r"ends in \.gguf"):
        CliRunner().invoke(export, [str(model), str(tmp_path / "small.bin")], catch_exceptions=False)
