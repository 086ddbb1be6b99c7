"""Plans for generation against brute force: every choice and order of peers, every cut, formulas written out again."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.kernels.compiled import available
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem, ServingNeeds
from fusionai.scheduling.serving import search as serving_search
from fusionai.scheduling.serving.pipeline import ServingPipeline
from fusionai.scheduling.serving.search import SLACK, ServingLimits, fastest_pipeline
from harness.examples import examples
from harness.problems import problems

pytestmark = pytest.mark.slow


@st.composite
def serving_problems(draw: st.DrawFn) -> Problem:
    posed = draw(problems(most_peers=4, most_blocks=6))
    blocks = tuple(
        msgspec.structs.replace(
            block,
            backward_flops=0.0,
            trainable_bytes=0,
            activation_bytes=0,
            looked_up_bytes=draw(st.sampled_from([0, block.parameter_bytes])),
            cache_token_bytes=draw(st.sampled_from([0, 100, 500])),
            cache_session_bytes=draw(st.sampled_from([0, 0, 7000])),
        )
        for block in posed.blocks
    )
    peers = tuple(
        msgspec.structs.replace(peer, memory_bandwidth_bytes_per_s=draw(st.sampled_from([0.0, 1e6, 1e9])))
        for peer in posed.peers
    )
    owner = posed.owner
    if owner is not None:
        same = next((peer for peer in peers if owner is not None and peer.peer == owner.peer), None)
        owner = same or owner
    needs = ServingNeeds(
        context_tokens=draw(st.sampled_from([16, 64, 200])),
        sessions=draw(st.integers(1, 6)),
        page_tokens=draw(st.sampled_from([1, 16])),
        retain=draw(st.booleans()),
        result_bytes=draw(st.sampled_from([0, 50_000])),
    )
    return msgspec.structs.replace(posed, task="serve", blocks=blocks, peers=peers, owner=owner, serving=needs)


def kept_tokens(needs: ServingNeeds) -> int:
    """One whole context; a page besides, as a session besides, is the probe's."""
    return (-(-needs.context_tokens // needs.page_tokens) + 1) * needs.page_tokens


def least_token_s(problem: Problem) -> float:
    needs = problem.serving
    assert needs is not None
    at_owner = problem.roles[1].place == "owner"
    inner = problem.blocks[1:-1] if at_owner else problem.blocks
    first = 1 if at_owner else 0
    best = inf
    for count in range(1, len(problem.peers) + 1) if problem.stages is None else [problem.stages]:
        for order in permutations(problem.peers, count):
            if not set(problem.required) <= {p.peer for p in order}:
                continue
            for between in combinations(range(1, len(inner)), count - 1):
                cuts = [0, *between, len(inner)]
                best = min(
                    best, token_s(problem, needs, list(order), [(first + a, first + b) for a, b in pairwise(cuts)])
                )
    return best


def token_s(problem: Problem, needs: ServingNeeds, order: list[PeerProfile], ranges: list[tuple[int, int]]) -> float:
    blocks, owner = problem.blocks, problem.owner
    machines = list(zip(order, ranges, strict=True))
    if problem.roles[1].place == "owner":
        assert owner is not None
        machines = [(owner, (0, 1)), *machines, (owner, (len(blocks) - 1, len(blocks)))]
    used: dict[str, float] = {}
    seconds = 0.0
    sessions, tokens = needs.sessions + 1, kept_tokens(needs)
    for machine, (a, b) in machines:
        for one in blocks[a:b]:
            flops_s = one.forward_flops / (machine.flops_per_s * machine.share)
            streamed = one.parameter_bytes - one.looked_up_bytes
            bandwidth = machine.memory_bandwidth_bytes_per_s * machine.share
            seconds += max(flops_s, streamed / bandwidth if bandwidth else 0.0)
        caches_behind = any(one.cache_token_bytes or one.cache_session_bytes for one in blocks[b:])
        each = sum(one.cache_token_bytes for one in blocks[a:b])
        each += blocks[b - 1].output_bytes if needs.retain and caches_behind else 0
        size = sum(one.parameter_bytes + sessions * one.cache_session_bytes for one in blocks[a:b])
        size += max(one.workspace_bytes for one in blocks[a:b]) + tokens * each
        used[machine.peer] = used.get(machine.peer, 0) + size
    if any(used[machine.peer] > machine.memory_bytes for machine, _ in machines):
        return inf

    def hop_s(sender: PeerProfile, receiver: PeerProfile, size: int) -> float:
        if sender.peer == receiver.peer:
            return 0.0
        own = problem.links.get(f"{sender.peer}>{receiver.peer}")
        if own is not None:
            return size / own.bandwidth_bytes_per_s + own.latency_s
        bandwidth = min(sender.uplink.bandwidth_bytes_per_s, receiver.downlink.bandwidth_bytes_per_s)
        return size / bandwidth + sender.uplink.latency_s + receiver.downlink.latency_s

    for (one, (_, cut)), (other, _) in pairwise(machines):
        seconds += hop_s(one, other, blocks[cut - 1].output_bytes)
    if owner is not None:
        seconds += hop_s(owner, machines[0][0], 0) + hop_s(machines[-1][0], owner, needs.result_bytes)
    return seconds


@settings(deadline=None, max_examples=examples(60))
@given(serving_problems())
def test_the_plan_is_the_fastest_there_is(posed: Problem) -> None:
    if len(posed.blocks) < 3:
        return
    least = least_token_s(posed)
    try:
        found = plan(posed)
    except PlanError:
        assert least == inf
        return
    assert found.serving is not None
    assert posed.serving is not None
    if posed.serving.sessions == 1:
        assert found.step_time_s == pytest.approx(least)
        assert found.certificate.exact
    else:
        # Stages may have been evened out, at a bounded cost that the certificate tells.
        assert least * (1 - 1e-9) <= found.step_time_s <= least * (1 + SLACK) * (1 + 1e-9)
        assert found.certificate.optimality_gap == pytest.approx(found.step_time_s / least - 1, abs=1e-8)
    assert found.serving.pages * found.serving.page_tokens >= posed.serving.context_tokens - found.serving.page_tokens
    taken: dict[str, int] = {}
    for stage in found.stages:
        taken[stage.peer] = taken.get(stage.peer, 0) + stage.memory_bytes
        assert taken[stage.peer] <= stage.memory_limit_bytes
    backwards = msgspec.structs.replace(posed, peers=tuple(reversed(posed.peers)))
    assert plan(backwards).step_time_s == found.step_time_s


@settings(deadline=None, max_examples=examples(40))
@given(serving_problems(), st.integers(0, 40))
def test_a_search_cut_off_never_promises_too_little(posed: Problem, budget: int) -> None:
    if len(posed.blocks) < 3:
        return
    least = least_token_s(posed)
    usable = [peer for peer in posed.peers if peer.flops_per_s > 0]
    assert posed.serving is not None
    line = ServingPipeline(posed, posed.serving, usable)
    index = {peer.peer: i for i, peer in enumerate(line.peers)}
    required = sum(1 << index[name] for name in posed.required)
    most = min(posed.stages or line.count, line.length, line.count)
    if posed.stages is not None and posed.stages > most:
        return
    limits = ServingLimits(posed.stages or 1, most, kept_tokens(posed.serving), required)
    found = fastest_pipeline(line, limits, budget=budget)
    if least < inf:
        assert found.bound_s <= least * (1 + 1e-9)
    if found.best is not None:
        assert found.seconds >= least * (1 - 1e-9)


@pytest.mark.skipif(not available(), reason="numba is not installed")
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(serving_problems())
def test_what_is_left_open_is_settled_exactly(posed: Problem) -> None:
    """Without a budget the best-first search gives up at once: the compiled one has to find the optimum by itself."""
    if posed.stages is not None and posed.stages > len(posed.peers):
        return
    usable = [peer for peer in posed.peers if peer.flops_per_s > 0]
    assert posed.serving is not None
    line = ServingPipeline(posed, posed.serving, usable)
    index = {peer.peer: i for i, peer in enumerate(line.peers)}
    required = sum(1 << index[name] for name in posed.required)
    most = min(posed.stages or line.count, line.length, line.count)
    if posed.stages is not None and posed.stages > most:
        return
    limits = ServingLimits(posed.stages or 1, most, kept_tokens(posed.serving), required)
    whole = fastest_pipeline(line, limits, budget=10**6)
    with pytest.MonkeyPatch.context() as blind:
        # Nor is there a good line to begin with.
        blind.setattr(serving_search, "BEAM", 0)
        settled = fastest_pipeline(line, limits, budget=0)
    assert settled.proven
    assert whole.proven
    assert settled.seconds == pytest.approx(whole.seconds, rel=1e-9)


def test_forty_blocks_on_many_peers_are_planned_with_a_small_gap() -> None:
    block = BlockCost(
        block=0,
        forward_flops=1e6,
        backward_flops=0,
        parameter_bytes=10**6,
        trainable_bytes=0,
        activation_bytes=0,
        output_bytes=4000,
        gradient_bytes=0,
        cache_token_bytes=100,
    )
    peers = tuple(
        PeerProfile(
            peer=f"p{n:02}",
            flops_per_s=1e11,
            memory_bandwidth_bytes_per_s=(5 + n % 7) * 1e9,
            memory_bytes=(3 + n % 5) * 10**6,
        )
        for n in range(24)
    )
    posed = Problem(
        task="serve",
        graph_hash="g",
        blocks=tuple(msgspec.structs.replace(block, block=n) for n in range(42)),
        peers=peers,
        owner=msgspec.structs.replace(peers[0], peer="owner", memory_bytes=10**8),
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(context_tokens=100, sessions=2),
    )
    found = plan(posed)
    assert found.certificate.optimality_gap < 0.25
    assert found.certificate.bound_tokens_per_s >= found.tokens_per_s
