"""Random planning problems of ten kinds, heavy-tailed where machines differ: what planners are judged by."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Final

import msgspec

from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement

KINDS: Final = (
    "equal",
    "two classes",
    "unequal speeds",
    "unequal memories",
    "slow links",
    "unequal links",
    "latency",
    "scarce memory",
    "one giant",
    "split",
)
POOL_ROLES: Final = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
GB: Final = 1e9


def judged_pool(kind: str, seed: int, peers: int, layers: int) -> Problem:
    """A language model of `layers` equal layers between an embedding and a head, on machines of this kind."""
    draw = Random(f"{kind} {seed} {peers} {layers}")
    width = draw.choice((512, 1024, 2048, 4096))
    tokens = draw.choice((128, 256, 512, 2048))
    blocks = _blocks(draw, layers, width, tokens)
    state = sum(4.0 * b.parameter_bytes for b in blocks)
    activations = sum(b.activation_bytes for b in blocks)
    microbatches = draw.choice((1, 2, 4, 8, 8, 8, 16, 64))
    whole = state + activations * min(microbatches, 4)
    speed, bandwidth, latency = 10 ** draw.uniform(11, 13), 10 ** draw.uniform(6.5, 9), 10 ** draw.uniform(-4, -1.5)
    memory = whole * 10 ** draw.uniform(-0.5, 0.5)
    tail = draw.uniform(0.5, 1.5)
    classes = [(exp(draw.gauss(0, tail)), exp(draw.gauss(0, 0.6))) for _ in range(2)]
    pool: list[PeerProfile] = []
    for number in range(peers):
        fast, large, wide, far = factors(draw, kind, number, peers, latency, tail, classes, slow=0.05, scarce=0.6)
        pool.append(
            PeerProfile(
                peer=f"p{number:04}",
                device=draw.choice(("cpu", "cuda")) if kind != "equal" else "cuda",
                flops_per_s=speed * fast,
                memory_bytes=max(1, int(memory * large)),
                scratch_bytes_per_s=0.0 if kind == "equal" else draw.choice((0.0, 2e8, 3e9)),
                uplink=Link(bandwidth_bytes_per_s=bandwidth * wide, latency_s=far / 2),
                downlink=Link(bandwidth_bytes_per_s=bandwidth * wide * draw.choice((1.0, 1.0, 5.0)), latency_s=far / 2),
                savings=("recompute",)
                if kind != "equal" and draw.random() < 0.1
                else ("recompute", "offload", "offload_weights"),
            )
        )
    problem = Problem(
        graph_hash="judged",
        blocks=blocks,
        peers=tuple(pool),
        roles=POOL_ROLES,
        microbatches=microbatches,
        microbatch_tokens=tokens,
        recompute=draw.choice(("auto", "auto", "auto", "auto", "never", "always")),
        offload=draw.choice(("auto", "auto", "auto", "never")),
        offload_weights=draw.choice(("auto", "auto", "auto", "never")),
    )
    if kind != "split":
        return problem
    owner = PeerProfile(
        peer="owner",
        flops_per_s=speed * 10 ** draw.uniform(-1.5, 0.5),
        memory_bytes=int(whole),
        uplink=Link(bandwidth_bytes_per_s=bandwidth * 10 ** draw.uniform(-1, 0.5), latency_s=latency / 2),
        downlink=Link(bandwidth_bytes_per_s=bandwidth * 10 ** draw.uniform(-1, 0.5), latency_s=latency / 2),
    )
    kept = draw.choice(((0, 0), (1, 1), (1, 2)))
    roles = (RolePlacement(role="feed"), RolePlacement(role="loss"))
    return msgspec.structs.replace(problem, owner=owner, roles=roles, kept_first=kept[0], kept_last=kept[1])


def with_wishes(problem: Problem, seed: int) -> Problem:
    """The same, some pairs of machines with links of their own, as many microbatches as drawn, and at times a number of
    stages that is asked for."""
    draw = Random(f"wishes {seed} {problem.peers[0].flops_per_s}")
    names = [one.peer for one in (*problem.peers, *([] if problem.owner is None else [problem.owner]))]
    pairs = [draw.sample(names, 2) for _ in range(draw.randint(0, 4))] if len(names) > 1 else []
    links = {
        f"{one}>{other}": Link(bandwidth_bytes_per_s=10 ** draw.uniform(6, 9.5), latency_s=10 ** draw.uniform(-5, -1))
        for one, other in pairs
    }
    stages = draw.randint(1, len(problem.peers)) if draw.random() < 0.4 else None
    microbatches = draw.choice((1, 2, 8, 32, 128))
    return msgspec.structs.replace(problem, links=links, stages=stages, microbatches=microbatches)


def factors(
    draw: Random,
    kind: str,
    number: int,
    peers: int,
    latency: float,
    tail: float,
    classes: list[tuple[float, float]],
    *,
    slow: float,
    scarce: float,
) -> tuple[float, float, float, float]:
    """Of machine `number` of a pool: speed, memory and bandwidth relative to the pool's, and latency. `slow`: relative
    bandwidth of slow links, `scarce`: relative memory where that is scarce."""
    fast = large = wide = 1.0
    far = latency
    match kind:
        case "equal":
            pass
        case "two classes":
            fast, large = classes[draw.randrange(2)]
        case "unequal speeds":
            fast = exp(draw.gauss(0, tail))
        case "unequal memories":
            large = exp(draw.gauss(0, tail))
        case "slow links":
            wide, fast = slow * exp(draw.gauss(0, 0.3)), exp(draw.gauss(0, 0.5))
        case "unequal links":
            wide, far, fast = exp(draw.gauss(0, 1.5)), latency * exp(draw.gauss(0, 1)), exp(draw.gauss(0, 0.5))
        case "latency":
            far, fast = 10 ** draw.uniform(-2, 0), exp(draw.gauss(0, 0.5))
        case "scarce memory":
            large, fast = scarce * exp(draw.gauss(0, 0.4)) * 3 / peers, exp(draw.gauss(0, 0.5))
        case "one giant":
            fast, large = (30.0, 3.0) if number == 0 else (exp(draw.gauss(0, 0.7)), exp(draw.gauss(0, 0.5)))
        case _:
            fast, large, wide = exp(draw.gauss(0, 1)), exp(draw.gauss(0, 0.5)), exp(draw.gauss(0, 0.5))
    return fast, large, wide, far


def _blocks(draw: Random, layers: int, width: int, tokens: int) -> tuple[BlockCost, ...]:
    rows = draw.choice((1, 4))
    vocabulary = draw.choice((4, 32)) * width
    crossing = 4 * rows * tokens * width
    found = [
        BlockCost(
            block=0,
            forward_flops=1.0 * rows * tokens * width,
            backward_flops=1.0 * rows * tokens * width,
            parameter_bytes=4 * vocabulary * width,
            trainable_bytes=4 * vocabulary * width,
            activation_bytes=crossing,
            output_bytes=crossing,
            gradient_bytes=crossing,
        )
    ]
    for number in range(1, layers + 1):
        spread = draw.choice((1.0, 1.0, 1.0, draw.uniform(0.5, 2)))
        parameters = int(12 * width * width * spread)
        flops = 2.0 * parameters * rows * tokens
        found.append(
            BlockCost(
                block=number,
                forward_flops=flops,
                backward_flops=2 * flops,
                parameter_bytes=4 * parameters,
                trainable_bytes=4 * parameters,
                activation_bytes=int(crossing * 12 * spread),
                workspace_bytes=2 * crossing,
                output_bytes=crossing,
                gradient_bytes=crossing,
            )
        )
    logits = 4 * rows * tokens * vocabulary
    found.append(
        BlockCost(
            block=layers + 1,
            forward_flops=2.0 * vocabulary * width * rows * tokens,
            backward_flops=4.0 * vocabulary * width * rows * tokens,
            parameter_bytes=4 * vocabulary * width,
            trainable_bytes=4 * vocabulary * width,
            activation_bytes=logits,
            workspace_bytes=logits,
            output_bytes=4,
            gradient_bytes=0,
        )
    )
    return tuple(found)
