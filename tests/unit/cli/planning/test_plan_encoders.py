"""What `fusion plan --task serve` says of an encoder: texts per second, by the arithmetic of whole texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionai.cli.main import main

pytestmark = pytest.mark.slow

MODEL = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 211,
    "max_position_embeddings": 512,
}
PEER = """
[[peers]]
name = "{name}"
flops_per_s = {flops_per_s}
memory = "200MB"
uplink = "1Gbit"
latency = "0ms"
memory_bandwidth_bytes_per_s = 1e12
"""
OWNER = PEER.replace("[[peers]]", "[owner]").format(name="me", flops_per_s="1e12")


def test_a_text_s_arithmetic_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bert.json").write_text(json.dumps(MODEL))
    peers = [PEER.format(name="quick", flops_per_s="3e9"), PEER.format(name="slow", flops_per_s="1e9")]
    (tmp_path / "pool.toml").write_text("".join(peers) + OWNER)
    figures = tmp_path / "plan.json"
    asked = ["plan", str(tmp_path / "bert.json"), "--pool", str(tmp_path / "pool.toml"), "--task", "serve"]
    asked += ["--home", str(tmp_path / "home"), "--json", str(figures)]
    assert main([*asked, "--details", "--stages", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Plan, per text of 256 tokens" in shown
    assert "texts/s, a text of 256 tokens in" in shown
    assert "A text has at most 512 tokens." in shown
    written = json.loads(figures.read_text())
    layers = {stage["peer"]: stage["blocks"] for stage in written["stages"] if "stage" in stage["roles"]}
    counts = {peer: end - start for peer, (start, end) in layers.items()}
    assert counts == {"quick": 3, "slow": 1}, "thrice as fast, so thrice as many layers"
    # A layer: four products of 32 x 32, two of 32 x 64, and both products of attention, for each of 256 tokens.
    layer_flops = 256 * (2 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 256 * 32)
    assert written["step_time_s"] == pytest.approx(layer_flops * (3 / 3e9 + 1 / 1e9), rel=0.25)
    assert main([*asked, "--weights", "int8"]) == 2
    assert "is an encoder and needs --weights fp32" in capsys.readouterr().err
