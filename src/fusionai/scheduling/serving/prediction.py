"""Predicts how fast a serving plan generates with a given placement of its stages.

A single session gets one token per trip through all stages. Many sessions share passes: `together` finds the number of
passes in flight that gives the most tokens per second in total. A pass is no faster than the busiest machine's part in
it. `serving`, `takeover` and `regrowth` compare plans with these predictions; `serving.pipeline` explains the terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import ServingNeeds, StagePlacement
from fusionai.scheduling.training.prediction import Prediction


def predict_serving(stages: Sequence[StagePlacement], costs: StageCosts) -> Prediction:
    """Predict one token of one session: `step_s` runs from a token's id to the next token's scores."""
    parts = _parts(stages, costs, 1, 1)
    seconds, cause = max(parts, key=lambda part: part[0])
    return Prediction(sum(part[0] for part in parts), f"{cause} ({format_seconds(seconds)} per token)")


def together(stages: Sequence[StagePlacement], costs: StageCosts, needs: ServingNeeds) -> tuple[int, float]:
    """Return the best number of passes in flight, and the tokens per second of all `needs.sessions` sessions
    together."""
    best = (1, 0.0)
    for passes in range(1, min(needs.sessions, 2 * len(stages)) + 1):
        round_s = round_trip_s(stages, costs, needs.sessions, passes)
        if needs.sessions / round_s > best[1] * (1 + 1e-9):
            best = (passes, needs.sessions / round_s)
    return best


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
    """Return a stage's compute seconds; the head, if the stage has it as its last block, computes `wanted` rows
    only."""
    if "loss" not in stage.roles or wanted == rows:
        return costs.decode_s(stage, stage.peer, rows)
    start, end = stage.blocks
    head = msgspec.structs.replace(stage, blocks=(end - 1, end))
    seconds = costs.decode_s(head, stage.peer, wanted) if wanted else 0.0
    if end - start == 1:
        return seconds
    return seconds + costs.decode_s(msgspec.structs.replace(stage, blocks=(start, end - 1)), stage.peer, rows)
