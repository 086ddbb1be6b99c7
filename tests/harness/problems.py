"""Planning problems of every shape, small enough for brute force: strategies for property tests."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import msgspec
from hypothesis import strategies as st

from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds

OWNER_ROLES = (RolePlacement(role="feed"), RolePlacement(role="loss"))
POOL_ROLES = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))


@st.composite
def block_costs(draw: st.DrawFn, number: int) -> BlockCost:
    parameters = draw(st.integers(0, 40)) * 1000
    crossing = draw(st.integers(0, 12)) * 1000
    return BlockCost(
        block=number,
        forward_flops=draw(st.integers(1, 60)) * 1e6,
        backward_flops=draw(st.integers(0, 120)) * 1e6,
        parameter_bytes=parameters,
        trainable_bytes=draw(st.sampled_from([0, parameters])),
        activation_bytes=draw(st.integers(0, 20)) * 1000,
        workspace_bytes=draw(st.integers(0, 10)) * 1000,
        output_bytes=crossing,
        gradient_bytes=draw(st.sampled_from([0, crossing])),
    )


@st.composite
def profiles(draw: st.DrawFn, name: str) -> PeerProfile:
    return PeerProfile(
        peer=name,
        flops_per_s=draw(st.sampled_from([1e9, 2e9, 5e9])) * draw(st.integers(8, 12)),
        share=draw(st.sampled_from([0.25, 0.5, 1.0])),
        fingerprint=draw(st.sampled_from(["cpu", "cpu", "cpu", "gpu", ""])),
        memory_bytes=draw(st.integers(80, 900)) * 1000,
        uplink=Link(
            bandwidth_bytes_per_s=draw(st.sampled_from([1e6, 1e7, 1e8])),
            latency_s=draw(st.sampled_from([0.0, 0.0005, 0.01])),
        ),
        downlink=Link(bandwidth_bytes_per_s=draw(st.sampled_from([4e6, 1e7, 1e9]))),
    )


@st.composite
def problems(draw: st.DrawFn, *, most_peers: int = 4, most_blocks: int = 6) -> Problem:
    owner_takes_loss = draw(st.booleans())
    count = draw(st.integers(max(2, most_blocks - 3), most_blocks))
    blocks = tuple(draw(block_costs(number)) for number in range(count))
    names = [f"peer{i}" for i in range(draw(st.integers(max(1, most_peers - 2), most_peers)))]
    peers = tuple(draw(profiles(name)) for name in names)
    owner = None
    if owner_takes_loss:
        # The owner's own machine may lend itself to the pool as well.
        shared = draw(st.booleans())
        owner = peers[0] if shared else draw(profiles("owner"))
        owner = msgspec.structs.replace(owner, memory_bytes=10**7)
        peers = (owner, *peers[1:]) if shared else peers
    links: dict[str, Link] = {}
    if len(names) > 1 and draw(st.booleans()):
        exception = Link(bandwidth_bytes_per_s=draw(st.sampled_from([1e5, 1e9])), latency_s=0.005)
        links[f"{names[0]}>{names[1]}"] = exception
        if draw(st.booleans()):
            links[f"{names[1]}>{names[0]}"] = exception
    return Problem(
        graph_hash="graph",
        blocks=blocks,
        peers=peers,
        owner=owner,
        roles=OWNER_ROLES if owner_takes_loss else POOL_ROLES,
        stages=draw(st.sampled_from([None, None, 1, 2, 3])),
        microbatches=draw(st.sampled_from([1, 2, 8, 20])),
        microbatch_tokens=64,
        links=links,
        required=tuple(names[-1:]) if draw(st.integers(0, 4)) == 0 else (),
    )


def served_by(peers: Iterable[PeerProfile], owner: PeerProfile | None = None) -> Problem:
    """Serve six blocks of 10 MB with small caches; without an owner, the pool has both ends."""
    block = BlockCost(
        block=0,
        forward_flops=2e6,
        backward_flops=0,
        parameter_bytes=10_000_000,
        trainable_bytes=0,
        activation_bytes=0,
        output_bytes=1000,
        gradient_bytes=0,
        cache_token_bytes=1000,
    )
    return Problem(
        task="serve",
        graph_hash="g",
        blocks=tuple(msgspec.structs.replace(block, block=number) for number in range(6)),
        peers=tuple(peers),
        owner=owner,
        roles=POOL_ROLES if owner is None else (),
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(context_tokens=64, sessions=4, cache_tokens=128, retain=False, result_bytes=400),
    )


def serving_machine(number: int, speed: float, memory: float, link: float, latency_s: float) -> PeerProfile:
    """Return a machine for `served_by`, which holds three of the six blocks if `memory` is 1; all factors multiply."""
    return PeerProfile(
        peer=f"peer{number:04}",
        flops_per_s=1e10 * speed,
        memory_bandwidth_bytes_per_s=1e9 * speed,
        memory_bytes=int(35_000_000 * memory),
        uplink=Link(bandwidth_bytes_per_s=5e6 * link, latency_s=latency_s),
        downlink=Link(bandwidth_bytes_per_s=1e8),
    )


def heavy_tailed(machines: int, seed: int) -> Problem:
    """Serve six blocks on machines whose speeds, memories, uplinks and latencies have heavy tails."""
    draw = Random(seed)
    peers: list[PeerProfile] = []
    for number in range(machines):
        speed, memory, link = draw.paretovariate(1.5), min(0.5 * draw.paretovariate(1.5), 6.0), draw.paretovariate(1.2)
        peers.append(serving_machine(number, speed, memory, link, 0.002 * draw.paretovariate(1.5)))
    return served_by(peers)
