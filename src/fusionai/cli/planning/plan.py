"""`fusion plan`: shows how a model would be split over a pool, its speed, and whether one machine alone is faster.

Turns flags into the planner's problem; `scheduling.planner` makes the plan. `capture` supplies the graph, `ir.cost` its
costs, `cli.planning.pool_file` or the live pool the machines. `cli.planning.view` and `cli.planning.figures` present
the result; `cli.planning.request` suggests changes if there is no plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, get_args

import click
import msgspec

from fusionai.backends.state import trained
from fusionai.cli import console
from fusionai.cli.options import HowMany, home_option, json_option, lora_option, write_json
from fusionai.cli.planning.alternatives import apart, apart_figures, show_apart, show_lines
from fusionai.cli.planning.figures import figures
from fusionai.cli.planning.pool_file import (
    ConstraintsTable,
    PoolOnPaper,
    catalogue_option,
    read_catalogue,
    read_pool,
    resolve,
)
from fusionai.cli.planning.request import Asked, Change, captured, problem_of, what_would_fit
from fusionai.cli.planning.view import (
    privacy_figures,
    privacy_lines,
    show_expense,
    show_guards,
    show_picture,
    show_plan,
)
from fusionai.cli.serving.options import MOST_SESSIONS, ServingOptions, serving_options
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import PlanError, UsageError
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.units import format_speed
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.stage_costs import Crossing, StageCosts, crossings
from fusionai.scheduling.problem.types import Lever, PeerProfile, Plan, Problem
from fusionai.scheduling.serving.parallel import ManyLines, many_lines
from fusionai.scheduling.standby.assignment import guarding
from fusionai.scheduling.standby.continuation import numerics
from fusionai.scheduling.token_cost import expense
from fusionai.scheduling.training import replicated
from fusionai.scheduling.training.replicated import lighter
from fusionai.wire.codecs import Compression
from fusionai.wire.messages import OptimizerSpec

FASTER: Final = 1.01
"""Least speed-up without the user's constraints that gives a warning (chosen)."""


@click.command()
@click.argument("model")
@click.option(
    "--pool",
    "pool_file",
    type=click.Path(path_type=Path),
    metavar="POOL.toml",
    help="Plan for the machines of this file.  [default: the pool that this machine has joined]",
)
@click.option(
    "--task", type=click.Choice(["train", "serve"]), default="train", show_default=True, help="Plan for this task."
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows per training step.")
@click.option(
    "--microbatches", type=click.IntRange(min=1), default=8, show_default=True, help="Microbatches per training step."
)
@click.option("--sequence", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per row.")
@click.option(
    "--compression",
    type=click.Choice(get_args(Compression)),
    default="none",
    show_default=True,
    help="Compress activations and gradients between the stages of a training job.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Format of a training job's matrix products. In bf16 more results depend on the cut; the plan says which.",
)
@lora_option
@click.option(
    "--recompute",
    type=click.Choice(get_args(Lever)),
    default="auto",
    show_default=True,
    help="Recompute activations in the backward pass of training stages instead of keeping them.",
)
@click.option(
    "--offload",
    type=click.Choice(get_args(Lever)),
    default="auto",
    show_default=True,
    help="Keep optimizer state in files on the stages' machines.",
)
@click.option(
    "--offload-weights",
    type=click.Choice(get_args(Lever)),
    default="auto",
    show_default=True,
    help="Keep weights in files on the stages' machines until a block needs them.",
)
@click.option(
    "--replicas",
    type=HowMany(),
    default="1",
    show_default=True,
    metavar="N|auto",
    help="Split each training step over N pipelines that sum their gradients; auto: the fastest number.",
)
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    help="Use exactly this many stages per replica.  [default: the planner chooses]",
)
@click.option("--spares", type=click.IntRange(min=0), help="Keep this many peers free as spares.")
@click.option("--require", multiple=True, metavar="PEER", help="Use this peer. May be repeated.")
@click.option("--exclude", multiple=True, metavar="PEER", help="Don't use this peer. May be repeated.")
@serving_options
@click.option(
    "--least-speed",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS/S",
    help="With --task serve: least speed of a session in the estimate for several pipelines.  [default: half of what a "
    "single session gets]",
)
@click.option(
    "--takeover",
    type=click.Choice(["any", "exact", "tolerant"]),
    default="any",
    show_default=True,
    help="Allow warm standbys with other numerics, which would continue with slightly different results; `exact`: "
    "never.",
)
@click.option(
    "--picture",
    "picture_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Also draw the plan into this file, and the estimated layout with replicas into FILE-replicas.svg.",
)
@catalogue_option
@home_option
@json_option
def plan(
    model: str,
    pool_file: Path | None,
    task: Literal["train", "serve"],
    batch: int,
    microbatches: int,
    sequence: int,
    compression: Compression,
    precision: Literal["fp32", "bf16"],
    lora: int | None,
    recompute: Lever,
    offload: Lever,
    offload_weights: Lever,
    replicas: int | Literal["auto"],
    stages: int | None,
    spares: int | None,
    require: tuple[str, ...],
    exclude: tuple[str, ...],
    served: ServingOptions,
    least_speed: float | None,
    takeover: Literal["any", "exact", "tolerant"],
    picture_file: Path | None,
    catalogue_file: Path | None,
    home: Path,
    json_file: Path | None,
) -> None:
    """Show how MODEL would be split over this machine's pool, or over the machines of POOL.toml, and how fast it would
    run. Nothing is started.

    MODEL: a configuration file (.json), a directory in Hugging Face layout, a hub id, or module:function.
    """
    if batch % microbatches:
        raise UsageError(f"--batch {batch} is not divisible into {microbatches} equal microbatches (--microbatches).")
    if picture_file is not None and picture_file.suffix != ".svg":
        raise UsageError(f"--picture: expected a name that ends in .svg, got {picture_file.name}.")
    if catalogue_file is not None and pool_file is None:
        raise UsageError("--catalogue needs --pool POOL.toml: the machines of a live pool are measured.")
    if task == "serve" and compression != "none":
        raise UsageError("--compression is for --task train.")
    levers = {"--recompute": recompute, "--offload": offload, "--offload-weights": offload_weights}
    for flag, value in levers.items():
        if task == "serve" and value != "auto":
            raise UsageError(f"{flag} is for --task train.")
    if offload_weights == "always" and recompute == "never":
        raise UsageError(
            "--offload-weights always needs recomputed activations, but --recompute is never.",
            hint="Use --recompute auto or always.",
        )
    if task == "serve" and precision != "fp32":
        raise UsageError("--precision is for --task train.", hint="Use --weights for a served model.")
    if task == "serve" and lora is not None:
        raise UsageError("--lora is for --task train.")
    if task == "serve" and replicas != 1:
        raise UsageError("--replicas is for --task train.")
    catalogue = read_catalogue(catalogue_file)
    pool = (
        read_pool(pool_file, catalogue)
        if pool_file is not None
        else _live_pool(home, trusted=served.privacy == "trusted")
    )
    asked = Asked(
        task=task,
        batch=batch,
        microbatches=microbatches,
        sequence=sequence,
        constraints=_constraints(pool, stages, spares, require, exclude),
        takeover=numerics(takeover),
        served=served,
        compression=compression,
        precision=precision,
        recompute=recompute,
        offload=offload,
        offload_weights=offload_weights,
        replicas=replicas,
        privacy=_level(served, pool),
        lora=lora,
    )
    graph = captured(model, asked, home)
    problem = paced(problem_of(graph, pool, asked))
    found = _planned(problem, graph, pool, asked)
    problem = replicated.with_replicas(problem, found.replicas)
    found = msgspec.structs.replace(
        found,
        warnings=(*found.warnings, *_constraint_warnings(found, problem)),
        excluded=(*found.excluded, *pool.absent),
    )
    names = {profile.peer: profile.name or profile.peer for profile in _everyone(pool)}
    beside = many_lines(problem, found, MOST_SESSIONS, least_speed) if task == "serve" else None
    watch = guarding(found, problem)
    between = crossings(found, StageCosts(problem, found))
    cost = expense(found, _everyone(pool), pool.prices)
    show_picture(found, between, names)
    show_plan(found, names)
    learning = None if task == "serve" else trained(graph, OptimizerSpec())
    if learning is not None:
        console.line(f"With AdamW, {learning.words}")
    for sentence in privacy_lines(asked.privacy, found):
        console.line(sentence)
    show_guards(watch, names)
    show_expense(cost, names)
    smaller = lighter(problem, found)
    if smaller:
        offers = (
            f"--compression {one.compression} at least {format_speed(one.tokens_per_s)} tokens/s "
            f"({one.tokens_per_s / found.tokens_per_s:.2g} x)"
            for one in smaller
        )
        console.line(f"Links are the bottleneck: with {', '.join(offers)}; each raises the loss slightly.")
    assumed = (*pool.assumed, *_unknown_bandwidths(found, pool))
    for sentence in assumed:
        console.line(f"Assumed: {sentence}")
    if beside is not None:
        show_lines(beside, found, names)
    separate = apart(problem, found) if found.replicas == 1 else None
    if separate is not None:
        show_apart(separate, found, names)
    if picture_file is not None:
        _draw(picture_file, found, between, names)
        if beside is not None:
            _draw_beside(picture_file.with_name(f"{picture_file.stem}-replicas.svg"), beside)
    if json_file is not None:
        written = figures(watch, names, between, cost, assumed, beside)
        packed = [{"compression": one.compression, "tokens_per_s": one.tokens_per_s} for one in smaller]
        write_json(
            json_file,
            "plan",
            {
                **written,
                "privacy": privacy_figures(asked.privacy, found),
                "trained": learning,
                "compression": compression,
                "codecs": list(found.codecs),
                "lighter": packed,
                "local_updates": apart_figures(separate, names),
            },
        )


def _level(served: ServingOptions, pool: PoolOnPaper) -> PrivacyLevel:
    """Return the privacy level asked for. Without one, embedding and head stay with the owner, unless the pool's file
    does not describe the owner's machine or places feed or loss in the pool."""
    apart = pool.owner is None or "pool" in (pool.constraints.loss, pool.constraints.feed)
    return served.privacy if served.asked is not None or not apart else "encrypted"


def _planned(problem: Problem, graph: Graph, pool: PoolOnPaper, asked: Asked) -> Plan:
    """Return the plan. Raises `PlanError`, with the changes that would give a plan if there are any."""
    try:
        return replicated.plan(problem)
    except PlanError as refusal:
        changes = what_would_fit(problem, list(_smaller(graph, pool, asked)))
        absent = f" Not connected: {', '.join(entry.peer for entry in pool.absent)}." if pool.absent else ""
        if not changes:
            raise PlanError(refusal.message, hint=f"{refusal.hint or ''}{absent}".strip() or None) from refusal
        raise PlanError(refusal.message, hint=f"There is a plan {', or '.join(changes)}.{absent}") from refusal


def _smaller(graph: Graph, pool: PoolOnPaper, asked: Asked) -> Iterator[Change]:
    """Yield changes of the request that need less memory."""

    def changed(words: str, smaller: Asked) -> Change:
        return Change(words=words, problem=lambda: problem_of(graph, pool, smaller))

    if asked.task == "serve":
        for weights in ("int8", "int4"):
            if asked.served.weights not in ("int4", weights):
                yield changed(
                    f"with --weights {weights}", replace(asked, served=replace(asked.served, weights=weights))
                )
        context = asked.served.needs(None).context_tokens // 4
        if context >= 2:
            shorter = replace(asked.served, context_tokens=context)
            yield changed(f"with --context {context}", replace(asked, served=shorter))
        return
    if asked.recompute == "never":
        yield changed("with --recompute auto", replace(asked, recompute="auto"))
    if asked.offload == "never":
        yield changed("with --offload auto", replace(asked, offload="auto"))
    if asked.offload_weights == "never":
        yield changed("with --offload-weights auto", replace(asked, offload_weights="auto"))
    if asked.rows > 1:
        yield changed(f"with --microbatches {asked.batch}", replace(asked, microbatches=asked.batch))
    if asked.sequence > 1:
        half = asked.sequence // 2
        yield changed(f"with --sequence {half}", replace(asked, sequence=half))


def _constraint_warnings(found: Plan, problem: Problem) -> Iterator[str]:
    """Yield a warning if the plan would be faster without the user's constraints."""
    wishes = {"required": problem.required, "pinned": problem.pinned, "spares": problem.spares_wanted}
    asked = [name for name, given in wishes.items() if given]
    if not asked:
        return
    free = replicated.plan(msgspec.structs.replace(problem, required=(), pinned={}, spares_wanted=None))
    if free.tokens_per_s > found.tokens_per_s * FASTER:
        used = len({stage.peer for stage in free.stages if "stage" in stage.roles})
        without = " and ".join(f"`{name}`" for name in asked)
        yield (
            f"Without {without} it would be faster: {format_speed(free.tokens_per_s)} tokens/s on {used} "
            f"{'peer' if used == 1 else 'peers'} instead of {format_speed(found.tokens_per_s)}."
        )


def _unknown_bandwidths(found: Plan, pool: PoolOnPaper) -> Iterator[str]:
    """Yield a sentence about machines without a known memory bandwidth, which mostly limits generation: they look too
    fast."""
    used = {stage.peer for stage in found.stages}
    blind = [
        peer.name or peer.peer
        for peer in _everyone(pool)
        if peer.peer in used and not peer.memory_bandwidth_bytes_per_s > 0
    ]
    if found.task == "serve" and blind:
        yield (
            f"{', '.join(dict.fromkeys(blind))}: no memory bandwidth is given, so only arithmetic is counted; real "
            "machines are slower."
        )


def _constraints(
    pool: PoolOnPaper, stages: int | None, spares: int | None, require: tuple[str, ...], exclude: tuple[str, ...]
) -> ConstraintsTable:
    """Return the constraints of the pool file, with those of the flags added or replaced."""
    table = pool.constraints
    required = (*table.required, *resolve(require, pool.peers, "--require"))
    excluded = (*table.excluded, *resolve(exclude, pool.peers, "--exclude"))
    both = sorted(set(required) & set(excluded))
    if both:
        raise UsageError(f"peer {both[0]!r} is both required and excluded.")
    return msgspec.structs.replace(
        table,
        required=tuple(dict.fromkeys(required)),
        excluded=tuple(dict.fromkeys(excluded)),
        stages=table.stages if stages is None else stages,
        spares=table.spares if spares is None else spares,
    )


def _live_pool(home: Path, *, trusted: bool) -> PoolOnPaper:
    from fusionai.cli.pool.session import pool_profiles

    return pool_profiles(home, trusted=trusted)


def _everyone(pool: PoolOnPaper) -> tuple[PeerProfile, ...]:
    return (*pool.peers, *((pool.owner,) if pool.owner is not None else ()))


def _draw(path: Path, found: Plan, between: tuple[Crossing, ...], names: Mapping[str, str]) -> None:
    from fusionai.dashboard.plan_chart import plan_picture
    from fusionai.storage.atomic import write_atomic

    write_atomic(path, plan_picture(found, between, names).encode())
    console.line(f"Written: {path}.")


def _draw_beside(path: Path, beside: ManyLines) -> None:
    from fusionai.dashboard.plan_chart import lines_picture
    from fusionai.storage.atomic import write_atomic

    write_atomic(path, lines_picture(beside).encode())
    console.line(f"Written: {path}.")
