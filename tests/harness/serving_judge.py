"""Enumerates every line of a small serving problem, by the cost model of docs/planning.md written out again.

Imports the problem's types only; no cost code of the planner is used. Every order of every choice of machines and every
cut is looked at, first stage first. A beginning is given up only where its seconds already reach the best line's: they
can only grow. `predicted` prices the stages of a plan with the same formulas.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem, ServingNeeds

LONGEST_PROMPT = 2048


@dataclass(frozen=True, slots=True)
class Verdict:
    """The optimum: seconds per token (inf: no line), with room for `cache_tokens`. `single_s`: of the fastest line with
    one machine of the pool and room for a context. `order` and `ends`: machines and where their stages end."""

    token_s: float
    cache_tokens: int
    single_s: float
    order: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of a plan's stages. `stage_bytes`: by stage; `machine_bytes`: of all that a machine holds."""

    token_s: float
    together_per_s: float
    prompt_tokens_per_s: float
    stage_bytes: tuple[int, ...]
    machine_bytes: dict[str, int]


def judged(problem: Problem) -> Verdict:
    """The best line, by the documented rule for the room that its caches have."""
    return _Case(problem).ruled()


def best_alone(problem: Problem) -> tuple[float, str]:
    """Seconds per token of the fastest machine that holds the whole model with a context, and which; one of the pool
    has the way in and out, the job owner's has none. (inf, "") where there is none."""
    needs, owner = _needs(problem), problem.owner
    everyone = [peer for peer in problem.peers if _usable(problem, peer)]
    everyone += [] if owner is None else [owner]
    needed = _stage_bytes(problem, 0, len(problem.blocks), least_tokens(needs))

    def token_s(one: PeerProfile) -> float:
        seconds = sum(_block_s(block, one, 1) for block in problem.blocks)
        if owner is None:
            return seconds
        return seconds + _hop_s(problem, owner, one, 0) + _hop_s(problem, one, owner, needs.result_bytes)

    return min(((token_s(one), one.peer) for one in everyone if one.memory_bytes >= needed), default=(inf, ""))


def least_tokens(needs: ServingNeeds) -> int:
    """Of any cache: one whole context in pages, and a page more."""
    return (ceil(needs.context_tokens / needs.page_tokens) + 1) * needs.page_tokens


def predicted(problem: Problem, plan: Plan) -> Predicted:
    """By the documented formulas, for the plan's machines, cuts and pages."""
    needs = _needs(problem)
    assert plan.serving is not None
    machines = {one.peer: one for one in ([] if problem.owner is None else [problem.owner])}
    machines |= {one.peer: one for one in problem.peers}
    stages = [(machines[stage.peer], *stage.blocks) for stage in plan.stages]
    length = len(problem.blocks)

    def seconds(rows: int, asked: int, *, waiting: bool = True) -> tuple[dict[str, float], list[float]]:
        """By machine what it computes, and by link."""
        busy: defaultdict[str, float] = defaultdict(float)
        for one, start, end in stages:
            for block in range(start, end):
                positions = asked if block == length - 1 else rows
                busy[one.peer] += _block_s(problem.blocks[block], one, positions) if positions else 0.0
        links = [
            _hop_s(
                problem,
                one,
                other,
                problem.blocks[end - 1].output_bytes * (asked if (start, last) == (length - 1, length) else rows),
                waiting=waiting,
            )
            for (one, _, end), (other, start, last) in pairwise(stages)
        ]
        if problem.owner is not None:
            links.append(_hop_s(problem, problem.owner, stages[0][0], 0, waiting=waiting))
            links.append(_hop_s(problem, stages[-1][0], problem.owner, needs.result_bytes * asked, waiting=waiting))
        return busy, links

    def trip_s(rows: int, asked: int) -> float:
        busy, links = seconds(rows, asked)
        return sum(busy.values()) + sum(links)

    together_per_s = 0.0
    for passes in range(1, min(needs.sessions, 2 * len(stages)) + 1):
        rows = ceil(needs.sessions / passes)
        busy, _ = seconds(rows, rows)
        together_per_s = max(together_per_s, needs.sessions / max(trip_s(rows, rows), passes * max(busy.values())))
    prompt = min(LONGEST_PROMPT, needs.context_tokens)
    pieces = ceil(prompt / needs.pass_tokens)
    busy, links = seconds(needs.pass_tokens, 0, waiting=False)
    first_s = (pieces - 1) * max(*busy.values(), *links, 0.0) + trip_s(prompt - (pieces - 1) * needs.pass_tokens, 1)
    tokens = plan.serving.pages * needs.page_tokens
    held: defaultdict[str, int] = defaultdict(int)
    sizes = [_stage_bytes(problem, start, end, tokens) for _, start, end in stages]
    for (one, _, _), size in zip(stages, sizes, strict=True):
        held[one.peer] += size
    return Predicted(trip_s(1, 1), together_per_s, prompt / first_s, tuple(sizes), dict(held))


class _Case:
    def __init__(self, problem: Problem) -> None:
        places = {role.role: role.place for role in problem.roles}
        owner = problem.owner
        count = len(problem.blocks)
        self.problem, self.owner, self.needs = problem, owner, _needs(problem)
        self.first = max(1, problem.kept_first) if places["feed"] == "owner" else 0
        self.cut = count - (max(1, problem.kept_last) if places["loss"] == "owner" else 0)
        assert owner is not None or (self.first == 0 and self.cut == count)
        smallest = min(
            _stage_bytes(problem, block, block + 1, least_tokens(self.needs)) for block in range(self.first, self.cut)
        )
        self.machines = [peer for peer in problem.peers if _usable(problem, peer) and peer.memory_bytes >= smallest]
        self.most = min(len(self.machines) - (problem.spares_wanted or 0), self.cut - self.first)
        self.ends_s = 0.0
        if owner is not None:
            ends = (*problem.blocks[: self.first], *problem.blocks[self.cut :])
            self.ends_s = sum(_block_s(block, owner, 1) for block in ends)

    def ruled(self) -> Verdict:
        needs = self.needs
        least = least_tokens(needs)
        cache = max((ceil(needs.cache_tokens / needs.page_tokens) + 1) * needs.page_tokens, least)
        single_s = self.enumerated(least, alone=True)[0]
        best = self.enumerated(cache)
        while best[0] == inf:
            if cache == least:
                return Verdict(inf, cache, single_s)
            cache = max(cache // needs.page_tokens // 2 * needs.page_tokens, least)
            best = self.enumerated(cache)
        if single_s < best[0]:
            while self.enumerated(cache, alone=True)[0] > single_s:
                cache = max(cache // needs.page_tokens // 2 * needs.page_tokens, least)
            best = self.enumerated(cache)
        return Verdict(best[0], cache, single_s, best[1], best[2])

    def enumerated(self, cache: int, *, alone: bool = False) -> tuple[float, tuple[str, ...], tuple[int, ...]]:
        """Seconds, machines and ends of stages of the fastest line with room for so many tokens."""
        problem, owner, machines = self.problem, self.owner, self.machines
        room = [one.memory_bytes for one in machines]
        if owner is not None:
            own = _stage_bytes(problem, 0, self.first, cache) + _stage_bytes(
                problem, self.cut, len(problem.blocks), cache
            )
            if own > owner.memory_bytes:
                return inf, (), ()
            room = [size - (own if one.peer == owner.peer else 0) for size, one in zip(room, machines, strict=True)]
        needed = {
            (a, b): _stage_bytes(problem, a, b, cache)
            for a in range(self.first, self.cut)
            for b in range(a + 1, self.cut + 1)
        }
        compute = [
            {(a, b): sum(_block_s(block, one, 1) for block in problem.blocks[a:b]) for a, b in needed}
            for one in machines
        ]
        crossing = [0, *(block.output_bytes for block in problem.blocks)]
        if self.cut == len(problem.blocks):
            crossing[-1] = self.needs.result_bytes
        pinned = {block - problem.blocks[0].block: peer for block, peer in problem.pinned.items()}
        must = set(problem.required) | set(problem.pinned.values())
        exactly = 1 if alone else problem.stages
        if problem.stages is not None and exactly != problem.stages:
            return inf, (), ()
        most = exactly or self.most
        best = (inf, (), ())

        def grow(order: tuple[int, ...], ends: tuple[int, ...], seconds: float) -> None:
            nonlocal best
            start = ends[-1] if ends else self.first
            for place, one in enumerate(machines):
                if place in order:
                    continue
                sender = machines[order[-1]] if order else owner
                into_s = 0.0 if sender is None else _hop_s(problem, sender, one, crossing[start])
                for end in range(start + 1, self.cut + 1):
                    if needed[start, end] > room[place]:
                        continue
                    if any((start <= block < end) != (peer == one.peer) for block, peer in pinned.items()):
                        continue
                    longer_s = seconds + into_s + compute[place][start, end]
                    if longer_s >= best[0]:
                        continue
                    if end < self.cut:
                        if len(order) + 1 < most:
                            grow((*order, place), (*ends, end), longer_s)
                        continue
                    count = len(order) + 1
                    used = (*(machines[k].peer for k in order), one.peer)
                    if (exactly is not None and count != exactly) or count > self.most or not must <= set(used):
                        continue
                    out_s = 0.0 if owner is None else _hop_s(problem, one, owner, crossing[end])
                    if longer_s + out_s < best[0]:
                        best = (longer_s + out_s, used, (*ends, end))

        grow((), (), self.ends_s)
        return best


def _needs(problem: Problem) -> ServingNeeds:
    assert problem.task == "serve"
    assert problem.serving is not None
    return problem.serving


def _usable(problem: Problem, peer: PeerProfile) -> bool:
    formats = peer.weight_formats
    return (
        peer.peer not in problem.excluded
        and "stage" in peer.roles
        and "serve" in peer.tasks
        and (not formats or _needs(problem).weights in formats)
    )


def _block_s(block: BlockCost, one: PeerProfile, positions: int) -> float:
    computing = positions * block.forward_flops / (one.flops_per_s * one.share)
    reading = 0.0
    if one.memory_bandwidth_bytes_per_s > 0:
        reading = (block.parameter_bytes - block.looked_up_bytes) / (one.memory_bandwidth_bytes_per_s * one.share)
    return max(computing, reading)


def _hop_s(problem: Problem, one: PeerProfile, other: PeerProfile, size_bytes: float, *, waiting: bool = True) -> float:
    if one.peer == other.peer:
        return 0.0
    own = problem.links.get(f"{one.peer}>{other.peer}")
    if own is not None:
        return size_bytes / own.bandwidth_bytes_per_s + (own.latency_s if waiting else 0.0)
    width = min(one.uplink.bandwidth_bytes_per_s, other.downlink.bandwidth_bytes_per_s)
    return size_bytes / width + (one.uplink.latency_s + other.downlink.latency_s if waiting else 0.0)


def _stage_bytes(problem: Problem, start: int, end: int, tokens: int) -> int:
    if start == end:
        return 0
    needs, blocks = _needs(problem), problem.blocks
    held = blocks[start:end]
    behind = any(block.cache_token_bytes or block.cache_session_bytes for block in blocks[end:])
    each = sum(block.cache_token_bytes for block in held)
    each += blocks[end - 1].output_bytes if needs.retain and behind else 0
    rings = (needs.sessions + 1) * sum(block.cache_session_bytes for block in held)
    weights = sum(block.parameter_bytes for block in held)
    return weights + max(block.workspace_bytes for block in held) + rings + tokens * each
