"""The word that a step is complete: one way to the job owner, one back, on top of what the pipeline takes."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement
from fusionai.scheduling.training.prediction import commit_s, first_stages, predict
from fusionai.scheduling.training.replicated import plan as replicated


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=1000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    return msgspec.structs.replace(base, **changes)


def peer(name: str, latency_s: float, **changes: object) -> PeerProfile:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=latency_s)
    base = PeerProfile(peer=name, flops_per_s=1e11, memory_bytes=10**9, fingerprint="cpu", uplink=link, downlink=link)
    return msgspec.structs.replace(base, **changes)


def problem(*peers: PeerProfile, **changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=tuple(block(number) for number in range(4)),
        peers=peers,
        owner=peer("owner", 0.005),
        stages=2,
        microbatches=4,
        microbatch_tokens=10,
        roles=(RolePlacement(role="loss", place="pool"),),
    )
    return msgspec.structs.replace(base, **changes)


def test_a_plan_says_what_of_its_step_the_word_takes():
    posed = problem(peer("a", 0.02), peer("b", 0.02))
    found = plan(posed)
    assert found.commit_s == pytest.approx(2 * (0.02 + 0.005))
    nobodys = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
    without = plan(problem(peer("a", 0.02), peer("b", 0.02), owner=None, roles=nobodys))
    assert without.commit_s == 0.0
    assert found.step_time_s == pytest.approx(without.step_time_s + found.commit_s)
    assert found.certificate.exact
    assert found.certificate.bound_tokens_per_s == pytest.approx(found.tokens_per_s)
    assert found.certificate.optimality_gap == 0.0
    assert predict(found.stages, StageCosts(posed, found)).step_s == pytest.approx(found.step_time_s)


def test_of_two_machines_that_are_alike_the_nearer_one_begins():
    posed = problem(peer("far", 0.05), peer("near", 0.001))
    found = plan(posed)
    assert [stage.peer for stage in found.stages] == ["near", "far"]
    assert found.commit_s == pytest.approx(2 * (0.001 + 0.005))
    assert found.commit_s == commit_s(found.stages, StageCosts(posed, found))
    assert found.certificate.exact


def test_of_replicas_the_farthest_is_waited_for():
    peers = (peer("a", 0.01), peer("b", 0.01), peer("c", 0.03), peer("d", 0.03))
    posed = problem(*peers, replicas=2)
    found = replicated(posed)
    firsts = {stage.peer for stage in first_stages(found.stages)}
    assert len(firsts) == 2
    latency_s = max(0.03 if name in "cd" else 0.01 for name in firsts)
    assert found.commit_s == pytest.approx(2 * (latency_s + 0.005))
