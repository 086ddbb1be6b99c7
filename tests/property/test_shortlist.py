"""Plans for pools too large to look at everybody: little is lost, and the bound counts those left out."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

from fusionai.scheduling import shortlist as shortlist_module
from fusionai.scheduling.annealing import annealed
from fusionai.scheduling.bound_kernels import Ground, extremes, reaches
from fusionai.scheduling.chain import Chain
from fusionai.scheduling.compiled import available, compiled
from fusionai.scheduling.pipeline import Pipeline
from fusionai.scheduling.planner import plan
from fusionai.scheduling.search import Limits
from fusionai.scheduling.shortlist import LARGE, shortlist
from fusionai.scheduling.types import BlockCost, Link, PeerProfile, Problem
from harness.problems import POOL_ROLES


def problem(seed: int, peers: int, layers: int = 12) -> Problem:
    draw = Random(f"{seed} {peers}")
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9,
            backward_flops=2e9,
            parameter_bytes=10**6,
            trainable_bytes=10**6,
            activation_bytes=10**5,
            output_bytes=10**5,
            gradient_bytes=10**5,
        )
        for number in range(layers)
    )
    pool = tuple(
        PeerProfile(
            peer=f"peer{number:04}",
            flops_per_s=draw.choice([5e9, 1e10, 2e10]) * draw.uniform(0.9, 1.1),
            memory_bytes=draw.randint(5, 30) * 10**6,
            uplink=Link(bandwidth_bytes_per_s=10 ** draw.uniform(6, 8), latency_s=draw.uniform(0, 0.02)),
        )
        for number in range(peers)
    )
    return Problem(graph_hash="g", blocks=blocks, peers=pool, roles=POOL_ROLES, microbatches=8, microbatch_tokens=64)


def listed(posed: Problem) -> set[str]:
    chain = Chain(posed, posed.blocks)
    peers, _ = shortlist(posed, chain, posed.peers, chain.length)
    return {peer.peer for peer in peers}


@pytest.mark.slow
def test_little_is_lost_and_the_bound_holds_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        posed = problem(seed, 110)
        assert len(listed(posed)) < len(posed.peers)
        found = plan(posed)
        with monkeypatch.context() as everybody:
            everybody.setattr(shortlist_module, "LARGE", 1000)
            whole = plan(posed)
        assert found.step_time_s <= whole.step_time_s * 1.02
        tokens = posed.microbatches * posed.microbatch_tokens
        assert tokens / found.certificate.bound_tokens_per_s <= whole.step_time_s * (1 + 1e-9)
        assert 0 <= found.certificate.optimality_gap < 0.5
        assert set(found.spares) | {stage.peer for stage in found.stages} == {peer.peer for peer in posed.peers}
        shuffled = list(posed.peers)
        Random(seed).shuffle(shuffled)
        assert plan(msgspec.structs.replace(posed, peers=tuple(shuffled))) == found


def test_who_must_be_used_is_listed() -> None:
    posed = problem(1, LARGE + 40)
    one, other, *_ = sorted({peer.peer for peer in posed.peers} - listed(posed))
    assert {one, other} <= listed(msgspec.structs.replace(posed, required=(one,), pinned={3: other}))


@pytest.mark.slow
def test_a_required_machine_of_many_is_used() -> None:
    posed = problem(2, LARGE + 20)
    slow = min({peer.peer for peer in posed.peers} - listed(posed))
    found = plan(msgspec.structs.replace(posed, required=(slow,)))
    assert slow in {stage.peer for stage in found.stages}


def test_everybody_of_a_smaller_pool_is_looked_at() -> None:
    posed = problem(3, LARGE)
    chain = Chain(posed, posed.blocks)
    assert shortlist(posed, chain, posed.peers, chain.length) == (list(posed.peers), None)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="numba is not installed")
def test_annealing_and_the_bound_are_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    posed = problem(4, 24)
    pipeline, limits = Pipeline(posed, posed.peers), Limits(fewest=1, most=12)
    monkeypatch.setattr("fusionai.scheduling.annealing.PERIODS", 3)
    fast = annealed(pipeline, limits, rounds=2000)
    monkeypatch.setattr("fusionai.scheduling.annealing.compiled", lambda kernel: kernel)
    assert annealed(pipeline, limits, rounds=2000) == fast
    even = np.full(4, 2.0)
    ground = Ground(
        work=np.arange(4.0), forward_bytes=even, gradient_bytes=even, needed_bytes=np.ones((3, 4)),
        speed=np.array([1.0, 3.0]), memory_bytes=np.ones(2), up=even[:2], down=even[:2], latency_s=np.zeros(2),
        plain=np.array([True, False]), pinned=np.array([-1, 1, -1]), pins=1,
    )  # fmt: skip
    periods = np.array([0.5, 1.0, 2.0, 3.0])
    for one, other in zip(reaches(ground, periods), compiled(reaches)(ground, periods), strict=True):
        assert np.array_equal(one, other)
    least, longest = extremes(ground)
    assert np.array_equal(least, compiled(extremes)(ground)[0])
    # Peer 0 may not hold block 1, and its link takes 2 s; peer 1 must hold block 1.
    assert least.tolist() == [2 / 3, 1 / 3, 2 / 3]
    assert longest == 2.0
    assert reaches(ground, periods)[1].tolist() == [[0, 0, 1, 1], [1, 3, 3, 3]]
