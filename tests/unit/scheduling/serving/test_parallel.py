"""Several serving lines: what they bring over one, what limits them, and a bound that nothing exceeds."""

from __future__ import annotations

from itertools import combinations
from random import Random

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Link, PeerProfile, Plan, Problem, ServingNeeds
from fusionai.scheduling.serving import parallel
from fusionai.scheduling.serving.bound import bound_tokens_per_s
from fusionai.scheduling.serving.parallel import (
    MUCH_SLOWER,
    SLOWER,
    ServingPipelines,
    further_pipeline,
    pace_figures,
    serving_pipelines,
    throughput_plan,
)
from fusionai.scheduling.serving.planning import serving_plan
from fusionai.scheduling.serving.prediction import LoadedPipeline, round_trip_s, session_tokens
from harness.problems import served_by

MB = 10**6


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divisions of many machines are improved for a moment only; `test_partition` is about them."""
    monkeypatch.setattr(parallel, "DIVIDING_PLANS", 40)


def problem(peers: int, *, memory_bytes: int = 35 * MB, owner: PeerProfile | None = None, seed: int = 0) -> Problem:
    """Six blocks of 10 MB, 10 ms to read on each peer; equal ones with seed 0."""
    draw = Random(seed)

    def peer(number: int) -> PeerProfile:
        factor = draw.uniform(0.5, 2) if seed else 1.0
        return PeerProfile(
            peer=f"peer{number:02}",
            flops_per_s=1e10 * factor,
            memory_bandwidth_bytes_per_s=1e9 * (draw.uniform(0.5, 2) if seed else 1.0),
            memory_bytes=int(memory_bytes * (draw.uniform(0.5, 2) if seed else 1.0)),
            uplink=Link(bandwidth_bytes_per_s=1e7, latency_s=0.002 * factor),
            downlink=Link(bandwidth_bytes_per_s=1e8),
        )

    return served_by(map(peer, range(peers)), owner)


def compared(posed: Problem, *, sessions: int = 16, least: float | None = None) -> ServingPipelines | None:
    return serving_pipelines(posed, plan(posed), sessions, least)


def test_equal_machines_make_equal_lines() -> None:
    """Two machines hold a model; thirteen make six lines, and one stays."""
    posed = problem(13)
    found = compared(posed)
    assert found is not None
    assert len(found.pipelines) == 6
    assert len(found.idle) == 1
    assert found.over_one_chain == pytest.approx(6.0)
    assert found.sessions == 6 * found.chain_sessions
    used = [stage.peer for line in found.pipelines for stage in line.stages]
    assert len(used) == len(set(used)) == 12
    assert found.bound_tokens_per_s >= found.tokens_per_s


@pytest.mark.slow
def test_every_line_holds_the_model_within_memory_and_time() -> None:
    for seed in range(1, 7):
        posed = problem(14, seed=seed)
        chain = plan(posed)
        found = serving_pipelines(posed, chain, 16)
        assert found is not None
        costs = StageCosts(posed)
        for line in found.pipelines:
            assert [b for stage in line.stages for b in range(*stage.blocks)] == list(range(6))
            rows = line.sessions // line.passes
            assert rows * line.passes == line.sessions <= 16
            for stage in line.stages:
                # 32 tokens of cache per session and block, a page for the probe.
                tokens = line.sessions * 32 + 16
                held = (stage.blocks[1] - stage.blocks[0]) * (10 * MB + tokens * 1000)
                assert stage.memory_bytes == held <= stage.memory_limit_bytes
            # No access link is crowded here: the plan's own formula says the same.
            seconds = round_trip_s(line.stages, costs, line.sessions, line.passes)
            assert 1 / line.session_tokens_per_s == pytest.approx(seconds)
            assert seconds <= 2 * chain.step_time_s * (1 + 1e-9)
        assert found.tokens_per_s == pytest.approx(sum(line.tokens_per_s for line in found.pipelines))
        assert found.slowest_session_tokens_per_s >= found.least_tokens_per_s * (1 - 1e-9)
        assert found.optimality_gap == pytest.approx(found.bound_tokens_per_s / found.tokens_per_s - 1)


def test_sessions_that_may_be_slower_let_more_machines_in() -> None:
    posed = problem(14, seed=3)
    narrow = compared(posed, least=plan(posed).tokens_per_s / 1.2)
    wide = compared(posed, least=plan(posed).tokens_per_s / 8)
    assert wide is not None
    assert narrow is None or narrow.tokens_per_s < wide.tokens_per_s
    assert compared(posed, least=10 * plan(posed).tokens_per_s) is None


@pytest.mark.slow
def test_no_lines_exceed_the_bound() -> None:
    """Every way to part small pools into two groups or three, each group's fastest line filled."""
    for seed in range(1, 5):
        posed = problem(6, memory_bytes=50 * MB, seed=seed)
        chain = plan(posed)
        for slower in (1.5, 3.0, 10.0):
            most_s = slower * chain.step_time_s
            bound = bound_tokens_per_s(posed, chain, 16, most_s)
            best = max(
                sum(_filled(posed, group, most_s) for group in groups) for groups in _parted(range(len(posed.peers)))
            )
            assert 0 < best <= bound
            found = serving_pipelines(posed, chain, 16, 1 / most_s)
            assert found is None or found.tokens_per_s <= bound


def _parted(peers: range) -> list[tuple[tuple[int, ...], ...]]:
    parted: list[tuple[tuple[int, ...], ...]] = [(tuple(peers),)]
    for size in range(1, len(peers)):
        for one in combinations(peers, size):
            rest = [peer for peer in peers if peer not in one]
            parted.append((one, tuple(rest)))
            parted += [
                (one, two, tuple(p for p in rest if p not in two))
                for part in range(1, len(rest))
                for two in combinations(rest, part)
            ]
    return parted


_KNOWN: dict[tuple[int, tuple[int, ...], float, int], float] = {}


def _filled(posed: Problem, group: tuple[int, ...], most_s: float, sessions: int = 16) -> float:
    key = (hash(posed.peers), group, most_s, sessions)
    if key not in _KNOWN:
        _KNOWN[key] = 0.0
        needs = posed.serving
        assert needs is not None
        for stages in (None, 1, 2, 3):
            part = msgspec.structs.replace(posed, peers=tuple(posed.peers[peer] for peer in group), stages=stages)
            try:
                load = LoadedPipeline(serving_plan(part).stages, StageCosts(posed), needs).filled(sessions, most_s)
            except PlanError:
                continue
            _KNOWN[key] = max(_KNOWN[key], 0.0 if load is None else load.tokens_per_s)
    return _KNOWN[key]


def test_the_bound_is_met_where_every_machine_holds_the_model() -> None:
    posed = problem(9, memory_bytes=200 * MB)
    found = compared(posed)
    assert found is not None
    assert len(found.pipelines) == 9
    assert found.optimality_gap <= 0.1


def test_the_owner_with_the_ends_holds_all_lines_up() -> None:
    owner = PeerProfile(
        peer="owner", flops_per_s=1e10, memory_bandwidth_bytes_per_s=1e9, memory_bytes=10**9,
        uplink=Link(bandwidth_bytes_per_s=1e9), downlink=Link(bandwidth_bytes_per_s=1e9),
    )  # fmt: skip
    found = compared(problem(40, owner=owner))
    assert found is not None
    assert found.owner_bound
    # Embedding and head: 20 ms of reading per pass of at most 16 sessions.
    assert found.tokens_per_s <= found.bound_tokens_per_s <= 16 / 0.02 * 1.001
    assert all(line.stages[0].peer == line.stages[-1].peer == "owner" for line in found.pipelines)
    # Beyond that, no further lines are made.
    assert len(found.pipelines) < 20


def test_a_poor_link_of_the_owner_holds_all_lines_up() -> None:
    slow = Link(bandwidth_bytes_per_s=1e5)
    owner = PeerProfile(peer="owner", flops_per_s=1e12, memory_bytes=10**9, uplink=slow, downlink=slow)
    posed = problem(20, owner=owner)
    # A kilobyte per token each way: filled, one line alone keeps the link busy.
    assert compared(posed, least=0.5) is None
    found = compared(posed, sessions=1, least=0.5)
    assert found is not None
    assert found.owner_bound
    assert found.tokens_per_s == pytest.approx(100)
    assert found.bound_tokens_per_s == pytest.approx(100)


def test_nothing_is_said_where_one_line_is_all_there_is() -> None:
    assert compared(problem(3)) is None
    posed = problem(12)
    chain = plan(posed)
    for wish in ({"stages": 2}, {"spares_wanted": 1}, {"required": ("peer00",)}, {"pinned": {0: "peer00"}}):
        assert serving_pipelines(msgspec.structs.replace(posed, **wish), chain, 16) is None
    assert serving_pipelines(msgspec.structs.replace(posed, task="train"), chain, 16) is None


def test_the_sessions_asked_for_may_be_few() -> None:
    """Four sessions on machines that read weights most of the time: one pass serves them all."""
    found = compared(problem(12))
    assert found is not None
    assert found.asked_pipelines >= 1
    one = plan(problem(12)).serving
    assert one is not None
    assert found.asked_tokens_per_s >= one.tokens_per_s_together * (1 - 1e-9)


def test_a_session_gets_its_part_of_the_wanted_cache_in_whole_pages() -> None:
    needs = ServingNeeds(context_tokens=100, sessions=4, cache_tokens=200, page_tokens=16)
    assert session_tokens(needs) == 64
    assert session_tokens(msgspec.structs.replace(needs, cache_tokens=0)) == 32
    assert session_tokens(msgspec.structs.replace(needs, cache_tokens=10**6)) == 112


def test_the_same_pool_gives_the_same_lines() -> None:
    posed = problem(14, seed=5)
    turned = msgspec.structs.replace(posed, peers=tuple(reversed(posed.peers)))
    one, other = _lines(posed), _lines(turned)
    assert one == other


def _lines(posed: Problem) -> ServingPipelines | None:
    chain: Plan = plan(posed)
    return serving_pipelines(posed, chain, 16)


def _opened(posed: Problem, first: Plan, *, fastest: bool) -> list[Plan]:
    """Pipelines as a job opens them: one after the other, on the machines that are left."""
    found, more = [first], first
    while more is not None:
        used = {stage.peer for one in found for stage in one.stages}
        left = tuple(peer for peer in posed.peers if peer.peer not in used)
        more = further_pipeline(msgspec.structs.replace(posed, peers=left), first, 0.0, fastest=fastest)
        if more is not None:
            found.append(more)
    return found


@pytest.mark.parametrize("seed", range(1, 7))
def test_pipelines_opened_one_after_the_other_are_those_of_the_division(seed: int) -> None:
    """For throughput they give what the best enumerated division into up to three groups gives."""
    posed = problem(5, seed=seed)
    most_s = MUCH_SLOWER * plan(posed).step_time_s
    opened = _opened(posed, throughput_plan(posed), fastest=False)
    used = [stage.peer for one in opened for stage in one.stages]
    assert len(used) == len(set(used))
    costs = StageCosts(posed)
    loads = [LoadedPipeline(one.stages, costs, posed.needs).filled(posed.needs.sessions, most_s) for one in opened]
    together = sum(load.tokens_per_s for load in loads if load is not None)
    best = max(sum(_filled(posed, group, most_s, 4) for group in groups) for groups in _parted(range(5)))
    assert together >= 0.97 * best


@pytest.mark.parametrize("seed", range(1, 7))
def test_the_floor_is_kept_where_latency_counts_too(seed: int) -> None:
    """The first pipeline is the one with the fastest token, and no further one takes more than `SLOWER` times as
    long."""
    posed = problem(6, seed=seed)
    first = plan(posed)
    for one in _opened(posed, first, fastest=True):
        assert first.step_time_s <= one.step_time_s * (1 + 1e-9)
        assert one.step_time_s <= SLOWER * first.step_time_s * (1 + 1e-9)
    assert further_pipeline(posed, first, 1.0) is None
    assert further_pipeline(msgspec.structs.replace(posed, peers=()), first, 0.0) is None


def test_a_pace_has_a_figure_for_each_number_of_sessions() -> None:
    posed = problem(4, seed=1)
    made = plan(posed)
    token_s, prompt_token_s = pace_figures(made, posed)
    assert made.serving is not None
    assert len(token_s) == made.serving.sessions == 4
    assert token_s[0] == pytest.approx(made.step_time_s)
    assert prompt_token_s == pytest.approx(1 / made.serving.prompt_tokens_per_s)


def test_one_pipeline_of_more_machines_may_be_the_best_division() -> None:
    """The fastest pipeline is a machine with room for one session; with the other machine there is room for many."""
    two = problem(2)
    peers = tuple(
        msgspec.structs.replace(peer, memory_bytes=size)
        for peer, size in zip(two.peers, (61 * MB, 40 * MB), strict=True)
    )
    posed = msgspec.structs.replace(two, peers=peers, serving=msgspec.structs.replace(two.needs, sessions=16))
    chain = plan(msgspec.structs.replace(posed, peers=peers[:1]))
    chain = msgspec.structs.replace(chain, spares=(peers[1].peer,))
    found = serving_pipelines(posed, chain, 16, 1 / (MUCH_SLOWER * chain.step_time_s))
    assert found is not None
    (pipeline,) = found.pipelines
    assert {stage.peer for stage in pipeline.stages} == {peer.peer for peer in peers}
    assert found.over_one_chain > 1.05
