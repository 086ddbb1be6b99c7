"""Divides the pool's peers into groups, each of which trains one replica as a pipeline of its own.

This module chooses the groups, their plans and, if it is not given, their number. All replicas take steps of equal size
and synchronise after each round, so the slowest one sets the speed. Groups are balanced first in memory and then in
speed. Then peers of the slowest group are exchanged for peers of others while that makes its plan faster. If not all
requested replicas fit, it returns as many as fit. It never looks at running jobs.

`planner` plans one group; `client.training.replicas` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem
from fusionai.wire.codecs import Exchanged, bytes_on_link

MOST_TRIES: Final = 60
"""Limit on plans made while improving groups; each takes milliseconds to tenths of a second."""
ALIKE: Final = 1.02
"""Groups are not improved if the slowest step is at most this factor above the fastest."""
COUNTS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of groups that are tried if the number is not given."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group and its plan. `peers`: ids, including peers that the plan does not use."""

    peers: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Exchanging:
    """How often replicas synchronise and how they pack what they send. `lag`: steps they compute during an exchange."""

    every: int
    codec: Exchanged
    lag: int = 0

    @property
    def beside(self) -> float:
        """Average part of a step that hides an exchange without making the step longer."""
        return self.lag / self.every


def divide(problem: Problem, most: int) -> tuple[Group, ...]:
    """Return at most `most` groups of the problem's peers; raise the planner's `PlanError` if not even one fits."""
    kept_out = set(problem.excluded)
    peers = sorted((one for one in problem.peers if one.peer not in kept_out), key=_strength, reverse=True)
    for count in range(min(most, len(peers)), 1, -1):
        groups = _planned(problem, _dealt(peers, count, _needed_bytes(problem)))
        if groups is not None:
            return tuple(_improved(problem, groups))
    return (_group(problem, peers),)


def fastest(problem: Problem, most: int, exchange: Exchanging | None = None) -> tuple[Group, ...]:
    """Return the groups whose number gives the most steps per second in total; the smallest such number. Raises like
    `divide`."""
    share_s = 0.0 if exchange is None else exchange_s(problem, exchange)
    beside = 0.0 if exchange is None else exchange.beside
    best = divide(problem, 1)
    for count in COUNTS:
        if count > min(most, len(problem.peers)):
            break
        groups = divide(problem, count)
        if len(groups) < count:  # larger numbers don't fit either
            break
        if steps_per_s(groups, share_s, beside) > steps_per_s(best, share_s, beside):
            best = groups
    return best


def steps_per_s(groups: Sequence[Group], share_s: float = 0.0, beside: float = 0.0) -> float:
    """Return the predicted steps per second of all groups together. `share_s`: seconds that one group's part in the
    exchanges adds to every step; a single group has none. `beside`: part of a step that hides the exchange."""
    step_s = max(group.plan.step_time_s for group in groups)
    exchanging_s = len(groups) * share_s if len(groups) > 1 else 0.0
    return len(groups) / (step_s + max(0.0, exchanging_s - beside * step_s))


def exchange_s(problem: Problem, exchange: Exchanging) -> float:
    """Return the seconds per step that one group's exchanges take; 0 without an owner. Once in `every` steps all
    trainable parameters go to the job owner and come back, over a line that all groups share."""
    if problem.owner is None:
        return 0.0
    packed_bytes = bytes_on_link(exchange.codec, sum(block.trainable_bytes for block in problem.blocks))
    down, up = problem.owner.downlink, problem.owner.uplink
    return packed_bytes * (1 / down.bandwidth_bytes_per_s + 1 / up.bandwidth_bytes_per_s) / exchange.every


def anchored(problem: Problem) -> Problem:
    """Return the problem with the additional memory of exchanging replicas. Stages keep the last synchronised
    parameters, the outer momentum and the packing error, each as large as the trainable parameters."""
    kept = problem.optimizer_bytes_per_trainable_byte + 3.0
    return msgspec.structs.replace(problem, optimizer_bytes_per_trainable_byte=kept)


def _strength(peer: PeerProfile) -> tuple[float, int, str]:
    return peer.effective_flops_per_s, peer.memory_bytes, peer.peer


def _needed_bytes(problem: Problem) -> float:
    """Return the bytes of one replica without activations: a first estimate of a group's memory; the plan is exact."""
    trained = 1 + problem.optimizer_bytes_per_trainable_byte  # gradients and optimizer state
    return sum(block.parameter_bytes + trained * block.trainable_bytes for block in problem.blocks)


def _dealt(peers: Sequence[PeerProfile], count: int, needed_bytes: float) -> list[list[PeerProfile]]:
    """Deal the peers, strongest first, each to the weakest group; groups that lack memory come first."""
    hands: list[list[PeerProfile]] = [[] for _ in range(count)]

    def wealth(hand: list[PeerProfile]) -> tuple[bool, float]:
        enough = sum(one.memory_bytes for one in hand) >= needed_bytes
        return enough, sum(one.effective_flops_per_s for one in hand)

    for peer in peers:
        min(hands, key=wealth).append(peer)
    return hands


def among(problem: Problem, peers: Sequence[PeerProfile]) -> Problem:
    """Return the problem with these peers alone; requirements and pins of other peers are dropped."""
    there = {one.peer for one in peers}
    absent = {one.peer for one in problem.peers} - there
    links = {pair: link for pair, link in problem.links.items() if absent.isdisjoint(pair.split(">"))}
    return msgspec.structs.replace(
        problem,
        peers=tuple(peers),
        links=links,
        excluded=(),
        required=tuple(peer for peer in problem.required if peer in there),
        pinned={block: peer for block, peer in problem.pinned.items() if peer in there},
    )


def _group(problem: Problem, peers: Iterable[PeerProfile]) -> Group:
    those = tuple(peers)
    return Group(tuple(one.peer for one in those), planned(among(problem, those)))


def _planned(problem: Problem, hands: Iterable[Sequence[PeerProfile]]) -> list[Group] | None:
    """Return the planned groups, or None if one of them has no plan."""
    try:
        return [_group(problem, hand) for hand in hands]
    except PlanError:
        return None


def _improved(problem: Problem, groups: list[Group]) -> list[Group]:
    profiles = {one.peer: one for one in problem.peers}
    tries = 0
    better = True
    while better:
        better = False
        steps_s = [group.plan.step_time_s for group in groups]
        slow = max(range(len(groups)), key=lambda place: steps_s[place])
        if steps_s[slow] < ALIKE * min(steps_s):
            return groups
        for other, mine, theirs in _exchanges(groups, slow):
            if tries >= MOST_TRIES:
                return groups
            tries += 2
            pair = _planned(problem, [[profiles[peer] for peer in hand] for hand in (mine, theirs)])
            if pair is None:
                continue
            if max(one.plan.step_time_s for one in pair) < groups[slow].plan.step_time_s:
                groups[slow], groups[other] = pair
                better = True
                break
    return groups


def _exchanges(groups: Sequence[Group], slow: int) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield another group's index and the two groups' new members: one peer exchanged, or one moved to the slow
    group."""
    mine = groups[slow].peers
    for other, group in enumerate(groups):
        if other == slow:
            continue
        for given in (*mine, None):
            for taken in group.peers:
                hands = [peer for peer in mine if peer != given], [peer for peer in group.peers if peer != taken]
                if given is not None:
                    hands[1].append(given)
                hands[0].append(taken)
                if hands[1]:
                    yield other, *hands
