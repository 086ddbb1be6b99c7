"""What packed boundaries cost in loss: the same model, data and steps in a pool, with each codec in turn.

    python benchmarks/compression.py [--steps 400] [--seeds 3] [--stages 3] [--codecs none,int8,...] [--json FILE]

A Llama type of 14M parameters on the source text of this Python's library, 1,024 tokens a step, cosine schedule;
shipped `fusion join` processes on loopback. Seeds change initialisation and the order of data; within a seed all
codecs get the same. Quoted: the loss on held-out text at the end, and the mean over the last tenth of the steps, both
as ratios to `none` of the same seed; the bytes that one microbatch takes over one boundary, both ways. Rows are
written as soon as they are known; what FILE has already is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from math import prod
from pathlib import Path
from typing import Any, Final, get_args

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.training.train import RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.storage.atomic import write_atomic
from fusionai.training.progress import Evaluated
from fusionai.wire.codecs import LADDER, Codec, packed_bytes, packing

WIDTH: Final = 384
ROWS, LENGTH, MICROBATCHES = 8, 128, 4
CORPUS_BYTES: Final = 6_000_000


def main() -> None:
    arguments = _arguments()
    known: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        known = [
            row
            for row in json.loads(arguments.json.read_text())["runs"]
            if (row["steps"], row["stages"]) == (arguments.steps, arguments.stages)
        ]
    for seed in range(1, arguments.seeds + 1):
        for codec in arguments.codecs:
            if not any((row["seed"], row["codec"]) == (seed, codec) for row in known):
                known.append(_trained(codec, seed, arguments.steps, arguments.stages))
                print(_shown(known[-1]), flush=True)
                if arguments.json is not None:
                    found = {"schema": "fusionai.compression/1", "runs": known, "ratios": _ratios(known)}
                    write_atomic(arguments.json, json.dumps(found, indent=2).encode() + b"\n")
    for codec, ratios in _ratios(known).items():
        print(f"{codec}: held-out loss {ratios['held_out']:.4f} x, last steps {ratios['last_steps']:.4f} x")


def _trained(codec: Codec, seed: int, steps: int, stages: int) -> dict[str, Any]:
    held_out: list[float] = []

    def seen(event: RunEvent) -> None:
        if isinstance(event, Evaluated):
            held_out.append(event.loss)

    async def pooled(directory: Path) -> tuple[float, ...]:
        peers = [LocalPeer(name=f"peer-{number}") for number in range(stages)]
        async with LocalPool(directory, peers) as local:
            options = TrainOptions(home=directory / "owner", invitation=local.invitation, threads=1)
            recipe = _recipe(directory, codec, seed, steps, stages)
            return (await train(recipe, options, on_event=seen, stop=asyncio.Event())).losses

    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as place:
        losses = run(pooled(Path(place)))
    crossing = (ROWS // MICROBATCHES, LENGTH, WIDTH)
    return {
        "codec": codec,
        "seed": seed,
        "steps": steps,
        "stages": stages,
        "held_out": held_out[-1],
        "last_steps": statistics.mean(losses[-max(1, steps // 10) :]),
        "boundary_bytes": sum(
            4 * prod(crossing) if codec == "none" else packed_bytes(packing(codec, forward=forward), crossing)
            for forward in (True, False)
        ),
        "losses": losses,
    }


def _ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """To `none` of the same seed: medians, and the worst."""
    plain = {row["seed"]: row for row in rows if row["codec"] == "none"}
    found: dict[str, dict[str, float]] = {}
    for codec in dict.fromkeys(row["codec"] for row in rows):
        pairs = [(row, plain[row["seed"]]) for row in rows if row["codec"] == codec and row["seed"] in plain]
        if pairs:
            ratios = {key: [row[key] / base[key] for row, base in pairs] for key in ("held_out", "last_steps")}
            found[codec] = {key: statistics.median(values) for key, values in ratios.items()}
            found[codec] |= {f"{key}_worst": max(values) for key, values in ratios.items()}
    return found


def _shown(row: dict[str, Any]) -> str:
    return (
        f"seed {row['seed']}, {row['codec']}: held-out {row['held_out']:.4f}, last steps {row['last_steps']:.4f}, "
        f"{row['boundary_bytes'] / 1e3:.0f} kB a microbatch and boundary"
    )


def _recipe(directory: Path, codec: Codec, seed: int, steps: int, stages: int) -> Recipe:
    return recipe_from_table(
        {
            "job": {"name": "bench", "steps": steps, "seed": seed, "directory": str(directory / "job")},
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": WIDTH,
                    "intermediate_size": 1024,
                    "num_hidden_layers": 6,
                    "num_attention_heads": 6,
                    "max_position_embeddings": LENGTH,
                    "tie_word_embeddings": False,
                }
            },
            "data": {
                "files": [str(path) for path in select_library(CORPUS_BYTES)],
                "format": "text",
                "sequence_length": LENGTH,
                "evaluation_fraction": 0.05,
                "tokenizer": {"train": 4096},
            },
            "train": {
                "batch_size": ROWS,
                "microbatches": MICROBATCHES,
                "learning_rate": 1e-3,
                "schedule": "cosine",
                "warmup_steps": min(20, steps),
                "clip_norm": 1.0,
                "optimizer": {"kind": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1},
                "compression": codec,
            },
            "evaluation": {"batches": 32},
            "privacy": {"level": "encrypted"},
            "placement": {"stages": stages},
            "output": {"tensorboard": False, "report": False},
        },
        directory / "bench.toml",
    )


def _arguments() -> argparse.Namespace:
    def codecs(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in get_args(Codec)]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(get_args(Codec))}, got {', '.join(unknown)}")
        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--codecs", type=codecs, default=list(LADDER))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
