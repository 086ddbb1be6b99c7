"""Graphs kept on disk: the same model is captured once, and anything that it may depend on has it captured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fusionai.capture import kept as kept_module
from fusionai.capture.kept import MOST_KEPT, kept
from fusionai.capture.models.source import CodeSource, ConfigSource, DirectorySource, HubSource, ModelSource
from fusionai.ir.schema import Graph
from harness.stand import layers

CONFIG: Mapping[str, Any] = {"model_type": "llama", "hidden_size": 64}
ASKED: Mapping[str, object] = {"batch": (1, 2), "task": "train", "lora": None}
GRAPH = layers()


class Capturing:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Graph:
        self.times += 1
        return GRAPH


@pytest.fixture
def times(tmp_path: Path) -> Callable[..., int]:
    """How often the model has been captured after one more question."""
    capturing = Capturing()

    def asked(source: ModelSource, options: Mapping[str, object] = ASKED) -> int:
        assert kept(tmp_path / "graphs", source, options, capturing) == GRAPH
        return capturing.times

    return asked


def test_a_configuration_is_captured_once(times: Callable[..., int]) -> None:
    assert times(ConfigSource(CONFIG)) == 1
    assert times(ConfigSource(dict(reversed(list(CONFIG.items()))))) == 1


def test_what_a_graph_depends_on_has_it_captured_again(
    times: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    times(ConfigSource(CONFIG))
    assert times(ConfigSource({**CONFIG, "hidden_size": 128})) == 2
    assert times(ConfigSource(CONFIG, "masked_lm")) == 3
    assert times(ConfigSource(CONFIG), {**ASKED, "lora": 8}) == 4
    assert times(ConfigSource(CONFIG), {**ASKED, "batch": (1, 4)}) == 5
    with monkeypatch.context() as changed:
        changed.setattr(kept_module, "_code", lambda: "other")
        assert times(ConfigSource(CONFIG)) == 6
    with monkeypatch.context() as changed:
        changed.setattr(kept_module, "_packages", lambda: iter(["torch-9.dist-info"]))
        assert times(ConfigSource(CONFIG)) == 7
    assert times(ConfigSource(CONFIG)) == 7


def test_a_directory_is_captured_again_when_a_file_of_it_changes(times: Callable[..., int], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"1")
    source = DirectorySource(model)
    assert times(source) == times(source) == 1
    (model / "model.safetensors").write_bytes(b"22")
    assert times(source) == 2
    (model / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 99}))
    assert times(source) == 3
    stat = (model / "config.json").stat()
    (model / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 98}))
    os.utime(model / "config.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert times(source) == 4


@pytest.mark.parametrize("source", [CodeSource("module:function"), HubSource("owner/name")])
def test_what_nobody_can_know_is_not_kept(times: Callable[..., int], source: ModelSource) -> None:
    assert times(source) == 1
    assert times(source) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"name": 3}'])
def test_a_file_that_is_no_graph_is_replaced(times: Callable[..., int], tmp_path: Path, content: bytes) -> None:
    times(ConfigSource(CONFIG))
    (path,) = (tmp_path / "graphs").iterdir()
    path.write_bytes(content)
    assert times(ConfigSource(CONFIG)) == 2
    assert times(ConfigSource(CONFIG)) == 2


def test_the_longest_unused_are_forgotten(times: Callable[..., int], tmp_path: Path) -> None:
    for width in range(MOST_KEPT + 3):
        times(ConfigSource({**CONFIG, "hidden_size": width}))
        for age, path in enumerate((tmp_path / "graphs").iterdir()):
            os.utime(path, (10**9 + age, 10**9 + age))
    assert len(list((tmp_path / "graphs").iterdir())) == MOST_KEPT


def test_a_disk_that_takes_nothing_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "graphs").write_text("in the way")
    assert kept(tmp_path / "graphs", ConfigSource(CONFIG), ASKED, Capturing()) == GRAPH
    assert "not kept" in caplog.text


@pytest.mark.slow
def test_a_plan_of_a_known_model_loads_no_framework(tmp_path: Path) -> None:
    model, pool = tmp_path / "model.json", tmp_path / "pool.toml"
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model.write_text(json.dumps({"model_type": "llama", "vocab_size": 128, **small}))
    pool.write_text('[[peers]]\nname = "one"\nflops_per_s = 1e11\nmemory = "1GB"\n')
    command = ["plan", str(model), "--pool", str(pool), "--home", str(tmp_path / "home")]
    program = (
        "import sys\nfrom fusionai.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print('loaded', *sorted({'torch', 'transformers', 'jax'} & set(sys.modules)))\nsys.exit(code)"
    )

    def run() -> list[str]:
        done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    first, second = run(), run()
    assert "torch" in first[-1]
    assert second[-1] == "loaded"
    assert second[:-1] == first[:-1]


def test_a_graph_depends_on_the_code_in_every_room_of_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "tracing"
    room.mkdir()
    (room / "export.py").write_text("before")
    monkeypatch.setattr(kept_module, "__file__", str(tmp_path / "kept.py"))
    before = kept_module._code()
    (room / "export.py").write_text("after")
    assert kept_module._code() != before
