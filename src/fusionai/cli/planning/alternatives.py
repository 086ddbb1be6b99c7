"""Shows what a pool could do instead of one pipeline: train replicas with local updates, or serve several pipelines.

`cli.planning.plan` shows it below the plan of one pipeline; `scheduling.serving.parallel` computes it;
`dashboard.plan_chart` draws it as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fusionai.cli import console
from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.scheduling.serving.parallel import METHOD, PlacedPipeline, ServingPipelines
from fusionai.scheduling.training.replicated import Exchanging, Group, anchored, exchange_s, fastest, steps_per_s

USUAL: Final = Exchanging(every=50, codec="int4")
"""Defaults of a recipe's `[replicas]` table."""
MOST_PEERS: Final = 32
"""Largest pool that is divided into replicas. Dividing more peers takes too long for a command (chosen)."""
WORTH: Final = 1.05
"""Least speed-up over the one pipeline for which the replicas are shown (chosen)."""


@dataclass(frozen=True, slots=True)
class ReplicaDivision:
    """A division of the pool into replicas. `tokens_per_s`: all replicas together, including the time of exchanges.
    `exchange_s`: duration of one exchange round."""

    groups: tuple[Group, ...]
    tokens_per_s: float
    exchange_s: float


def replica_division(problem: Problem, chain: Plan) -> ReplicaDivision | None:
    """Return the division into replicas, or None if it is not worth showing: there is one group, the speed-up is below
    `WORTH`, or the pool has more than `MOST_PEERS` peers."""
    if problem.task != "train" or len(problem.peers) > MOST_PEERS or problem.stages is not None or problem.required:
        return None
    try:
        groups = fastest(anchored(problem), len(problem.peers), USUAL)
    except PlanError:
        return None  # with the memory that exchanges need, nothing fits
    share_s = exchange_s(problem, USUAL)
    tokens_per_s = steps_per_s(groups, share_s) * problem.microbatches * problem.microbatch_tokens
    if len(groups) == 1 or tokens_per_s < WORTH * chain.tokens_per_s:
        return None
    return ReplicaDivision(groups, tokens_per_s, len(groups) * share_s * USUAL.every)


def show_replica_division(found: ReplicaDivision, chain: Plan, names: Mapping[str, str]) -> None:
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


def replica_division_figures(found: ReplicaDivision | None, names: Mapping[str, str]) -> dict[str, object] | None:
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


_SHOWN: Final = 12
"""Most pipelines shown; those with the highest throughput are chosen."""


def show_pipelines(found: ServingPipelines, chain: Plan, names: Mapping[str, str]) -> None:
    """Print the throughput against the one pipeline's, the machines of each pipeline, and warnings."""
    used = _used_peers(chain)
    console.line()
    console.line("Estimate: several pipelines, each with its own sessions (jobs can't run this yet)")
    console.line(
        f"Serving jobs run the one pipeline above, on {_peers(used)}. Filled with "
        f"{_sessions(found.chain_sessions)}, it would give {format_speed(found.chain_tokens_per_s)} tokens/s."
    )
    console.line(
        f"{_pipelines(len(found.pipelines))} would serve {_sessions(found.sessions)} with "
        f"{format_speed(found.tokens_per_s)} tokens/s, {found.over_one_chain:.3g} x as much; a session gets at least "
        f"{format_speed(found.slowest_session_tokens_per_s)} tokens/s. If each session must get "
        f"{format_speed(found.least_tokens_per_s)}, no layout can give more than "
        f"{format_speed(found.bound_tokens_per_s)} ({found.optimality_gap:.1%} more; {METHOD})."
    )
    for pipeline in pipelines_picture(found, names):
        console.line(console.printable(pipeline))
    if found.idle:
        console.line(f"In no pipeline: {_peers(len(found.idle))}.")
    for warning in pipelines_warnings(found, chain):
        console.warning(warning)


def pipelines_warnings(found: ServingPipelines, chain: Plan) -> Iterator[str]:
    """Yield warnings where fewer machines would be as fast, or the job owner's machine limits all pipelines."""
    serving = chain.serving
    asked = 0 if serving is None else serving.sessions
    if found.asked_pipelines == 1 and asked:
        yield (
            f"For the requested {_sessions(asked)}, one pipeline is as fast as several: several are faster from "
            f"{_sessions(found.chain_sessions + 1)} on."
        )
    if found.owner_bound:
        yield (
            "The job owner's machine, which computes embedding and head, limits all pipelines: with --ends pool they "
            "would be faster."
        )
    alone = chain.single_peer_tokens_per_s
    if alone is not None and alone >= chain.tokens_per_s:
        yield f"For one session, one machine alone is as fast as any pipeline: {format_speed(alone)} tokens/s."


def pipelines_picture(found: ServingPipelines, names: Mapping[str, str]) -> Iterator[str]:
    """Yield one row per pipeline: who holds which blocks, how many sessions, how fast."""
    ranked = sorted(range(len(found.pipelines)), key=lambda number: (-found.pipelines[number].tokens_per_s, number))
    for number in sorted(ranked[:_SHOWN]):
        pipeline = found.pipelines[number]
        yield (
            f"  pipeline {number}: {_route(pipeline, names)}; {_sessions(pipeline.sessions)}, "
            f"{format_speed(pipeline.tokens_per_s)} tokens/s, {format_speed(pipeline.session_tokens_per_s)} each"
        )
    if len(found.pipelines) > _SHOWN:
        rest = [found.pipelines[number] for number in ranked[_SHOWN:]]
        speed = sum(pipeline.tokens_per_s for pipeline in rest)
        yield f"  and {_pipelines(len(rest))} with {format_speed(speed)} tokens/s together; --json lists all."


def _route(pipeline: PlacedPipeline, names: Mapping[str, str]) -> str:
    return " > ".join(f"{names.get(stage.peer, stage.peer)} {_blocks(*stage.blocks)}" for stage in pipeline.stages)


def _blocks(start: int, end: int) -> str:
    return str(start) if end - start == 1 else f"{start}-{end - 1}"


def _used_peers(chain: Plan) -> int:
    return len({stage.peer for stage in chain.stages if "stage" in stage.roles})


def _peers(count: int) -> str:
    return "1 machine" if count == 1 else f"{count:,} machines"


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count:,} sessions"


def _pipelines(count: int) -> str:
    return "1 pipeline" if count == 1 else f"{count:,} pipelines"
