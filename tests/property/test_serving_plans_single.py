"""A serving plan is never slower than one machine that holds the whole model and one context: random pools."""

from __future__ import annotations

from math import exp, inf
from random import Random

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds

ROUNDING = 1e-9


def serving_pool(seed: int) -> Problem:
    """Machines whose memories differ by orders: some hold the model with one context, few with all that are wanted."""
    draw = Random(f"serving {seed}")
    layers, width = draw.choice((3, 4, 6)), draw.choice((512, 2048))
    weights = 12 * width * width * 2
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=float(weights),
            backward_flops=0.0,
            parameter_bytes=weights,
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=4 * width,
            gradient_bytes=0,
            cache_token_bytes=8 * width,
        )
        for number in range(layers)
    )
    context = draw.choice((512, 4096))
    whole = layers * (weights + 4 * width + context * 8 * width)
    peers = tuple(
        PeerProfile(
            peer=f"p{number}",
            flops_per_s=1e11 * exp(draw.gauss(0, 1)),
            memory_bandwidth_bytes_per_s=draw.choice((0.0, 2e10 * exp(draw.gauss(0, 1)))),
            memory_bytes=int(whole * exp(draw.gauss(0, 1))),
            uplink=Link(bandwidth_bytes_per_s=1e7, latency_s=10 ** draw.uniform(-4, -1)),
        )
        for number in range(draw.randint(1, 6))
    )
    owner = PeerProfile(peer="owner", flops_per_s=1e11 * exp(draw.gauss(0, 1.5)), memory_bytes=whole)
    at_owner = draw.random() < 0.3
    place = "owner" if at_owner else "pool"
    return Problem(
        task="serve",
        graph_hash="g",
        blocks=blocks,
        peers=peers,
        owner=owner if at_owner else None,
        roles=(RolePlacement(role="feed", place=place), RolePlacement(role="loss", place=place)),
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(
            context_tokens=context,
            sessions=draw.choice((1, 16)),
            cache_tokens=context * draw.choice((1, 4)),
            result_bytes=4 * 32000,
            retain=draw.random() < 0.5,
        ),
    )


def single_s(problem: Problem) -> float:
    """Seconds per token of the fastest plan with one machine of the pool, by formulas written out again; inf where none
    has room for a context and the probe's page."""
    needs, owner = problem.serving, problem.owner
    assert needs is not None
    blocks = problem.blocks if owner is None else problem.blocks[1:-1]
    tokens = -(-needs.context_tokens // needs.page_tokens) * needs.page_tokens + needs.page_tokens
    sent = blocks[-1].output_bytes if needs.retain and owner is not None else 0
    needed = sum(b.parameter_bytes + tokens * b.cache_token_bytes for b in blocks) + tokens * sent

    def seconds(machine: PeerProfile, some: tuple[BlockCost, ...]) -> float:
        bandwidth = machine.memory_bandwidth_bytes_per_s
        return sum(
            max(b.forward_flops / machine.flops_per_s, b.parameter_bytes / bandwidth if bandwidth else 0.0)
            for b in some
        )

    best = inf
    for peer in problem.peers:
        if peer.memory_bytes < needed:
            continue
        token_s = seconds(peer, blocks)
        if owner is not None:
            token_s += seconds(owner, (problem.blocks[0], problem.blocks[-1]))
            for one, other, size in (
                (owner, peer, problem.blocks[0].output_bytes),
                (peer, owner, blocks[-1].output_bytes),
            ):
                width = min(one.uplink.bandwidth_bytes_per_s, other.downlink.bandwidth_bytes_per_s)
                token_s += size / width + one.uplink.latency_s + other.downlink.latency_s
        best = min(best, token_s)
    return best


def test_no_line_is_slower_than_one_machine() -> None:
    planned = shorter = 0
    for seed in range(150):
        problem = serving_pool(seed)
        try:
            found = plan(problem)
        except PlanError:
            assert single_s(problem) == inf, seed
            continue
        assert found.step_time_s <= single_s(problem) * (1 + ROUNDING), seed
        assert 1 / found.step_time_s <= found.certificate.bound_tokens_per_s * (1 + ROUNDING), seed
        planned += 1
        assert problem.serving is not None
        shorter += bool(found.warnings) and "Memory is short" in found.warnings[-1]
    assert planned > 100
    assert shorter > 5
