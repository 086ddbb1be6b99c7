"""The bound on all divisions of a pool, judged by every pipeline of small pools: every order, every cut, every load."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Problem, StagePlacement
from fusionai.scheduling.serving import bound
from fusionai.scheduling.serving.bound import bound_tokens_per_s
from fusionai.scheduling.serving.parallel import serving_pipelines
from fusionai.scheduling.serving.prediction import LoadedPipeline
from harness.problems import heavy_tailed, served_by, serving_machine

SESSIONS = 16


def pipelines(posed: Problem) -> Iterator[tuple[frozenset[int], list[StagePlacement]]]:
    """Every pipeline: the machines' order and the cuts; with an owner, the owner has the first and the last block."""
    first, last = (0, len(posed.blocks)) if posed.owner is None else (1, len(posed.blocks) - 1)
    for size in range(1, min(len(posed.peers), last - first) + 1):
        for order in permutations(range(len(posed.peers)), size):
            for inner in combinations(range(first + 1, last), size - 1):
                cuts = (first, *inner, last)
                parts = [(posed.peers[place].peer, cuts[k], cuts[k + 1]) for k, place in enumerate(order)]
                if posed.owner is not None:
                    parts = [(posed.owner.peer, 0, first), *parts, (posed.owner.peer, last, last + 1)]
                yield (
                    frozenset(order),
                    [StagePlacement(stage=k, peer=peer, blocks=(a, b)) for k, (peer, a, b) in enumerate(parts)],
                )


def best_of_all(posed: Problem, most_s: float) -> float:
    """The most tokens a second of any division into any pipelines, without the limits of the owner's machine."""
    costs = StageCosts(posed)
    values: dict[frozenset[int], float] = {}
    for group, stages in pipelines(posed):
        loaded = LoadedPipeline(stages, costs, posed.needs)
        if (loaded.room is None or loaded.room >= 1) and (load := loaded.filled(SESSIONS, most_s)) is not None:
            values[group] = max(values.get(group, 0.0), load.tokens_per_s)

    @cache
    def best(left: frozenset[int]) -> float:
        found = 0.0
        for group, value in values.items():
            if group <= left:
                found = max(found, value + best(left - group))
        return found

    return best(frozenset(range(len(posed.peers))))


SPREAD = st.sampled_from((0.05, 0.3, 0.9, 1.0, 1.1, 2.0, 3.5, 40.0))
MACHINES = st.lists(
    st.tuples(
        SPREAD,
        st.sampled_from((0.1, 0.31, 0.6, 0.95, 1.2, 1.75, 2.0, 6.0)),
        SPREAD,
        st.sampled_from((0.0, 0.002, 0.05)),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("by_sets", [bound.BY_SETS, 0])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=MACHINES, slower=st.sampled_from((1.0, 2.0, 8.0)), owned=st.booleans())
def test_no_division_exceeds_the_bound(
    by_sets: int, drawn: list[tuple[float, float, float, float]], slower: float, owned: bool
):
    owner = serving_machine(9999, 1e4, 100.0, 1e4, 0.001) if owned else None
    posed = served_by([serving_machine(number, *one) for number, one in enumerate(drawn)], owner)
    try:
        chain = plan(posed)
    except PlanError:
        return
    most_s = slower * chain.step_time_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "BY_SETS", by_sets)
        assert best_of_all(posed, most_s) <= bound_tokens_per_s(posed, chain, SESSIONS, most_s)


def test_pipelines_with_smaller_caches_than_the_fastest_plan_count_too():
    """Two fast machines hold the model beside few sessions, but not beside the whole cache that is wanted."""
    fast = [serving_machine(number, 40.0, 30.3 / 35, 40.0, 0.0) for number in (1, 2)]
    posed = served_by([serving_machine(0, 1.0, 3.0, 1.0, 0.0), *fast])
    chain = plan(posed)
    most_s = 2 * chain.step_time_s
    best = best_of_all(posed, most_s)
    assert best > SESSIONS * chain.certificate.bound_tokens_per_s
    assert best <= bound_tokens_per_s(posed, chain, SESSIONS, most_s)


@pytest.mark.parametrize(("seed", "most"), [(0, 1.03), (2, 1.03), (5, 1.12), (6, 1.08)])
def test_the_bound_of_few_unequal_machines_is_close(seed: int, most: float):
    posed = heavy_tailed(5, seed)
    chain = plan(posed)
    for slower in (2.0, 8.0):
        best = best_of_all(posed, slower * chain.step_time_s)
        assert bound_tokens_per_s(posed, chain, SESSIONS, slower * chain.step_time_s) <= most * best


@pytest.mark.parametrize(("machines", "seed", "most"), [(16, 0, 0.1), (16, 2, 0.22), (64, 0, 0.5)])
def test_the_bound_of_many_unequal_machines_does_not_become_looser(machines: int, seed: int, most: float):
    posed = heavy_tailed(machines, seed)
    chain = plan(posed)
    found = serving_pipelines(posed, chain, SESSIONS, chain.tokens_per_s / 8)
    assert found is not None
    assert 0 <= found.optimality_gap <= most


def test_machines_without_room_for_the_model_have_a_bound_of_zero():
    posed = heavy_tailed(16, 0)
    chain = plan(posed)
    peers = tuple(msgspec.structs.replace(peer, memory_bytes=3_000_000) for peer in posed.peers)
    assert bound_tokens_per_s(msgspec.structs.replace(posed, peers=peers), chain, SESSIONS, 1.0) == 0.0
