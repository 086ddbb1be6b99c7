"""How long planning takes and how far plans can be from the optimum, on random pools of growing size.

    python benchmarks/planner.py [--peers 4 8 16 32 64] [--pools 3] [--json FILE]

Pools mix the catalogue's consumer devices (measured-like speeds with 10 % spread), uplinks log-uniform from 50 to 1000
Mbit/s and latencies up to 20 ms each way; models are chains of equal layers with a large last block (the head), with
`roomy` or `tight` memory. Each case is planned once; times are wall-clock on this machine, one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from pathlib import Path
from typing import Any

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.types import BlockCost, Link, PeerProfile, Problem, RolePlacement

_DEVICES_FLOPS_PER_S = (5.1e12, 1.19e13, 3.3e13, 6.0e12, 2.7e12)
_MICROBATCH_TOKENS = 512
_WIDTH = 2048


def main() -> None:
    arguments = _arguments()
    results = []
    for peers in arguments.peers:
        for memory in ("roomy", "tight"):
            for seed in range(arguments.pools):
                result = measure(peers, memory, seed)
                results.append(result)
                outcome = result.get("refused") or (
                    f"gap {100 * result['optimality_gap']:.2f} % {'exact' if result['exact'] else 'bound'}, "
                    f"{result['stages']} stages"
                )
                print(f"{peers:3} peers, {memory}, pool {seed}: {result['seconds']:.3f} s, {outcome}")
    if arguments.json is not None:
        text = {"schema": "fusionai.benchmark.planner/1", "machine": platform.processor(), "results": results}
        arguments.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def measure(peers: int, memory: str, seed: int) -> dict[str, Any]:
    """Plan one pool once."""
    problem = random_problem(peers, memory, random.Random(f"{peers} {memory} {seed}"))
    case: dict[str, Any] = {"peers": peers, "memory": memory, "seed": seed, "blocks": len(problem.blocks)}
    started_s = time.perf_counter()
    try:
        found = plan(problem)
    except PlanError as error:
        return {**case, "seconds": time.perf_counter() - started_s, "refused": str(error)}
    return {
        **case,
        "seconds": time.perf_counter() - started_s,
        "exact": found.certificate.exact,
        "optimality_gap": found.certificate.optimality_gap,
        "explored": found.certificate.explored,
        "stages": sum("stage" in stage.roles for stage in found.stages),
        "step_time_s": found.step_time_s,
        "tokens_per_s": found.tokens_per_s,
    }


def random_problem(peers: int, memory: str, draw: random.Random) -> Problem:
    """A model that a third (tight) or a tenth (roomy) of the pool's memory holds, as long as the pool is wide."""
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 6, 8, 10, 16, 32, 64], help="pool sizes")
    parser.add_argument("--pools", type=int, default=2, help="random pools per size and memory")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
