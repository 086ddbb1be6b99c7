"""Measures training over home links: tokens per second by bandwidth, latency and codec, and with local updates.

    python benchmarks/homes.py [--part both|real|simulated] [--rounds 2] [--steps 8] [--loss FILE] [--json FILE]
        [--page FILE]

Measured: four `fusion join` on this machine, with a part of a core each and `--upload-limit` and `--download-limit`,
behind the proxies of `truth` that add the latency, run the same job with each codec in turn. Speeds are ratios to
`none` of the same link and round. Each step is compared with the simulator's, which uses the codec's bytes and the
stages' measured work. `local updates`: the same machines as `[replicas] count = "auto"` divides them, each replica with
the batch of the pipeline, exchanging every `EVERY` steps in int4. Their tokens per second are counted over whole
rounds, exchanges included.

Simulated: fifty RTX 3080 with the catalogue's figures on equal home links, the planner's plan for each codec, and the
step that the simulator computes for it. `adaptive` chooses a codec per boundary. `local updates`: the number of groups
that takes most steps together, with `adaptive` inside each. Every 50 steps the machines of all groups exchange every
parameter in int4 with each other, as the planner counts it, and no step overlaps the exchange.

`compression` measures what a codec costs in loss, `local_updates` what local updates cost; with `--loss` and
`--local-loss` their results are in the same table. A measured row takes some minutes and is written at once; rows that
FILE already has are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

import truth
from fusionai.client.training.replicas import InReplica, ReplicasEvent, train_replicas
from fusionai.client.training.train import TrainOptions
from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.scheduling.training.replicated import Exchanging, Group, exchange_s, fastest
from fusionai.simulator.step import Rules, simulate_steps
from fusionai.storage.atomic import write_atomic
from fusionai.training.joint_exchange import RoundDone
from fusionai.training.progress import StepDone
from fusionai.wire.codecs import Compression, Exchanged
from random_pools import BYTES_PER_PARAMETER, DEVICES, GB, MODELS, POOL_ROLES, REACHED, TOKENS

CODECS: Final[tuple[Compression, ...]] = ("none", "int8", "adaptive")
LOCAL: Final = "local updates"
EVERY: Final = 8
"""Steps between exchanges of the real runs; a real job would take 50, and exchange a sixth as often."""
ROUNDS: Final = 3
"""Exchange rounds of a real run with local updates; the first is not counted."""
SIMULATED_EVERY: Final = 50
EXCHANGED: Final[Exchanged] = "int4"
ANCHORED: Final = 8 / BYTES_PER_PARAMETER
"""Bytes of the anchor and of the packing error, in float32, per byte of a parameter."""
BANDWIDTHS_MBIT_PER_S: Final = (10, 20, 100, 1000)
LATENCIES_S: Final = (0.01, 0.04)
"""One-way latencies between any two machines, in seconds."""
SHARES: Final = (0.35, 0.35, 0.35, 0.35)
MICROBATCHES: Final = 8
HOMES: Final = 50
SIMULATED_MODELS: Final = ("1.3B", "8B")
PAGE_TOP: Final = """# How fast is training over home links?

Over slow home links, packed boundary tensors and local updates raise tokens per second; the tables show by how much.
Their cost in loss is in [analysis.md](analysis.md#effect-of-the-optimisations-on-the-loss), where the same
optimisations are applied to larger pools. `python benchmarks/homes.py --json homes.json --page docs/homes.md` writes
this page.
"""
REAL_WORDS: Final = f"""\
Four `fusion join` processes run on two cores with {SHARES[0]:g} of a core each, behind proxies that add the latency,
with `--upload-limit` and `--download-limit`. A figure is tokens per second divided by that of the same machines, line
and round with nothing packed. Local updates: the same machines as `[replicas] count = "auto"` divides them, exchanging
every {EVERY} steps in {EXCHANGED} (a real job would take 50). "Simulated over real step": with `none`, `int8` and
`adaptive`, simulated from the stages' measured work."""
SIMULATED_WORDS: Final = f"""\
A cell shows tokens per second of the planner's plan, by the discrete-event simulator, and the number of machines it
uses. Local updates: groups that train apart, with `adaptive` inside each group, and exchange every {SIMULATED_EVERY}
steps in {EXCHANGED} between their machines."""
_, PEAK_FLOPS, CARD_BYTES, CARD_BANDWIDTH = DEVICES[1]


def real(rounds: int, steps: int, known: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the measured rows that `known` does not have."""
    there = {(row["mbit_per_s"], row["one_way_s"]) for row in known}
    number = -1
    for bandwidth in BANDWIDTHS_MBIT_PER_S:
        for latency_s in LATENCIES_S:
            number += 1
            if (bandwidth, latency_s) in there:
                continue
            case = truth.Case(
                number=number,
                shares=SHARES,
                bandwidth_bytes_per_s=bandwidth * 1e6 / 8,
                latency_s=latency_s,
                microbatches=MICROBATCHES,
                loss="pool",
            )
            runs: dict[str, list[dict[str, Any]]] = {codec: [] for codec in (*CODECS, LOCAL)}
            for _ in range(rounds):
                for codec in CODECS:
                    runs[codec].append(_run(case, codec, steps))
                runs[LOCAL].append(_run_local(case))
            row = {"mbit_per_s": bandwidth, "one_way_s": latency_s, "codecs": {}}
            for codec in CODECS:
                ratios = [plain["step_s"] / run["step_s"] for plain, run in zip(runs["none"], runs[codec], strict=True)]
                row["codecs"][codec] = {
                    "speed_to_none": statistics.median(ratios),
                    "simulated_to_real": statistics.median(run["simulated_s"] / run["step_s"] for run in runs[codec]),
                    "runs": runs[codec],
                }
            local = zip(runs["none"], runs[LOCAL], strict=True)
            row[LOCAL] = {
                "speed_to_none": statistics.median(one["tokens_per_s"] / plain["tokens_per_s"] for plain, one in local),
                "runs": runs[LOCAL],
            }
            told = ", ".join(
                f"{codec} x{one['speed_to_none']:.2f} (simulated {one['simulated_to_real'] - 1:+.1%})"
                for codec, one in row["codecs"].items()
            )
            told += f", {LOCAL} x{row[LOCAL]['speed_to_none']:.2f} with {runs[LOCAL][-1]['replicas']} replicas"
            print(f"real, {bandwidth:5} Mbit/s, {latency_s * 1000:.0f} ms: {told}", flush=True)
            yield row


def _run(case: truth.Case, codec: Compression, steps: int) -> dict[str, Any]:
    planned, done = truth.real_run(case, steps, codec, declared=True)
    counted = done[truth.WARM_UP_STEPS :]
    link = Link(bandwidth_bytes_per_s=case.bandwidth_bytes_per_s, latency_s=case.latency_s / 2)
    shaped = truth.shaped(case, planned)
    peers = tuple(msgspec.structs.replace(peer, uplink=link, downlink=link) for peer in shaped.peers)
    problem = msgspec.structs.replace(shaped, peers=peers, links={}, compression=codec)
    simulated = simulate_steps(planned.plan, problem, Rules(steps=4), truth.durations(counted, planned.plan))
    return {
        "step_s": statistics.median(step.step_s for step in counted),
        "tokens_per_s": statistics.median(step.tokens_per_s for step in counted),
        "simulated_s": simulated.step_s,
        "planned_s": planned.plan.step_time_s,
        "codecs": planned.plan.codecs,
    }


def _run_local(case: truth.Case) -> dict[str, Any]:
    rounds: list[float] = []
    tokens: list[tuple[float, float]] = []
    """(when, tokens of a step)"""

    def see(event: ReplicasEvent) -> None:
        match event:
            case RoundDone():
                rounds.append(time.monotonic())
            case InReplica(event=StepDone(tokens_per_s=per_s, step_s=step_s, replayed=False)):
                tokens.append((time.monotonic(), per_s * step_s))
            case _:
                pass

    async def job(recipe: Recipe, options: TrainOptions) -> int:
        assert recipe.replicas is not None
        done = await train_replicas(recipe, recipe.replicas, options, on_event=see, stop=asyncio.Event())
        assert not done.failed, done.failed
        return len(done.replicas)

    # The exchange's codec packs what crosses between stages, too, where that pays.
    replicas = {"count": "auto", "every": EVERY, "codec": EXCHANGED}
    number = truth.in_pool(case, job, steps=EVERY * ROUNDS, compression="adaptive", declared=True, replicas=replicas)
    counted = sum(amount for at_s, amount in tokens if rounds[0] < at_s <= rounds[-1])
    return {"tokens_per_s": counted / (rounds[-1] - rounds[0]), "replicas": number, "rounds": len(rounds)}


def simulated() -> list[dict[str, Any]]:
    rows = []
    for model in SIMULATED_MODELS:
        for bandwidth in BANDWIDTHS_MBIT_PER_S:
            for latency_s in LATENCIES_S:
                row: dict[str, Any] = {"model": model, "mbit_per_s": bandwidth, "one_way_s": latency_s, "codecs": {}}
                for codec in CODECS:
                    row["codecs"][codec] = _simulated(homes(model, bandwidth * 1e6 / 8, latency_s, codec))
                row[LOCAL] = _simulated_local(homes(model, bandwidth * 1e6 / 8, latency_s, "adaptive"))
                rows.append(row)
                told = ", ".join(
                    f"{codec} {one['tokens_per_s']:,.0f} tokens/s on {one['machines']}" if one else f"{codec} too small"
                    for codec, one in (*row["codecs"].items(), (LOCAL, row[LOCAL]))
                )
                print(f"simulated, {model:>4}, {bandwidth:5} Mbit/s, {latency_s * 1000:.0f} ms: {told}", flush=True)
    return rows


def homes(model: str, bytes_per_s: float, latency_s: float, codec: Compression) -> Problem:
    """Blocks as in `random_pools`, with float32 across cuts."""
    layers, width, squares = MODELS[model]
    parameters = squares * width**2
    crossing_bytes = 4 * TOKENS * width
    block = BlockCost(
        block=0,
        forward_flops=2 * parameters * TOKENS,
        backward_flops=4 * parameters * TOKENS,
        parameter_bytes=int(BYTES_PER_PARAMETER * parameters),
        trainable_bytes=int(BYTES_PER_PARAMETER * parameters),
        activation_bytes=17 * crossing_bytes // 2,
        output_bytes=crossing_bytes,
        gradient_bytes=crossing_bytes,
    )
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s / 2)
    return Problem(
        graph_hash="homes",
        blocks=tuple(msgspec.structs.replace(block, block=number) for number in range(layers)),
        peers=tuple(
            PeerProfile(
                peer=f"home{number:02}",
                flops_per_s=REACHED * PEAK_FLOPS,
                memory_bytes=CARD_BYTES - GB,
                memory_bandwidth_bytes_per_s=CARD_BANDWIDTH,
                fingerprint="RTX 3080",
                uplink=link,
                downlink=link,
            )
            for number in range(HOMES)
        ),
        roles=POOL_ROLES,
        microbatches=4 * layers,
        microbatch_tokens=TOKENS,
        optimizer_bytes_per_trainable_byte=3.0,
        compression=codec,
        recompute="auto",
    )


def _simulated(problem: Problem) -> dict[str, Any] | None:
    """None where fifty machines do not hold the model."""
    try:
        found = plan(problem)
    except PlanError:
        return None
    step_s = simulate_steps(found, problem, Rules(steps=1, bare=True)).step_s
    tokens = problem.microbatches * problem.microbatch_tokens
    return {
        "tokens_per_s": tokens / step_s,
        "planned_tokens_per_s": found.tokens_per_s,
        "machines": len({stage.peer for stage in found.stages}),
        "gap": found.certificate.optimality_gap,
        "codecs": found.codecs,
        "recomputing_stages": sum(stage.recompute for stage in found.stages),
    }


def _simulated_local(problem: Problem) -> dict[str, Any] | None:
    kept = problem.optimizer_bytes_per_trainable_byte + ANCHORED
    problem = msgspec.structs.replace(problem, optimizer_bytes_per_trainable_byte=kept)
    try:
        exchanging = Exchanging(every=SIMULATED_EVERY, codec=EXCHANGED)
        groups = fastest(problem, HOMES, exchanging)
    except PlanError:
        return None
    step_s = max(_step_s(problem, group) for group in groups)
    exchanging_s = exchange_s(problem, groups, exchanging)
    tokens = len(groups) * problem.microbatches * problem.microbatch_tokens
    return {
        "tokens_per_s": tokens * SIMULATED_EVERY / (SIMULATED_EVERY * step_s + exchanging_s),
        "replicas": len(groups),
        "machines": sum(len({stage.peer for stage in group.plan.stages}) for group in groups),
        "step_s": step_s,
        "exchange_s": exchanging_s,
    }


def _step_s(problem: Problem, group: Group) -> float:
    peers = tuple(one for one in problem.peers if one.peer in group.peers)
    return simulate_steps(group.plan, msgspec.structs.replace(problem, peers=peers), Rules(steps=1, bare=True)).step_s


def losses(path: Path) -> dict[str, float]:
    """Codec -> held-out loss over that of `none` with the same seed, median over seeds."""
    ratios: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    return {codec: found["held_out"] for codec, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("both", "real", "simulated"), default="both")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--loss", type=Path, metavar="FILE", help="what `compression` wrote")
    parser.add_argument("--local-loss", type=Path, metavar="FILE", help="what `local_updates` wrote")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="for the tables in Markdown")
    options = parser.parse_args()
    known = _known(options.json)
    report: dict[str, Any] = {
        "schema": "fusionai.benchmark.homes/1",
        "cores": os.cpu_count(),
        "simulator": truth.simulator_hash(),
        "case": {"shares": SHARES, "microbatches": MICROBATCHES},
        "simulated": known.get("simulated") or (None if options.part == "real" else simulated()),
        "real": known.get("real") or [],
        "loss_to_none": None if options.loss is None else losses(options.loss),
        "loss_to_every_step": None if options.local_loss is None else losses(options.local_loss),
    }
    if report["loss_to_none"]:
        print(", ".join(f"loss of {codec}: x{ratio:.4f}" for codec, ratio in report["loss_to_none"].items()))
    if report["loss_to_every_step"]:
        told = (f"{LOCAL} in {codec}: x{ratio:.4f}" for codec, ratio in report["loss_to_every_step"].items())
        print(", ".join(told))
    if options.json is not None:
        _write(options.json, report)
    if options.part != "simulated":
        for row in real(options.rounds, options.steps, tuple(report["real"])):
            report["real"].append(row)
            if options.json is not None:
                _write(options.json, report)
    if options.page is not None:
        write_atomic(options.page, page(report).encode())


def _known(file: Path | None) -> dict[str, Any]:
    return {} if file is None or not file.exists() else json.loads(file.read_text(encoding="utf-8"))


def page(report: Mapping[str, Any]) -> str:
    """The tables in Markdown."""
    lines = [PAGE_TOP]
    if report["real"]:
        lines += [
            "## Four machines, measured",
            "",
            REAL_WORDS,
            "",
            "| line | one-way latency | none | int8 | adaptive | local updates | simulated over real step | rounds |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in report["real"]:
            cells = [f"{codec['speed_to_none']:.2f}" for codec in row["codecs"].values()]
            chosen = sorted({name for run in row["codecs"]["adaptive"]["runs"] for name in run["codecs"]})
            cells[-1] += f" ({', '.join(chosen) or 'none'})"
            local = row[LOCAL]
            cells.append(f"{local['speed_to_none']:.2f} ({local['runs'][-1]['replicas']} replicas)")
            cells.append(", ".join(f"{codec['simulated_to_real']:.2f}" for codec in row["codecs"].values()))
            cells.append(str(len(local["runs"])))
            lines.append(_row(row, cells))
        lines.append("")
    if report["simulated"]:
        lines += ["## Fifty RTX 3080, simulated", "", SIMULATED_WORDS, ""]
        lines += ["| model | line | one-way latency | none | int8 | adaptive | local updates |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for row in report["simulated"]:
            cells = [
                f"{one['tokens_per_s']:,.0f} on {one['machines']}" if one else "does not fit"
                for one in row["codecs"].values()
            ]
            local = row[LOCAL]
            cells.append(f"{local['tokens_per_s']:,.0f}, {local['replicas']} groups" if local else "does not fit")
            lines.append(f"| {row['model']} {_row(row, cells)}")
        lines.append("")
    return "\n".join(lines)


def _row(row: Mapping[str, Any], cells: Sequence[str]) -> str:
    return f"| {row['mbit_per_s']} Mbit/s | {row['one_way_s'] * 1000:.0f} ms | {' | '.join(cells)} |"


def _write(file: Path, report: dict[str, Any]) -> None:
    write_atomic(file, json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
