"""Who trains together with whom: the pool's peers divided into groups, each a pipeline of its own.

Decides the groups, their plans and, where it is free, their number. All replicas take equally large steps and meet
after each round, so that the slowest sets the pace: groups are made equal in memory first and then in speed, and peers
of the slowest are exchanged for those of others as long as its plan gets faster. Where not all replicas fit, as many as
do. Never looks at running jobs.

Neighbours: `planner` plans one group, `client.replicas` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.types import PeerProfile, Plan, Problem
from fusionai.wire.codecs import Exchanged, bytes_on_link

MOST_TRIES: Final = 60
"""Plans made in search of better groups; each takes some milliseconds to some tenths of a second."""
ALIKE: Final = 1.02
"""Groups whose steps differ by no more are not improved."""
COUNTS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""That are tried where the number is free."""


@dataclass(frozen=True, slots=True)
class Group:
    """`peers`: ids, those included that its plan has no use for."""

    peers: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Exchanging:
    """How often replicas agree, and how what they send is packed. `lag`: steps they take meanwhile."""

    every: int
    codec: Exchanged
    lag: int = 0

    @property
    def beside(self) -> float:
        """So much of a step is there for an exchange, on average, without making it longer."""
        return self.lag / self.every


def divide(problem: Problem, most: int) -> tuple[Group, ...]:
    """At most `most` groups of the problem's peers. Raises the planner's `PlanError` where not even one fits."""
    kept_out = set(problem.excluded)
    peers = sorted((one for one in problem.peers if one.peer not in kept_out), key=_strength, reverse=True)
    for count in range(min(most, len(peers)), 1, -1):
        groups = _planned(problem, _dealt(peers, count, _needed_bytes(problem)))
        if groups is not None:
            return tuple(_improved(problem, groups))
    return (_group(problem, peers),)


def fastest(problem: Problem, most: int, exchange: Exchanging | None = None) -> tuple[Group, ...]:
    """Of so many groups as take most steps together in the same time; the fewest of equals. Raises as `divide`."""
    share_s = 0.0 if exchange is None else exchange_s(problem, exchange)
    beside = 0.0 if exchange is None else exchange.beside
    best = divide(problem, 1)
    for count in COUNTS:
        if count > min(most, len(problem.peers)):
            break
        groups = divide(problem, count)
        if len(groups) < count:  # more don't fit either
            break
        if pace(groups, share_s, beside) > pace(best, share_s, beside):
            best = groups
    return best


def pace(groups: Sequence[Group], share_s: float = 0.0, beside: float = 0.0) -> float:
    """Steps of all groups together, per second, by their plans. `share_s`: what each group's part in the exchanges
    takes of every step of all; a group alone has none. `beside`: so much of a step hides it."""
    step_s = max(group.plan.step_time_s for group in groups)
    exchanging_s = len(groups) * share_s if len(groups) > 1 else 0.0
    return len(groups) / (step_s + max(0.0, exchanging_s - beside * step_s))


def exchange_s(problem: Problem, exchange: Exchanging) -> float:
    """Of a step, for one group: all that is trained goes to the job owner and comes back once in `every` steps, over a
    line that all groups share. Without an owner: none."""
    if problem.owner is None:
        return 0.0
    packed_bytes = bytes_on_link(exchange.codec, sum(block.trainable_bytes for block in problem.blocks))
    down, up = problem.owner.downlink, problem.owner.uplink
    return packed_bytes * (1 / down.bandwidth_bytes_per_s + 1 / up.bandwidth_bytes_per_s) / exchange.every


def anchored(problem: Problem) -> Problem:
    """The same where replicas exchange: stages keep what was agreed on, the outer momentum and what packing lost, each
    as large as what is trained."""
    kept = problem.optimizer_bytes_per_trainable_byte + 3.0
    return msgspec.structs.replace(problem, optimizer_bytes_per_trainable_byte=kept)


def _strength(peer: PeerProfile) -> tuple[float, int, str]:
    return peer.effective_flops_per_s, peer.memory_bytes, peer.peer


def _needed_bytes(problem: Problem) -> float:
    """Of one replica, less activations: a first guess at what a group must have; its plan knows."""
    trained = 1 + problem.optimizer_bytes_per_trainable_byte  # a gradient, and what the optimizer keeps
    return sum(block.parameter_bytes + trained * block.trainable_bytes for block in problem.blocks)


def _dealt(peers: Sequence[PeerProfile], count: int, needed_bytes: float) -> list[list[PeerProfile]]:
    """Strongest first, each to whoever has least: of those that lack memory, if there are any, else of all."""
    hands: list[list[PeerProfile]] = [[] for _ in range(count)]

    def wealth(hand: list[PeerProfile]) -> tuple[bool, float]:
        enough = sum(one.memory_bytes for one in hand) >= needed_bytes
        return enough, sum(one.effective_flops_per_s for one in hand)

    for peer in peers:
        min(hands, key=wealth).append(peer)
    return hands


def among(problem: Problem, peers: Sequence[PeerProfile]) -> Problem:
    """The same problem with these peers alone; what is asked of others is asked of another group."""
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
    """None if one of them can't be planned."""
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
    """Another group, and whom the slow one and that one would have: one for one exchanged, or one handed over."""
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
