"""Predicts how fast placed stages generate: one session, many sessions together, and a pipeline filled with sessions.

A single session gets one token per trip through all stages. Many sessions share passes: in a round every pass crosses
the pipeline once and each session gets one token.

    round = max(transit of a pass, passes * busiest machine's part of one, passes * slowest link's part of one)

A machine's part is the time for its blocks' operations or for reading their weights, whichever is longer
(`serving.pipeline`). Sessions are limited by memory and by the longest round allowed.

`serving.planning`, `takeover` and `continuation` compare plans with these predictions, `serving.parallel` fills
pipelines, and `serving.bound` proves what no division of a pool can exceed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import msgspec
import numpy as np

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.kernels.compiled import Floats
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Problem, ServingNeeds, StagePlacement
from fusionai.scheduling.serving.pipeline import retained_bytes, ring_bytes, stage_bytes, token_bytes
from fusionai.scheduling.training.prediction import Prediction


def predict_serving(stages: Sequence[StagePlacement], costs: StageCosts) -> Prediction:
    """Predict one token of one session: `step_s` runs from a token's id to the next token's scores."""
    parts = _parts(stages, costs, 1, 1)
    seconds, cause = max(parts, key=lambda part: part[0])
    bottleneck = f"{cause} ({format_seconds(seconds)} per {costs.problem.unit.rstrip('s')})"
    return Prediction(sum(part[0] for part in parts), bottleneck)


def together(stages: Sequence[StagePlacement], costs: StageCosts, needs: ServingNeeds) -> tuple[int, float]:
    """Return the best number of passes in flight, and the tokens per second of all sessions together."""
    best = (1, 0.0)
    for passes in range(1, min(needs.sessions, 2 * len(stages)) + 1):
        round_s = round_trip_s(stages, costs, needs.sessions, passes)
        if needs.sessions / round_s > best[1] * (1 + 1e-9):
            best = (passes, needs.sessions / round_s)
    return best


def shared_round_s(stages: Sequence[StagePlacement], costs: StageCosts, sessions: int) -> float:
    """Return the seconds from one token of a session to its next, if `sessions` generate together in as many passes as
    suit them, at most one for each machine."""
    most = min(sessions, len({stage.peer for stage in stages}))
    return min(round_trip_s(stages, costs, sessions, passes) for passes in range(1, most + 1))


def round_trip_s(stages: Sequence[StagePlacement], costs: StageCosts, sessions: int, passes: int) -> float:
    """Return the seconds from one token of a session to its next, if `sessions` share `passes` in flight."""
    rows = -(-sessions // passes)
    busy: defaultdict[str, float] = defaultdict(float)
    for stage in stages:
        busy[stage.peer] += costs.decode_s(stage, stage.peer, rows)
    transit_s = sum(seconds for seconds, _ in _parts(stages, costs, rows, rows))
    # Each session gets one token while all passes go round once.
    return max(transit_s, passes * max(busy.values()))


def first_token_s(stages: Sequence[StagePlacement], costs: StageCosts, prompt_tokens: int, chunk_tokens: int) -> float:
    """Return the seconds from a prompt to its first token, without other requests.

    `prompt_tokens`: tokens of the prompt that are not in the cache. Chunks follow each other without waiting, so each
    adds the time of the busiest machine or link, and the last one its whole trip. The head computes one row only, that
    of the last token. Later chunks take longer, because attention covers all positions before them.
    """
    pieces, last = divmod(prompt_tokens - 1, chunk_tokens)
    seconds = sum(part for part, _ in _parts(stages, costs, last + 1, 1))
    seconds += sum(costs.attention_s(stage, pieces * chunk_tokens, last + 1) for stage in stages)
    if pieces:
        parts, waits = (_parts(stages, costs, rows, 0) for rows in (chunk_tokens, 0))
        # A link's latency does not delay the next chunk.
        links = [part - wait for (part, _), (wait, _) in zip(parts, waits, strict=True)][len(stages) :]
        for piece in range(pieces):
            busy: defaultdict[str, float] = defaultdict(float)
            for stage, (compute_s, _) in zip(stages, parts, strict=False):  # the remaining parts are links
                busy[stage.peer] += compute_s + costs.attention_s(stage, piece * chunk_tokens, chunk_tokens)
            seconds += max([*busy.values(), *links])
    return seconds


def _parts(stages: Sequence[StagePlacement], costs: StageCosts, rows: int, wanted: int) -> list[tuple[float, str]]:
    """Return the parts of a pass of `rows` positions as (seconds, description). Scores are computed for `wanted` of the
    positions: the head, and the link to a stage that is only the head, carry no others."""
    needs = costs.problem.serving
    owner = costs.problem.owner
    parts = [
        (_compute_s(stage, costs, rows, wanted), f"compute of stage {stage.stage} on {costs.name(stage.peer)}")
        for stage in stages
    ]
    for one, other in pairwise(stages):
        link = costs.hop(one.peer, other.peer)
        sent = wanted if "loss" in other.roles and other.blocks[1] - other.blocks[0] == 1 else rows
        seconds = sent * costs.forward_bytes(one) / link.bandwidth_bytes_per_s + link.latency_s
        parts.append((seconds, f"link between stage {one.stage} and stage {other.stage}"))
    if owner is not None and needs is not None:
        first, last = costs.hop(owner.peer, stages[0].peer), costs.hop(stages[-1].peer, owner.peer)
        parts.append((first.latency_s, f"link from {costs.name(owner.peer)} to stage {stages[0].stage}"))
        seconds = wanted * needs.result_bytes / last.bandwidth_bytes_per_s + last.latency_s
        parts.append((seconds, f"link from stage {stages[-1].stage} to {costs.name(owner.peer)}"))
    return parts


def _compute_s(stage: StagePlacement, costs: StageCosts, rows: int, wanted: int) -> float:
    """Return a stage's compute seconds; a head as its last block computes `wanted` rows only."""
    if "loss" not in stage.roles or wanted == rows:
        return costs.decode_s(stage, stage.peer, rows)
    start, end = stage.blocks
    head = msgspec.structs.replace(stage, blocks=(end - 1, end))
    seconds = costs.decode_s(head, stage.peer, wanted) if wanted else 0.0
    if end - start == 1:
        return seconds
    return seconds + costs.decode_s(msgspec.structs.replace(stage, blocks=(start, end - 1)), stage.peer, rows)


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """Load of a pipeline: `sessions` are spread over `passes` in flight, and each gets one token per round."""

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


def stage_room(problem: Problem, stage: StagePlacement) -> Room:
    """Memory of a placed stage."""
    behind = problem.blocks[stage.blocks[1] - problem.blocks[0].block :]
    return room_of(problem.blocks_of(stage), behind, problem.needs)


def room_of(blocks: Sequence[BlockCost], behind: Sequence[BlockCost], needs: ServingNeeds) -> Room:
    """Memory of a stage of `blocks`; `behind`: the model's blocks after it."""
    sent = retained_bytes((*blocks, *behind), len(blocks), needs)
    probe_only = msgspec.structs.replace(needs, sessions=0)
    each = session_tokens(needs) * token_bytes(blocks, sent) + ring_bytes(blocks, probe_only)
    return Room(stage_bytes(blocks, probe_only, sent, needs.page_tokens), each)


class LoadedPipeline:
    """A pipeline of placed `stages`, priced by `costs`."""

    def __init__(self, stages: Sequence[StagePlacement], costs: StageCosts, needs: ServingNeeds) -> None:
        problem = costs.problem
        self._owner = problem.owner_id
        self._peers = [stage.peer for stage in stages]
        self._bound_by_work: list[tuple[Floats, Floats]] = []
        fixed: defaultdict[str, int] = defaultdict(int)
        each: defaultdict[str, int] = defaultdict(int)
        for stage in stages:
            blocks = problem.blocks_of(stage)
            profile = costs.profiles[stage.peer]
            bandwidth = profile.memory_bandwidth_bytes_per_s * profile.share or inf
            flops = np.array([block.forward_flops for block in blocks])
            read = np.array([float(block.parameter_bytes - block.looked_up_bytes) for block in blocks])
            self._bound_by_work.append((flops / profile.effective_flops_per_s, read / bandwidth))
            room = stage_room(problem, stage)
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
        """Memory of the job owner's ends, which all pipelines share."""
        self.room = min(
            ((costs.profiles[peer].memory_bytes - fixed[peer]) // each[peer] for peer in fixed if each[peer]),
            default=None,
        )
        """Sessions that the pool's machines have memory for; None: no limit."""

    def round_s(self, rows: int, passes: int) -> tuple[float, float]:
        """Seconds between two tokens of a session with `rows` sessions per pass, and the fraction of that time in which
        the owner's machine computes."""
        busy: defaultdict[str, float] = defaultdict(float)
        for peer, (flops_s, read_s) in zip(self._peers, self._bound_by_work, strict=True):
            busy[peer] += float(np.maximum(rows * flops_s, read_s).sum())
        sent_s = [rows * row_s for row_s in self._row_s]
        transit_s = sum(busy.values()) + sum(sent_s) + self._latency_s
        whole_s = max(transit_s, passes * max(*busy.values(), *sent_s, 1e-12))
        return whole_s, passes * busy.get(self._owner, 0.0) / whole_s

    def at(self, rows: int, passes: int) -> PipelineLoad:
        whole_s, owner_busy = self.round_s(rows, passes)
        return PipelineLoad(rows * passes, passes, whole_s, owner_busy)

    def filled(self, most_sessions: int, most_s: float = inf) -> PipelineLoad | None:
        """The load with the most tokens a second, with rounds of at most `most_s`; None if not one session fits."""
        sessions = most_sessions if self.room is None else min(most_sessions, self.room)
        best: PipelineLoad | None = None
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
