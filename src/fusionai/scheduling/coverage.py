"""Assigns an interval of blocks to every peer of a large pool, so that each block has many holders.

Peer i holds its own [a_i, b_i) and passes as many microbatches a second as its compute and its access link allow. A
block's cover is the sum over its holders; the pool's throughput is the least cover. Microbatches are routed from
holder to holder: no peer waits for a fixed partner, and a peer that joins or leaves changes only its own interval.

The peers take their best interval in turn, many times, while uneven cover is penalised more and more. From this layout
or, in small pools, the best simple one (`constructions`), simulated annealing removes and places peers again
(`coverage_kernels`). `coverage_bound` bounds the distance from the optimum. Deterministic: effort is a count, random
numbers come from a seed.

Not counted: gradients that holders of a block exchange, hops between holders beyond their access links, caches. Routes
and steps are not planned here. `planner` makes plans of one replica, `many_holders` compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.constructions import CONSTRUCTIONS
from fusionai.scheduling.coverage_bound import Proof
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.scheduling.kernels.coverage import Layout, Swarm, shake, sweep
from fusionai.scheduling.problem.chain import Chain, check_blocks
from fusionai.scheduling.problem.eligibility import check_names, eligible
from fusionai.scheduling.problem.embedding_and_head import ends_of, middle, owners_flops, place_of
from fusionai.scheduling.problem.links import check_access
from fusionai.scheduling.problem.types import Certificate, Excluded, PeerProfile, Problem
from fusionai.scheduling.swarm import idle, needed_bytes, stretches, swarm_of

IN_FLIGHT: Final = 2
"""Microbatches a holder has room for: one in work and one waiting."""
SMALL: Final = 600
"""Most peers of a small pool. Up to here the simple constructions are tried as starts, and annealing has several
starts; chosen."""
CLOSE: Final = 5e-4
"""Relative gap to the bound at which the search ends, chosen."""
EFFORT: Final = 240_000_000
"""Most intervals evaluated by the search, chosen."""
SLOW_EFFORT: Final = 500_000
"""Most intervals evaluated if kernels can't be compiled."""
SWEEPS: Final = 60
CREW: Final = 3
"""Most peers that annealing removes and places again in one round."""
STARTS: Final = 12
MOST_ROUNDS: Final = 400_000
PROOF_ROUNDS: Final = 120
_SHARPNESS: Final = (0.5, 2000.0)
"""Sharpness of the first and of the last sweep, divided by the bound."""


class _Shake(NamedTuple):
    """Parameters of one annealing run. `first`, `last`: sharpness at the start and the end, divided by the least cover;
    `noise` and `heat` as in `coverage_kernels.shake`."""

    first: float
    last: float
    noise: float
    heat: float


_SHAKES: Final = (
    _Shake(30.0, 600.0, 0.5, 0.02),
    _Shake(8.0, 30.0, 0.3, 0.2),
    _Shake(5.0, 60.0, 0.3, 1.0),
    _Shake(8.0, 30.0, 0.3, 0.02),
)


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One peer's interval: block numbers, half-open."""

    peer: str
    blocks: tuple[int, int]
    rate_per_s: float
    """Microbatches a second that the peer can pass."""
    memory_bytes: int
    memory_limit_bytes: int


class CoveragePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The interval of every peer and the throughput of all peers together."""

    graph_hash: str
    holdings: tuple[Holding, ...]
    """Sorted by blocks, then by peer."""
    idle: tuple[str, ...]
    """Usable peers without an interval."""
    excluded: tuple[Excluded, ...]
    microbatches_per_s: float
    tokens_per_s: float
    scarcest_block: int
    least_holders: int
    """Fewest holders of any block. If it is 1, losing that peer stops all work until another peer has loaded the
    block."""
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Solved:
    """A layout with its least cover and the upper bound for any layout, in microbatches a second."""

    layout: Layout
    cover: float
    bound: float
    explored: int


def cover(problem: Problem, *, in_flight: int = IN_FLIGHT, seed: int = 0, effort: int = EFFORT) -> CoveragePlan:
    """Return the plan with the most microbatches a second. Raises `PlanError` if a block fits no peer.
    `problem.stages`, `microbatches` and `links` are ignored."""
    check_blocks(problem.blocks)
    check_names(problem)
    loss_elsewhere = place_of(problem, "loss") == "owner"
    pool_blocks = middle(problem)
    chain = Chain(problem, pool_blocks)
    needed = needed_bytes(chain, in_flight)
    smallest = min(needed[block, block + 1] for block in range(chain.length))
    usable, refused = eligible(problem, pool_blocks, smallest)
    for peer in usable:
        check_access(peer)
    _check_room(chain, needed, usable)
    swarm = swarm_of(chain, usable, in_flight, loss_elsewhere=loss_elsewhere)
    solved = solve(swarm, seed=seed, effort=effort)
    layout = solved.layout
    if solved.cover <= 0:
        raise PlanError(
            "the peers' memory does not hold every block at least once.",
            hint="Let more peers join, let providers lend more memory, or use smaller microbatches.",
        )
    limit = _owner_per_s(problem, chain) if loss_elsewhere else np.inf
    speed, bound = min(solved.cover, limit), min(solved.bound, limit)
    gap = bound / speed - 1
    holdings = [
        Holding(
            peer=peer.peer,
            blocks=chain.numbers(int(layout.start[i]), int(layout.end[i])),
            rate_per_s=float(layout.rate[i]),
            memory_bytes=int(needed[layout.start[i], layout.end[i]]),
            memory_limit_bytes=peer.memory_bytes,
        )
        for i, peer in enumerate(usable)
        if layout.start[i] < layout.end[i]
    ]
    holders = [int(((layout.start <= b) & (b < layout.end)).sum()) for b in range(chain.length)]
    return CoveragePlan(
        graph_hash=problem.graph_hash,
        holdings=tuple(sorted(holdings, key=lambda held: (held.blocks, held.peer))),
        idle=tuple(peer.peer for i, peer in enumerate(usable) if layout.start[i] == layout.end[i]),
        excluded=tuple(refused),
        microbatches_per_s=speed,
        tokens_per_s=speed * problem.microbatch_tokens,
        scarcest_block=pool_blocks[int(np.argmin(layout.cover))].block,
        least_holders=min(holders),
        certificate=Certificate(
            method="best intervals in turn, laid again with noise; capacity bound",
            exact=False,
            bound_tokens_per_s=bound * problem.microbatch_tokens,
            optimality_gap=gap,
            explored=solved.explored,
        ),
    )


def solve(swarm: Swarm, *, seed: int = 0, effort: int = EFFORT, start: Layout | None = None) -> Solved:
    """Return the best layout found; if `start` is given, no worse than `start`."""
    peers = len(swarm.speed)
    if not available():
        effort = min(effort, SLOW_EFFORT)
    each = max(1, int(stretches(swarm).sum(axis=1).mean()))
    budget = max(peers, effort // each)
    proof = Proof(swarm)
    layout, spent = _evened(swarm, proof, min(SWEEPS, max(1, budget // (2 * peers))))
    candidates = [layout] if start is None else [start, layout]
    if peers <= SMALL:
        candidates += [construct(swarm) for construct in CONSTRUCTIONS.values()]
    layout = max(candidates, key=lambda one: float(one.cover.min()))
    if not proof.close(layout, CLOSE):
        layout, done = _laid_again(swarm, proof, layout, budget - spent, seed)
        spent += done
        proof.sharpen(layout, min(PROOF_ROUNDS, max(1, effort // (20 * peers * each))), CLOSE)
    reached = float(layout.cover.min())
    return Solved(layout, reached, max(proof.bound, reached), spent)


def _laid_again(swarm: Swarm, proof: Proof, begun: Layout, budget: int, seed: int) -> tuple[Layout, int]:
    """Anneal from `begun` and from the best layout so far in turn, with different parameters: if memory is short, the
    results differ widely. Returns the best layout and the effort spent."""
    peers = len(swarm.speed)
    movable = np.flatnonzero(stretches(swarm).any(axis=1)).astype(np.int64)
    crew = min(CREW, max(1, len(movable)))
    rounds = min(max(0, budget) // (crew + 1), MOST_ROUNDS)
    starts = max(1, min(STARTS, rounds // 10_000)) if peers <= SMALL else 1
    best = begun
    spent = 0
    for turn in range(starts):
        ways = _SHAKES[turn % len(_SHAKES)]
        layout = _copied(begun if turn % 2 else best)
        goal = proof.bound * (1 - CLOSE)
        _, done = compiled(shake)(
            swarm, layout, movable, rounds // starts, ways.first, ways.last, ways.noise, ways.heat, crew, goal,
            seed * STARTS + turn,
        )  # fmt: skip
        spent += done * (crew + 1) // 2
        if layout.cover.min() > best.cover.min():
            best = layout
        if proof.close(best, CLOSE):
            break
    return best, spent


def _evened(swarm: Swarm, proof: Proof, sweeps: int) -> tuple[Layout, int]:
    """The best layout of `sweeps` rounds in which each peer takes its best interval. Uneven cover weighs little at
    first, so that peers find blocks that suit them before they fill gaps. Also returns the intervals chosen."""
    order = np.argsort(-swarm.speed, kind="stable").astype(np.int64)
    layout = idle(swarm)
    best = idle(swarm)
    for turn, sharpness in enumerate(np.geomspace(*_SHARPNESS, sweeps)):
        compiled(sweep)(swarm, layout, order, float(sharpness) / proof.bound)
        proof.try_cover(layout.cover, float(sharpness))
        if layout.cover.min() > best.cover.min():
            best = _copied(layout)
            if proof.close(best, CLOSE):
                return best, (turn + 1) * len(order)
    return best, sweeps * len(order)


def _copied(layout: Layout) -> Layout:
    return Layout(layout.start.copy(), layout.end.copy(), layout.rate.copy(), layout.cover.copy())


def _owner_per_s(problem: Problem, chain: Chain) -> float:
    """Microbatches a second that the job owner's machine and link can pass."""
    owner = problem.owner
    if owner is None:
        raise PlanError("the loss is placed with the job owner, but the problem has no owner's profile.")
    first = ends_of(problem).first
    front = Chain(problem, problem.blocks[:first]) if first else None
    sent, back = (0.0, 0.0) if front is None else (front.forward_bytes[first], front.gradient_bytes[first])
    seconds = (
        owners_flops(problem) / owner.effective_flops_per_s,
        (chain.forward_bytes[chain.length] + back) / owner.downlink.bandwidth_bytes_per_s,
        (chain.gradient_bytes[chain.length] + sent) / owner.uplink.bandwidth_bytes_per_s,
        1e-12,
    )
    return 1.0 / max(seconds)


def _check_room(
    chain: Chain, needed: np.ndarray[tuple[int, int], np.dtype[np.float64]], usable: Sequence[PeerProfile]
) -> None:
    if not usable:
        raise PlanError("no peer of the pool can be used.", hint="Let more peers join, or mend what stands in the way.")
    largest = max(peer.memory_bytes for peer in usable)
    block = max(range(chain.length), key=lambda b: needed[b, b + 1])
    if needed[block, block + 1] > largest:
        raise PlanError(
            f"block {chain.blocks[block].block} alone needs {format_bytes(int(needed[block, block + 1]))}, the largest "
            f"peer lends {format_bytes(largest)}: "
            f"{format_bytes(int(needed[block, block + 1]) - largest)} are missing.",
            hint="Use smaller microbatches, let providers lend more memory, or let more peers join.",
        )
