"""Shows what replicas that train separately and synchronise every few steps would gain, if the gain is worth a line.

`cli.plan` shows it below the plan of one pipeline; `scheduling.training.replica_groups` divides the machines into
replicas; `fusion train` runs such replicas for a recipe with `[replicas]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fusionai.cli import console
from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.scheduling.training.replica_groups import Exchanging, Group, anchored, exchange_s, fastest, pace

USUAL: Final = Exchanging(every=50, codec="int4")
"""Defaults of a recipe's `[replicas]` table."""
MOST_PEERS: Final = 32
"""Largest pool that is divided into replicas. Dividing more peers takes too long for a command (chosen)."""
WORTH: Final = 1.05
"""Least speed-up over the one pipeline for which the replicas are shown (chosen)."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A division of the pool into replicas. `tokens_per_s`: all replicas together, including the time of exchanges.
    `exchange_s`: duration of one exchange round."""

    groups: tuple[Group, ...]
    tokens_per_s: float
    exchange_s: float


def apart(problem: Problem, chain: Plan) -> Apart | None:
    """Return the division into replicas, or None if it is not worth showing: there is one group, the speed-up is below
    `WORTH`, or the pool has more than `MOST_PEERS` peers."""
    if problem.task != "train" or len(problem.peers) > MOST_PEERS or problem.stages is not None or problem.required:
        return None
    try:
        groups = fastest(anchored(problem), len(problem.peers), USUAL)
    except PlanError:
        return None  # with the memory that exchanges need, nothing fits
    share_s = exchange_s(problem, USUAL)
    tokens_per_s = pace(groups, share_s) * problem.microbatches * problem.microbatch_tokens
    if len(groups) == 1 or tokens_per_s < WORTH * chain.tokens_per_s:
        return None
    return Apart(groups, tokens_per_s, len(groups) * share_s * USUAL.every)


def show_apart(found: Apart, chain: Plan, names: Mapping[str, str]) -> None:
    console.line()
    times = found.tokens_per_s / chain.tokens_per_s
    console.line(
        f"As {len(found.groups)} replicas that synchronise every {USUAL.every} steps ([replicas] in the recipe): "
        f"{format_speed(found.tokens_per_s)} tokens/s together, {times:.3g} x the plan above. Each replica trains on "
        f"its own batch; an exchange in {USUAL.codec} takes {format_seconds(found.exchange_s)} if nothing overlaps it."
    )
    console.table(
        ("replica", "stages on", "step", "spares"),
        [
            (
                str(number),
                ", ".join(names.get(stage.peer, stage.peer) for stage in group.plan.stages if "stage" in stage.roles),
                format_seconds(group.plan.step_time_s),
                ", ".join(names.get(peer, peer) for peer in group.peers if peer not in _used(group.plan)),
            )
            for number, group in enumerate(found.groups)
        ],
        right=(2,),
    )


def apart_figures(found: Apart | None, names: Mapping[str, str]) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "every": USUAL.every,
        "codec": USUAL.codec,
        "tokens_per_s": found.tokens_per_s,
        "exchange_s": found.exchange_s,
        "replicas": [
            {"peers": [names.get(peer, peer) for peer in group.peers], "step_time_s": group.plan.step_time_s}
            for group in found.groups
        ],
    }


def _used(plan: Plan) -> set[str]:
    return {stage.peer for stage in plan.stages}
