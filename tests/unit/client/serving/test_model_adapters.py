"""What NAME=DIR may be, and what is said where it is no adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusionai.client.serving.model import find_adapters, find_model
from fusionai.client.serving.names import parse_adapters
from fusionai.primitives.errors import ModelError, UsageError
from fusionai.primitives.tensors import host_tensor
from fusionai.storage.adapter_files import CONFIG_FILE, AdapterConfig, encode_adapter_config
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter


def job(directory: Path) -> Path:
    """As `fusion train` with [adapter] leaves it."""
    keys = {"q.lora_A.weight": (2, 3), "q.lora_B.weight": (4, 2)}
    header = CheckpointHeader(graph_hash="", adapter_keys=frozenset(keys))
    config = encode_adapter_config(AdapterConfig(rank=2, alpha=4.0), base=None, task=None)
    with CheckpointWriter(directory / "checkpoints", 7, header, files={CONFIG_FILE: config}) as writer:
        for key, shape in keys.items():
            writer.add(f"model/{key}", host_tensor("float32", shape, np.zeros(shape, np.float32).tobytes()))
        writer.finish()
    return directory


def test_a_name_and_a_directory() -> None:
    assert parse_adapters(["law=/a/b=c", "me/poems:2=x"]) == (("law", Path("/a/b=c")), ("me/poems:2", Path("x")))


@pytest.mark.parametrize("written", ["law", "law=", "=dir", "a b=dir", "/x=dir"])
def test_what_is_no_name_and_directory(written: str) -> None:
    with pytest.raises(UsageError, match="NAME=DIR"):
        parse_adapters([written])


def test_names_come_once() -> None:
    with pytest.raises(UsageError, match="two adapters"):
        parse_adapters(["a=x", "a=y"])


def test_a_job_or_its_checkpoint_is_an_adapter_and_no_model(tmp_path: Path) -> None:
    directory = job(tmp_path / "tuned")
    whole, step = find_adapters([("a", directory), ("b", directory / "checkpoints" / "step-00000007")])
    assert whole.files.directory == step.files.directory
    assert whole.words == "adapter a: rank 2 on 1 layers"
    with pytest.raises(ModelError, match="holds an adapter") as problem:
        find_model(str(directory))
    assert "--adapter" in str(problem.value)
    (directory / "checkpoints" / "step-00000007" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter"):
        find_model(str(directory / "checkpoints" / "step-00000007"))


def test_what_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no directory"):
        find_adapters([("a", tmp_path / "nowhere")])
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        find_adapters([("a", tmp_path)])
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="no checkpoint yet"):
        find_adapters([("a", tmp_path / "new")])
