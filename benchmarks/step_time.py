"""What a step takes between homes against what its plan says: four machines in four homes, real lines, real routers.

    python benchmarks/step_time.py [--bandwidth 20] [--latency 0.04] [--share 0.35] [--rounds 2]
        [--steps 16] [--json FILE]

Needs root. Each machine is in a network namespace behind a router of its own that translates addresses (user space,
tests/harness/router.py) and has a line of `--bandwidth` Mbit/s with half the latency, each way; broker and job owner
are in the public place, where lines end. By default the routers forward the machines' port, so that links go by TCP;
with `--router preserving` they go by QUIC, with `symmetric` over the broker's relay. What is run is what people run:
`fusion broker`, `fusion join --share`, `fusion train`. Machines measure their own lines and speeds, as they always do;
nobody is told how the lines are shaped. Machines, their routers, broker and owner share this machine's cores: with a
`--share` that leaves some for the others, a machine computes as fast as when it measured itself. Quoted: the plan's
step over the median of those measured, less one, for boundaries unpacked and in int8 in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from fusionai.corpus.files import select_library
from fusionai.storage.atomic import write_atomic

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness.homes import PUBLIC, Homes, why_not  # noqa: E402

MACHINES: Final = ("a", "b", "c", "d")
CODECS: Final = ("none", "int8")
WIDTH, LENGTH, ROWS, MICROBATCHES = 128, 256, 16, 8
PORT: Final = 4800
GOAL: Final = 0.10
PATIENCE_S: Final = 120.0


def main() -> None:
    options = _arguments()
    if reason := why_not():
        raise SystemExit(f"no homes can be made here: {reason}.")
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for codec in CODECS:
            run = _run(codec, options.router, options.bandwidth, options.latency, options.steps, options.share)
            runs.append(run | {"round": number})
            print(_shown(runs[-1]), flush=True)
    errors = [abs(one["error"]) for one in runs]
    print(f"off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most (goal {GOAL:.0%})")
    if options.json is not None:
        found = {"schema": "fusionai.step_time/1", "runs": runs, "median": statistics.median(errors)}
        write_atomic(options.json, json.dumps(found, indent=2).encode() + b"\n")


def _run(codec: str, router: str, megabits: float, latency_s: float, steps: int, share: float) -> dict[str, Any]:
    kinds, machines = dict.fromkeys(MACHINES, router), dict.fromkeys(MACHINES, 1)
    with (
        tempfile.TemporaryDirectory(prefix="fusion-bench-") as place,
        Homes(kinds, machines, line=(megabits * 1e6, latency_s / 2)) as homes,
    ):
        directory = Path(place)
        recipe = _recipe(directory, codec, steps)
        broker = homes.run("public", *_fusion("broker", "--home", directory / "broker", "--host", PUBLIC))
        invitation = _heard(broker, "fusion1-")
        for name in MACHINES:
            limits = ("--share", share, "--threads", 1, "--max-memory", "2GB", "--port", PORT)
            peer = homes.run(
                f"{name}1", *_fusion("join", invitation, "--home", directory / name, "--name", name, *limits)
            )
            _heard(peer, "In pool")  # one after the other: each measures its speed alone
            _drained(peer)
        _drained(broker)
        figures = directory / "figures.json"
        owner = homes.run(
            "public",
            *_fusion("train", recipe, "--home", directory / "owner", "--invite", invitation, "--threads", 1),
            *("--json", figures),
        )
        _heard(owner, f"step {steps // 2}/")
        links = _links(homes, directory)
        said, _ = owner.communicate(timeout=60 + 20 * steps)
        if owner.returncode != 0:
            raise SystemExit(said)
        observed = max(json.loads(figures.read_text())["observed"], key=lambda row: row["steps"])
        warnings = sorted({line.strip() for line in said.splitlines() if "warning" in line})
    return {
        "codec": codec,
        "router": router,
        "bandwidth_mbit_per_s": megabits,
        "latency_s": latency_s,
        "share": share,
        "predicted_s": observed["predicted_step_s"],
        "measured_s": observed["measured_step_s"],
        "error": observed["predicted_step_s"] / observed["measured_step_s"] - 1,
        "bottleneck": observed["bottleneck"],
        "stages": observed["stages"],
        "steps": observed["steps"],
        "warnings": warnings,
        "links": links,
    }


def _fusion(*arguments: object) -> tuple[str, ...]:
    return ("env", "OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1", sys.executable, "-m", "fusionai", *map(str, arguments))


def _heard(process: subprocess.Popen[str], words: str) -> str:
    """The first word it says that begins so, or the line that has the words."""
    assert process.stdout is not None
    said, deadline_s = "", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and (line := process.stdout.readline()):
        said += line
        if words in line:
            return next((word for word in line.split() if word.startswith(words)), line)
    raise SystemExit(f"{words!r} was never said: {said}")


def _drained(process: subprocess.Popen[str]) -> None:
    """Nobody reads it any more, and it must not wait for that."""
    threading.Thread(target=lambda: process.stdout and process.stdout.read(), daemon=True).start()


def _links(homes: Homes, directory: Path) -> list[dict[str, Any]]:
    """What machines say of the links they have, half-way."""
    told = directory / "pool.json"
    asked = homes.run("public", *_fusion("pool", "--home", directory / "owner", "--json", told))
    said, _ = asked.communicate(timeout=PATIENCE_S)
    if asked.returncode != 0:
        raise SystemExit(said)
    members = json.loads(told.read_text())["members"]
    names = {one["peer"]: one["name"] for one in members}
    return [
        {"from": one["name"], **link, "to": names.get(link["peer"], "owner")}
        for one in members
        for link in one["links"]
    ]


def _recipe(directory: Path, codec: str, steps: int) -> Path:
    files = [str(path) for path in select_library(400_000)]
    path = directory / "recipe.toml"
    path.write_text(
        f"""
[job]
name = "step-time"
seed = 1
steps = {steps}
directory = "run"

[model]
task = "causal_lm"

[model.config]
model_type = "llama"
vocab_size = 1024
hidden_size = {WIDTH}
intermediate_size = {WIDTH}
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = {LENGTH}

[data]
files = {json.dumps(files)}
sequence_length = {LENGTH}
tokenizer = {{ train = 1024 }}

[train]
batch_size = {ROWS}
microbatches = {MICROBATCHES}
learning_rate = 1e-3
compression = "{codec}"

[placement]
stages = {len(MACHINES)}
loss = "pool"

[output]
tensorboard = false
report = false
""",
        encoding="utf-8",
    )
    return path


def _shown(one: dict[str, Any]) -> str:
    return (
        f"{one['codec']}: planned {one['predicted_s']:.2f} s, measured {one['measured_s']:.2f} s, off by "
        f"{one['error']:+.1%}; slowest by the plan: {one['bottleneck']}; links: "
        f"{', '.join(sorted({link['way'] for link in one['links']}))}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=20.0, help="Mbit/s of every home's line, each way")
    parser.add_argument("--latency", type=float, default=0.04, help="seconds between any two homes, one way")
    parser.add_argument("--router", choices=("preserving", "forwarding", "symmetric"), default="forwarding")
    parser.add_argument("--share", type=float, default=0.35, help="of a core that each machine may use")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
