"""Measures an exchange between replicas: its time against the bound, and the bytes on the owner's line.

    python benchmarks/exchange.py [--part both|real|simulated] [--replicas 8] [--stages 2] [--mbit 20] [--one-way 0.02]
        [--width 256] [--layers 8] [--rounds 3] [--json FILE]

Real: every machine is a `fusion join` process of its own on this machine, behind a proxy that adds the latency
(`truth`), and keeps to the bandwidth in both directions (`--upload-limit`, `--download-limit`). Each replica has
`stages` machines. The bytes on the owner's line stand beside what they would be if it summed the differences: as much
as all replicas' packed parameters, each way.

An exchange begins when the last replica has done the step that ends a round. It ends before the next step, which takes
as long as the others (median); the last exchange of a job is not counted. The bound is twice the packed shares that the
largest stage sends, over its line: no exchange between these machines can be faster. All machines compute on this
machine's cores, so packing and summing take longer than on machines of their own; the share of the time in which its
cores were busy is stated.

Simulated: the shipped machine of a round (`coordination.training.twin_round`) at each of `SIMULATED_REPLICAS` stages,
over the simulator's lines, without the time that packing and summing take. The same for the real case's sizes, to be
compared with it. Efficiency is the part of the time in which replicas of an 8B model train, each on as many RTX 3080 as
the planner takes at equal lines, with an exchange every `SIMULATED_EVERY` steps.
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
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec

import homes
import truth
from fusionai.client.training.replicas import InReplica, ReplicasEvent, train_replicas
from fusionai.client.training.train import Planned, TrainOptions
from fusionai.coordination.training.twin_round import (
    Agree,
    MakeParts,
    PartsArrived,
    PartsMade,
    Receiver,
    SendParts,
    SharesSummed,
    SumShares,
    TwinCommand,
    TwinEvent,
    TwinRound,
    spans,
)
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.tables import ConfigModel
from fusionai.execution.training.twins import BATCH_BYTES
from fusionai.ir.cost import block_costs
from fusionai.scheduling.planner import plan
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.network import LinkDirection
from fusionai.simulator.step import Rules, simulate_steps
from fusionai.storage.atomic import write_atomic
from fusionai.training.joint_exchange import RoundDone
from fusionai.training.progress import StepDone
from fusionai.wire.codecs import bytes_on_link
from fusionai.wire.messages import Fence
from random_pools import MODELS

EVERY: Final = 3
"""Steps of a round; a real job would take 50."""
CODEC: Final = "int4"
SHARE: Final = 1.0
"""Machines don't rest: they are idle most of the time of an exchange."""
MICROBATCHES: Final = 2
SIMULATED_REPLICAS: Final = 64
SIMULATED_EVERY: Final = 50
SIMULATED_MBIT: Final = (20, 100)
LATENCY_S: Final = 0.04
"""One way between any two machines, in the simulated case."""


def measured(options: argparse.Namespace) -> dict[str, Any]:
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
    sizes: list[Mapping[str, int]] = []
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
                sizes.append(
                    {key: prod(one.shape) for key, one in prepared.captured.graph.params.items() if one.trainable}
                )
            case _:
                pass

    async def job(asked: Recipe, training: TrainOptions) -> None:
        recipe = _resized(asked, options)
        assert recipe.replicas is not None
        result = await train_replicas(recipe, recipe.replicas, training, on_event=see, stop=asyncio.Event())
        assert not result.failed, result.failed

    replicas = {"count": options.replicas, "every": EVERY, "codec": CODEC, "early_steps": 0}
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
    simulated_s, _ = simulated_exchange_s(
        _first(sizes[0], max(largest)), options.replicas, case.bandwidth_bytes_per_s, options.one_way
    )
    whole_s, cores_s = busy[-1][0] - busy[0][0], busy[-1][1] - busy[0][1]
    return {
        "exchange_s": took,
        "simulated_s": simulated_s,
        "bound_s": 2 * share_bytes / case.bandwidth_bytes_per_s,
        "owner_line_bytes": line_bytes,
        "differences_bytes": 2 * options.replicas * bytes_on_link(CODEC, 4 * trained[0]),
        "trained_parameters": trained[0],
        "step_s": statistics.median(usual.values()),
        "busy": cores_s / whole_s / (os.cpu_count() or 1),
    }


def _first(sizes: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """Return parameters of about this size, for those of a stage."""
    found: dict[str, int] = {}
    for key, size in sorted(sizes.items()):
        if 4 * sum(found.values()) < nbytes:
            found[key] = size
    return found


def simulated_exchange_s(
    sizes: Mapping[str, int], replicas: int, bytes_per_s: float, latency_s: float
) -> tuple[float, float]:
    """Return (seconds of an exchange of one stage of each replica, its bound). `sizes`: values of each parameter."""
    divided = {key: spans(key, size, (1.0,) * replicas) for key, size in sizes.items()}
    shares = {
        key: frozenset(member for member, (first, below) in enumerate(pieces) if first < below)
        for key, pieces in divided.items()
    }
    packed = {
        (key, member): bytes_on_link(CODEC, 4 * (below - first))
        for key, pieces in divided.items()
        for member, (first, below) in enumerate(pieces)
    }
    agenda = Agenda()
    rounds = [TwinRound(place, shares, replicas) for place in range(replicas)]
    up, down = ([LinkDirection(agenda) for _ in rounds] for _ in range(2))
    sent_bytes = [0.0] * replicas
    ended: list[float] = []

    def perform(place: int, commands: Sequence[TwinCommand]) -> None:
        for command in commands:
            match command:
                case MakeParts():
                    for batch in batches:
                        handle(place, PartsMade(batch))
                case SumShares(keys):
                    handle(place, SharesSummed(keys))
                case SendParts(kind, to, keys):
                    piece_of = to.member if kind == "difference" else place
                    some = frozenset(key for key in keys if piece_of in shares[key])
                    if some:
                        nbytes = sum(packed[key, piece_of] for key in some)
                        sent_bytes[place] += nbytes
                        send(place, to.member, nbytes, PartsArrived(kind, place, some))
                case Agree():
                    ended.append(agenda.now_s)

    def handle(place: int, event: TwinEvent) -> None:
        perform(place, rounds[place].handle(event))

    def send(place: int, to: int, nbytes: float, event: PartsArrived) -> None:
        """Use both lines: the receiver's from the first byte on. The parts are there when both are done."""
        seconds, connection, open_ends = nbytes / bytes_per_s, (str(place), str(to)), [None, None]

        def done() -> None:
            open_ends.pop()
            if not open_ends:
                handle(to, event)

        receive = partial(down[to].carry, connection, seconds, _nothing, done)
        begun = partial(agenda.after, latency_s, receive)
        up[place].carry(connection, seconds, begun, partial(agenda.after, latency_s, done))

    batches = _batches(sizes, BATCH_BYTES * (replicas - 1))
    for place, one in enumerate(rounds):
        others = frozenset(
            Receiver(other, str(other), 0, Fence(1, 1, 0)) for other in range(replicas) if other != place
        )
        perform(place, one.locate(others))
        perform(place, one.begin())
    agenda.run()
    assert len(ended) == replicas, "every stage agrees"
    return max(ended), max(sent_bytes) / bytes_per_s


def _nothing() -> None: ...


def _batches(sizes: Mapping[str, int], most_bytes: float) -> list[frozenset[str]]:
    """Return the parameters that are sent together, as `execution.training.twins` groups them."""
    found, fresh, fresh_bytes = list[frozenset[str]](), set[str](), 0.0
    for key, size in sorted(sizes.items()):
        fresh.add(key)
        fresh_bytes += bytes_on_link(CODEC, 4 * size)
        if fresh_bytes >= most_bytes:
            found.append(frozenset(fresh))
            fresh, fresh_bytes = set(), 0.0
    return [*found, frozenset(fresh)]


def simulated() -> list[dict[str, Any]]:
    """Return the efficiency of replicas of an 8B model on home lines."""
    rows: list[dict[str, Any]] = []
    for mbit in SIMULATED_MBIT:
        problem = homes.homes("8B", mbit * 1e6 / 8, LATENCY_S, "adaptive")
        kept = problem.optimizer_bytes_per_trainable_byte + homes.ANCHORED
        problem = msgspec.structs.replace(problem, optimizer_bytes_per_trainable_byte=kept)
        found = plan(problem)
        step_s = simulate_steps(found, problem, Rules(steps=1, bare=True)).step_s
        stage = max(found.stages, key=lambda one: one.blocks[1] - one.blocks[0])
        _, width, squares = MODELS["8B"]
        squares_of = {"q": 1, "k": 0.25, "v": 0.25, "o": 1, "gate": 3.5, "up": 3.5, "down": squares - 9.5}
        sizes = {
            f"layers.{layer}.{name}": int(times * width**2)
            for layer in range(*stage.blocks)
            for name, times in squares_of.items()
        }
        took_s, bound_s = simulated_exchange_s(sizes, SIMULATED_REPLICAS, mbit * 1e6 / 8, LATENCY_S)
        training_s = SIMULATED_EVERY * step_s
        rows.append(
            {
                "mbit_per_s": mbit,
                "replicas": SIMULATED_REPLICAS,
                "machines_of_a_replica": len({one.peer for one in found.stages}),
                "step_s": step_s,
                "exchange_s": took_s,
                "bound_s": bound_s,
                "efficiency": training_s / (training_s + took_s),
            }
        )
        print(
            f"simulated, 8B, {mbit} Mbit/s, {SIMULATED_REPLICAS} replicas of {rows[-1]['machines_of_a_replica']} "
            f"machines: a step takes {step_s:.0f} s, an exchange {took_s:.0f} s ({took_s / bound_s:.3f} of the bound); "
            f"efficiency {rows[-1]['efficiency']:.3f} with {SIMULATED_EVERY} steps",
            flush=True,
        )
    return rows


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
    parser.add_argument("--part", choices=("both", "real", "simulated"), default="both")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=20.0, help="Mbit/s of each machine, each way")
    parser.add_argument("--one-way", type=float, default=0.02, help="seconds")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    report: dict[str, Any] = {"schema": "fusionai.benchmark.exchange/1", "cores": os.cpu_count()}
    report["case"] = {name: getattr(options, name) for name in ("replicas", "stages", "mbit", "one_way", "rounds")}
    if options.part != "real":
        report["simulated"] = simulated()
    if options.part != "simulated":
        report["real"] = found = measured(options)
        median_s = statistics.median(found["exchange_s"])
        line_bytes = statistics.median(found["owner_line_bytes"])
        print(
            f"an exchange takes {median_s:.2f} s ({median_s / found['bound_s']:.2f} of the bound, "
            f"{found['bound_s']:.2f} s; simulated {found['simulated_s']:.2f} s), {line_bytes / 1e3:.1f} kB over the "
            f"owner's line ({line_bytes / found['differences_bytes']:.2%} of all differences); "
            f"{found['trained_parameters'] / 1e6:.1f}M parameters, cores {found['busy']:.0%} "
            "busy",
            flush=True,
        )
    if options.json is not None:
        write_atomic(options.json, json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
