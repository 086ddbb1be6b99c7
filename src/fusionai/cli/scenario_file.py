"""A scenario written down by hand, for `fusion simulate SCENARIO.toml`: model, pool, job, churn, links, recovery.

Decides the file's keys and their units. Paths in it are relative to it. Neighbours: `pool_file` reads the pool it
names, `asked` makes a problem of it, `simulator.scenario` has what its churn becomes, `cli.simulate` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fusionai.cli.asked import Asked, problem_of
from fusionai.cli.catalogue_file import read_toml
from fusionai.cli.pool_file import PoolOnPaper, read_pool
from fusionai.cli.serving_options import ServingOptions
from fusionai.corpus.strict import convert
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import RecipeError, UsageError
from fusionai.primitives.units import parse_seconds, parse_share
from fusionai.scheduling.catalogue import Catalogue
from fusionai.scheduling.going_on import Takeover, numerics
from fusionai.scheduling.types import BlockCost, Problem
from fusionai.simulator.network import Weather
from fusionai.simulator.scenario import Churn, Scenario, Timings

_Count = Annotated[int, Meta(ge=1)]


class JobTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training: rows per step, their parts, tokens per row. `compression`: so many times fewer bytes cross a cut, both
    ways. `checkpoint_every`: steps, 0: never. Serving: `sessions` at a time, of at most `context` tokens."""

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
    """Mean times; what is left out does not happen."""

    stay: str | None = None
    away: str = "30min"
    crashes: str = "50%"
    silent: str = "25%"
    freeze_every: str | None = None
    freeze: str = "10s"
    late: str = "0%"


class LinksTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """On top of the pool's bandwidths and latencies."""

    jitter: str = "0s"
    loss: str = "0%"


class RecoveryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See `simulator.scenario.Timings`."""

    notice: str | None = None
    silence: str | None = None
    plan: str | None = None
    journal: str | None = None
    grace: str | None = None
    patience: str | None = None


class ScenarioTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. `model`: as for `fusion plan`; `pool`: a pool file."""

    model: str
    pool: str
    task: Literal["train", "serve"] = "train"
    hours: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    seed: Annotated[int, Meta(ge=0)] = 1
    job: JobTable = JobTable()
    churn: ChurnTable = ChurnTable()
    links: LinksTable = LinksTable()
    recovery: RecoveryTable = RecoveryTable()


@dataclass(frozen=True, slots=True)
class ScenarioOnPaper:
    """`model`: where it is, seen from here."""

    table: ScenarioTable
    model: str
    pool: PoolOnPaper
    scenario: Scenario

    @property
    def asked(self) -> Asked:
        """As flags would say it: the pool's constraints, with the job's own over them."""
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
        """What is to be planned. `graph`: of `model`, for the task."""
        problem = problem_of(graph, self.pool, self.asked)
        times = self.table.job.compression
        return msgspec.structs.replace(problem, blocks=tuple(_compressed(block, times) for block in problem.blocks))


def read_scenario(path: Path, catalogue: Catalogue | None = None) -> ScenarioOnPaper:
    """Raises `RecipeError` with one sentence that says what to mend, `UsageError` on a GPU nobody knows."""
    table = convert(read_toml(path, "scenario"), ScenarioTable, path.name)
    job = table.job
    if job.batch % job.microbatches:
        raise RecipeError(
            f"{path.name}: {job.batch} rows can't be parted into {job.microbatches} equal microbatches.",
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
    churn, links, recovery = table.churn, table.links, table.recovery
    times = {f"{name}_s": (name, value) for name, value in msgspec.structs.asdict(recovery).items() if value}
    defaults = Churn()
    return Scenario(
        hours=table.hours,
        seed=table.seed,
        checkpoint_every=table.job.checkpoint_every,
        takeover=table.job.takeover,
        churn=Churn(
            stay_s=defaults.stay_s if churn.stay is None else _time(churn.stay, "churn.stay", path),
            away_s=_time(churn.away, "churn.away", path),
            crashes=_part(churn.crashes, "churn.crashes", path),
            silent=_part(churn.silent, "churn.silent", path),
            freeze_every_s=(
                defaults.freeze_every_s
                if churn.freeze_every is None
                else _time(churn.freeze_every, "churn.freeze_every", path)
            ),
            freeze_s=_time(churn.freeze, "churn.freeze", path),
            late=_part(churn.late, "churn.late", path),
        ),
        timings=Timings(
            **{field: _time(value, f"recovery.{name}", path, least=False) for field, (name, value) in times.items()}
        ),
        weather=Weather(
            jitter_s=_time(links.jitter, "links.jitter", path, least=False),
            loss=_part(links.loss, "links.loss", path),
        ),
    )


def _time(text: str, key: str, path: Path, *, least: bool = True) -> float:
    """Seconds; `least`: more than none."""
    try:
        seconds = parse_seconds(text)
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: {key}: {wrong.message}") from None
    if seconds < 0 or (least and seconds == 0):
        raise RecipeError(f"{path.name}: {key}: expected {'more than' if least else 'at least'} 0 s, got {text!r}.")
    return seconds


def _part(text: str, key: str, path: Path) -> float:
    """In [0, 1)."""
    if text.strip() in ("0", "0%"):
        return 0.0
    try:
        part = parse_share(text)
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: {key}: {wrong.message}") from None
    if key == "links.loss" and part >= 1:
        raise RecipeError(f"{path.name}: {key}: nothing arrives over a link that loses {text}.")
    return part


def _compressed(block: BlockCost, times: float) -> BlockCost:
    return msgspec.structs.replace(
        block, output_bytes=round(block.output_bytes / times), gradient_bytes=round(block.gradient_bytes / times)
    )
