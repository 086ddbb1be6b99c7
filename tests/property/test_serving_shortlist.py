"""A large pool is searched by a part of its peers: little may be lost by that, and the bound must be everybody's."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds
from fusionai.scheduling.serving import search as serving_shortlist
from fusionai.scheduling.serving.search import shortlist


def problem(seed: int, peers: int) -> Problem:
    draw = Random(seed)
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=2e8,
            backward_flops=0,
            parameter_bytes=10**8,
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=8192,
            gradient_bytes=0,
            cache_token_bytes=1000,
        )
        for number in range(10)
    )
    pool = tuple(
        PeerProfile(
            peer=f"peer{number:03}",
            flops_per_s=1e13,
            memory_bytes=draw.choice([2, 4, 6]) * 10**8,
            memory_bandwidth_bytes_per_s=draw.choice([1e11, 3e11, 1e12]),
            uplink=Link(bandwidth_bytes_per_s=1e7, latency_s=draw.uniform(0.001, 0.02)),
            downlink=Link(bandwidth_bytes_per_s=1e8, latency_s=draw.uniform(0.001, 0.02)),
        )
        for number in range(peers)
    )
    return Problem(
        task="serve",
        graph_hash="g",
        blocks=blocks,
        peers=pool,
        roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(context_tokens=256, sessions=1, retain=False),
    )


def needs(posed: Problem) -> ServingNeeds:
    assert posed.serving is not None
    return posed.serving


@pytest.mark.slow
def test_little_is_lost_and_the_bound_holds_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        posed = problem(seed, 60)
        listed = shortlist(posed, needs(posed), posed.peers, posed.blocks)
        assert len(listed.peers) < 40
        found = plan(posed)
        with monkeypatch.context() as everybody:
            everybody.setattr(serving_shortlist, "LARGE", 1000)
            whole = plan(posed)
        assert found.step_time_s <= whole.step_time_s * 1.01
        assert 0 < listed.bound_s <= whole.step_time_s
        assert 1 / found.certificate.bound_tokens_per_s <= whole.step_time_s * (1 + 1e-9)
        assert set(found.spares) | {stage.peer for stage in found.stages} == {peer.peer for peer in posed.peers}


def test_who_must_be_used_is_listed() -> None:
    posed = problem(1, 80)
    slowest = max(posed.peers, key=lambda peer: (peer.uplink.latency_s, peer.peer)).peer
    assert slowest not in {peer.peer for peer in shortlist(posed, needs(posed), posed.peers, posed.blocks).peers}
    posed = msgspec.structs.replace(posed, required=(slowest,))
    assert slowest in {peer.peer for peer in shortlist(posed, needs(posed), posed.peers, posed.blocks).peers}


def test_small_pools_are_looked_at_whole() -> None:
    posed = problem(2, 30)
    listed = shortlist(posed, needs(posed), posed.peers, posed.blocks)
    assert listed.peers == list(posed.peers)
    assert listed.bound_s == 0.0


@pytest.mark.slow
def test_exceptional_links_count_for_nothing_in_the_bound() -> None:
    """Two peers side by side may beat every access link."""
    posed = problem(3, 60)
    links = {
        f"{a.peer}>{b.peer}": Link(bandwidth_bytes_per_s=1e12)
        for a in posed.peers[:8]
        for b in posed.peers[:8]
        if a is not b
    }
    posed = msgspec.structs.replace(posed, links=links)
    found = plan(posed)
    assert 1 / found.certificate.bound_tokens_per_s <= found.step_time_s
