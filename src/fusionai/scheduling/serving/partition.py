"""Divides machines among the pipelines of a served model so that all pipelines together give the most tokens a second.

Up to `EXACT` machines are divided exactly, by dynamic programming over sets of machines:

    best(S) = max over subsets T of S of  value(T) + best(S without T)

where `value(T)` is the throughput of the pipeline that has every machine of T, filled with sessions that get a token
within the longest round allowed. Machines may stay idle. Of more machines, those without a pipeline first form
pipelines of neighbours in the order of their speeds. Then the division is improved piece by piece: the machines of a
few pipelines, and idle ones, are divided anew exactly, for as long as that helps (large neighbourhood search, Shaw
1998). Equal sets of machines are planned once, so a pool of equal machines is divided quickly.

`scheduling.serving.parallel` opens pipelines as divided here; `scheduling.serving.planning` plans each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, TypeVar
from zlib import crc32

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.embedding_and_head import middle
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem
from fusionai.scheduling.serving.planning import serving_plan
from fusionai.scheduling.serving.prediction import LoadedPipeline

EXACT: Final = 7
"""Most machines that are divided exactly (chosen): 119 sets of up to `LONGEST` machines are planned for them."""
LONGEST: Final = 5
"""Most machines of a pipeline in an exact division, if fewer can hold the model; otherwise all (chosen)."""
BUDGET: Final = 2_000
"""Budget of the search for each pipeline."""
PIECE: Final = 5
"""Most machines that are divided anew at a time (chosen): small pieces allow more attempts for the same time."""
PLANS: Final = 2_000
"""Most pipelines that are planned while a division is improved (chosen): a few seconds."""
ROW_SIZES: Final = 2
"""Sizes of groups of neighbours that are planned from each machine on, from the least that holds the model (chosen)."""
TRIES: Final = 60
"""Attempts in a row without a gain after which a division is final (chosen)."""


@dataclass(frozen=True, slots=True)
class Division:
    """Plans of the pipelines, the one with the highest throughput first, and their tokens a second together."""

    plans: tuple[Plan, ...]
    tokens_per_s: float


_Group = frozenset[int]
T = TypeVar("T")


def divided(
    problem: Problem,
    most_sessions: int,
    most_s: float,
    start: Sequence[Collection[str]] = (),
    most_plans: int = PLANS,
) -> Division:
    """Return the division of the problem's machines. `most_sessions`: limit of a pipeline; `most_s`: longest round, in
    seconds. `start`: machines of pipelines, by id, to begin with if there are more machines than are divided exactly.
    `most_plans`: limit of pipelines planned then. Without a pipeline that fits, the division is empty."""
    values = _Values(problem, most_sessions, most_s)
    numbers = {peer.peer: number for number, peer in enumerate(problem.peers)}
    if len(numbers) <= EXACT:
        groups = values.best(frozenset(numbers.values()))
    else:
        groups = [frozenset(numbers[peer] for peer in group) for group in start]
        groups += _in_a_row(values, set(numbers.values()).difference(*groups), most_plans)
        groups = _improved(values, groups, values.planned + most_plans)
    groups = sorted(groups, key=lambda group: (-values.of(group), min(group)))
    plans = tuple(plan for group in groups if (plan := values.plan(group)) is not None)
    return Division(plans, sum(values.of(group) for group in groups))


@dataclass(slots=True)
class _Values:
    """What pipelines of sets of machines give. Machines are numbered as in the problem."""

    problem: Problem
    most_sessions: int
    most_s: float
    planned: int = 0
    """Pipelines planned so far."""
    _costs: StageCosts = field(init=False)
    _kinds: list[PeerProfile] = field(init=False)
    """Each machine without its names: equal machines are exchangeable, unless they have links of their own."""
    _known: dict[tuple[object, ...], tuple[tuple[int, ...], Plan | None, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._costs = StageCosts(self.problem)
        linked = self.problem.linked
        self._kinds = [
            peer if peer.peer in linked else msgspec.structs.replace(peer, peer="", name="")
            for peer in self.problem.peers
        ]
        self._known = {}

    def of(self, group: _Group) -> float:
        """Tokens a second of the pipeline of all these machines; 0 if there is none."""
        return self._entry(group)[2]

    def plan(self, group: _Group) -> Plan | None:
        """The plan of that pipeline, on these very machines."""
        members, plan, _ = self._entry(group)
        if plan is None or frozenset(members) == group:
            return plan
        found, _ = self._made(tuple(sorted(group)))
        return found

    def _entry(self, group: _Group) -> tuple[tuple[int, ...], Plan | None, float]:
        members = tuple(sorted(group, key=lambda number: (repr(self._kinds[number]), number)))
        key = tuple(self._kinds[number] for number in members)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (members, *self._made(members))
        return known

    def _made(self, members: Sequence[int]) -> tuple[Plan | None, float]:
        self.planned += 1
        peers = tuple(self.problem.peers[number] for number in members)
        names = {self.problem.owner_id, *(peer.peer for peer in peers)}
        part = msgspec.structs.replace(
            self.problem, peers=peers, links=self.problem.links_among(names), stages=len(peers), incumbent=None
        )
        try:
            plan = serving_plan(part, BUDGET, compared=False)
        except PlanError:
            return None, 0.0
        load = LoadedPipeline(plan.stages, self._costs, self.problem.needs).filled(self.most_sessions, self.most_s)
        return plan, 0.0 if load is None else load.tokens_per_s

    def best(self, machines: _Group) -> list[_Group]:
        """The best division of these machines."""
        numbers = sorted(machines)
        longest = len(numbers) if len(numbers) > LONGEST and not self._fits(numbers) else LONGEST
        found: dict[_Group, tuple[float, list[_Group]]] = {frozenset(): (0.0, [])}

        def best(left: _Group) -> tuple[float, list[_Group]]:
            if left in found:
                return found[left]
            # The first machine is idle, or in a pipeline with some of the others.
            first, *others = sorted(left)
            best_so_far = best(left - {first})
            for size in range(min(longest, len(left))):
                for with_it in combinations(others, size):
                    group = frozenset((first, *with_it))
                    if (value := self.of(group)) > 0:
                        rest_value, rest = best(left - group)
                        if value + rest_value > best_so_far[0] * (1 + 1e-9):
                            best_so_far = value + rest_value, [group, *rest]
            found[left] = best_so_far
            return best_so_far

        return best(frozenset(numbers))[1]

    def _fits(self, numbers: Sequence[int]) -> bool:
        """Whether `LONGEST` of these machines, those with most memory, can hold the model."""
        largest = sorted(numbers, key=lambda number: -self.problem.peers[number].memory_bytes)[:LONGEST]
        return any(self.of(frozenset(largest[:size])) > 0 for size in range(1, LONGEST + 1))


def _in_a_row(values: _Values, idle: Collection[int], most_plans: int) -> list[_Group]:
    """Return pipelines of idle machines, each of neighbours in the order of speeds: the best ones, by dynamic
    programming,

        best(i) = max of best(i + 1) and, over sizes k, value(i, ..., i + k - 1) + best(i + k)

    From each machine on, the `ROW_SIZES` least sizes that make a pipeline are planned, the fastest machines first."""
    peers = values.problem.peers
    row = sorted(idle, key=lambda number: (-peers[number].effective_flops_per_s, peers[number].peer))
    weights_bytes = sum(block.parameter_bytes for block in middle(values.problem))
    limit = values.planned + most_plans
    tried: list[list[_Group]] = [[] for _ in row]
    for first, groups in enumerate(tried):
        for size in range(1, min(LONGEST, len(row) - first) + 1):
            group = frozenset(row[first : first + size])
            fits = sum(peers[number].memory_bytes for number in group) >= weights_bytes
            if fits and values.planned < limit and len(groups) < ROW_SIZES and values.of(group) > 0:
                groups.append(group)
    best: list[tuple[float, list[_Group]]] = [(0.0, [])]
    for groups in reversed(tried):  # best[-1] is of the machine behind
        made = [(values.of(group) + best[-len(group)][0], [group, *best[-len(group)][1]]) for group in groups]
        best.append(max([best[-1], *made], key=lambda one: one[0]))
    return best[-1][1]


def _improved(values: _Values, start: Sequence[_Group], most_plans: int) -> list[_Group]:
    """Return a better division than `start`: the machines of a few pipelines, and idle ones, are divided anew."""
    groups = list(start)
    idle: list[int] = sorted(set(range(len(values.problem.peers))) - {number for group in groups for number in group})
    attempt = failures = 0
    while failures < TRIES and values.planned < most_plans:
        attempt += 1
        chosen = list(_some(groups, idle, attempt))
        piece = frozenset(number for group in chosen for number in group)
        piece |= frozenset(_shuffled(idle, attempt)[: PIECE - len(piece)])
        made = values.best(piece)
        gain = sum(map(values.of, made)) - sum(map(values.of, chosen))
        failures = 0 if gain > 1e-9 else failures + 1
        if gain > 1e-9:
            groups = [group for group in groups if group not in chosen] + made
            idle = sorted((frozenset(idle) | piece) - {number for group in made for number in group})
    return groups


def _some(groups: Sequence[_Group], idle: Sequence[int], attempt: int) -> Iterator[_Group]:
    """Yield pipelines, in another order at each attempt, as long as they have at most `PIECE` machines together."""
    room = PIECE - min(len(idle), 1)
    for group in _shuffled(groups, attempt):
        if len(group) <= room:
            room -= len(group)
            yield group


def _shuffled(items: Sequence[T], attempt: int) -> list[T]:
    """Return the items in an order that looks random and is the same for the same attempt."""
    places = sorted(range(len(items)), key=lambda place: crc32(f"{attempt} {place}".encode()))
    return [items[place] for place in places]
