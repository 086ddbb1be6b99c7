"""`fusion check`: what fits, what does not, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionai.cli.main import main

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
ODD = """
import torch

class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, labels):
        return torch.linalg.svdvals(self.layer(x)).sum()

def build():
    return Odd(), {"x": torch.zeros(2, 4), "labels": torch.zeros(2)}
"""


@pytest.mark.slow
def test_a_model_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    figures = tmp_path / "check.json"
    assert main(["check", str(tmp_path / "model.json"), "--json", str(figures)]) == 0
    written = json.loads(figures.read_text())
    assert (written["schema"], written["ok"], written["cached_serving"]) == ("fusionai.check/1", True, True)
    assert [block["kind"] for block in written["blocks"]] == [0, 1, 1, 1, 2, 3]
    shown = capsys.readouterr().out
    assert "3 of 3 attention layers recognised" in shown
    assert "1-3" in shown
    assert "Supported" in shown


@pytest.mark.slow
def test_what_an_adapter_would_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rank 4: (32 + 32) of q and o, (32 + 16) of k and v, three of (32 + 64), times 4, in each of three layers."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    figures = tmp_path / "check.json"
    assert main(["check", str(tmp_path / "model.json"), "--lora", "4", "--json", str(figures)]) == 0
    written = json.loads(figures.read_text())["trained"]
    count = 3 * 4 * (2 * 64 + 2 * 48 + 3 * 96)
    assert written["parameters"] == count
    # Two moments of each number, and a count of steps of each of the matrices.
    assert written["optimizer_bytes"] == 2 * 4 * count + 4 * 3 * 7 * 2
    assert written["frozen_parameters"] > count
    assert written["frozen_optimizer_bytes"] == 0
    assert "and 0 B for the others" in capsys.readouterr().out


@pytest.mark.slow
def test_an_operator_nobody_knows_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "odd_model_of_this_test.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", "odd_model_of_this_test:build", "--task", "module_loss"]) == 1
    shown = capsys.readouterr().out
    assert "Unsupported: aten.linalg_svdvals.default" in shown
    assert "Not supported" in shown


@pytest.mark.parametrize(
    ("model", "said"),
    [("./nofile.json", "there is no configuration file"), ("no model at all", "is not a model")],
)
def test_what_is_no_model_is_wrong_use(model: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", model]) == 2
    assert said in capsys.readouterr().err


PLAIN = """
import torch

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}

def build():
    return Plain(), {"x": torch.zeros(2, 8)}
"""


@pytest.mark.slow
def test_the_graph_is_compared_with_the_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "plain_module.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    figures = tmp_path / "check.json"
    command = ["check", "plain_module:build", "--task", "module_loss", "--compare", "--json", str(figures)]
    assert main(command) == 0
    assert "Compared: graph and module differ by 0 relative at most, gradients by 0." in capsys.readouterr().out
    assert json.loads(figures.read_text())["compared"]["forward_diff"] == 0.0
