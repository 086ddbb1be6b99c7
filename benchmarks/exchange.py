"""Measures an exchange between replicas: its time against the bound, and the bytes on the owner's line.

    python benchmarks/exchange.py [--replicas 8] [--stages 2] [--mbit 20] [--one-way 0.02] [--width 256]
        [--layers 8] [--rounds 3] [--between peers,owner] [--json FILE]

Every machine is a `fusion join` process of its own on this machine, behind a proxy that adds the latency (`truth`),
and keeps to the bandwidth in both directions (`--upload-limit`, `--download-limit`). Each replica has `stages`
machines. The same job runs with the exchange between the machines and over the owner, in turn.

An exchange begins when the last replica has done the step that ends a round. It ends before the next step, which takes
as long as the others (median); the last exchange of a job is not counted. The bound is twice the packed shares that the largest stage sends, over its line: no exchange between
these machines can be faster. All machines compute on this machine's cores, so packing and summing take longer than on
machines of their own; the share of the time in which its cores were busy is stated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import msgspec

import truth
from fusionai.client.training.replicas import InReplica, ReplicasEvent, train_replicas
from fusionai.client.training.train import Planned, TrainOptions
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.tables import ConfigModel
from fusionai.ir.cost import block_costs
from fusionai.storage.atomic import write_atomic
from fusionai.training.outer import RoundDone
from fusionai.training.progress import StepDone
from fusionai.wire.codecs import bytes_on_link

EVERY: Final = 3
"""Steps of a round; a real job would take 50."""
CODEC: Final = "int4"
SHARE: Final = 1.0
"""Machines don't rest: they are idle most of the time of an exchange."""
MICROBATCHES: Final = 2


def measured(options: argparse.Namespace, between: str) -> dict[str, Any]:
    """Run one job and return what its exchanges took."""
    case = truth.Case(
        number=0,
        shares=(SHARE,) * (options.replicas * options.stages),
        bandwidth_bytes_per_s=options.mbit * 1e6 / 8,
        latency_s=options.one_way,
        microbatches=MICROBATCHES,
        loss="pool",
    )
    done_s: defaultdict[int, dict[int, float]] = defaultdict(dict)
    """Step -> replica -> when it was done."""
    steps_s: defaultdict[int, dict[int, float]] = defaultdict(dict)
    line_bytes: list[int] = []
    trained: list[int] = []
    largest: list[int] = []
    """Bytes of the largest stage's parameters, of each replica."""
    busy: list[tuple[float, float]] = []

    def see(event: ReplicasEvent) -> None:
        match event:
            case RoundDone(nbytes=nbytes):
                line_bytes.append(nbytes)
            case InReplica(number=number, event=StepDone(record=record, step_s=step_s, replayed=False)):
                done_s[record.step][number] = time.monotonic()
                steps_s[number][record.step] = step_s
                busy.append((time.monotonic(), _processor_s()))
            case InReplica(event=Planned(plan=plan, prepared=prepared)):
                costs = block_costs(prepared.captured.graph, prepared.symbols, training=True)
                stages = [sum(cost.trainable_bytes for cost in costs[slice(*stage.blocks)]) for stage in plan.stages]
                assert len(stages) == options.stages, plan.stages
                trained.append(sum(stages) // 4)
                largest.append(max(stages))
            case _:
                pass

    async def job(asked: Recipe, training: TrainOptions) -> None:
        recipe = _resized(asked, options)
        assert recipe.replicas is not None
        result = await train_replicas(recipe, recipe.replicas, training, on_event=see, stop=asyncio.Event())
        assert not result.failed, result.failed

    replicas = {"count": options.replicas, "every": EVERY, "codec": CODEC, "exchange": between, "early_steps": 0}
    truth.in_pool(case, job, steps=EVERY * options.rounds, declared=True, replicas=replicas)
    ends = range(EVERY - 1, EVERY * options.rounds, EVERY)
    usual = {
        number: statistics.median(took for step, took in steps.items() if step not in ends and step > 0)
        for number, steps in steps_s.items()
    }
    took = [
        max(done_s[end + 1][number] - usual[number] for number in usual) - max(done_s[end].values())
        for end in ends[:-1]
    ]
    share_bytes = bytes_on_link(CODEC, max(largest)) * (options.replicas - 1) / options.replicas
    whole_s, cores_s = busy[-1][0] - busy[0][0], busy[-1][1] - busy[0][1]
    return {
        "exchange_s": took,
        "bound_s": 2 * share_bytes / case.bandwidth_bytes_per_s,
        "owner_line_bytes": line_bytes,
        "trained_parameters": trained[0],
        "step_s": statistics.median(usual.values()),
        "busy": cores_s / whole_s / (os.cpu_count() or 1),
    }


def _resized(asked: Recipe, options: argparse.Namespace) -> Recipe:
    source = asked.model.source
    assert isinstance(source, ConfigModel)
    config = {
        **source.config,
        "hidden_size": options.width,
        "intermediate_size": 8 * options.width // 3 // 32 * 32,
        "num_hidden_layers": options.layers,
    }
    model = msgspec.structs.replace(asked.model, source=msgspec.structs.replace(source, config=config))
    return msgspec.structs.replace(
        asked,
        model=model,
        placement=msgspec.structs.replace(asked.placement, stages=options.stages),
        train=msgspec.structs.replace(asked.train, batch_size=MICROBATCHES),
        data=msgspec.structs.replace(asked.data, sequence_length=32),
    )


def _processor_s() -> float:
    """Return the processor time that this machine has spent on all processes."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    idle = int(fields[3]) + int(fields[4])
    return (sum(map(int, fields[:8])) - idle) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=20.0, help="Mbit/s of each machine, each way")
    parser.add_argument("--one-way", type=float, default=0.02, help="seconds")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--between", default="peers,owner")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    report: dict[str, Any] = {"schema": "fusionai.benchmark.exchange/1", "cores": os.cpu_count()}
    report["case"] = {name: getattr(options, name) for name in ("replicas", "stages", "mbit", "one_way", "rounds")}
    for between in options.between.split(","):
        report[between] = found = measured(options, between)
        median_s = statistics.median(found["exchange_s"])
        print(
            f"{between}: an exchange takes {median_s:.2f} s ({median_s / found['bound_s']:.2f} of the bound between "
            f"machines, {found['bound_s']:.2f} s), {statistics.median(found['owner_line_bytes']) / 1e3:.1f} kB over "
            f"the owner's line; {found['trained_parameters'] / 1e6:.1f}M parameters, cores {found['busy']:.0%} busy",
            flush=True,
        )
    if {"peers", "owner"} <= report.keys():
        ratio = statistics.median(report["peers"]["owner_line_bytes"]) / statistics.median(
            report["owner"]["owner_line_bytes"]
        )
        print(f"owner's line: {ratio:.2%} of the exchange over the owner")
        report["line_ratio"] = ratio
    if options.json is not None:
        write_atomic(options.json, json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
