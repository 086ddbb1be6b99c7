"""How fast a serving plan generates with its stages exactly as they lie. Decides nothing; moves nothing.

One session gets a token per trip through all stages. Many sessions share passes: `together` looks for the number of
passes in flight that gives all of them most tokens per second, where a pass is no faster than the busiest machine's
part in it. Neighbours: `serving` and `takeover` compare plans with this; `serving_line` explains the terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.prediction import Prediction
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import ServingNeeds, StagePlacement


def predict_serving(stages: Sequence[StagePlacement], costs: StageCosts) -> Prediction:
    """Of one token of one session: `step_s` from its id to the next token's scores."""
    parts = _parts(stages, costs, 1, 1)
    seconds, cause = max(parts, key=lambda part: part[0])
    return Prediction(sum(part[0] for part in parts), f"{cause} ({format_seconds(seconds)} per token)")


def together(stages: Sequence[StagePlacement], costs: StageCosts, needs: ServingNeeds) -> tuple[int, float]:
    """(passes in flight, tokens per second of all `needs.sessions` sessions generating)."""
    best = (1, 0.0)
    for passes in range(1, min(needs.sessions, 2 * len(stages)) + 1):
        round_s = round_trip_s(stages, costs, needs.sessions, passes)
        if needs.sessions / round_s > best[1] * (1 + 1e-9):
            best = (passes, needs.sessions / round_s)
    return best


def round_trip_s(stages: Sequence[StagePlacement], costs: StageCosts, sessions: int, passes: int) -> float:
    """From one token of a session to its next, `sessions` of them sharing `passes` in flight."""
    rows = -(-sessions // passes)
    busy: defaultdict[str, float] = defaultdict(float)
    for stage in stages:
        busy[stage.peer] += costs.decode_s(stage, stage.peer, rows)
    transit_s = sum(seconds for seconds, _ in _parts(stages, costs, rows, rows))
    # All passes go round once while each session gets one token.
    return max(transit_s, passes * max(busy.values()))


def first_token_s(stages: Sequence[StagePlacement], costs: StageCosts, prompt_tokens: int, chunk_tokens: int) -> float:
    """From a prompt, of which so many tokens are in no cache, to its first token, while nobody else asks. Chunks follow
    each other without waiting, so each costs what the busiest machine or link takes for it, and the last one its whole
    way; the head is asked for one row only, that of the last token. Later chunks take longer, since attention looks at
    what is before them."""
    pieces, last = divmod(prompt_tokens - 1, chunk_tokens)
    seconds = sum(part for part, _ in _parts(stages, costs, last + 1, 1))
    seconds += sum(costs.attention_s(stage, pieces * chunk_tokens, last + 1) for stage in stages)
    if pieces:
        parts, waits = (_parts(stages, costs, rows, 0) for rows in (chunk_tokens, 0))
        # A link's latency holds nobody up who follows.
        links = [part - wait for (part, _), (wait, _) in zip(parts, waits, strict=True)][len(stages) :]
        for piece in range(pieces):
            busy: defaultdict[str, float] = defaultdict(float)
            for stage, (compute_s, _) in zip(stages, parts, strict=False):  # the links' parts follow
                busy[stage.peer] += compute_s + costs.attention_s(stage, piece * chunk_tokens, chunk_tokens)
            seconds += max([*busy.values(), *links])
    return seconds


def _parts(stages: Sequence[StagePlacement], costs: StageCosts, rows: int, wanted: int) -> list[tuple[float, str]]:
    """What a pass of `rows` positions takes on its way, piece by piece. Only of `wanted` of them scores are asked for:
    the head sees no others, nor does the link to a stage that is the head alone."""
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
    """Of a stage with the head, its last block."""
    if "loss" not in stage.roles or wanted == rows:
        return costs.decode_s(stage, stage.peer, rows)
    start, end = stage.blocks
    head = msgspec.structs.replace(stage, blocks=(end - 1, end))
    seconds = costs.decode_s(head, stage.peer, wanted) if wanted else 0.0
    if end - start == 1:
        return seconds
    return seconds + costs.decode_s(msgspec.structs.replace(stage, blocks=(start, end - 1)), stage.peer, rows)
