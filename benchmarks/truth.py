"""Simulated step times against real ones: pools of 2 to 6 peers on loopback, links shaped by a proxy.

    python benchmarks/truth.py [--runs 30] [--steps 14] [--seed 1] [--only 3,7] [--json FILE]

Every run is drawn from the seed: so many peers, what part of its time each lends (together at most `CORES` cores; a
peer rests after each piece of work as `fusion join --share` does), one bandwidth and one latency for all links, how
many microbatches, who computes the loss. The peers are the shipped `fusion join`, each behind a proxy
(tests/harness/fault_proxy.py, in a process of its own) that delays and throttles every connection both ways.

Blind: the simulator's code is as it is before the first run; its hash stands in the result. Of each run it gets the
plan, the links as they were shaped, and, from every other step of those that are counted, the seconds of each stage's
pieces of work: forward, backward, weight gradients and update. What it says is compared with the median of the steps
between them (in turn, not one half and then the other: shared machines get faster and slower within a minute). Beside
it stands what the plan itself predicted, from the peers' profiles alone.

Not compared: the profiles' operations per second (that is the plan's error), and steps before the third.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.ir.cost import block_costs
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, RolePlacement
from fusionai.simulator.step import Durations, Recorded, Rules, simulate_steps
from fusionai.training.progress import FaultSeen, StepDone
from fusionai.wire.codecs import Compression

Result = TypeVar("Result")
ROOT: Final = Path(__file__).resolve().parents[1]
WARM_UP_STEPS: Final = 2
CORES: Final = 1.6
"""All shares together; the rest of two cores is for broker, owner, proxies and sealing of frames."""
PEERS: Final = (2, 3, 4, 5, 6)
BANDWIDTHS_BIT_PER_S: Final = (20e6, 50e6, 100e6, 200e6)
LATENCIES_S: Final = (0.002, 0.01, 0.025, 0.05)
MICROBATCHES: Final = (4, 8, 16)
LENGTH: Final = 128
LAYERS: Final = 12
UNLIMITED_BYTES_PER_S: Final = 1e9
SLICE_S: Final = 0.002
"""How finely the proxies throttle."""
SIMULATING: Final = (
    "simulator/*.py",
    "coordination/training/stage.py",
    "scheduling/problem/chain.py",
    "scheduling/problem/types.py",
    "scheduling/problem/stage_costs.py",
)
GOALS: Final = {"median": 0.05, "p95": 0.10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    number: int
    shares: tuple[float, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    microbatches: int
    loss: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Errors are simulated (predicted) over observed, less one."""

    case: Case
    observed_s: float
    observed_spread: float
    """Longest over shortest step of those compared."""
    simulated_s: float
    predicted_s: float
    error: float
    plan_error: float
    stages: list[dict[str, Any]]
    steps_s: list[float]


def cases(count: int, seed: int) -> list[Case]:
    """Numbers of peers in turn; everything else drawn."""
    drawn = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        peers = PEERS[number % len(PEERS)]
        parts = [draw.uniform(0.5, 1.0) for _ in range(peers)]
        drawn.append(
            Case(
                number=number,
                shares=tuple(round(min(0.8, CORES * part / sum(parts)), 2) for part in parts),
                bandwidth_bytes_per_s=draw.choice(BANDWIDTHS_BIT_PER_S) / 8,
                latency_s=draw.choice(LATENCIES_S),
                microbatches=draw.choice(MICROBATCHES),
                loss=draw.choice(("pool", "owner")),
            )
        )
    return drawn


def recipe(
    case: Case,
    directory: Path,
    steps: int,
    compression: Compression = "none",
    replicas: Mapping[str, object] | None = None,
) -> Recipe:
    files = [str(path) for path in select_library(300_000)]
    return recipe_from_table(
        {
            "job": {"name": "truth", "steps": steps, "directory": str(directory / "job")},
            "model": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": 512,
                    "max_position_embeddings": LENGTH,
                    "tie_word_embeddings": False,
                    "hidden_size": 192,
                    "intermediate_size": 512,
                    "num_hidden_layers": LAYERS,
                    "num_attention_heads": 4,
                }
            },
            "data": {"files": files, "format": "text", "sequence_length": LENGTH, "tokenizer": {"train": 512}},
            "train": {
                "batch_size": 2 * case.microbatches,
                "microbatches": case.microbatches,
                "learning_rate": 1e-4,
                "compression": compression,
                "optimizer": {"kind": "adamw"},
            },
            "privacy": {"level": "encrypted"},
            "placement": {"loss": case.loss} | ({} if replicas else {"stages": len(case.shares)}),
            **({} if replicas is None else {"replicas": replicas}),
            "output": {"tensorboard": False, "report": False},
        },
        directory / "truth.toml",
    )


# ---------------------------------------------------------------------------------------------------------- a run


def real_run(
    case: Case, steps: int, compression: Compression = "none", *, declared: bool = False
) -> tuple[Planned, list[StepDone]]:
    """`declared`: peers say their bandwidth and keep to it, so that plans know it; else the proxies make it.

    Raises `SystemExit` when something failed on the way: such a run says nothing about step times."""
    planned: list[Planned] = []
    done: list[StepDone] = []
    faults: list[str] = []

    def see(event: RunEvent) -> None:
        match event:
            case Planned():
                planned.append(event)
            case StepDone():
                done.append(event)
            case FaultSeen():
                faults.append(event.reason)
            case _:
                pass

    async def job(asked: Recipe, options: TrainOptions) -> None:
        await train(asked, options, on_event=see, stop=asyncio.Event())

    in_pool(case, job, steps=steps, compression=compression, declared=declared)
    if faults or len(planned) != 1 or len(done) != steps:
        raise SystemExit(f"run {case.number}: {len(done)} of {steps} steps, {len(planned)} plans, faults: {faults}")
    return planned[0], done


def in_pool(
    case: Case,
    job: Callable[[Recipe, TrainOptions], Awaitable[Result]],
    *,
    steps: int,
    compression: Compression = "none",
    declared: bool = False,
    replicas: Mapping[str, object] | None = None,
) -> Result:
    """What `job` makes of the case's recipe in the case's pool; `declared` as in `real_run`."""
    # A peer that keeps to its bandwidth itself is not held to it a second time.
    between = replace(case, bandwidth_bytes_per_s=UNLIMITED_BYTES_PER_S) if declared else case
    with tempfile.TemporaryDirectory(prefix="fusion-truth-") as place, Proxies(between) as proxies:
        directory = Path(place)

        async def main() -> Result:
            peers = [
                LocalPeer(
                    name=f"peer-{n}",
                    share=share,
                    port=port,
                    address=address,
                    limit_bytes_per_s=case.bandwidth_bytes_per_s if declared else None,
                )
                for n, (share, (port, address)) in enumerate(zip(case.shares, proxies.ways, strict=True))
            ]
            async with LocalPool(directory, peers) as local:
                options = TrainOptions(home=directory / "owner", invitation=local.invitation, device="cpu", threads=1)
                return await job(recipe(case, directory, steps, compression, replicas), options)

        return run(main())


class Proxies:
    """One in front of each peer, all in one process besides this one."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.ways: list[tuple[int, str]] = []
        """(port the peer listens at, address it tells others)"""

    def __enter__(self) -> Proxies:
        case = self._case
        asked = [len(case.shares), case.bandwidth_bytes_per_s, case.latency_s]
        command = [sys.executable, str(Path(__file__).resolve()), "--proxies", json.dumps(asked)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.ways = [tuple(way) for way in json.loads(self._child.stdout.readline())]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def keep_proxies(asked: str) -> None:
    """Until standard input ends."""
    sys.path.insert(0, str(ROOT / "tests"))
    from harness import fault_proxy

    fault_proxy.SLICE_S = SLICE_S
    count, bytes_per_s, delay_s = json.loads(asked)
    proxies = [fault_proxy.FaultProxy() for _ in range(count)]
    ways = []
    for proxy in proxies:
        proxy.__enter__()
        port = fault_proxy.free_port()
        proxy.aim(port)
        proxy.throttle(bytes_per_s)
        proxy.delay(delay_s)
        ways.append((port, proxy.address))
    print(json.dumps(ways), flush=True)
    sys.stdin.read()
    for proxy in proxies:
        proxy.__exit__(None, None, None)


# ------------------------------------------------------------------------------------------------------ the comparison


def compared(case: Case, planned: Planned, done: list[StepDone]) -> Outcome:
    counted = done[WARM_UP_STEPS:]
    known, unknown = counted[::2], counted[1::2]
    problem = shaped(case, planned)
    measured = durations(known, planned.plan)
    # One more than were recorded: the first stands before its commit, not between two.
    rules = Rules(steps=len(known) + 1)
    simulated_s = simulate_steps(planned.plan, problem, rules, recorded(known, planned.plan)).step_s
    steps_s = [step.step_s for step in unknown]
    observed_s = statistics.median(steps_s)
    return Outcome(
        case=case,
        observed_s=observed_s,
        observed_spread=max(steps_s) / min(steps_s),
        simulated_s=simulated_s,
        predicted_s=planned.plan.step_time_s,
        error=simulated_s / observed_s - 1,
        plan_error=planned.plan.step_time_s / observed_s - 1,
        stages=[
            {"blocks": list(stage.blocks), "in_flight": stage.in_flight, **asdict(measured[stage.stage])}
            for stage in planned.plan.stages
        ],
        steps_s=[step.step_s for step in counted],
    )


def shaped(case: Case, planned: Planned) -> Problem:
    """The job's costs over links as the proxies make them: each connection has its own."""
    plan, prepared = planned.plan, planned.prepared
    costs = block_costs(prepared.captured.graph, prepared.symbols, training=True)
    everyone = sorted({plan.feed, *(stage.peer for stage in plan.stages)})
    link = Link(bandwidth_bytes_per_s=case.bandwidth_bytes_per_s, latency_s=case.latency_s)
    # Its speed is measured with the others'; here it is an end of links.
    owner = PeerProfile(peer=plan.feed, flops_per_s=1.0, memory_bytes=1)
    return Problem(
        graph_hash=plan.graph_hash,
        blocks=tuple(BlockCost(**msgspec.structs.asdict(cost)) for cost in costs),
        peers=planned.members,
        owner=owner,
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss")),
        microbatches=plan.microbatches,
        microbatch_tokens=prepared.tokens_per_microbatch,
        links={f"{one}>{other}": link for one in everyone for other in everyone if one != other},
    )


def durations(steps: list[StepDone], plan: Plan) -> dict[int, Durations]:
    """Medians over the steps of what each stage's work took, its rest included."""
    found = {}
    for stage in plan.stages:
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for step in steps:
            updating_s = 0.0
            for span in step.spans.get(stage.stage, ()):
                if span.kind == "apply":  # the norms before a vote and the update behind it
                    updating_s += span.end_s - span.start_s
                else:
                    seconds[span.kind].append(span.end_s - span.start_s)
            seconds["apply"].append(updating_s)
        middle = {kind: statistics.median(values) for kind, values in seconds.items()}
        found[stage.stage] = Durations(
            forward_s=middle.get("forward", 0.0),
            backward_s=middle.get("backward", 0.0),
            weights_s=middle.get("weights", 0.0),
            update_s=middle.get("apply", 0.0),
        )
    return found


def recorded(steps: list[StepDone], plan: Plan) -> dict[int, Recorded]:
    """What each stage's work took, its rest included, step by step. The norms before a vote and the update behind it
    are both told as `apply`."""
    found: dict[int, list[dict[tuple[str, int], float]]] = {stage.stage: [] for stage in plan.stages}
    for step in steps:
        for stage, taken in found.items():
            seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
            for span in step.spans.get(stage, ()):
                seconds[span.kind, span.microbatch] += span.end_s - span.start_s
            taken.append(dict(seconds))
    return {stage: Recorded(tuple(taken)) for stage, taken in found.items()}


def simulator_hash() -> str:
    """Of the code that simulates a step."""
    digest = hashlib.sha256()
    for path in sorted(file for pattern in SIMULATING for file in (ROOT / "src" / "fusionai").glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    def of(errors: list[float]) -> dict[str, float]:
        ordered = sorted(map(abs, errors))
        place = min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)
        return {"median": statistics.median(ordered), "p95": ordered[place], "worst": ordered[-1]}

    return {
        "runs": len(outcomes),
        "simulated": of([one.error for one in outcomes]),
        "simulated_bias": statistics.median(one.error for one in outcomes),
        "planned": of([one.plan_error for one in outcomes]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="numbers of runs, separated by commas")
    parser.add_argument("--json", type=Path, default=Path("truth-benchmark.json"))
    parser.add_argument("--proxies", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.proxies:
        keep_proxies(options.proxies)
        return 0
    wanted = {int(word) for word in options.only.split(",") if word.strip()}
    outcomes: list[Outcome] = []
    frozen = simulator_hash()
    for case in cases(options.runs, options.seed):
        if wanted and case.number not in wanted:
            continue
        planned, done = real_run(case, options.steps)
        outcome = compared(case, planned, done)
        outcomes.append(outcome)
        print(
            f"run {case.number:2}  {len(case.shares)} peers, {case.bandwidth_bytes_per_s * 8 / 1e6:3.0f} Mbit/s, "
            f"{case.latency_s * 1e3:2.0f} ms, {case.microbatches:2} microbatches, loss {case.loss:5}  observed "
            f"{outcome.observed_s:6.3f} s (x{outcome.observed_spread:.2f}), simulated {outcome.simulated_s:6.3f} s "
            f"({outcome.error:+.1%}), planned {outcome.predicted_s:6.3f} s ({outcome.plan_error:+.1%})",
            flush=True,
        )
        if simulator_hash() != frozen:
            raise SystemExit("the simulator was changed while it was being tested: these runs don't count.")
        write(options.json, outcomes, frozen)
    found = summary(outcomes)
    kept = all(found["simulated"][name] <= most for name, most in GOALS.items())
    print(
        f"{found['runs']} runs: simulated step times are off by {found['simulated']['median']:.1%} in the median, "
        f"{found['simulated']['p95']:.1%} at p95 (goals: {GOALS['median']:.0%} and {GOALS['p95']:.0%}); plans by "
        f"{found['planned']['median']:.1%} and {found['planned']['p95']:.1%}"
    )
    return 0 if kept else 1


def write(path: Path, outcomes: list[Outcome], frozen: str) -> None:
    """After every run: whoever reads finds whole figures."""
    report = {
        "schema": "fusionai.benchmark.truth/1",
        "simulator": frozen,
        "cores": os.cpu_count(),
        "finished_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "summary": summary(outcomes),
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
