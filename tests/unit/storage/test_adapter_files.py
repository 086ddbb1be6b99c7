from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.adapter_files import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    AdapterConfig,
    encode_adapter_config,
    read_adapter,
    read_adapter_config,
)
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointReader, CheckpointWriter
from fusionai.storage.safetensors_file import SafetensorsFile, write_safetensors

CONFIG = AdapterConfig(rank=4, alpha=8.0, targets=("layers.0.q", "layers.1.q"))


def zeros(*shape: int) -> HostTensor:
    return host_tensor("float32", shape, np.zeros(shape, np.float32).tobytes())


def adapter(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    written = json.loads(encode_adapter_config(CONFIG, base="base", task="CAUSAL_LM")) | changes
    (directory / CONFIG_FILE).write_text(json.dumps(written))
    parts = {
        f"{PREFIX}layers.{layer}.q.lora_{part}.weight": zeros(*shape)
        for layer in (0, 1)
        for part, shape in (("A", (4, 6)), ("B", (5, 4)))
    }
    write_safetensors(directory / WEIGHTS_FILE, parts)
    return directory


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = read_adapter(adapter(tmp_path))
    assert (found.config.rank, found.config.alpha, found.rank) == (4, 8.0, 4)
    assert {name: (one.rank, one.inputs, one.outputs) for name, one in found.layers.items()} == {
        "layers.0.q": (4, 6, 5),
        "layers.1.q": (4, 6, 5),
    }


def test_the_scale_is_pefts() -> None:
    assert CONFIG.scale("layers.0.q", 4) == 2.0
    stabilised = AdapterConfig(rank=4, alpha=8.0, rank_stabilised=True, alpha_pattern={"0.q": 2.0, "1": 5.0})
    assert [stabilised.scale(f"layers.{layer}.q", 4) for layer in (0, 1)] == [1.0, 4.0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"something_new": 1}, "something_new"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "rank r"),
        ({"alpha_pattern": {"layers\\.[0-9]+": 4}}, "names of layers"),
    ],
)
def test_what_would_give_another_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read_adapter_config(adapter(tmp_path, **changes))


def test_what_is_no_adapter_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    place = adapter(tmp_path / "pickled")
    (place / WEIGHTS_FILE).rename(place / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        read_adapter(place)
    (place / WEIGHTS_FILE).write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="damaged"):
        read_adapter(place)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"q.lora_A.weight": zeros(4, 6)}, "lacks"),
        ({"q.lora_A.weight": zeros(4, 6), "q.lora_B.weight": zeros(5, 3)}, "rank, in"),
        ({"q.lora_embedding_A": zeros(4, 6)}, "not part of"),
    ],
)
def test_weights_that_do_not_fit_each_other(tmp_path: Path, parts: dict[str, HostTensor], named: str) -> None:
    place = adapter(tmp_path)
    (place / WEIGHTS_FILE).unlink()
    write_safetensors(place / WEIGHTS_FILE, {PREFIX + name: value for name, value in parts.items()})
    with pytest.raises(ModelError, match=named):
        read_adapter(place)


def test_a_checkpoint_of_an_adapter_is_in_pefts_layout(tmp_path: Path) -> None:
    keys = frozenset({"q.lora_A.weight", "q.lora_B.weight"})
    header = CheckpointHeader(graph_hash="g", adapter_keys=keys, base={"model.safetensors": "0" * 64})
    entries = {
        "model/q.lora_A.weight": zeros(4, 6),
        "model/q.lora_B.weight": zeros(5, 4),
        "model/rotary": zeros(3),
        "optimizer/q.lora_A.weight/exp_avg": zeros(4, 6),
    }
    with CheckpointWriter(tmp_path, 3, header, files={CONFIG_FILE: b"{}"}, shard_bytes=1) as writer:
        for name, value in entries.items():
            writer.add(name, value)
        directory = writer.finish(entries)
    assert SafetensorsFile(directory / WEIGHTS_FILE).names == tuple(sorted(PREFIX + key for key in keys))
    assert not list(directory.glob("model*"))
    reader = CheckpointReader(directory)
    reader.verify()
    assert reader.manifest.base == header.base
    assert {name: bytes(reader.read(name).data) for name in reader.names} == {
        name: bytes(value.data) for name, value in entries.items()
    }
