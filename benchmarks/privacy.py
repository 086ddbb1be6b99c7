"""What the privacy levels `encrypted` and `split` cost against `open`: training and serving, interleaved, on loopback.

    python benchmarks/privacy.py [--width 512] [--rounds 4] [--steps 20] [--tokens 96] [--json FILE]

One pool of two peers, one thread each, a broker and the job owner's process with one thread, all on this machine over
mutual TLS. In each round every level trains the same model on the same text and answers the same prompt, in an order
that turns from round to round. With `split` embedding and head are the owner's, otherwise the pool's. Quoted are ratios
within a round: time per step, and per token, over that of `open`, less one; the median of all rounds, and between which
rounds' figures it lies 95 in 100 times. Beside them stands the processor time that all these processes together took
for a step: other programs change it less, and it says what machines of their own would feel where here four processes
share the cores. Links are encrypted at every level: between `open` and `encrypted` nothing but the word differs, so
that their ratio says what the machine's other work does to such a comparison. What crosses grows with a model's width,
what is computed with its square.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import serving
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.scheduling.problem.embedding_and_head import owners_part
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling
from fusionai.storage.atomic import write_atomic
from fusionai.training.progress import StepDone

LEVELS: Final[tuple[PrivacyLevel, ...]] = ("open", "encrypted", "split")
VOCABULARY, LENGTH, ROWS, MICROBATCHES = 2048, 128, 8, 8
HEAD_WIDTH: Final = 64


def _config(width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 6,
        "num_attention_heads": width // HEAD_WIDTH,
        "num_key_value_heads": width // HEAD_WIDTH,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }


WARM_UP_STEPS: Final = 2
WARM_UP_TOKENS: Final = 8
GOAL: Final = 0.05


def main() -> None:
    options = _arguments()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as place:
        run(_measured(Path(place), options, rounds))
    print(_verdict(_summary(rounds)), flush=True)


async def _measured(directory: Path, options: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    config = _config(options.width)
    model = _model(directory / "model", config)
    peers = [LocalPeer(name=f"peer-{index}", memory_bytes=2 * 10**9) for index in range(2)]
    async with LocalPool(directory, peers) as pool:
        for number in range(options.rounds):
            found: dict[str, Any] = {}
            for level in (*LEVELS[number % 3 :], *LEVELS[: number % 3]):
                recipe = _recipe(directory, config, level, number, options.steps)
                found[level] = await _step(directory, pool, recipe)
                if options.tokens:
                    found[level]["token_s"] = await _token_s(directory, model, level, options.tokens)
            rounds.append(found | {"load_1_minute": os.getloadavg()[0]})
            print(f"round {number}: {_shown(found)}", flush=True)
            if options.json is not None:
                whole = {"schema": "fusionai.privacy/1", "width": options.width, "goal": GOAL}
                whole |= {"rounds": rounds, "over": _summary(rounds)}
                write_atomic(options.json, json.dumps(whole, indent=2).encode() + b"\n")


async def _step(directory: Path, pool: LocalPool, recipe: Recipe) -> dict[str, Any]:
    seconds: list[float] = []
    processors_s: list[float] = []
    planned: list[Planned] = []
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in pool.pids.values())]

    def seen(event: RunEvent) -> None:
        match event:
            case StepDone(step_s=step_s):
                seconds.append(step_s)
                used = [process.cpu_times() for process in processes]
                processors_s.append(sum(one.user + one.system for one in used))
            case Planned():
                planned.append(event)
            case _:
                pass

    options = TrainOptions(home=directory / "owner", invitation=pool.invitation, device="cpu", threads=1)
    await train(recipe, options, on_event=seen, stop=asyncio.Event())
    part = owners_part(planned[0].plan)
    return {
        "step_s": statistics.median(seconds[WARM_UP_STEPS:]),
        "processor_s": (processors_s[-1] - processors_s[WARM_UP_STEPS]) / (len(seconds) - 1 - WARM_UP_STEPS),
        "blocks": [list(stage.blocks) for stage in planned[0].plan.stages],
        "owner_memory_bytes": 0 if part is None else part.memory_bytes,
        "owner_compute_s": 0.0 if part is None else part.compute_s,
    }


async def _token_s(directory: Path, model: Path, level: PrivacyLevel, tokens: int) -> float:
    request = ServeRequest(
        model=str(model),
        needs=lambda _positions: ServingNeeds(context_tokens=256, sessions=2, cache_tokens=512, pass_tokens=64),
        home=directory / "owner",
        ends="owner" if keeps_ends(level) else "pool",
        privacy=level,
        device="cpu",
        threads=1,
        stages=2,
    )
    at_s: list[float] = []
    async with serving(request, on_event=lambda _event: None) as served:
        prompt = tuple((7 * place + 3) % VOCABULARY for place in range(32))
        asked = Generation(prompt=prompt, max_tokens=tokens, sampling=Sampling(temperature=0.0))
        async for event in served.engine.submit(asked):
            match event:
                case Emitted():
                    at_s.append(time.perf_counter())
                case Finished(reason=reason, detail=detail) if reason != "length":
                    raise SystemExit(f"an answer ended early: {reason} {detail}")
                case _:
                    pass
    gaps = [after - before for before, after in pairwise(at_s)]
    return statistics.median(gaps[WARM_UP_TOKENS:])


def _model(directory: Path, config: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).save_pretrained(directory)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.save(str(directory / "tokenizer.json"))
    return directory


def _recipe(directory: Path, config: dict[str, Any], level: PrivacyLevel, number: int, steps: int) -> Recipe:
    files = [str(path) for path in select_library(400_000)]
    name = f"{level}-{number}"
    return recipe_from_table(
        {
            "job": {"name": name, "steps": steps, "directory": str(directory / name)},
            "model": {"config": config},
            "data": {"files": files, "format": "text", "sequence_length": LENGTH, "tokenizer": {"train": VOCABULARY}},
            "train": {"batch_size": ROWS, "microbatches": MICROBATCHES, "learning_rate": 3e-4, "clip_norm": 1.0},
            "placement": {"stages": 2, "loss": "owner" if keeps_ends(level) else "pool"},
            "privacy": {"level": level},
            "output": {"tensorboard": False, "report": False},
        },
        directory / f"{name}.toml",
    )


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each level and figure: how much more than `open`, per round and in the median."""
    summary: dict[str, Any] = {}
    for level in LEVELS[1:]:
        for figure in ("step_s", "processor_s", *(("token_s",) if "token_s" in rounds[0][level] else ())):
            over = [one[level][figure] / one["open"][figure] - 1 for one in rounds]
            low, high = _interval(over)
            summary[f"{level} {figure}"] = {"median": statistics.median(over), "low": low, "high": high, "rounds": over}
    return summary


def _interval(values: list[float]) -> tuple[float, float]:
    """Where the median of many more rounds lies, 95 in 100 times: order statistics, whatever the noise looks like."""
    ordered, count = sorted(values), len(values)
    below, left = 0, 0.0
    while left + math.comb(count, below) / 2**count <= 0.025:
        left += math.comb(count, below) / 2**count
        below += 1
    return ordered[max(0, below - 1)], ordered[min(count - 1, count - below)]


def _shown(found: dict[str, Any]) -> str:
    def one(level: str) -> str:
        token_s = found[level].get("token_s")
        token = "" if token_s is None else f", {token_s * 1000:.1f} ms a token"
        return f"{level} {found[level]['step_s']:.3f} s a step{token}"

    return "; ".join(one(level) for level in LEVELS)


def _verdict(summary: dict[str, Any]) -> str:
    each = ", ".join(
        f"{name} {one['median']:+.1%} ({one['low']:+.1%} to {one['high']:+.1%})" for name, one in summary.items()
    )
    return f"over open, median of rounds and its 95% interval: {each} (goal at most {GOAL:.0%})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help=f"of the model, a multiple of {HEAD_WIDTH}")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer; 0: nothing is served")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
