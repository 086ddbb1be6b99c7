"""Microbatches in flight: what the planner's credit reaches of the closed form, beside older and smaller rules.

    python benchmarks/credits.py [--part both|simulated|real] [--rounds 2] [--steps 8] [--json FILE]

Simulated: eight equal stages of three blocks, 50 ms, 100 Mbit/s, several periods and sizes of what crosses a cut, 64
microbatches, with whole backwards and with weight gradients put off. For each rule: the closed form's step over the
simulated one, and microbatches in flight, all stages together, over 1F1B's. `fewest`: with as few as were found to
reach `GOAL` (one after the other taken away where the step stays short enough). `least`: what no schedule can go below
at `GOAL`, since a microbatch is in flight at a stage for its trip below and back (Little). Microbatches between forward
and backward count, not those whose weight gradients are put off.

Beside microbatches stands activation memory, over that of textbook 1F1B (all is kept until its backward): a block keeps
so many times what crosses a cut as a Llama block does, and a microbatch has buffers on both sides. `again`: the
planner's rule with activations made again in backward (`recompute = "always"`), a third more work; its closed form
counts that, `reached_of_kept` is to the closed form of the line that keeps all.

Real: four `fusion join` on loopback behind the proxies of `truth`, each with a part of a core,
the same job under each rule in turn. Speeds are ratios to the planner's rule within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Final

import msgspec

import truth
from fusionai.scheduling.problem.types import (
    BlockCost,
    Certificate,
    Link,
    PeerProfile,
    Plan,
    Problem,
    RolePlacement,
    StagePlacement,
)
from fusionai.scheduling.training import pipeline as planning
from fusionai.scheduling.training.pipeline import Pipeline, credits_needed
from fusionai.simulator.step import Rules, StepRun, simulate_steps

GOAL: Final = 0.95
STAGES: Final = 8
MICROBATCHES: Final = 64
LATENCY_S: Final = 0.05
BANDWIDTH_BYTES_PER_S: Final = 12.5e6
FLOPS_PER_S: Final = 1e10
BLOCKS_PER_STAGE: Final = 3
KEPT_TO_CROSSING: Final = 25.1
"""Of a Llama block of hidden size 1024 with 512 tokens, by `ir.cost`: activations for backward to what it puts out."""
CASES: Final = (
    (0.1, 200_000),
    (0.15, 500_000),
    (0.3, 200_000),
    (0.3, 500_000),
    (0.3, 1_000_000),
    (0.3, 1_500_000),
    (0.3, 2_500_000),
    (0.9, 1_000_000),
    (3.0, 1_000_000),
)
"""(seconds of a microbatch's forward and backward, bytes that cross a cut each way)"""
REAL: Final = truth.Case(
    number=0,
    shares=(0.35, 0.35, 0.35, 0.35),
    bandwidth_bytes_per_s=12.5e6,
    latency_s=0.05,
    microbatches=16,
    loss="pool",
)
BATCH_ROWS, HIDDEN, FLOAT_BYTES = 2, 192, 4
"""Of a microbatch of the recipe of `truth`, and what a value takes on its way."""

Rule = Callable[[Sequence[float], Sequence[float], float], tuple[int, ...]]
"""As `credits_needed`: compute per stage, round trips between stages, period."""


def one_forward_one_backward(compute_s: Sequence[float], *_: object) -> tuple[int, ...]:
    return tuple(range(len(compute_s), 0, -1))


def little_and_two(compute_s: Sequence[float], round_trip_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """ceil(round trip / period) + 2, and 1F1B's at least."""
    below_s = [sum(compute_s[k + 1 :]) + sum(round_trip_s[k:]) for k in range(len(compute_s))]
    return tuple(max(len(compute_s) - k, ceil(away_s / period_s) + 2) for k, away_s in enumerate(below_s))


RULES: Final[dict[str, Rule]] = {
    "planner": credits_needed,
    "little + 2": little_and_two,
    "1f1b": one_forward_one_backward,
}


def behind_proxies(rule: Rule) -> Rule:
    """The rule, told of the trips the proxies make: what peers measure of their links on joining is loopback's."""
    crossing_bytes = BATCH_ROWS * truth.LENGTH * HIDDEN * FLOAT_BYTES
    trip_s = 2 * (REAL.latency_s + crossing_bytes / REAL.bandwidth_bytes_per_s)
    return lambda compute_s, round_trip_s, period_s: rule(compute_s, [trip_s] * len(round_trip_s), period_s)


@contextmanager
def ruled(rule: Rule) -> Iterator[None]:
    """Plans made in this process have this rule's credit, still as far as memory goes."""
    shipped = planning.credits_needed
    planning.credits_needed = rule
    try:
        yield
    finally:
        planning.credits_needed = shipped


# ------------------------------------------------------------------------------------------------------- simulated


class Line:
    """Equal stages on equal machines with memory for everything."""

    def __init__(self, compute_s: float, crossing_bytes: int, lag: bool, *, again: bool = False) -> None:
        link = Link(bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S, latency_s=LATENCY_S / 2)
        flops = compute_s * FLOPS_PER_S / BLOCKS_PER_STAGE
        self.problem = Problem(
            graph_hash="g",
            blocks=tuple(
                BlockCost(
                    block=number,
                    forward_flops=flops / 3,
                    backward_flops=flops * 2 / 3,
                    parameter_bytes=1000,
                    trainable_bytes=1000,
                    activation_bytes=round(KEPT_TO_CROSSING * crossing_bytes),
                    output_bytes=crossing_bytes,
                    gradient_bytes=crossing_bytes,
                )
                for number in range(STAGES * BLOCKS_PER_STAGE)
            ),
            recompute="always" if again else "never",
            peers=tuple(
                PeerProfile(peer=f"p{n}", flops_per_s=FLOPS_PER_S, memory_bytes=10**12, uplink=link, downlink=link)
                for n in range(STAGES)
            ),
            roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
            microbatches=MICROBATCHES,
            microbatch_tokens=1,
        )
        self._rules = Rules(steps=1, bare=True, weight_lag=lag)
        self._pipeline = Pipeline(self.problem, self.problem.peers)
        self._cuts = range(0, STAGES * BLOCKS_PER_STAGE + 1, BLOCKS_PER_STAGE)
        found = self._pipeline.fold(range(STAGES), self._cuts)
        assert found is not None, "memory for everything"
        self._found = found
        self.closed_s = self._pipeline.step_s(found)
        self.period_s = found.period_s
        # Nobody waits for weight gradients that are put off.
        backward_s = 2 / 3 * compute_s
        needless_s = self._rules.weight_part * backward_s if lag else 0.0
        self.trips_s = [
            stage.transit_s - needless_s * (STAGES - number)
            for number, stage in enumerate(self._pipeline.pool_stages(found))
        ]

    def credit(self, rule: Rule) -> tuple[int, ...]:
        with ruled(rule):
            return self._pipeline.in_flight(self._found)

    def run(self, credit: Sequence[int]) -> StepRun:
        plan = Plan(
            graph_hash="g",
            stages=tuple(
                StagePlacement(
                    stage=n,
                    peer=f"p{n}",
                    blocks=(self._cuts[n], self._cuts[n + 1]),
                    recompute=self.problem.recompute == "always",
                    in_flight=count,
                    memory_limit_bytes=10**12,
                    in_flight_bytes=1,
                )
                for n, count in enumerate(credit)
            ),
            feed="p0",
            microbatches=MICROBATCHES,
            step_time_s=self.closed_s,
            tokens_per_s=1.0,
            certificate=Certificate(method="", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
        )
        return simulate_steps(plan, self.problem, self._rules)

    def activation_bytes(self, credit: Sequence[int]) -> float:
        """Of all stages: what is kept and buffered in flight, and the block that is being made again."""
        chain = self._pipeline.chain
        again_bytes = KEPT_TO_CROSSING * self.problem.blocks[0].output_bytes if chain.savings.recompute else 0.0
        return sum(
            count * chain.in_flight_bytes(start, end) + again_bytes
            for count, (start, end) in zip(credit, pairwise(self._cuts), strict=True)
        )

    def reached(self, credit: Sequence[int]) -> float:
        return self.closed_s / self.run(credit).step_s

    def fewest(self) -> tuple[int, ...]:
        """From the planner's credit downwards, last stages first; what no single one can be taken from."""
        kept = list(self.credit(credits_needed))
        while True:
            for stage in reversed(range(STAGES)):
                fewer = [count - (n == stage) for n, count in enumerate(kept)]
                if fewer[stage] >= 1 and self.reached(fewer) >= GOAL:
                    kept = fewer
                    break
            else:
                return tuple(kept)

    def least(self) -> int:
        """With K in flight a stage's forward m + K begins after its backward m, so it has (M - 1) // K round trips one
        after the other, beside one through all stages."""
        most_s = self.closed_s / GOAL
        return sum(
            next(k for k in range(1, MICROBATCHES + 1) if (MICROBATCHES - 1) // k * trip_s + self.trips_s[0] <= most_s)
            for trip_s in self.trips_s
        )


def simulated() -> list[dict[str, Any]]:
    found = []
    plain = sum(range(1, STAGES + 1))
    for lag in (False, True):
        for compute_s, crossing_bytes in CASES:
            line, lighter = (Line(compute_s, crossing_bytes, lag, again=again) for again in (False, True))
            textbook_bytes = line.activation_bytes(RULES["1f1b"]([compute_s] * STAGES, (), 0.0))
            given = {name: line.credit(rule) for name, rule in RULES.items()}
            if line.reached(given["planner"]) >= GOAL:
                given["fewest"] = line.fewest()
            row: dict[str, Any] = {
                "compute_s": compute_s,
                "crossing_bytes": crossing_bytes,
                "period_s": line.period_s,
                "weight_gradients_put_off": lag,
                "least_over_1f1b": line.least() / plain,
            }
            row["rules"] = {
                name: {
                    "reached": line.reached(credit),
                    "over_1f1b": sum(credit) / plain,
                    "activations_over_1f1b": line.activation_bytes(credit) / textbook_bytes,
                    "in_flight": credit,
                }
                for name, credit in given.items()
            }
            credit = lighter.credit(credits_needed)
            row["again"] = {
                "reached": lighter.reached(credit),
                "reached_of_kept": line.closed_s / lighter.run(credit).step_s,
                "over_1f1b": sum(credit) / plain,
                "activations_over_1f1b": lighter.activation_bytes(credit) / textbook_bytes,
                "activations_over_1f1b_again": lighter.activation_bytes(credit)
                / lighter.activation_bytes(RULES["1f1b"]([compute_s] * STAGES, (), 0.0)),
                "in_flight": credit,
            }
            found.append(row)
            told = ", ".join(
                f"{name} {entry['reached']:.1%} (x{entry['over_1f1b']:.2f})" for name, entry in row["rules"].items()
            )
            print(
                f"{'put off' if lag else 'whole  '} compute {compute_s:.2f} s, transfer "
                f"{crossing_bytes / BANDWIDTH_BYTES_PER_S:.3f} s: {told}; "
                f"no schedule below x{row['least_over_1f1b']:.2f}; again {row['again']['reached']:.1%} "
                f"(of the closed form that keeps all {row['again']['reached_of_kept']:.1%}; activations "
                f"x{row['again']['activations_over_1f1b']:.2f})",
                flush=True,
            )
    return found


# ------------------------------------------------------------------------------------------------------------ real


def real(rounds: int, steps: int) -> dict[str, Any]:
    """Every rule once per round."""
    runs: list[dict[str, Any]] = []
    for number in range(rounds):
        for name, rule in RULES.items():
            with ruled(behind_proxies(rule)):
                planned, done = truth.real_run(REAL, steps)
            counted = done[truth.WARM_UP_STEPS :]
            step_s = statistics.median(step.step_s for step in counted)
            passes_s = statistics.median(passes(step) for step in counted)
            closed_s = measured_closed_s(planned, counted)
            in_flight = [stage.in_flight for stage in planned.plan.stages]
            runs.append(
                {
                    "round": number,
                    "rule": name,
                    "step_s": step_s,
                    "closed_s": closed_s,
                    "passes_s": passes_s,
                    "reached": closed_s / passes_s,
                    "in_flight": in_flight,
                }
            )
            print(
                f"real, round {number}, {name}: {in_flight} in flight, step {step_s:.3f} s, "
                f"of it passes {passes_s:.3f} s, "
                f"{closed_s / passes_s:.1%} of the closed form",
                flush=True,
            )
    ours = {run["round"]: run["step_s"] for run in runs if run["rule"] == "planner"}
    return {
        "case": msgspec.to_builtins(REAL),
        "runs": runs,
        "speed_over_planner": {
            name: statistics.median(ours[run["round"]] / run["step_s"] for run in runs if run["rule"] == name)
            for name in RULES
        },
        "reached": {name: statistics.median(run["reached"] for run in runs if run["rule"] == name) for name in RULES},
    }


def passes(step: truth.StepDone) -> float:
    """What the closed form is about: at the first stage, from the first forward's begin to the last backward's end."""
    spans = [span for span in step.spans[0] if span.kind in ("forward", "backward")]
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def measured_closed_s(planned: truth.Planned, counted: list[truth.StepDone]) -> float:
    """The closed form over what the stages' work took in these steps and the links as they were shaped."""
    takes = truth.durations(counted, planned.plan)
    compute_s = [
        takes[stage.stage].forward_s + takes[stage.stage].backward_s + takes[stage.stage].weights_s
        for stage in planned.plan.stages
    ]
    problem = truth.shaped(REAL, planned)
    ends = [stage.blocks[1] for stage in planned.plan.stages[:-1]]
    first = problem.blocks[0].block
    hops_s = []
    transfers_s = []
    for end in ends:
        block = problem.blocks[end - 1 - first]
        there_s, back_s = (size / REAL.bandwidth_bytes_per_s for size in (block.output_bytes, block.gradient_bytes))
        transfers_s += [there_s, back_s]
        hops_s.append(there_s + back_s + 2 * REAL.latency_s)
    return (REAL.microbatches - 1) * max(*compute_s, *transfers_s) + sum(compute_s) + sum(hops_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--part", choices=("both", "simulated", "real"), default="both")
    parser.add_argument("--json", type=Path, default=Path("credits-benchmark.json"))
    options = parser.parse_args()
    rows = [] if options.part == "real" else simulated()
    report: dict[str, Any] = {
        "schema": "fusionai.benchmark.credits/1",
        "cores": os.cpu_count(),
        "finished_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "goal": GOAL,
        "simulated": rows,
        "real": None if options.part == "simulated" else real(options.rounds, options.steps),
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    kept = all(row["rules"]["planner"]["reached"] >= GOAL for row in rows)
    if rows:
        print(f"the planner's credit reaches {GOAL:.0%} of the closed form in {'all' if kept else 'not all'} cases")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
