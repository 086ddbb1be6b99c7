"""What it costs to agree only now and then: replicas with local updates against gradients summed at every step.

    python benchmarks/local_updates.py [--steps 1500] [--every 50] [--rows 64] [--replicas 2] [--codecs int2,int4]
        [--learning-rate 0.004] [--early-steps 320] [--seed 1] [--seeds 1] [--json FILE]

A Llama type of 0.2M parameters on the source text of this Python's library; shipped `fusion join` processes on
loopback. A replica's step takes `--rows` sequences of 128 tokens: with few of them a gradient is mostly noise, which
summing at every step halves and going alone does not. In `--early-steps` after the warm-up there are five exchanges
where there is usually one. `int4+5`: in int4, and five steps go on while an exchange
travels. The base is one job whose batch is all replicas' together: bit for bit what replicas do that sum gradients at
every step. Both take the same tokens; within a seed everything begins with the same weights. Quoted: the loss on
held-out text at the end and the mean over the last tenth of the steps, as ratios to the base; bytes exchanged among
replicas' machines, and how many times more gradients at every step would have been, in float32. Rows are
written as soon as they are known; what FILE has already is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final, get_args

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.training.replicas import InReplica, ReplicasEvent, train_replicas
from fusionai.client.training.train import RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.storage.atomic import write_atomic
from fusionai.training.progress import Evaluated
from fusionai.wire.codecs import Exchanged

WIDTH, LAYERS, VOCABULARY = 64, 3, 512
LENGTH, MICROBATCHES = 128, 1
"""Of one replica's step."""
CORPUS_BYTES: Final = 12_000_000
BASE: Final = "every step"
KINDS: Final = get_args(Exchanged)
SAME: Final = ("steps", "every", "early_steps", "replicas", "rows", "learning_rate")


def main() -> None:
    arguments = _arguments()
    setting = {name: getattr(arguments, name) for name in SAME}
    known: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        written = json.loads(arguments.json.read_text())["runs"]
        known = [row for row in written if {name: row.get(name) for name in SAME} == setting]
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for kind in (BASE, *arguments.codecs):
            if not any((row["seed"], row["kind"]) == (seed, kind) for row in known):
                known.append(_trained(kind, seed, **setting))
                print(_shown(known[-1]), flush=True)
                if arguments.json is not None:
                    found = {"schema": "fusionai.local_updates/1", "runs": known, "ratios": _ratios(known)}
                    write_atomic(arguments.json, json.dumps(found, indent=2).encode() + b"\n")
    for kind, ratios in _ratios(known).items():
        print(f"{kind}: held-out loss {ratios['held_out']:.4f} x, last steps {ratios['last_steps']:.4f} x")


def _trained(
    kind: str,
    seed: int,
    *,
    steps: int,
    every: int,
    early_steps: int,
    replicas: int,
    rows: int,
    learning_rate: float,
) -> dict[str, Any]:
    held_out: list[float] = []

    def seen(event: RunEvent) -> None:
        if isinstance(event, Evaluated):
            held_out.append(event.loss)

    def seen_of_all(event: ReplicasEvent) -> None:
        if isinstance(event, InReplica):
            seen(event.event)

    async def pooled(directory: Path) -> tuple[list[float], int, int]:
        peers = [LocalPeer(name=f"peer-{number}") for number in range(replicas)]
        async with LocalPool(directory, peers) as local:
            options = TrainOptions(home=directory / "owner", invitation=local.invitation, threads=1)
            recipe = _recipe(directory, kind, seed, steps, (every, early_steps), replicas, rows, learning_rate)
            if recipe.replicas is None:
                return list((await train(recipe, options, on_event=seen, stop=asyncio.Event())).losses), 0, 0
            all_of_them = await train_replicas(
                recipe, recipe.replicas, options, on_event=seen_of_all, stop=asyncio.Event()
            )
            assert not all_of_them.failed, all_of_them.failed
            losses = zip(*(one.losses for one in all_of_them.replicas.values()), strict=True)
            mean = [statistics.fmean(step) for step in losses]
            return mean, all_of_them.exchanged_bytes, all_of_them.every_step_bytes

    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as place:
        losses, exchanged_bytes, gradient_bytes = run(pooled(Path(place)))
    return {
        "kind": kind,
        "seed": seed,
        "steps": steps,
        "every": every,
        "early_steps": early_steps,
        "replicas": replicas,
        "rows": rows,
        "learning_rate": learning_rate,
        "held_out": held_out[-1],
        "last_steps": statistics.mean(losses[-max(1, steps // 10) :]),
        "exchanged_bytes": exchanged_bytes,
        "times_less": gradient_bytes / exchanged_bytes if exchanged_bytes else 1.0,
        "losses": losses,
    }


def _ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """To the base of the same seed: medians, and the worst."""
    base = {row["seed"]: row for row in rows if row["kind"] == BASE}
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        pairs = [(row, base[row["seed"]]) for row in rows if row["kind"] == kind and row["seed"] in base]
        if pairs:
            ratios = {key: [row[key] / other[key] for row, other in pairs] for key in ("held_out", "last_steps")}
            found[kind] = {key: statistics.median(values) for key, values in ratios.items()}
            found[kind] |= {f"{key}_worst": max(values) for key, values in ratios.items()}
            found[kind]["times_less"] = statistics.median(row["times_less"] for row, _ in pairs)
    return found


def _parted(kind: str) -> tuple[str, int]:
    """Its codec, and the steps that go on meanwhile."""
    codec, _, steps = kind.partition("+")
    return codec, int(steps or 0)


def _shown(row: dict[str, Any]) -> str:
    return (
        f"seed {row['seed']}, {row['kind']}: held-out {row['held_out']:.4f}, last steps {row['last_steps']:.4f}, "
        f"{row['exchanged_bytes'] / 1e6:.1f} MB exchanged, {row['times_less']:.0f} x less"
    )


def _recipe(
    directory: Path,
    kind: str,
    seed: int,
    steps: int,
    every: tuple[int, int],
    replicas: int,
    rows: int,
    learning_rate: float,
) -> Recipe:
    """`every`: steps between exchanges, and steps of early rounds."""
    together = replicas if kind == BASE else 1
    table: dict[str, Any] = {
        "job": {"name": "bench", "steps": steps, "seed": seed, "directory": str(directory / "job")},
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": WIDTH,
                "intermediate_size": 176,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 2,
                "max_position_embeddings": LENGTH,
                "tie_word_embeddings": False,
            }
        },
        "data": {
            "files": [str(path) for path in select_library(CORPUS_BYTES)],
            "format": "text",
            "sequence_length": LENGTH,
            "evaluation_fraction": 0.05,
            "tokenizer": {"train": VOCABULARY},
        },
        "train": {
            "batch_size": together * rows,
            "microbatches": together * MICROBATCHES,
            "learning_rate": learning_rate,
            "schedule": "cosine",
            "warmup_steps": min(100, steps),
            "clip_norm": 1.0,
            "optimizer": {"kind": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "evaluation": {"batches": 10},
        "privacy": {"level": "encrypted"},
        "placement": {"stages": together},
        "output": {"tensorboard": False, "report": False},
    }
    if kind != BASE:
        codec, overlap = _parted(kind)
        usual, early = every
        table["replicas"] = {"count": replicas, "every": usual, "early_steps": early, "codec": codec}
        table["replicas"] |= {"overlap": overlap}
    return recipe_from_table(table, directory / "bench.toml")


def _arguments() -> argparse.Namespace:
    def codecs(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            codec, _, steps = name.partition("+")
            if codec not in KINDS or not (steps.isdigit() or name == codec):
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(KINDS)}, or one and +STEPS; got {name}")
        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64, help="sequences of each replica's step")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of the base and of the replicas alike")
    parser.add_argument("--early-steps", type=int, default=320, help="after the warm-up, with five times the exchanges")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="so many")
    parser.add_argument("--codecs", type=codecs, default=["int2", "int4"])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
