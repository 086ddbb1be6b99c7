"""How good plans are, how far from the optimum they can be, and how long planning takes, on random pools.

    python benchmarks/planner.py [PART ...] [--seeds 20] [--json FILE]

    chains     one replica, at most 12 peers: the exact search
    large      one replica, 24 to 5,000 peers: gap to the bound
    latency    the line of stages a token crosses soonest: up to 14 peers, and 5,000
    alike      one replica, pools of equal machines and of ones that hardly differ
    lines      several serving lines side by side, 64 and 500 peers: gain over one, gap to the bound

Pools mix consumer devices (`random_pools`), uplinks from 50 to 1000 Mbit/s. Times are CPU seconds of this process, one
thread; the first plan, which compiles or loads compiled loops, is reported as `first`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement
from fusionai.scheduling.serving.parallel import serving_pipelines
from random_pools import alike_pool, serving_pool, training_pool

Result = dict[str, Any]
Value = TypeVar("Value")

_DEVICES_FLOPS_PER_S: Final = (5.1e12, 1.19e13, 3.3e13, 6.0e12, 2.7e12)
_MICROBATCH_TOKENS: Final = 512
_WIDTH: Final = 2048
MOST_SESSIONS: Final = 255


def main() -> None:
    arguments = _arguments()
    parts: dict[str, Callable[[argparse.Namespace], Result]] = {
        "chains": chains,
        "large": large,
        "latency": latency,
        "alike": alike,
        "lines": lines,
    }
    results: dict[str, Result] = {}
    for name in arguments.parts or list(parts):
        print(f"\n{name}", flush=True)
        results[name] = parts[name](arguments)
    if arguments.json is not None:
        text = {"schema": "fusionai.benchmark.planner/2", "machine": platform.processor(), "results": results}
        arguments.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def chains(arguments: argparse.Namespace) -> Result:
    """Ten pools per seed, of 4 to 12 peers, roomy and tight in turn."""
    first_s = _timed(lambda: plan(random_problem(12, "tight", random.Random(0))))[1]
    seconds: list[float] = []
    refused = exact = 0
    for number in range(10 * arguments.seeds):
        draw = random.Random(f"chain {number}")
        problem = random_problem(draw.randint(4, 12), ("roomy", "tight")[number % 2], draw)
        try:
            found, spent_s = _timed(lambda problem=problem: plan(problem))
        except PlanError:
            refused += 1
            continue
        seconds.append(spent_s)
        exact += found.certificate.exact
    print(
        f"  {len(seconds)} plans, {exact} proven optimal, {refused} pools too small; {_spread(seconds, 's')}; "
        f"first {first_s:.2f} s"
    )
    return {"seconds": seconds, "exact": exact, "refused": refused, "first_s": first_s}


def large(arguments: argparse.Namespace) -> Result:
    results: Result = {}
    for peers, model in ((24, "8B"), (64, "8B"), (500, "8B"), (5_000, "1.3B"), (5_000, "70B")):
        gaps: list[float] = []
        seconds: list[float] = []
        for seed in range(min(5, arguments.seeds) if peers == 5_000 else arguments.seeds):
            problem = training_pool(peers, model, seed)
            found, spent_s = _timed(lambda problem=problem: plan(problem))
            seconds.append(spent_s)
            gaps.append(found.certificate.optimality_gap)
        print(
            f"  {peers:5} peers, {model:>4}: gap {_spread([100 * gap for gap in gaps], '%')}; {_spread(seconds, 's')}",
            flush=True,
        )
        results[f"{peers} {model}"] = {"gaps": gaps, "seconds": seconds}
    return results


def latency(arguments: argparse.Namespace) -> Result:
    results: Result = {}
    for peers, model in ((8, "8B"), (14, "8B"), (14, "70B"), (64, "70B"), (500, "70B"), (5_000, "70B")):
        gaps: list[float] = []
        seconds: list[float] = []
        exact = refused = 0
        _timed(lambda peers=peers, model=model: _served(peers, model, -1))
        for seed in range(arguments.seeds if peers < 5_000 else min(5, arguments.seeds)):
            found, spent_s = _timed(lambda peers=peers, model=model, seed=seed: _served(peers, model, seed))
            if found is None:
                refused += 1
                continue
            seconds.append(spent_s)
            gaps.append(found.certificate.optimality_gap)
            exact += found.certificate.exact
        if not seconds:
            print(f"  {peers:5} peers, {model:>4}: all {refused} pools too small")
            continue
        print(
            f"  {peers:5} peers, {model:>4}: {exact} of {len(seconds)} proven optimal ({refused} too small), "
            f"gap {_spread([100 * gap for gap in gaps], '%')}; {_spread(seconds, 's')}"
        )
        results[f"{peers} {model}"] = {"gaps": gaps, "seconds": seconds, "exact": exact, "refused": refused}
    return results


def alike(arguments: argparse.Namespace) -> Result:
    results: Result = {}
    for peers, kinds, spread in ((25, 1, 0.0), (25, 1, 0.01), (25, 3, 0.0), (25, 3, 0.01), (64, 1, 0.01)):
        gaps: list[float] = []
        seconds: list[float] = []
        exact = 0
        for seed in range(arguments.seeds):
            problem = alike_pool(peers, kinds, "8B", spread, seed)
            found, spent_s = _timed(lambda problem=problem: plan(problem))
            seconds.append(spent_s)
            gaps.append(found.certificate.optimality_gap)
            exact += found.certificate.exact
        print(
            f"  {peers} peers of {kinds} kinds, {100 * spread:.0f} % apart: {exact} of {len(gaps)} proven optimal, "
            f"gap {_spread([100 * gap for gap in gaps], '%')}; {_spread(seconds, 's')}",
            flush=True,
        )
        results[f"{peers} {kinds} {spread}"] = {"gaps": gaps, "seconds": seconds, "exact": exact}
    return results


def lines(arguments: argparse.Namespace) -> Result:
    results: Result = {}
    for peers, model, slower in ((64, "8B", 2.0), (64, "70B", 2.0), (64, "70B", 4.0), (500, "70B", 4.0)):
        gaps: list[float] = []
        seconds: list[float] = []
        gains: list[float] = []
        for seed in range(arguments.seeds):
            problem = serving_pool(peers, model, seed, sessions=16)
            one = plan(problem)
            found, spent_s = _timed(
                lambda problem=problem, one=one, slower=slower: serving_pipelines(
                    problem, one, MOST_SESSIONS, one.tokens_per_s / slower
                )
            )
            if found is None:
                continue
            seconds.append(spent_s)
            gaps.append(found.optimality_gap)
            gains.append(found.over_one_chain)
        print(
            f"  {peers:5} peers, {model:>4}, sessions up to {slower:.0f} x slower: {_spread(gains, 'x one line')}; "
            f"gap {_spread([100 * gap for gap in gaps], '%')}; {_spread(seconds, 's')}",
            flush=True,
        )
        results[f"{peers} {model} {slower}"] = {"gains": gains, "gaps": gaps, "seconds": seconds}
    return results


def _served(peers: int, model: str, seed: int) -> Any:
    try:
        return plan(serving_pool(peers, model, seed))
    except PlanError:
        return None


def random_problem(peers: int, memory: str, draw: random.Random) -> Problem:
    """One replica: a model that a third (tight) or a tenth (roomy) of the pool's memory holds."""
    layers = max(8, min(48, 2 * peers))
    layer_bytes = 4 * 12 * _WIDTH**2
    boundary_bytes = 4 * _MICROBATCH_TOKENS * _WIDTH
    head_bytes = 4 * 32_000 * _WIDTH
    embedding = _block(0, 0, head_bytes, boundary_bytes, boundary_bytes)
    middle = [_block(n, layer_bytes, layer_bytes, 16 * boundary_bytes, boundary_bytes) for n in range(1, layers + 1)]
    logits_bytes = 4 * _MICROBATCH_TOKENS * 32_000
    head = _block(layers + 1, head_bytes, head_bytes, boundary_bytes, logits_bytes)
    loss = _block(layers + 2, logits_bytes, 0, logits_bytes, 4)
    blocks = (embedding, *middle, head, loss)
    whole_bytes = sum(4 * b.parameter_bytes + 8 * b.activation_bytes for b in blocks)
    room = whole_bytes * (10 if memory == "roomy" else 3) / peers
    pool = tuple(
        PeerProfile(
            peer=f"peer{number:03}",
            flops_per_s=draw.choice(_DEVICES_FLOPS_PER_S) * draw.uniform(0.9, 1.1),
            memory_bytes=int(max(room * draw.uniform(0.5, 1.5), 5 * head_bytes)),
            uplink=Link(bandwidth_bytes_per_s=6.25e6 * 20 ** draw.random(), latency_s=draw.uniform(0, 0.02)),
            downlink=Link(bandwidth_bytes_per_s=1.25e8, latency_s=draw.uniform(0, 0.02)),
        )
        for number in range(peers)
    )
    owner = PeerProfile(
        peer="owner",
        flops_per_s=6.0e12,
        memory_bytes=16 * 10**9,
        uplink=Link(bandwidth_bytes_per_s=1.25e8),
        downlink=Link(bandwidth_bytes_per_s=1.25e8),
    )
    return Problem(
        graph_hash="benchmark",
        blocks=blocks,
        peers=pool,
        owner=owner,
        # Logits of a large vocabulary over a home's uplink would drown everything else.
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss", place="pool")),
        microbatches=16,
        microbatch_tokens=_MICROBATCH_TOKENS,
    )


def _block(number: int, worked_bytes: int, parameter_bytes: int, activation_bytes: int, output_bytes: int) -> BlockCost:
    flops = 2.0 * _MICROBATCH_TOKENS * worked_bytes / 4
    return BlockCost(
        block=number,
        forward_flops=flops,
        backward_flops=2 * flops,
        parameter_bytes=parameter_bytes,
        trainable_bytes=parameter_bytes,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        gradient_bytes=output_bytes,
    )


def _timed(work: Callable[[], Value]) -> tuple[Value, float]:
    """CPU seconds, so that other work on the machine counts little."""
    started_s = time.process_time()
    value = work()
    return value, time.process_time() - started_s


def _spread(values: list[float], unit: str) -> str:
    if not values:
        return "none"
    return (
        f"median {median(values):.3g} {unit}, p95 {float(np.percentile(values, 95)):.3g} {unit}, "
        f"most {max(values):.3g} {unit}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="all if none is named")
    parser.add_argument("--seeds", type=int, default=20, help="random pools per case")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
