"""Divisions of machines among pipelines, judged by an enumeration of all divisions of small pools."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Link, PeerProfile, Problem
from fusionai.scheduling.serving import partition
from fusionai.scheduling.serving.bound import bound_tokens_per_s
from fusionai.scheduling.serving.parallel import MUCH_SLOWER, serving_pipelines
from fusionai.scheduling.serving.partition import ROW_SIZES, divided
from fusionai.scheduling.serving.planning import serving_plan
from fusionai.scheduling.serving.prediction import LoadedPipeline
from harness.problems import heavy_tailed, served_by

MB = 1_000_000
SESSIONS = 16


def pool(machines: int, seed: int | None, memory_bytes: int = 35 * MB) -> Problem:
    """A model of 60 MB on machines with heavy tails of speed and memory; equal ones without a seed."""
    draw = Random(seed)

    def peer(number: int) -> PeerProfile:
        speed, memory = (1.0, 1.0) if seed is None else (draw.paretovariate(1.5), draw.uniform(0.4, 2.5))
        return PeerProfile(
            peer=f"peer{number:02}",
            flops_per_s=1e10 * speed,
            memory_bandwidth_bytes_per_s=1e9 * speed,
            memory_bytes=int(memory_bytes * memory),
            uplink=Link(bandwidth_bytes_per_s=1e7, latency_s=0.002),
            downlink=Link(bandwidth_bytes_per_s=1e8),
        )

    return served_by(map(peer, range(machines)))


def partitions(machines: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put the machines into groups."""
    if not machines:
        yield ()
        return
    first, *others = machines
    for rest in partitions(tuple(others)):
        yield ((first,), *rest)
        for place, group in enumerate(rest):
            yield (*rest[:place], (first, *group), *rest[place + 1 :])


def best_of_all(posed: Problem, most_s: float) -> float:
    """The most tokens a second of any division into groups in which each group's machines are all used, or idle."""

    @cache
    def value(group: tuple[int, ...]) -> float:
        peers = tuple(posed.peers[number] for number in group)
        try:
            found = serving_plan(msgspec.structs.replace(posed, peers=peers, stages=len(peers)))
        except PlanError:
            return 0.0
        load = LoadedPipeline(found.stages, StageCosts(posed), posed.needs).filled(SESSIONS, most_s)
        return 0.0 if load is None else load.tokens_per_s

    return max(sum(map(value, groups)) for groups in partitions(tuple(range(len(posed.peers)))))


@pytest.mark.parametrize("seed", range(8))
def test_few_machines_are_divided_as_well_as_possible(seed: int):
    posed = pool(5, seed)
    try:
        most_s = 2 * plan(posed).step_time_s
    except PlanError:
        assert divided(posed, SESSIONS, 1.0).plans == ()
        return
    found = divided(posed, SESSIONS, most_s)
    assert found.tokens_per_s == pytest.approx(best_of_all(posed, most_s), rel=1e-6)
    used = [stage.peer for made in found.plans for stage in made.stages]
    assert len(used) == len(set(used))


@pytest.mark.parametrize("seed", [1, 2])
def test_many_machines_are_divided_better_than_they_were(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partition, "PLANS", 250)
    posed = pool(14, seed)
    chain = plan(posed)
    most_s = 2 * chain.step_time_s
    start = [{stage.peer for stage in chain.stages}]
    before = LoadedPipeline(chain.stages, StageCosts(posed), posed.needs).filled(SESSIONS, most_s)
    assert before is not None
    found = divided(posed, SESSIONS, most_s, start)
    assert found.tokens_per_s > 1.5 * before.tokens_per_s
    assert found.tokens_per_s <= bound_tokens_per_s(posed, chain, SESSIONS, most_s)
    used = [stage.peer for made in found.plans for stage in made.stages]
    assert len(used) == len(set(used))
    assert divided(posed, SESSIONS, most_s, start) == found


def test_equal_machines_are_planned_once_for_each_number():
    posed = pool(7, None, memory_bytes=200 * MB)
    planned = []

    def counted(problem: Problem, budget: int, *, compared: bool) -> object:
        planned.append(len(problem.peers))
        return serving_plan(problem, budget, compared=compared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "serving_plan", counted)
        found = divided(posed, SESSIONS, 2 * plan(posed).step_time_s)
    assert len(found.plans) == 7
    assert {stage.peer for made in found.plans for stage in made.stages} == {peer.peer for peer in posed.peers}
    # Each number of machines once, and each pipeline of the division on its own machines.
    assert len(planned) <= partition.LONGEST + 7


def test_a_model_that_only_all_machines_hold_gets_them_all():
    posed = pool(6, None, memory_bytes=11 * MB)
    found = divided(posed, SESSIONS, 1.0)
    (made,) = found.plans
    assert len({stage.peer for stage in made.stages}) == 6


def test_machines_that_hold_no_pipeline_stay_idle():
    posed = pool(3, None, memory_bytes=12 * MB)
    assert divided(posed, SESSIONS, 1.0) == partition.Division((), 0.0)


def in_rows(values: partition._Values, row: list[int]) -> float:
    """Best throughput of pipelines of neighbours, by trying all."""
    if not row:
        return 0.0
    found, made = in_rows(values, row[1:]), 0
    for size in range(1, min(partition.LONGEST, len(row)) + 1):
        if made < ROW_SIZES and (value := values.of(frozenset(row[:size]))) > 0:
            made += 1
            found = max(found, value + in_rows(values, row[size:]))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_in_speed_form_the_best_pipelines(seed: int):
    posed = heavy_tailed(10, seed)
    chain = plan(posed)
    values = partition._Values(posed, 16, MUCH_SLOWER * chain.step_time_s)
    row = sorted(range(10), key=lambda number: -posed.peers[number].effective_flops_per_s)
    groups = partition._in_a_row(values, row, 10_000)
    assert sum(map(values.of, groups)) == pytest.approx(in_rows(values, row))
    assert len({number for group in groups for number in group}) == sum(map(len, groups))


@pytest.mark.parametrize(("seed", "most_idle"), [(0, 12), (2, 20)])
def test_a_large_unequal_pool_is_not_left_idle(seed: int, most_idle: int):
    """Copies of a few patterns left 34 and 36 of 64 machines idle."""
    posed = heavy_tailed(64, seed)
    chain = plan(posed)
    found = serving_pipelines(posed, chain, 16, 1 / (MUCH_SLOWER * chain.step_time_s))
    assert found is not None
    assert len(found.idle) <= most_idle
    assert found.optimality_gap < 0.25
