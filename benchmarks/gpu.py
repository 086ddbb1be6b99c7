"""How near a device's decoding and training come to its limits, beside other engines on the same device.

    python benchmarks/gpu.py [--device auto] [--rounds 10] [--model DIRECTORY] [--gguf FILE] [--json FILE]

Decoding is limited by memory bandwidth, training by matrix products. Each round measures both limits and every rate, so
that a change of the device's clock or another program affects them alike. A share is the median, over the rounds, of a
rate's ratio to the limit of its own round. Layers are those of `fusion doctor --self-test`: on a processor they are
small, and the figures only show that the command works.

llama.cpp is measured by its `llama-bench` on the model of --gguf, vLLM by its `vllm bench latency` on that of --model,
each with the bytes of its weights. torchtitan trains from a configuration of its own: only whether it is installed is
reported. What is not installed is said.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from fusionai.backends import measurement
from fusionai.backends.self_test import DECODING, TRAINING
from fusionai.backends.torch.backend import TorchBackend, calls_per_s
from fusionai.backends.torch.self_test import TestedDevice, decoding_run, tested, training_run

MEASURE_S: Final = 0.3
"""Time of each measurement in a round, in seconds; chosen."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS: Final = 128
"""Tokens that other engines decode."""
TIMEOUT_S: Final = 900.0


def main() -> None:
    arguments = _arguments()
    found = tested(TorchBackend(arguments.device))
    rates = _rates(found)
    limits = _limits(found)
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        rounds.append({name: work * calls_per_s(call, found.device, MEASURE_S) for name, (call, work) in rates.items()})
        rounds[-1] |= {name: work * calls_per_s(call, found.device, MEASURE_S) for name, (call, work) in limits.items()}
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
    shares = {name: _share(name, rounds) for name in rates}
    bandwidth = statistics.median(one["bandwidth"] for one in rounds)
    print(f"{found.device} ({found.device_name}): {bandwidth / 1e9:.4g} GB/s copied")
    for name, share in shares.items():
        print(f"{name:20} {share['median']:6.1%} of its limit (rounds: {share['least']:.1%} to {share['most']:.1%})")
    others = {
        "llama.cpp": _llama_bench(arguments.gguf, bandwidth),
        "vLLM": _vllm(arguments.model, bandwidth),
        "torchtitan": _torchtitan(),
    }
    for name, other in others.items():
        print(f"{name:20} " + (f"{other['share']:6.1%} of its limit" if "share" in other else other["problem"]))
    if arguments.json is not None:
        device = {"device": str(found.device), "name": found.device_name, "versions": found.versions}
        report = {"device": device, "measured_at": time.time(), "rounds": rounds, "shares": shares, "others": others}
        arguments.json.write_text(json.dumps(report, indent=2), encoding="utf-8")


def _rates(found: TestedDevice) -> dict[str, tuple[Callable[[], object], float]]:
    """What is measured -> a call, and its bytes or operations."""
    made: dict[str, tuple[Callable[[], object], float]] = {}
    for form in DECODING:
        call, read_bytes = decoding_run(found, form)
        made[f"decoding {form}"] = call, float(read_bytes)
    for precision in ("fp32", "bf16"):
        assert precision in TRAINING
        microbatch, flops, _ = training_run(found, precision)
        made[f"training {precision}"] = microbatch, flops
    return made


def _limits(found: TestedDevice) -> dict[str, tuple[Callable[[], object], float]]:
    kind = found.device.type
    size = measurement.MATRIX_SIZE[kind]
    made: dict[str, tuple[Callable[[], object], float]] = {}
    for name, dtype in DTYPES.items():
        matrix = torch.ones(size, size, device=found.device, dtype=dtype)
        made[f"products {name}"] = (lambda matrix=matrix: torch.mm(matrix, matrix)), 2.0 * size**3
    source = torch.zeros(measurement.COPY_BYTES[kind], dtype=torch.uint8, device=found.device)
    target = torch.zeros_like(source)
    made["bandwidth"] = (lambda: target.copy_(source)), 2.0 * source.nbytes
    return made


def _share(name: str, rounds: list[dict[str, float]]) -> dict[str, float]:
    limit = "bandwidth" if name.startswith("decoding") else name.replace("training", "products")
    ratios = [one[name] / one[limit] for one in rounds]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _llama_bench(model: Path | None, bandwidth_bytes_per_s: float) -> dict[str, Any]:
    program = shutil.which("llama-bench")
    if program is None:
        return {"problem": "not installed (no `llama-bench` in the PATH)"}
    if model is None:
        return {"problem": "installed, not measured: name a model by --gguf"}
    command = [program, "-m", str(model), "-p", "0", "-n", str(TOKENS), "-o", "json"]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S)
    if ended.returncode:
        return {"problem": f"failed: {ended.stderr.decode(errors='replace').strip()[-300:]}"}
    (row,) = json.loads(ended.stdout)
    tokens_per_s, weight_bytes = float(row["avg_ts"]), int(row["model_size"])
    return _beside(tokens_per_s, weight_bytes, bandwidth_bytes_per_s)


def _vllm(model: Path | None, bandwidth_bytes_per_s: float) -> dict[str, Any]:
    program = shutil.which("vllm")
    if program is None:
        return {"problem": "not installed (no `vllm` in the PATH)"}
    if model is None:
        return {"problem": "installed, not measured: name a directory of Hugging Face files by --model"}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "latency.json"
        command = [program, "bench", "latency", "--model", str(model), "--batch-size", "1", "--input-len", "32"]
        command += ["--output-len", str(TOKENS), "--output-json", str(file)]
        ended = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S)
        if ended.returncode:
            return {"problem": f"failed: {ended.stderr.decode(errors='replace').strip()[-300:]}"}
        latency_s = float(json.loads(file.read_text(encoding="utf-8"))["avg_latency"])
    weight_bytes = sum(one.stat().st_size for one in model.glob("*.safetensors"))
    return _beside(TOKENS / latency_s, weight_bytes, bandwidth_bytes_per_s)


def _beside(tokens_per_s: float, weight_bytes: int, bandwidth_bytes_per_s: float) -> dict[str, Any]:
    share = tokens_per_s * weight_bytes / bandwidth_bytes_per_s
    return {"tokens_per_s": tokens_per_s, "weight_bytes": weight_bytes, "share": share}


def _torchtitan() -> dict[str, Any]:
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return {"problem": "not installed"}
    return {"problem": f"{version} is installed, not measured: it trains from a configuration of its own"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
