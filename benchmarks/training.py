"""Training speed of a pool against one process and against torch's own pipeline, interleaved in one go.

    python benchmarks/training.py [--rounds 3] [--steps 6] [--small] [--device cpu] [--json FILE]

Systems, in turn, round after round: one process with two threads (plain PyTorch + transformers); a pool of 2 and of 4
stages, one thread each, over mutual TLS on loopback, with a broker and a job owner as processes of their own;
`torch.distributed.pipelining` 1F1B over gloo with 2 and 4 ranks, one thread each. The same 134M-parameter Llama-type
model, batch 8 x 256 in 8 microbatches, AdamW, clipping. The first two steps of each run are not counted. Quoted are
ratios within a round; absolute figures are for orientation only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.training.progress import StepDone

HERE = Path(__file__).resolve().parent
BIG = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
ROWS, LENGTH, MICROBATCHES = 8, 256, 8
WARM_UP_STEPS = 2


def config(small: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 2048 if small else 32_000,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        **(SMALL if small else BIG),
    }


def recipe(directory: Path, small: bool, stages: int, steps: int, loss: str) -> Recipe:
    """The pool's job: real text, the model above."""
    files = [str(path) for path in select_library(1_000_000)]
    return recipe_from_table(
        {
            "job": {"name": "bench", "steps": steps, "directory": str(directory / "job")},
            "model": {"config": config(small)},
            "data": {"files": files, "format": "text", "sequence_length": LENGTH, "tokenizer": {"train": 2048}},
            "train": {
                "batch_size": ROWS,
                "microbatches": MICROBATCHES,
                "learning_rate": 3e-4,
                "clip_norm": 1.0,
                "optimizer": {"kind": "adamw", "weight_decay": 0.1},
            },
            "privacy": {"level": "encrypted"},
            "placement": {"stages": stages, "loss": loss},
            "output": {"tensorboard": False, "report": False},
        },
        directory / "bench.toml",
    )


def pool(small: bool, stages: int, steps: int, loss: str, device: str) -> dict[str, Any]:
    """Tokens/s of a pool of `stages` peers with one thread each."""
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as place:
        directory = Path(place)
        seconds: list[float] = []
        plans: list[Any] = []

        def seen(event: RunEvent) -> None:
            if isinstance(event, StepDone):
                seconds.append(event.step_s)
            elif isinstance(event, Planned):
                plans.append([list(stage.blocks) for stage in event.plan.stages])

        async def main() -> None:
            peers = [LocalPeer(name=f"peer-{index}", device=device) for index in range(stages)]
            async with LocalPool(directory, peers) as local:
                options = TrainOptions(home=directory / "owner", invitation=local.invitation, device=device, threads=1)
                await train(recipe(directory, small, stages, steps, loss), options, on_event=seen, stop=asyncio.Event())

        run(main())
        return {"tokens_per_s": speed(seconds), "step_s": seconds, "blocks": plans[0]}


def one_process(small: bool, steps: int, threads: int, device: str) -> dict[str, Any]:
    """Plain PyTorch + transformers."""
    return child(["single", str(threads)], small, steps, device, processes=1, threads=threads)[0]


def torch_pipeline(small: bool, stages: int, steps: int, device: str) -> dict[str, Any]:
    """`torch.distributed.pipelining`, 1F1B over gloo."""
    return child(["pipeline", str(stages)], small, steps, device, processes=stages, threads=1)[-1]


def child(
    arguments: list[str], small: bool, steps: int, device: str, *, processes: int, threads: int
) -> list[dict[str, Any]]:
    """Run `benchmarks/plain_training.py` as `processes` processes; their last lines are JSON."""
    with tempfile.TemporaryDirectory() as place:
        started = []
        for rank in range(processes):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
            }
            command = [sys.executable, str(HERE / "plain_training.py"), *arguments, "--steps", str(steps)]
            command += ["--config", json.dumps(config(small)), "--store", f"{place}/store", "--device", device]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        answers = [process.communicate()[0] for process in started]
        for process in started:
            if process.returncode != 0:
                raise SystemExit(f"{arguments[0]} failed with exit code {process.returncode}")
    results = [json.loads(answer.strip().splitlines()[-1]) for answer in answers]
    return [{"tokens_per_s": speed(result["step_s"]), **result} for result in results]


def speed(step_s: list[float]) -> float:
    """Tokens/s over all steps but the first two, in which every system touches its memory for the first time."""
    counted = step_s[WARM_UP_STEPS:] or step_s[-1:]
    return len(counted) * ROWS * LENGTH / sum(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="a toy model, to try the benchmark itself")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=Path("training-benchmark.json"))
    parser.add_argument("--only", default="", help="names of systems, separated by semicolons")
    options = parser.parse_args()
    small, steps, device = options.small, options.steps, options.device
    systems = {
        "one process, 2 threads": lambda: one_process(small, steps, 2, device),
        "pool, 2 stages": lambda: pool(small, 2, steps, "pool", device),
        "torch pipelining, 2 stages": lambda: torch_pipeline(small, 2, steps, device),
        "pool, 4 stages": lambda: pool(small, 4, steps, "pool", device),
        "torch pipelining, 4 stages": lambda: torch_pipeline(small, 4, steps, device),
        "pool, 4 stages, loss at the owner": lambda: pool(small, 4, steps, "owner", device),
    }
    wanted = [name.strip() for name in options.only.split(";") if name.strip()]
    systems = {name: system for name, system in systems.items() if not wanted or name in wanted}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(options.rounds):
        for name, system in systems.items():
            result = system()
            runs[name].append(result)
            print(f"round {number + 1}  {name:<36} {result['tokens_per_s']:8.1f} tokens/s", flush=True)
    base = next(iter(systems))
    speeds = {name: [result["tokens_per_s"] for result in results] for name, results in runs.items()}
    ratios = {
        name: [mine / theirs for mine, theirs in zip(values, speeds[base], strict=True)]
        for name, values in speeds.items()
    }
    print(f"\nratio to {base!r}, round by round: min / median / max")
    for name, values in ratios.items():
        print(f"  {name:<36} {min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}")
    for stages in (2, 4):
        ours, theirs = speeds.get(f"pool, {stages} stages"), speeds.get(f"torch pipelining, {stages} stages")
        if ours and theirs:
            values = [a / b for a, b in zip(ours, theirs, strict=True)]
            print(f"  pool / torch pipelining, {stages} stages: median {statistics.median(values):.3f}")
    report = {
        "schema": "fusionai.benchmark.training/1",
        "config": config(small),
        "batch": [ROWS, LENGTH, MICROBATCHES],
        "steps": steps,
        "device": device,
        "cores": os.cpu_count(),
        "finished_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": runs,
        "ratios": ratios,
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
