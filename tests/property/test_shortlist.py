"""Plans for pools too large to look at everybody: little is lost, and the bound counts those left out."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from fusionai.scheduling.kernels.compiled import available
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.scheduling.training.bound import Relaxation
from fusionai.scheduling.training.pipeline import Pipeline
from fusionai.scheduling.training.search import annealed
from fusionai.scheduling.training.solving import LISTED
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


@pytest.mark.slow
def test_little_is_lost_and_the_bound_holds_for_everybody() -> None:
    for seed in range(2):
        posed = problem(seed, LISTED + 40)
        found = plan(posed)
        assert 0 <= found.certificate.optimality_gap < 0.03
        assert set(found.spares) | {stage.peer for stage in found.stages} == {peer.peer for peer in posed.peers}
        shuffled = list(posed.peers)
        Random(seed).shuffle(shuffled)
        assert plan(msgspec.structs.replace(posed, peers=tuple(shuffled))) == found


@pytest.mark.slow
def test_a_required_machine_of_many_is_used() -> None:
    posed = problem(2, LISTED + 20)
    slow = min(posed.peers, key=lambda peer: peer.flops_per_s).peer
    found = plan(msgspec.structs.replace(posed, required=(slow,)))
    assert slow in {stage.peer for stage in found.stages}


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="numba is not installed")
def test_annealing_and_the_bound_are_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    posed = problem(4, 24)
    pipeline, limits = Pipeline(posed, posed.peers), PipelineLimits(fewest=1, most=12)
    monkeypatch.setattr("fusionai.scheduling.training.search.PERIODS", 3)
    fast = annealed(pipeline, limits, rounds=2000)
    monkeypatch.setattr("fusionai.scheduling.training.search.compiled", lambda kernel: kernel)
    assert annealed(pipeline, limits, rounds=2000) == fast


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="numba is not installed")
def test_the_bound_is_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    posed = problem(5, 6, layers=5)
    pipeline, limits = Pipeline(posed, posed.peers), PipelineLimits(fewest=1, most=5)
    known_s = plan(posed).step_time_s
    bounds: list[float] = []
    for _ in range(2):
        relaxation = Relaxation(pipeline, limits)
        relaxation.narrow(known_s, effort=20_000)
        bounds.append(relaxation.bound_s)
        monkeypatch.setattr("fusionai.scheduling.training.bound.compiled", lambda kernel: kernel)
    assert bounds[0] == bounds[1]
