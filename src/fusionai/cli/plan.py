"""`fusion plan`: how a model would be cut over a pool, how fast it would run, and whether one machine would do better.

Decides how a plan reads; `scheduling.planner` decides the plan. Neighbours: `capture` gives the graph, `ir.cost` prices
it, `cli.pool_file` or the pool itself gives the machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.json_output import json_option, write_json
from fusionai.cli.options import home_option
from fusionai.cli.pool_file import PoolOnPaper, read_pool
from fusionai.cli.serving_options import ServingOptions, serving_options
from fusionai.client.serving_problem import serving_problem
from fusionai.ir.cost import block_costs
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.serving import serving_graph
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_bytes, format_seconds, format_speed
from fusionai.scheduling import planner
from fusionai.scheduling.guards import Guarding, guarding
from fusionai.scheduling.types import BlockCost, Plan, Problem, RolePlacement, StagePlacement


@click.command()
@click.argument("model")
@click.option(
    "--pool",
    "pool_file",
    type=click.Path(path_type=Path),
    metavar="POOL.toml",
    help="Machines as a file describes them.",
)
@click.option("--task", type=click.Choice(["train", "serve"]), default="train", show_default=True, help="What for.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows per step.")
@click.option("--microbatches", type=click.IntRange(min=1), default=8, show_default=True, help="Parts of a step.")
@click.option("--sequence", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per row.")
@click.option("--stages", type=click.IntRange(min=1), help="Exactly so many.  [default: the planner chooses]")
@click.option("--spares", type=click.IntRange(min=0), help="Keep so many peers free.")
@serving_options
@click.option(
    "--takeover",
    type=click.Choice(["exact", "tolerant"]),
    help="Whether a machine that computes other bits may guard a stage.  [default: exact; serve: tolerant]",
)
@home_option
@json_option
def plan(
    model: str,
    pool_file: Path | None,
    task: Literal["train", "serve"],
    batch: int,
    microbatches: int,
    sequence: int,
    stages: int | None,
    spares: int | None,
    served: ServingOptions,
    takeover: Literal["exact", "tolerant"] | None,
    home: Path,
    json_file: Path | None,
) -> None:
    """How MODEL would be cut over the pool of this machine, or over that of POOL.toml, and how fast it would run.

    MODEL: a configuration file (.json), a directory in Hugging Face layout, a hub id, or module:function.
    """
    if batch % microbatches:
        raise UsageError(f"{batch} rows can't be parted into {microbatches} equal microbatches.")
    pool = read_pool(pool_file) if pool_file is not None else _live_pool(home)
    rows = batch // microbatches
    graph = _captured(model, rows, sequence, training=task == "train")
    if task == "serve":
        problem = serving_problem(
            serving_graph(graph),
            pool.peers,
            pool.owner,
            served.needs(None),
            ends="pool" if pool.owner is None else served.ends,
            stages=stages,
            spares=spares,
            takeover=takeover or "tolerant",
        )
    else:
        problem = _problem(graph, pool, rows, microbatches, sequence, stages, spares, takeover or "exact")
    found = planner.plan(problem)
    names = {profile.peer: profile.name for profile in (*pool.peers, *((pool.owner,) if pool.owner else ()))}
    watch = guarding(found, problem)
    show_plan(found, names)
    _show_guards(watch, names)
    if json_file is not None:
        write_json(json_file, "plan", figures(watch, names))


def figures(watch: Guarding, names: dict[str, str]) -> dict[str, object]:
    """What `--json` writes."""
    found = watch.plan
    return {
        "stages": [
            {
                "peer": names.get(stage.peer, stage.peer),
                "blocks": list(stage.blocks),
                "roles": list(stage.roles),
                "compute_s": stage.compute_s,
                "send_s": stage.send_s,
                "memory_bytes": stage.memory_bytes,
                "memory_limit_bytes": stage.memory_limit_bytes,
                **_serving_part(found, stage),
            }
            for stage in found.stages
        ],
        "step_time_s": found.step_time_s,
        "tokens_per_s": found.tokens_per_s,
        "bound_tokens_per_s": found.certificate.bound_tokens_per_s,
        "optimality_gap": found.certificate.optimality_gap,
        "method": found.certificate.method,
        "bottleneck": found.bottleneck,
        "spares": [names.get(peer, peer) for peer in found.spares],
        "guards": [{"stage": guard.stage, "peer": names.get(guard.peer, guard.peer)} for guard in found.guards],
        "unguarded": [entry.stage for entry in watch.unguarded],
        "snapshot_every": found.snapshot_every,
        "excluded": [{"peer": names.get(entry.peer, entry.peer), "reason": entry.reason} for entry in found.excluded],
        "single_peer_tokens_per_s": found.single_peer_tokens_per_s,
        "warnings": list(found.warnings),
        "serving": found.serving,
    }


def _serving_part(found: Plan, stage: StagePlacement) -> dict[str, object]:
    if found.serving is None:
        return {}
    return {"weight_bytes": stage.weight_bytes, "cache_bytes": stage.cache_bytes}


def _live_pool(home: Path) -> PoolOnPaper:
    from fusionai.cli.session import pool_profiles

    return pool_profiles(home)


def _captured(model: str, rows: int, sequence: int, *, training: bool) -> Graph:
    from fusionai.capture.capture import capture
    from fusionai.capture.source import parse_source

    source = parse_source(model)
    return capture(source, batch=(1, max(rows, 2)), sequence=(1, max(sequence, 2)), train=training).graph


def _problem(
    graph: Graph,
    pool: PoolOnPaper,
    rows: int,
    microbatches: int,
    sequence: int,
    stages: int | None,
    spares: int | None,
    takeover: Literal["exact", "tolerant"],
) -> Problem:
    sizes = {"b": rows, "s": sequence}
    symbols = {name: sizes[name] for name in graph.symbols}
    costs = block_costs(graph, symbols, training=True)
    # Without a word about the owner's machine, nothing can be placed there.
    place: Literal["owner", "pool"] = "pool" if pool.owner is None else "owner"
    return Problem(
        graph_hash=content_hash(graph),
        blocks=tuple(BlockCost(**msgspec.structs.asdict(cost)) for cost in costs),
        peers=pool.peers,
        owner=pool.owner,
        roles=(RolePlacement(role="feed", place=place), RolePlacement(role="loss", place=place)),
        stages=stages,
        microbatches=microbatches,
        microbatch_tokens=rows * sequence,
        spares_wanted=spares,
        takeover=takeover,
    )


def show_plan(found: Plan, names: Mapping[str, str]) -> None:
    """For people: the stages, how fast, how good, who stands by."""
    rows = [
        (
            str(stage.stage),
            names.get(stage.peer, stage.peer),
            f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
            "+".join(stage.roles),
            format_seconds(stage.compute_s),
            format_seconds(stage.send_s),
            f"{format_bytes(stage.memory_bytes)} of {format_bytes(stage.memory_limit_bytes)}",
        )
        for stage in found.stages
    ]
    console.table(
        ("stage", "peer", "blocks", "roles", "compute", "send", "memory"),
        rows,
        title="Plan, per microbatch" if found.serving is None else "Plan, per token",
        right=(4, 5),
    )
    _show_speed(found)
    certificate = found.certificate
    if certificate.exact:
        console.line(f"Proven best ({certificate.method}).")
    else:
        console.line(
            f"At most {certificate.optimality_gap:.1%} below the best possible ({certificate.method}; bound "
            f"{format_speed(certificate.bound_tokens_per_s)} tokens/s)."
        )
    if found.single_peer_tokens_per_s is not None:
        console.line(f"One machine alone: {format_speed(found.single_peer_tokens_per_s)} tokens/s.")
    if found.spares:
        console.line(f"Standing by: {', '.join(names.get(peer, peer) for peer in found.spares)}.")
    for entry in found.excluded:
        console.line(f"Left out: {names.get(entry.peer, entry.peer)}: {entry.reason}.")
    for warning in found.warnings:
        console.warning(warning)


def _show_speed(found: Plan) -> None:
    sizes = found.serving
    if sizes is None:
        console.line(
            f"{format_speed(found.tokens_per_s)} tokens/s, a step of {found.microbatches} microbatches in "
            f"{format_seconds(found.step_time_s)}; slowest: {found.bottleneck}."
        )
        return
    console.line(
        f"One session: {format_speed(found.tokens_per_s)} tokens/s, a token in {format_seconds(found.step_time_s)}; "
        f"slowest: {found.bottleneck}."
    )
    console.line(
        f"{sizes.sessions} sessions together: {format_speed(sizes.tokens_per_s_together)} tokens/s with "
        f"{sizes.passes_in_flight} passes in flight."
    )
    console.line(
        f"Weights {sizes.weights}, cache {sizes.cache}: {sizes.pages} pages, {sizes.pages * sizes.page_tokens} tokens "
        f"(contexts of up to {sizes.context_tokens})."
    )


def _show_guards(watch: Guarding, names: dict[str, str]) -> None:
    """Who stands in for whom, and why nobody does where that is so."""
    for guard in watch.plan.guards:
        bits = "" if guard.exact else ", with other bits"
        console.line(f"Stage {guard.stage} is guarded by {names.get(guard.peer, guard.peer)}{bits}.")
    if watch.plan.guards:
        console.line(f"Snapshots: {watch.interval.reason}")
    for entry in watch.unguarded:
        reasons = "; ".join(f"{names.get(e.peer, e.peer)}: {e.reason.rstrip('.')}" for e in entry.reasons)
        console.line(f"Stage {entry.stage} is not guarded: {reasons or 'no peer stands by'}.")
