"""One model served by PyTorch, JAX and ONNX Runtime machines, as people start them; the last two never load PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.live_pool import LivePool, Process
from harness.saved_model import asked, greedy, heard, saved_model

pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.timeout(1200)
def test_three_frameworks_serve_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    model = saved_model(tmp_path / "tiny")
    with LivePool(tmp_path, peers=("torch",)) as pool:
        others = {name: pool.start(name, pool.invite(), "--backend", name) for name in ("jax", "onnxruntime")}
        for peer in others.values():
            peer.wait_for("In pool")
        figures = tmp_path / "serve.json"
        server = Process(
            *("serve", model, "--stages", 3, "--context", 128, "--sessions", 2, "--port", 0, "--spares", 0),
            *("--home", pool.owner, "--json", figures),
        )
        try:
            heard(server, "curl ")
            ready = json.loads(figures.read_text())
            served = [ready["peers"][stage["peer"]] for stage in ready["plan"]["stages"] if "stage" in stage["roles"]]
            assert sorted(served) == ["jax", "onnxruntime", "torch"]
            for prompt in ("a pool of", "serves a model"):
                assert asked(ready["url"], prompt)["choices"][0]["text"] == greedy(model, prompt)
            if sys.platform == "linux":
                for name, library in (("jax", "jaxlib"), ("onnxruntime", "onnxruntime_pybind")):
                    mapped = Path(f"/proc/{others[name].process.pid}/maps").read_text()
                    assert library in mapped
                    assert "libtorch" not in mapped
            server.interrupt()
            assert server.ended() == 0
        finally:
            server.end()
