"""What MODEL may be, and what is said where it is nothing that can be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionai.client.serving.model import find_model, job_name
from fusionai.primitives.errors import ModelError


def model(directory: Path, *, weights: bool = True) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if weights:
        (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_a_directory_is_called_by_its_name(tmp_path: Path) -> None:
    found = find_model(str(model(tmp_path / "my-llama")))
    assert (found.name, found.directory) == ("my-llama", tmp_path / "my-llama")


def test_one_checkpoint_is_called_by_its_job(tmp_path: Path) -> None:
    found = find_model(str(model(tmp_path / "novel" / "checkpoints" / "step-00000010")))
    assert found.name == "novel"


def test_a_job_without_a_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="has no checkpoint yet") as refused:
        find_model(str(tmp_path / "job"))
    assert "checkpoint_every" in str(refused.value.hint)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    directory = model(tmp_path / "old", weights=False)
    (directory / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which is never read") as refused:
        find_model(str(directory))
    assert "save_pretrained" in str(refused.value.hint)


def test_no_weights_no_service(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        find_model(str(model(tmp_path / "empty", weights=False)))
    config = tmp_path / "new.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="no weights and no tokenizer"):
        find_model(str(config))
    with pytest.raises(ModelError, match="no weights and no tokenizer"):
        find_model("my_models:build")
    (tmp_path / "other").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("model", "job"), [("Qwen/Qwen3-0.6B", "qwen-qwen3-0-6b"), ("__", "model"), ("x" * 200, "x" * 80)]
)
def test_a_job_has_a_name_the_broker_takes(model: str, job: str) -> None:
    assert job_name(model) == job
