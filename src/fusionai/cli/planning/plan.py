"""`fusion plan`: shows how a model would be split over a pool, its speed, and whether one machine alone is faster.

Turns flags into the planner's problem; `scheduling.planner` makes the plan. `capture` supplies the graph, `ir.cost` its
costs, `cli.planning.pool_file` or the live pool the machines. `cli.planning.report` presents the result;
`cli.planning.request` suggests changes if there is no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import click
import msgspec
from click.core import ParameterSource

from fusionai.cli import options as flags
from fusionai.cli.options import ServingOptions, write_json
from fusionai.cli.planning.pool_file import (
    ConstraintsTable,
    PoolOnPaper,
    catalogue_option,
    read_catalogue,
    read_pool,
    resolve,
)
from fusionai.cli.planning.report import PlanReport
from fusionai.cli.planning.request import Asked, Change, captured, problem_of, what_would_fit
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import PlanError, UsageError
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.tensors import tensor_bytes
from fusionai.primitives.units import format_speed
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.types import Plan, Problem, SavingMode
from fusionai.scheduling.standby.continuation import numerics
from fusionai.scheduling.training import replicated
from fusionai.wire.codecs import Compression

FASTER: Final = 1.01
"""Least speed-up without the user's constraints that gives a warning (chosen)."""


_TASKS: Final = ("train", "serve")


@click.command()
@click.argument("model")
@flags.path_option(
    "--pool",
    "POOL.toml",
    "Plan for the machines of this file.  [default: the pool that this machine has joined]",
    name="pool_file",
)
@flags.choice_option("--task", "Plan for this task.", _TASKS, "train")
@flags.number_option("--batch", "Rows per training step.", 8, 1, metavar=None)
@flags.number_option("--microbatches", "Microbatches per training step.", 8, 1, metavar=None)
@flags.number_option("--sequence", "Tokens per row.", 256, 1, metavar=None)
@flags.choice_option(
    "--compression",
    "Compress activations and gradients between the stages of a training job.",
    get_args(Compression),
    "none",
)
@flags.choice_option(
    "--precision",
    "Format of a training job's matrix products. In bf16 more results depend on the cut; the plan says which.",
    ["fp32", "bf16"],
    "fp32",
)
@flags.lora_option
@flags.choice_option(
    "--base",
    "With --lora: keep the weights that are not trained in this format, as `base` in a recipe's [adapter].",
    ["fp32", "bf16", "int8", "int4"],
    "fp32",
)
@flags.choice_option(
    "--recompute",
    "Recompute activations in the backward pass of training stages instead of keeping them.",
    get_args(SavingMode),
    "auto",
)
@flags.choice_option(
    "--offload", "Keep optimizer state in files on the stages' machines.", get_args(SavingMode), "auto"
)
@flags.choice_option(
    "--offload-weights",
    "Keep weights in files on the stages' machines until a block needs them.",
    get_args(SavingMode),
    "auto",
)
@click.option(
    "--replicas",
    type=flags.WordOrCount(["auto"], "expected a whole number of at least 1, or auto; got {!r}."),
    default="1",
    show_default=True,
    metavar="N|auto",
    help="Split each training step over N pipelines that sum their gradients; auto: the fastest number.",
)
@flags.stages_option(" (per replica)")
@flags.number_option("--spares", "Keep this many peers free as spares.", None, 0, metavar=None)
@click.option("--require", multiple=True, metavar="PEER", help="Use this peer. May be repeated.")
@click.option("--exclude", multiple=True, metavar="PEER", help="Don't use this peer. May be repeated.")
@flags.serving_options
@click.option(
    "--least-speed",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS/S",
    help="With --task serve: least speed of a session in the estimate for several pipelines.  [default: half of what a "
    "single session gets]",
)
@flags.choice_option(
    "--takeover",
    "Allow warm standbys with other numerics, which would continue with slightly different results; `exact`: never.",
    ["any", "exact", "tolerant"],
    "any",
)
@click.option("--details", is_flag=True, help="Also show stages, proof, standbys, cost and what was assumed.")
@flags.path_option(
    "--picture",
    "FILE.svg",
    "Also draw the plan into this file, and the estimated layout with replicas into FILE-replicas.svg.",
    name="picture_file",
    dir_okay=False,
)
@catalogue_option
@flags.home_option
@flags.json_option
def plan(
    model: str,
    pool_file: Path | None,
    task: Literal["train", "serve"],
    stages: int | None,
    spares: int | None,
    require: tuple[str, ...],
    exclude: tuple[str, ...],
    served: ServingOptions,
    least_speed: float | None,
    takeover: Literal["any", "exact", "tolerant"],
    details: bool,
    picture_file: Path | None,
    catalogue_file: Path | None,
    home: Path,
    json_file: Path | None,
    **of_training: Any,
) -> None:
    """Show how MODEL would be split over this machine's pool, or over the machines of POOL.toml, and how fast it would
    run. Nothing is started. MODEL: a configuration file (.json), a directory in Hugging Face layout, a hub id, or
    module:function."""
    _check_flags(task, of_training)
    if picture_file is not None and picture_file.suffix != ".svg":
        raise UsageError(f"--picture: expected a name that ends in .svg, got {picture_file.name}.")
    if catalogue_file is not None and pool_file is None:
        raise UsageError("--catalogue needs --pool POOL.toml: the machines of a live pool are measured.")
    catalogue = read_catalogue(catalogue_file)
    if pool_file is not None:
        pool = read_pool(pool_file, catalogue)
    else:
        from fusionai.cli.pool.session import pool_profiles

        pool = pool_profiles(home, trusted=served.privacy == "trusted")
    asked = Asked(
        task=task,
        constraints=_constraints(pool, stages, spares, require, exclude),
        takeover=numerics(takeover),
        served=served,
        privacy=_level(served, pool),
        **of_training,
    )
    graph = captured(model, asked, home)
    problem = paced(problem_of(graph, pool, asked))
    smaller = list(_smaller(graph, pool, asked, lambda other: captured(model, other, home)))
    found = _planned(problem, pool, smaller)
    problem = replicated.with_replicas(problem, found.replicas)
    found = msgspec.structs.replace(
        found,
        warnings=(*found.warnings, *_constraint_warnings(found, problem), *_unused_flags(task), *_anew(problem, graph)),
        excluded=(*found.excluded, *pool.absent),
    )
    report = PlanReport.of(found, problem, graph, pool, asked, least_speed)
    report.show(details=details)
    if picture_file is not None:
        report.draw(picture_file)
    write_json(json_file, "plan", report.figures())


_ONLY_IN_TRAINING: Final = {
    "compression": "none",
    "recompute": "auto",
    "offload": "auto",
    "offload_weights": "auto",
    "precision": "fp32",
    "lora": None,
    "base": "fp32",
    "replicas": 1,
}
"""Flags that have no meaning with --task serve, with their defaults."""
_UNUSED: Final = {
    "serve": ("batch", "microbatches", "sequence"),
    "train": ("weights", "cache", "context_tokens", "sessions", "least_speed"),
}
"""Task -> parameters of the command that its plans do not depend on. They are accepted, so that one command line can
serve for both tasks."""


def _check_flags(task: Literal["train", "serve"], given: Mapping[str, object]) -> None:
    """Raise `UsageError` for flags of a training job that contradict each other or the task."""
    batch, microbatches = given["batch"], given["microbatches"]
    assert isinstance(batch, int)
    assert isinstance(microbatches, int)
    if task == "train" and batch % microbatches:
        raise UsageError(
            f"--batch {batch} is not divisible into {microbatches} equal microbatches (--microbatches).",
            hint="Choose a batch that is a multiple of the number of microbatches.",
        )
    for name, default in _ONLY_IN_TRAINING.items():
        if task == "serve" and given[name] != default:
            flag = f"--{name.replace('_', '-')}"
            instead = "Use --weights for a served model." if name in ("precision", "base") else f"Leave {flag} out."
            raise UsageError(f"{flag} is for --task train.", hint=instead)
    if given["base"] != "fp32" and given["lora"] is None:
        raise UsageError(
            f"--base {given['base']} is for the weights that are not trained, but without --lora all are trained.",
            hint="Add --lora RANK, or leave --base out.",
        )
    if given["offload_weights"] == "always" and given["recompute"] == "never":
        raise UsageError(
            "--offload-weights always needs recomputed activations, but --recompute is never.",
            hint="Use --recompute auto or always.",
        )


def _unused_flags(task: Literal["train", "serve"]) -> Iterator[str]:
    """Yield a sentence per flag that was given although plans for this task do not depend on it."""
    context = click.get_current_context()
    for flag in context.command.params:
        given = flag.name is not None and context.get_parameter_source(flag.name) is ParameterSource.COMMANDLINE
        if given and flag.name in _UNUSED[task]:
            yield f"{flag.opts[0]} has no effect on a plan for --task {task}."


def _anew(problem: Problem, graph: Graph) -> Iterator[str]:
    if problem.serving is not None and problem.serving.whole:
        yield f"{graph.name} can't use caches: the whole text is recomputed for every token, half a context on average."


def _level(served: ServingOptions, pool: PoolOnPaper) -> PrivacyLevel:
    """Return the privacy level asked for. Without one, embedding and head stay with the owner, unless the pool's file
    does not describe the owner's machine or places feed or loss in the pool."""
    ends_in_pool = pool.owner is None or "pool" in (pool.constraints.loss, pool.constraints.feed)
    return served.privacy if served.asked is not None or not ends_in_pool else "encrypted"


def _planned(problem: Problem, pool: PoolOnPaper, smaller: Sequence[Change]) -> Plan:
    """Return the plan. Raises `PlanError`, with the changes that would give a plan if there are any. `smaller`:
    requests that need less memory."""
    try:
        return replicated.plan(problem)
    except PlanError as refusal:
        changes = what_would_fit(problem, smaller)
        absent = f" Not connected: {', '.join(entry.peer for entry in pool.absent)}." if pool.absent else ""
        if not changes:
            raise PlanError(refusal.message, hint=f"{refusal.hint or ''}{absent}".strip() or None) from refusal
        raise PlanError(refusal.message, hint=f"There is a plan {', or '.join(changes)}.{absent}") from refusal


_RANK: Final = 16
"""Rank of the adapters that are tried if the whole model can't be trained (chosen)."""


def _smaller(graph: Graph, pool: PoolOnPaper, asked: Asked, again: Callable[[Asked], Graph]) -> Iterator[Change]:
    """Yield changes of the request that need less memory. `again` captures the model for another request."""

    def changed(words: str, smaller: Asked) -> Change:
        return Change(words=words, problem=lambda: problem_of(graph, pool, smaller))

    served = asked.served
    if asked.task == "serve":
        for weights in ("int8", "int4"):
            if served.weights not in ("int4", weights):
                yield changed(f"with --weights {weights}", replace(asked, served=replace(served, weights=weights)))
        context = served.needs(None).context_tokens // 4
        if context >= 2:
            yield changed(f"with --context {context}", replace(asked, served=replace(served, context_tokens=context)))
        return
    for name in ("recompute", "offload", "offload_weights"):
        if getattr(asked, name) == "never":
            yield changed(f"with --{name.replace('_', '-')} auto", replace(asked, **{name: "auto"}))
    if asked.rows > 1:
        yield changed(f"with --microbatches {asked.batch}", replace(asked, microbatches=asked.batch))
    if asked.sequence > 1:
        half = asked.sequence // 2
        yield changed(f"with --sequence {half}", replace(asked, sequence=half))
    if asked.base in ("fp32", "bf16"):
        yield from _adapted(graph, pool, asked, again)


def _adapted(graph: Graph, pool: PoolOnPaper, asked: Asked, again: Callable[[Asked], Graph]) -> Iterator[Change]:
    """Yield the training of adapters. Their base has 4 bits if adapters were asked for already, or if the lent memory
    can't hold the model as it is."""
    whole_bytes = sum(tensor_bytes(spec.dtype, spec.shape) for spec in graph.params.values())
    lent_bytes = sum(peer.memory_bytes for peer in pool.peers)
    adapted = replace(asked, lora=_RANK if asked.lora is None else asked.lora)
    words = f"with --lora {adapted.lora}"
    if asked.lora is not None or whole_bytes > lent_bytes:
        adapted = replace(adapted, base="int4")
        words += " --base int4"
    yield Change(words=words, problem=lambda: problem_of(again(adapted), pool, adapted))


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
