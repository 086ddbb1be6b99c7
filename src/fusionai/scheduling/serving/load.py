"""Computes how many sessions a serving pipeline (line) holds, in how many passes, and how fast it serves them.

    round = max(transit of a pass, passes * busiest machine's part of one, passes * slowest link's part of one)

In a round every pass crosses the line once and each session gets one token. A machine's part is the time for its
blocks' operations or for reading their weights, whichever is longer (`serving_line`). Sessions are limited by memory
and by the longest round allowed.

`many_lines` fills lines with this module; `serving_prediction` prices the single line of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import msgspec
import numpy as np

from fusionai.scheduling.kernels.compiled import Floats
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, ServingNeeds, StagePlacement
from fusionai.scheduling.serving.pipeline import retained_bytes, ring_bytes, stage_bytes, token_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a line: `sessions` are spread over `passes` in flight, and each gets one token per round."""

    sessions: int
    passes: int
    round_s: float
    owner_busy: float
    """Fraction of the time in which the job owner's machine computes."""

    @property
    def tokens_per_s(self) -> float:
        return self.sessions / self.round_s


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of a stage in bytes: `fixed` without sessions (including the probe's page), `each` per session."""

    fixed: int
    each: int


def session_tokens(needs: ServingNeeds) -> int:
    """Cache positions reserved for a session: its share of the wanted cache, in whole pages."""
    wanted = max(needs.cache_tokens, needs.context_tokens)
    pages = -(-wanted // (needs.sessions * needs.page_tokens))
    return min(pages, -(-needs.context_tokens // needs.page_tokens)) * needs.page_tokens


def stage_room(blocks: Sequence[BlockCost], behind: Sequence[BlockCost], needs: ServingNeeds) -> Room:
    """Memory of a stage of `blocks`; `behind`: the model's blocks after it."""
    sent = retained_bytes((*blocks, *behind), len(blocks), needs)
    probe_only = msgspec.structs.replace(needs, sessions=0)
    each = session_tokens(needs) * token_bytes(blocks, sent) + ring_bytes(blocks, probe_only)
    return Room(stage_bytes(blocks, probe_only, sent, needs.page_tokens), each)


class LoadedLine:
    """A line of placed `stages`, priced by `costs`."""

    def __init__(self, stages: Sequence[StagePlacement], costs: StageCosts, needs: ServingNeeds) -> None:
        problem = costs.problem
        first = problem.blocks[0].block
        self._owner = "" if problem.owner is None else problem.owner.peer
        self._peers = [stage.peer for stage in stages]
        self._working: list[tuple[Floats, Floats]] = []
        fixed: defaultdict[str, int] = defaultdict(int)
        each: defaultdict[str, int] = defaultdict(int)
        for stage in stages:
            start, end = stage.blocks[0] - first, stage.blocks[1] - first
            blocks = problem.blocks[start:end]
            profile = costs.profiles[stage.peer]
            bandwidth = profile.memory_bandwidth_bytes_per_s * profile.share or inf
            flops = np.array([block.forward_flops for block in blocks])
            read = np.array([float(block.parameter_bytes - block.looked_up_bytes) for block in blocks])
            self._working.append((flops / profile.effective_flops_per_s, read / bandwidth))
            room = stage_room(blocks, problem.blocks[end:], needs)
            fixed[stage.peer] += room.fixed
            each[stage.peer] += room.each
        self._row_s = [
            costs.forward_bytes(one) / costs.hop(one.peer, other.peer).bandwidth_bytes_per_s
            for one, other in pairwise(stages)
        ]
        self._latency_s = sum(costs.hop(one.peer, other.peer).latency_s for one, other in pairwise(stages))
        if self._owner:
            into, back = costs.hop(self._owner, stages[0].peer), costs.hop(stages[-1].peer, self._owner)
            self._row_s.append(needs.result_bytes / back.bandwidth_bytes_per_s)
            self._latency_s += into.latency_s + back.latency_s
        self.owner_room = Room(fixed.pop(self._owner, 0), each.pop(self._owner, 0))
        """Memory of the job owner's ends, which all lines share."""
        self.room = min(
            ((costs.profiles[peer].memory_bytes - fixed[peer]) // each[peer] for peer in fixed if each[peer]),
            default=None,
        )
        """Sessions that the pool's machines have memory for; None: no limit."""

    def round_s(self, rows: int, passes: int) -> tuple[float, float]:
        """Seconds between two tokens of a session with `rows` sessions per pass, and the fraction of that time in which
        the owner's machine computes."""
        busy: defaultdict[str, float] = defaultdict(float)
        for peer, (flops_s, read_s) in zip(self._peers, self._working, strict=True):
            busy[peer] += float(np.maximum(rows * flops_s, read_s).sum())
        sent_s = [rows * row_s for row_s in self._row_s]
        transit_s = sum(busy.values()) + sum(sent_s) + self._latency_s
        whole_s = max(transit_s, passes * max(*busy.values(), *sent_s, 1e-12))
        return whole_s, passes * busy.get(self._owner, 0.0) / whole_s

    def at(self, rows: int, passes: int) -> Load:
        whole_s, owner_busy = self.round_s(rows, passes)
        return Load(rows * passes, passes, whole_s, owner_busy)

    def filled(self, most_sessions: int, most_s: float = inf) -> Load | None:
        """The load with the most tokens a second, for at most `most_sessions` sessions with rounds of at most `most_s`;
        None if not even one session fits."""
        sessions = most_sessions if self.room is None else min(most_sessions, self.room)
        best: Load | None = None
        for passes in range(1, min(sessions, 2 * len(self._peers)) + 1):
            rows = self._most_rows(passes, sessions // passes, most_s)
            if rows == 0:
                break
            load = self.at(rows, passes)
            if best is None or load.tokens_per_s > best.tokens_per_s * (1 + 1e-9):
                best = load
        return best

    def _most_rows(self, passes: int, most: int, most_s: float) -> int:
        """Most rows, up to `most`, with which a round takes at most `most_s`; found by bisection."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.round_s(middle, passes)[0] <= most_s:
                low = middle
            else:
                high = middle - 1
        return low
