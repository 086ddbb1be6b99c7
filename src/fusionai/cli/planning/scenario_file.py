"""Reads the scenario file of `fusion simulate SCENARIO.toml`: model, pool, job, churn, links, recovery.

Defines the file's keys and their units. Paths in it are relative to the file. `cli.planning.pool_file` reads the pool
that it names, `cli.planning.request` builds the planner's problem, `simulator.scenario` has the types for churn and
timings, `cli.planning.simulate` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.cli.options import ServingOptions
from fusionai.cli.planning.pool_file import PoolOnPaper, read_pool, read_toml
from fusionai.cli.planning.request import Asked, problem_of
from fusionai.corpus.strict import convert
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import RecipeError, UsageError
from fusionai.primitives.units import parse_seconds, parse_share
from fusionai.scheduling.analysis.catalogue import Catalogue
from fusionai.scheduling.problem.types import BlockCost, Problem
from fusionai.scheduling.standby.continuation import Takeover, numerics
from fusionai.simulator.network import Weather
from fusionai.simulator.scenario import Churn, Scenario, Timings

_Count = Annotated[int, Meta(ge=1)]


class ScenarioJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The job. Training: `batch` rows per step in `microbatches`, `sequence` tokens per row. `compression`: factor by
    which fewer bytes cross a cut, in both directions. `checkpoint_every`: in steps, 0: never. Serving: `sessions` at a
    time, each of at most `context` tokens."""

    batch: _Count = 32
    microbatches: _Count = 32
    sequence: _Count = 512
    stages: _Count | None = None
    spares: Annotated[int, Meta(ge=0)] | None = None
    takeover: Takeover = "any"
    compression: Annotated[float, Meta(ge=1)] = 1.0
    checkpoint_every: Annotated[int, Meta(ge=0)] = 100
    sessions: _Count = 8
    context: Annotated[int, Meta(ge=2)] | None = None
    weights: Literal["fp32", "bf16", "fp16", "int8", "int4"] = "fp32"


class ChurnTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How machines come, go and freeze, as mean times and fractions. Events that are left out do not happen."""

    stay: str | None = None
    away: str = "30min"
    crashes: str = "50%"
    silent: str = "25%"
    freeze_every: str | None = None
    freeze: str = "10s"
    late: str = "0%"


class LinksTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Jitter and packet loss, in addition to the pool's bandwidths and latencies."""

    jitter: str = "0s"
    loss: str = "0%"


class RecoveryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Durations of recovery; `simulator.scenario.Timings` explains each."""

    notice: str | None = None
    silence: str | None = None
    plan: str | None = None
    journal: str | None = None
    grace: str | None = None
    patience: str | None = None


class ScenarioTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. `model`: as for `fusion plan`; `pool`: path of a pool file."""

    model: str
    pool: str
    task: Literal["train", "serve"] = "train"
    hours: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    seed: Annotated[int, Meta(ge=0)] = 1
    job: ScenarioJob = ScenarioJob()
    churn: ChurnTable = ChurnTable()
    links: LinksTable = LinksTable()
    recovery: RecoveryTable = RecoveryTable()


@dataclass(frozen=True, slots=True)
class ScenarioOnPaper:
    """A scenario that was read. `model`: its path resolved relative to the file, or its name."""

    table: ScenarioTable
    model: str
    pool: PoolOnPaper
    scenario: Scenario

    @property
    def asked(self) -> Asked:
        """Return the planning request: the pool's constraints, overridden by the job's."""
        job, wishes = self.table.job, self.pool.constraints
        return Asked(
            task=self.table.task,
            batch=job.batch,
            microbatches=job.microbatches,
            sequence=job.sequence,
            constraints=msgspec.structs.replace(
                wishes,
                stages=wishes.stages if job.stages is None else job.stages,
                spares=wishes.spares if job.spares is None else job.spares,
            ),
            takeover=numerics(job.takeover),
            served=ServingOptions(
                weights=job.weights, cache="fp32", context_tokens=job.context, sessions=job.sessions, ends="owner"
            ),
        )

    def problem(self, graph: Graph) -> Problem:
        """Return the planner's problem. `graph`: the graph of `model`, captured for the task."""
        problem = problem_of(graph, self.pool, self.asked)
        times = self.table.job.compression
        return msgspec.structs.replace(problem, blocks=tuple(_compressed(block, times) for block in problem.blocks))


def read_scenario(path: Path, catalogue: Catalogue | None = None) -> ScenarioOnPaper:
    """Return the scenario of a file. Raises `RecipeError` for an error in the file, `UsageError` for an unknown GPU."""
    table = convert(read_toml(path, "scenario"), ScenarioTable, path.name)
    job = table.job
    if job.batch % job.microbatches:
        raise RecipeError(
            f"{path.name}: a batch of {job.batch} rows is not divisible into {job.microbatches} equal microbatches.",
            hint="Choose a `batch` that is a multiple of `microbatches`.",
        )
    near = path.parent / table.model
    return ScenarioOnPaper(
        table=table,
        model=str(near) if near.exists() else table.model,
        pool=read_pool(path.parent / table.pool, catalogue),
        scenario=_scenario(table, path),
    )


def _scenario(table: ScenarioTable, path: Path) -> Scenario:
    return Scenario(
        hours=table.hours,
        seed=table.seed,
        checkpoint_every=table.job.checkpoint_every,
        takeover=table.job.takeover,
        churn=Churn(**_quantities(table.churn, "churn", path)),
        timings=Timings(**_quantities(table.recovery, "recovery", path)),
        weather=Weather(**_quantities(table.links, "links", path)),
    )


_SHARES: Final = ("crashes", "silent", "late", "loss")


def _quantities(table: msgspec.Struct, kind: str, path: Path) -> dict[str, float]:
    """Return the values of a table's texts: shares by their name, durations by their name with `_s`."""
    found: dict[str, float] = {}
    for name, text in msgspec.structs.asdict(table).items():
        if text is not None and name in _SHARES:
            found[name] = _part(text, f"{kind}.{name}", path)
        elif text is not None:
            found[f"{name}_s"] = _time(text, f"{kind}.{name}", path, least=kind == "churn")
    return found


def _time(text: str, key: str, path: Path, *, least: bool) -> float:
    """Parse a duration in seconds; with `least` it must be above zero. Raises `RecipeError`."""
    try:
        seconds = parse_seconds(text)
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: {key}: {wrong.message}") from None
    if seconds < 0 or (least and seconds == 0):
        raise RecipeError(f"{path.name}: {key}: expected {'more than' if least else 'at least'} 0 s, got {text!r}.")
    return seconds


def _part(text: str, key: str, path: Path) -> float:
    """Parse a fraction from 0 to 1; the loss of links must be below 1. Raises `RecipeError`."""
    if text.strip() in ("0", "0%"):
        return 0.0
    try:
        part = parse_share(text)
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: {key}: {wrong.message}") from None
    if key == "links.loss" and part >= 1:
        raise RecipeError(f"{path.name}: {key}: expected a loss below 100%, got {text}.")
    return part


def _compressed(block: BlockCost, times: float) -> BlockCost:
    return msgspec.structs.replace(
        block, output_bytes=round(block.output_bytes / times), gradient_bytes=round(block.gradient_bytes / times)
    )
