"""Reads a job's recipe, a TOML file, strictly into a frozen `Recipe`. Decides which settings can be combined.

Relative paths are relative to the recipe's directory, so that a job resumes from any working directory. No setting is
ignored: a key without effect is refused. Neighbours: `tables` has the structs, `strict` the error messages, `source`
opens the data that a recipe names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from fusionai.corpus import tables as spec
from fusionai.corpus.recipe_checks import RecipeChecks
from fusionai.corpus.schedule import TIMES
from fusionai.corpus.strict import convert
from fusionai.primitives.errors import RecipeError
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.units import format_count
from fusionai.wire.messages import OptimizerSpec


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checked recipe. `path`: the file it came from; `directory`: absolute directory for the job's output.
    `evaluation` is None if no part of the data is kept for it, `replicas` if there are no local updates; `summed`:
    number of pipelines whose gradients are summed at every step."""

    path: str
    directory: str
    job: spec.JobTable
    model: spec.Model
    data: spec.Data
    train: spec.Train
    adapter: spec.Adapter | None = None
    evaluation: spec.EvaluationTable | None
    placement: spec.PlacementTable
    faults: spec.FaultsTable
    replicas: spec.Replicas | None = None
    summed: int | Literal["auto"] = 1
    privacy: spec.Privacy = spec.Privacy()
    output: spec.OutputTable

    @property
    def checks(self) -> bool:
        """True if the job's work is spot-checked by machines that stand by."""
        return self.replicas is None and self.faults.checks != "none"

    @property
    def optimizer(self) -> OptimizerSpec:
        """The optimizer as stages run it: with local updates, its state also has what the exchanges need."""
        replicas = self.replicas
        overlapped = replicas is not None and replicas.overlap > 0
        return msgspec.structs.replace(self.train.optimizer, anchored=replicas is not None, overlapped=overlapped)

    def describe(self) -> str:
        """One line for logs with names, sizes and settings; it contains no text of the data."""
        train = self.train
        match self.data:
            case spec.TextData(sequence_length=length) | spec.ChatData(sequence_length=length):
                work = f"{train.batch_size} x {length} tokens ({format_count(train.batch_size * length)})"
            case spec.TensorData():
                work = f"{train.batch_size} records"
        parts = [
            f"{self.job.name}: {self.model.task} of {_described_model(self.model)}",
            "" if self.adapter is None else _described_adapter(self.adapter),
            f"{self.job.steps} steps of {work} in {train.microbatches} microbatches",
            f"{train.optimizer.kind} at {train.learning_rate:g} ({train.schedule}, {train.warmup_steps} warm-up steps)",
            "no clipping" if train.clip_norm is None else f"clipping at {train.clip_norm:g}",
            train.precision,
            "" if train.compression == "none" else f"{train.compression} between stages",
            "" if self.replicas is None else _described_replicas(self.replicas),
            "" if self.summed == 1 else f"{_number_of(self.summed)}, gradients summed at every step",
            f"privacy {self.privacy.level}",
            f"seed {self.job.seed}",
        ]
        return ", ".join(part for part in parts if part)


def load_recipe(path: str | Path, *, privacy: PrivacyLevel | None = None) -> Recipe:
    """Read and check a recipe file. `privacy` replaces the file's privacy level. Raises `RecipeError`."""
    file = Path(path).expanduser().absolute()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"no recipe at {path}.", hint="Give the path of a TOML file.") from None
    except UnicodeDecodeError as problem:
        raise RecipeError(f"{path}: not UTF-8 text (byte {problem.start}).") from None
    except OSError as problem:
        hint = "Give the path of a TOML file that you may read."
        raise RecipeError(f"{path}: can't be read ({problem.strerror}).", hint=hint) from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise RecipeError(f"{path}: not valid TOML: {problem}.") from None
    if privacy is not None and isinstance(written := table.setdefault("privacy", {}), dict):
        written["level"] = privacy
    return recipe_from_table(table, file)


def recipe_from_table(table: Mapping[str, object], path: Path) -> Recipe:
    """The recipe in a parsed table. `path`: the file that it came from or could be written to; relative paths start at
    its directory, and messages name it. Raises `RecipeError`."""
    check = RecipeChecks(path)
    tables = convert(table, spec.RecipeTables, path.name)
    check.train(tables, table)
    data = check.data(tables)
    return Recipe(
        path=str(path),
        directory=check.resolve(tables.job.directory or f"runs/{tables.job.name}"),
        job=tables.job,
        model=check.model(tables.model),
        data=data,
        train=tables.train,
        adapter=check.adapter(tables),
        evaluation=check.evaluation(tables),
        placement=check.placement(tables.placement),
        faults=tables.faults,
        replicas=check.replicas(tables),
        summed=check.summed(tables),
        privacy=check.privacy(tables),
        output=tables.output,
    )


def _described_replicas(replicas: spec.Replicas) -> str:
    packed = "" if replicas.codec == "none" else f" in {replicas.codec}"
    beside = f", overlapped with {replicas.overlap} steps" if replicas.overlap else ""
    early = (
        f", every {replicas.every // TIMES} during {replicas.early_steps} early steps" if replicas.early_steps else ""
    )
    return f"{_number_of(replicas.count)} that exchange every {replicas.every} steps{early}{packed}{beside}"


def _number_of(replicas: int | Literal["auto"]) -> str:
    return "as many replicas as pay off" if replicas == "auto" else f"{replicas} replicas"


def _described_adapter(adapter: spec.Adapter) -> str:
    kept = "" if adapter.base == "fp32" else f", the base in {adapter.base}"
    kept += " (held by the job owner)" if adapter.holder == "owner" else ""
    match adapter:
        case spec.NewAdapter(rank=rank, targets=targets):
            where = "its linear layers" if targets is None else ", ".join(targets)
            return f"an adapter of rank {rank} on {where}{kept}"
        case spec.KnownAdapter(path=path):
            return f"the adapter in {path} on it{kept}"


def _described_model(model: spec.Model) -> str:
    match model.source:
        case spec.ConfigModel(config=config):
            return f"a new {config['model_type']}"
        case spec.LocalModel(path=path):
            return f"the model in {path}"
        case spec.HubModel(hub=hub):
            return hub
        case spec.FactoryModel(module=module, function=function):
            return f"{module}:{function}"
