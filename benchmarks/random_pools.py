"""Random pools and models for `planner.py`, `homes.py`: consumer devices, uplinks of homes, three language models."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds

GB: Final = 10**9
DEVICES: Final = (
    # share of the pool, dense fp16 FLOP/s, memory, memory bandwidth: RTX 3060, 3080, 4090, 4060 of a laptop, M2 Max
    (0.30, 25.5e12, 12 * GB, 360e9),
    (0.25, 59.5e12, 10 * GB, 760e9),
    (0.15, 165.2e12, 24 * GB, 1008e9),
    (0.20, 25.0e12, 8 * GB, 256e9),
    (0.10, 13.5e12, 64 * GB, 400e9),
)
MODELS: Final = {"1.3B": (24, 2048, 12), "8B": (32, 4096, 13), "70B": (80, 8192, 12.75)}
"""Layers, width, parameters of a layer in squares of the width."""
REACHED: Final = 0.4
"""Of the peak, in training."""
TOKENS: Final = 2048
BYTES_PER_PARAMETER: Final = 2
POOL_ROLES: Final = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))


def training_pool(peers: int, model: str, seed: int, *, compression: float = 4.0) -> Problem:
    """Return a training problem whose boundary tensors are compressed by the factor `compression`."""
    draw = random.Random(f"{peers} {model} {seed} {compression}")
    count, width, squares = MODELS[model]
    parameters = squares * width**2
    crossing = int(2 * TOKENS * width / compression)
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=2 * parameters * TOKENS,
            backward_flops=6 * parameters * TOKENS,
            parameter_bytes=int(BYTES_PER_PARAMETER * parameters),
            trainable_bytes=int(BYTES_PER_PARAMETER * parameters),
            activation_bytes=0,
            output_bytes=crossing,
            gradient_bytes=crossing,
        )
        for number in range(count)
    )
    pool = [_peer(number, draw) for number in range(peers)]
    return Problem(
        graph_hash="benchmark",
        blocks=blocks,
        peers=tuple(pool),
        roles=POOL_ROLES,
        microbatches=4 * count,
        microbatch_tokens=TOKENS,
        # Gradients in bf16, a float32 master copy and two 8-bit slots: 10 bytes per parameter.
        optimizer_bytes_per_trainable_byte=3.0,
    )


def alike_pool(peers: int, kinds: int, model: str, spread: float, seed: int) -> Problem:
    """Of so many kinds; measured speeds within `spread` of the kind's, uplinks within three times that."""
    problem = training_pool(peers, model, seed)
    draw = random.Random(f"alike {peers} {kinds} {model} {spread} {seed}")
    pool: list[PeerProfile] = []
    for number, peer in enumerate(problem.peers):
        kind = problem.peers[number % kinds]
        up = kind.uplink.bandwidth_bytes_per_s * (1 + 3 * spread * draw.uniform(-1, 1))
        pool.append(
            msgspec.structs.replace(
                kind,
                peer=peer.peer,
                memory_bytes=max(kind.memory_bytes, 16 * GB),
                flops_per_s=kind.flops_per_s * (1 + spread * draw.uniform(-1, 1)),
                uplink=Link(bandwidth_bytes_per_s=up, latency_s=kind.uplink.latency_s),
            )
        )
    return msgspec.structs.replace(problem, peers=tuple(pool))


def serving_pool(peers: int, model: str, seed: int, *, sessions: int = 1) -> Problem:
    """Weights of 4 bits, ends in the pool, room for the contexts of four sessions."""
    draw = random.Random(f"serve {peers} {model} {seed}")
    layers, width, squares = MODELS[model]
    parameters = squares * width**2
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=2 * parameters,
            backward_flops=0,
            parameter_bytes=int(0.55 * parameters),
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=2 * width,
            gradient_bytes=0,
            cache_token_bytes=4 * width // 8,
        )
        for number in range(layers)
    )
    pool = tuple(_peer(number, draw) for number in range(peers))
    return Problem(
        task="serve",
        graph_hash="benchmark",
        blocks=blocks,
        peers=pool,
        roles=POOL_ROLES,
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(
            context_tokens=2048,
            sessions=sessions,
            cache_tokens=0 if sessions == 1 else 2048 * min(sessions, 4),
            weights="int4",
            retain=False,
        ),
    )


def _peer(number: int, draw: random.Random) -> PeerProfile:
    device = draw.choices(DEVICES, weights=[share for share, *_ in DEVICES])[0]
    _, flops_per_s, memory_bytes, bandwidth = device
    spread = draw.uniform(0.9, 1.1)
    return PeerProfile(
        peer=f"peer{number:05}",
        flops_per_s=REACHED * flops_per_s * spread,
        memory_bytes=int(0.9 * memory_bytes),
        memory_bandwidth_bytes_per_s=0.7 * bandwidth * spread,
        uplink=Link(bandwidth_bytes_per_s=6.25e6 * 20 ** draw.random(), latency_s=draw.uniform(0.002, 0.03)),
        downlink=Link(bandwidth_bytes_per_s=1.25e8, latency_s=draw.uniform(0.002, 0.03)),
    )
