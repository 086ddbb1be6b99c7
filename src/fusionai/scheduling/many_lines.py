"""What several lines would serve over the one of a plan, in pools much larger than the model needs. Decides whether
that is worth a word.

Lines have no machine in common, the job owner's apart; each serves sessions of its own, as many as its memory has room
for and as still get a token every `SLOWER` times as long as the plan takes for one alone (`line_load`). The objective
is what all of them together generate under that limit. The plan's line is the first. Machines like those of a known
line, the least of those that will do, make further ones like it; where there are no more such, the fastest line among
who is left is a new pattern.

`lines_bound` says what no lines exceed. Neighbours: `serving` plans lines, `cli.lines_view` shows them; `many_holders`
does the like for training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.line_load import Load, LoadedLine, stage_room
from fusionai.scheduling.lines_bound import bound_tokens_per_s
from fusionai.scheduling.serving import serving_plan
from fusionai.scheduling.serving_line import block_s
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import PeerProfile, Plan, Problem, ServingNeeds, StagePlacement

METHOD: Final = "lines like the fastest, one after the other; bound by work and rounds"
WORTH_A_WORD: Final = 1.05
"""By so much more throughput lines must have to be shown."""
SLOWER: Final = 2.0
"""A session's seconds per token on a filled line, at most, by what the plan predicts for one alone."""
PATTERNS: Final = 10
"""Lines that are searched for; all others are made like one of them."""
BUDGET: Final = 5_000
"""Of each search."""
ROOMS: Final = (1, 4)
"""Times the wanted cache that searched lines have room for: longer lines are slower and hold more sessions. The better
way counts."""
LIKE: Final = 1.15
"""A stage's seconds, by those of the machine whose place it takes; room for sessions likewise."""
NEAR_S: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLine:
    """One line, filled."""

    stages: tuple[StagePlacement, ...]
    sessions: int
    passes: int
    tokens_per_s: float
    """All of its sessions together."""
    session_tokens_per_s: float
    """What each of them gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyLines:
    """Lines that no job can run yet, against the one that a job would run."""

    lines: tuple[ServedLine, ...]
    """The plan's first."""
    idle: tuple[str, ...]
    """Usable peers in none."""
    sessions: int
    tokens_per_s: float
    slowest_session_tokens_per_s: float
    least_tokens_per_s: float
    """What each session had to get."""
    chain_sessions: int
    chain_tokens_per_s: float
    """The plan's line, filled the same way."""
    over_one_chain: float
    asked_lines: int
    """So many lines serve the sessions asked for best."""
    asked_tokens_per_s: float
    owner_bound: bool
    """Whether the job owner's machine, which all lines share, holds them up."""
    bound_tokens_per_s: float
    optimality_gap: float


def many_lines(
    problem: Problem, chain_plan: Plan, most_sessions: int, least_tokens_per_s: float | None = None
) -> ManyLines | None:
    """For a serving job, with at most `most_sessions` per line, each of which gets at least so many tokens a second
    (None: half of what the plan predicts for one alone). None where one line does as well, where it can't give a
    session that much, and where the job owner's wishes name stages, spares or who holds what, which only one line
    has."""
    needs = problem.serving
    wishes = problem.stages is not None or problem.spares_wanted or problem.required or problem.pinned
    if problem.task != "serve" or needs is None or wishes:
        return None
    costs = StageCosts(problem)
    most_s = SLOWER * chain_plan.step_time_s if least_tokens_per_s is None else 1 / least_tokens_per_s
    best: tuple[_Filled, _Free] | None = None
    for room in ROOMS:
        filled = _Filled(problem, needs, costs, most_sessions, most_s)
        pool = _Free(problem, chain_plan, costs, needs)
        if not filled.add(chain_plan.stages):
            return None
        _fill(problem, filled, pool, chain_plan.stages, room)
        if best is None or filled.tokens_per_s > best[0].tokens_per_s:
            best = filled, pool
    assert best is not None, "there is at least one way to look for lines"
    return _compared(problem, chain_plan, *best, most_sessions, most_s)


def _fill(problem: Problem, filled: _Filled, pool: _Free, pattern: Sequence[StagePlacement], room: int) -> None:
    """Lines like `pattern`, then like the fastest among who is left with room for so many times the wanted cache."""
    if room > 1:
        wanted = _fastest(problem, pool.left(), room)
        if wanted is None or not filled.add(wanted):
            return
        pool.take(wanted)
        pattern = wanted
    for _ in range(PATTERNS):
        load = filled.last
        while not filled.full and (stages := pool.like(pattern, load)) is not None:
            if not filled.add(stages):
                break
            pool.take(stages)
        found = None if filled.full else _fastest(problem, pool.left(), room)
        if found is None or not filled.add(found):
            break
        pool.take(found)
        pattern = found


class _Filled:
    """Lines so far, and what they leave of the job owner's machine."""

    def __init__(
        self, problem: Problem, needs: ServingNeeds, costs: StageCosts, most_sessions: int, most_s: float
    ) -> None:
        self._needs, self._costs = needs, costs
        self._most_sessions, self._most_s = most_sessions, most_s
        self._owner = problem.owner
        self.placed: list[tuple[Sequence[StagePlacement], LoadedLine, Load]] = []
        self._owner_bytes = 0
        self.owner_busy = 0.0
        """Of the owner's machine or access link, what is taken; above 1, everybody waits for it."""

    @property
    def last(self) -> Load:
        return self.placed[-1][2]

    @property
    def tokens_per_s(self) -> float:
        return sum(load.tokens_per_s for _, _, load in self.placed) / max(1.0, self.owner_busy)

    @property
    def full(self) -> bool:
        return self.owner_busy >= 1

    def add(self, stages: Sequence[StagePlacement]) -> bool:
        """Whether any session can be served by it within the limit."""
        line = LoadedLine(stages, self._costs, self._needs)
        load = line.filled(self._room(line), self._most_s)
        if load is None:
            return False
        self.placed.append((stages, line, load))
        self._owner_bytes = max(self._owner_bytes, line.owner_room.fixed) + load.sessions * line.owner_room.each
        self.owner_busy += max(load.owner_busy, self._link_busy(stages, load.tokens_per_s))
        return True

    def _room(self, line: LoadedLine) -> int:
        """Sessions that the owner's memory leaves room for."""
        owner, room = self._owner, line.owner_room
        if owner is None or not room.each:
            return self._most_sessions
        taken = max(self._owner_bytes, room.fixed)
        return min(self._most_sessions, (owner.memory_bytes - taken) // room.each)

    def _link_busy(self, stages: Sequence[StagePlacement], tokens_per_s: float) -> float:
        owner = self._owner
        if owner is None:
            return 0.0
        mine = [stage.peer == owner.peer for stage in stages]
        up = self._costs.forward_bytes(stages[0]) if mine[0] else 0.0
        down = (
            self._costs.forward_bytes(stages[-2]) if mine[-1] and len(stages) > 1 else float(self._needs.result_bytes)
        )
        return tokens_per_s * max(up / owner.uplink.bandwidth_bytes_per_s, down / owner.downlink.bandwidth_bytes_per_s)


class _Free:
    """Machines in no line, as arrays."""

    def __init__(self, problem: Problem, chain_plan: Plan, costs: StageCosts, needs: ServingNeeds) -> None:
        self._own = "" if problem.owner is None else problem.owner.peer
        standing_by = set(chain_plan.spares) - {self._own}
        peers = [peer for peer in problem.peers if peer.peer in standing_by]
        peers.sort(key=lambda peer: peer.peer)
        self._peers = peers
        self._costs, self._needs = costs, needs
        self._blocks = costs.problem.blocks
        self._here = np.ones(len(peers), dtype=np.bool_)
        self._place = {peer.peer: place for place, peer in enumerate(peers)}
        self._speed = np.array([peer.effective_flops_per_s for peer in peers])
        reading = np.array([peer.memory_bandwidth_bytes_per_s * peer.share for peer in peers])
        self._reading = np.where(reading > 0, reading, np.inf)
        self._memory = np.array([float(peer.memory_bytes) for peer in peers])
        self._up = np.array([peer.uplink.bandwidth_bytes_per_s for peer in peers])
        self._down = np.array([peer.downlink.bandwidth_bytes_per_s for peer in peers])
        self._latency_s = np.array([peer.uplink.latency_s + peer.downlink.latency_s for peer in peers])
        # The least that will do goes first: what is better may be needed elsewhere.
        self._least_first = np.lexsort((self._speed, self._memory))

    def left(self) -> list[PeerProfile]:
        return [peer for peer, here in zip(self._peers, self._here, strict=True) if here]

    def take(self, stages: Sequence[StagePlacement]) -> None:
        for stage in stages:
            if stage.peer in self._place:
                self._here[self._place[stage.peer]] = False

    def like(self, pattern: Sequence[StagePlacement], load: Load) -> list[StagePlacement] | None:
        """The same stages on machines like those of the pattern; None if one of them finds none."""
        here = self._here.copy()
        stages: list[StagePlacement] = []
        for stage in pattern:
            if stage.peer == self._own:
                # The model's ends are there once for all lines; a stage of the pool would be needed again.
                if "stage" in stage.roles:
                    return None
                stages.append(stage)
                continue
            suits = here & self._suits(stage, load)
            chosen = next((int(place) for place in self._least_first if suits[place]), None)
            if chosen is None:
                return None
            here[chosen] = False
            stages.append(self._moved(stage, self._peers[chosen]))
        return stages

    def _suits(self, stage: StagePlacement, load: Load) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        first = self._blocks[0].block
        start, end = stage.blocks[0] - first, stage.blocks[1] - first
        blocks = self._blocks[start:end]
        rows = max(1, load.sessions // load.passes)
        like = self._costs.profiles[stage.peer]
        seconds = np.zeros(len(self._peers))
        for block in blocks:
            read_s = (block.parameter_bytes - block.looked_up_bytes) / self._reading
            seconds += np.maximum(rows * block.forward_flops / self._speed, read_s)
        mine_s = sum(block_s(block, like, rows) for block in blocks)
        room = stage_room(blocks, self._blocks[end:], self._needs)
        sessions = max(1.0, load.sessions / LIKE)
        suits = (seconds <= LIKE * mine_s) & (self._memory >= room.fixed + sessions * room.each)
        sent = rows * self._costs.forward_bytes(stage)
        came = rows * float(self._blocks[start - 1].output_bytes) if start else 0.0
        hop_s = sent / self._up + came / self._down + self._latency_s
        like_s = sent / like.uplink.bandwidth_bytes_per_s + came / like.downlink.bandwidth_bytes_per_s
        like_s += like.uplink.latency_s + like.downlink.latency_s
        return suits & (hop_s <= LIKE * like_s + NEAR_S)

    def _moved(self, stage: StagePlacement, peer: PeerProfile) -> StagePlacement:
        return msgspec.structs.replace(
            stage,
            peer=peer.peer,
            compute_s=self._costs.decode_s(stage, peer.peer, 1),
            send_s=stage.send_s
            * self._costs.profiles[stage.peer].uplink.bandwidth_bytes_per_s
            / peer.uplink.bandwidth_bytes_per_s,
            memory_limit_bytes=peer.memory_bytes,
            fingerprint=peer.fingerprint,
        )


def _fastest(problem: Problem, left: Sequence[PeerProfile], room: int) -> tuple[StagePlacement, ...] | None:
    """The line of who is left that a token crosses soonest, with room for so many times the wanted cache."""
    needs = problem.serving
    assert needs is not None, "a serving problem says what it needs"
    needs = msgspec.structs.replace(needs, cache_tokens=room * max(needs.cache_tokens, needs.context_tokens))
    own = [] if problem.owner is None else [problem.owner.peer]
    names = {*own, *(peer.peer for peer in left)}
    links = {key: link for key, link in problem.links.items() if names >= set(key.split(">"))}
    posed = msgspec.structs.replace(problem, peers=tuple(left), links=links, excluded=(), incumbent=None, serving=needs)
    try:
        return serving_plan(posed, BUDGET).stages if left else None
    except PlanError:
        return None


def _compared(
    problem: Problem, chain_plan: Plan, filled: _Filled, pool: _Free, most_sessions: int, most_s: float
) -> ManyLines | None:
    slowed = max(1.0, filled.owner_busy)
    lines = tuple(_served(problem, stages, load, slowed) for stages, _, load in filled.placed)
    chain_load = filled.placed[0][2]
    chain_speed = lines[0].tokens_per_s if len(lines) == 1 else chain_load.tokens_per_s
    together = sum(line.tokens_per_s for line in lines)
    if together < WORTH_A_WORD * chain_speed:
        return None
    asked = list(_asked(filled, problem))
    asked_lines, asked_speed = max(asked, key=lambda entry: entry[1])
    bound = max(bound_tokens_per_s(problem, chain_plan, most_sessions, most_s), together)
    return ManyLines(
        least_tokens_per_s=1 / most_s,
        lines=lines,
        idle=tuple(peer.peer for peer in pool.left()),
        sessions=sum(line.sessions for line in lines),
        tokens_per_s=together,
        slowest_session_tokens_per_s=min(line.session_tokens_per_s for line in lines),
        chain_sessions=chain_load.sessions,
        chain_tokens_per_s=chain_speed,
        over_one_chain=together / chain_speed,
        asked_lines=asked_lines,
        asked_tokens_per_s=asked_speed,
        owner_bound=slowed > 1,
        bound_tokens_per_s=bound,
        optimality_gap=bound / together - 1,
    )


def _asked(filled: _Filled, problem: Problem) -> Iterator[tuple[int, float]]:
    """(lines, tokens per second) where the sessions asked for are spread over the first lines."""
    needs = problem.serving
    assert needs is not None, "a serving problem says what it needs"
    for count in range(1, min(len(filled.placed), needs.sessions) + 1):
        speed = 0.0
        for number, (_, line, _) in enumerate(filled.placed[:count]):
            share = needs.sessions // count + (number < needs.sessions % count)
            load = line.filled(share)
            speed += 0.0 if load is None else load.tokens_per_s
        yield count, speed


def _served(problem: Problem, stages: Sequence[StagePlacement], load: Load, slowed: float) -> ServedLine:
    """With memory as filled: what is kept for its sessions, not for those of the plan."""
    needs = problem.serving
    assert needs is not None, "a serving problem says what it needs"
    first = problem.blocks[0].block
    placed: list[StagePlacement] = []
    for number, stage in enumerate(stages):
        start, end = stage.blocks[0] - first, stage.blocks[1] - first
        room = stage_room(problem.blocks[start:end], problem.blocks[end:], needs)
        size = room.fixed + load.sessions * room.each
        weights = sum(block.parameter_bytes for block in problem.blocks[start:end])
        placed.append(
            msgspec.structs.replace(
                stage, stage=number, memory_bytes=size, weight_bytes=weights, cache_bytes=load.sessions * room.each
            )
        )
    return ServedLine(
        stages=tuple(placed),
        sessions=load.sessions,
        passes=load.passes,
        tokens_per_s=load.tokens_per_s / slowed,
        session_tokens_per_s=1 / load.round_s / slowed,
    )
