"""What several holders of each block would bring, and what they would cost."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from fusionai.scheduling.many_holders import ManyHolders, many_holders
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement

POOL = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
OWNER = PeerProfile(peer="owner", flops_per_s=1e10, memory_bytes=10**9)


def problem(peers: int, *, memory_bytes: int, microbatches: int = 8, speed: float = 1e9) -> Problem:
    """Six equal blocks of 3 s on each of so many equal peers; 4 MB of state each."""
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=0.01)
    return Problem(
        graph_hash="g",
        blocks=tuple(
            BlockCost(
                block=number,
                forward_flops=1e9,
                backward_flops=2e9,
                parameter_bytes=10**6,
                trainable_bytes=10**6,
                activation_bytes=0,
                output_bytes=1000,
                gradient_bytes=1000,
            )
            for number in range(6)
        ),
        peers=tuple(
            PeerProfile(peer=f"peer{n:02}", flops_per_s=speed, memory_bytes=memory_bytes, uplink=link, downlink=link)
            for n in range(peers)
        ),
        roles=POOL,
        microbatches=microbatches,
        microbatch_tokens=100,
    )


def compared(posed: Problem) -> ManyHolders | None:
    return many_holders(posed, plan(posed))


@pytest.mark.slow
def test_whole_models_side_by_side():
    """Twelve machines that hold everything: twice what the longest chain passes."""
    posed = problem(12, memory_bytes=10**9)
    found = compared(posed)
    assert found is not None
    # A chain has at most a block for each of six peers: 3 s a microbatch. All twelve together: 12 / 18 per second.
    assert found.chain_steady_tokens_per_s == pytest.approx(100 / 3, rel=1e-3)
    assert found.layout.tokens_per_s == pytest.approx(100 * 12 / 18, rel=0.01)
    assert found.over_one_chain == pytest.approx(2.0, rel=0.01)
    assert found.trip_s == pytest.approx(18, rel=0.2)
    assert found.step_time_s == pytest.approx(
        7 / found.layout.microbatches_per_s + found.trip_s + found.exchange_s, rel=1e-6
    )
    assert found.holders == tuple(
        sum(held.blocks[0] <= block < held.blocks[1] for held in found.layout.holdings) for block in range(6)
    )


@pytest.mark.slow
def test_the_exchange_is_that_of_the_peer_with_most_to_send():
    found = compared(problem(12, memory_bytes=10**9))
    assert found is not None
    most = max(
        sum(2e6 * (found.holders[b] - 1) / found.holders[b] for b in range(*held.blocks))
        for held in found.layout.holdings
    )
    assert found.exchange_s == pytest.approx(most / 1e6)


@pytest.mark.slow
def test_from_so_many_microbatches_on_replicas_are_faster():
    posed = problem(12, memory_bytes=10**9)
    chain, found = plan(posed), compared(posed)
    assert found is not None
    assert found.pays_from_microbatches is not None
    period_s = posed.microbatch_tokens / found.chain_steady_tokens_per_s

    def ahead(microbatches: int) -> bool:
        chain_s = chain.step_time_s + (microbatches - posed.microbatches) * period_s
        more = (microbatches - posed.microbatches) / found.layout.microbatches_per_s
        return found.step_time_s + more < chain_s

    here = found.pays_from_microbatches
    assert [ahead(here - 2), ahead(here + 1)] == [False, True]


@pytest.mark.slow
def test_more_machines_bring_more():
    steady = [compared(problem(count, memory_bytes=9 * 10**6)) for count in (12, 24, 48)]
    rates = [found.layout.tokens_per_s for found in steady if found is not None]
    assert len(rates) == 3
    assert all(2 * one == pytest.approx(other, rel=0.05) for one, other in pairwise(rates))


@pytest.mark.slow
def test_the_owners_loss_counts():
    posed = msgspec.structs.replace(
        problem(24, memory_bytes=9 * 10**6),
        owner=OWNER,
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss")),
    )
    found = compared(posed)
    assert found is not None
    assert len(found.holders) == 5
    # 3e9 FLOPs at 1e10 FLOP/s.
    assert found.layout.microbatches_per_s <= 1 / 0.3 + 1e-9
    slower = msgspec.structs.replace(posed, owner=msgspec.structs.replace(OWNER, flops_per_s=1e9))
    assert compared(slower) is None


@pytest.mark.slow
def test_one_chain_is_enough_or_asked_for():
    small = problem(2, memory_bytes=10**9)
    assert compared(small) is None
    posed = problem(12, memory_bytes=10**9)
    for wish in ({"stages": 2}, {"spares_wanted": 1}, {"required": ("peer03",)}, {"pinned": {2: "peer03"}}):
        assert compared(msgspec.structs.replace(posed, **wish)) is None
