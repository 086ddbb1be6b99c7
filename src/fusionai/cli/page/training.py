"""Recipes that are made on the page: a form with few fields becomes a recipe file, and a recipe the commands to run.

The file is checked by the schema that all recipes have, and its data must exist, before anything is started. The form
has no field for own code: models are directories that exist, names on the hub, or one of a few new ones. Each word that
reaches a command line is a number, a path made here, or a model's name that can't be a flag.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.capture.models.source import DirectorySource, GgufSource, HubSource
from fusionai.client.serving.names import CHECKPOINTS, source_of
from fusionai.corpus.files import find_files
from fusionai.corpus.recipe import Recipe, load_recipe, recipe_from_table
from fusionai.corpus.tables import FileData, Filled, HubModel, JobName, LocalModel
from fusionai.primitives.errors import UsageError
from fusionai.storage.atomic import write_atomic
from fusionai.transport.security.identity import make_private_directory

VOCABULARY: Final = 8192
NEW_MODELS: Final[Mapping[str, Mapping[str, int]]] = {
    "new-small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8},
    "new-medium": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "new-large": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
}
"""Sizes of new models (chosen; the second is that of recipes/llama_small_text.toml)."""
CHECKPOINTS_OF_A_JOB: Final = 10
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class TrainingForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the page asks for. `model`: one of `NEW_MODELS`, a directory, or a name on the hub; `adapter_rank`: train an
    adapter of this rank instead of the model."""

    name: JobName
    model: Filled
    files: Filled
    format: Literal["auto", "text", "jsonl", "parquet", "chat", "instructions"] = "auto"
    sequence_length: Annotated[int, Meta(ge=2, le=65_536)] = 256
    steps: Annotated[int, Meta(ge=1, le=10_000_000)] = 1000
    batch_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    microbatches: Annotated[int, Meta(ge=1, le=4096)] = 8
    learning_rate: Annotated[float, Meta(gt=0, le=10)] = 5e-4
    adapter_rank: Annotated[int, Meta(ge=1, le=512)] | None = None


def checked_model(text: str) -> str:
    """Return the model's name as a command's argument: an absolute path or a name on the hub. Raises `UsageError` for
    any other text."""
    if not text.isprintable() or text.startswith("-"):
        raise UsageError(f"{text[:80]!r} is no model: expected a directory, a GGUF file or a name on the hub.")
    match source_of(text):
        case DirectorySource(path=path) | GgufSource(path=path):
            return str(path.expanduser().absolute())
        case HubSource():
            return text


def checked_served(text: str) -> str:
    """Return what `checked_model` returns, also for the directory of a trained job."""
    path = Path(text).expanduser()
    if text.isprintable() and (path / CHECKPOINTS).is_dir():
        return str(path.absolute())
    return checked_model(text)


class PageRecipe:
    """A recipe below the page's directory. Raises `UsageError` for a name that no job may have."""

    def __init__(self, directory: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name[:80]!r} is no name of a job: lower-case letters, digits and hyphens.")
        self.name = name
        self.directory = directory / name
        self.path = self.directory / "recipe.toml"

    @property
    def is_started(self) -> bool:
        return (self.directory / "run").exists()

    def keep(self, form: TrainingForm) -> str:
        """Write the form as a recipe and return its text. Raises `UsageError`, above all for settings and files that
        don't fit, and if another recipe of this name has been started."""
        make_private_directory(self.directory)
        table = recipe_table(form)
        text = written_recipe(table)
        if self.is_started and self.path.is_file() and self.path.read_text(encoding="utf-8") != text:
            raise UsageError(
                f"there is a job {self.name!r} with other settings.", hint="Choose another name, or start it again."
            )
        if form.model in NEW_MODELS:
            write_atomic(self.directory / "model.json", json.dumps(_config(form)).encode())
        data = recipe_from_table(table, self.path).data.source
        if isinstance(data, FileData):
            find_files(data)
        write_atomic(self.path, text.encode())
        return text

    def load(self) -> Recipe:
        """Return the recipe. Raises `UsageError` if there is none."""
        return load_recipe(self.path)

    def plan_command(self, form: TrainingForm, home: Path, json_file: Path) -> tuple[str, ...]:
        """Return the arguments of `fusion plan` for this recipe."""
        model = str(self.directory / "model.json") if form.model in NEW_MODELS else checked_model(form.model)
        sizes = ("--batch", form.batch_size, "--microbatches", form.microbatches, "--sequence", form.sequence_length)
        lora = () if form.adapter_rank is None else ("--lora", form.adapter_rank)
        words = ("plan", model, "--task", "train", *sizes, *lora, "--home", home, "--json", json_file)
        return tuple(str(word) for word in words)

    def train_command(self, home: Path) -> tuple[str, ...]:
        return ("train", str(self.path), "--home", str(home))

    def serve_command(self, home: Path) -> tuple[str, ...]:
        """Return the arguments of `fusion serve` for what this recipe has trained."""
        recipe = self.load()
        where = ("--port", "0", "--home", str(home))
        if recipe.adapter is None:
            return ("serve", checked_served(recipe.directory), "--name", self.name, *where)
        match recipe.model.source:
            case LocalModel(path=base) | HubModel(hub=base):
                return ("serve", checked_model(base), "--adapter", f"{self.name}={recipe.directory}", *where)
            case _:
                raise UsageError(f"the base of {self.name!r} is in no file, so it can't be served.")


def recipes_in(directory: Path) -> tuple[PageRecipe, ...]:
    """Return the recipes that were made on the page and started, by name."""
    found = (PageRecipe(directory, path.parent.name) for path in sorted(directory.glob("*/recipe.toml")))
    return tuple(one for one in found if one.is_started)


def recipe_table(form: TrainingForm) -> dict[str, dict[str, Any]]:
    """Return the recipe's tables."""
    is_new = form.model in NEW_MODELS
    if is_new:
        model: dict[str, Any] = {"config": "model.json"}
    else:
        named = checked_model(form.model)
        model = {"path": named} if Path(named).is_absolute() else {"hub": named}
    # Relative paths of a recipe start at its directory, which is not the reader's.
    files = str(Path(form.files).expanduser().absolute())
    data = {"files": [files], "format": form.format, "sequence_length": form.sequence_length}
    table: dict[str, dict[str, Any]] = {
        "job": {
            "name": form.name,
            "steps": form.steps,
            "checkpoint_every": max(1, form.steps // CHECKPOINTS_OF_A_JOB),
            "directory": "run",
        },
        "model": {"task": "causal_lm", **model},
        "data": {**data, **({"tokenizer": {"train": VOCABULARY}} if is_new else {})},
        "train": {
            "batch_size": form.batch_size,
            "microbatches": form.microbatches,
            "learning_rate": form.learning_rate,
            "schedule": "cosine",
            "clip_norm": 1.0,
        },
    }
    if form.adapter_rank is not None:
        table["adapter"] = {"rank": form.adapter_rank}
    return table


def _config(form: TrainingForm) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        **NEW_MODELS[form.model],
        "max_position_embeddings": max(512, form.sequence_length),
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def written_recipe(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables as TOML. Raises `UsageError` if a text can't be written so that it is read as it was."""
    parts = [
        "\n".join([f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())])
        for name, keys in table.items()
    ]
    text = "\n\n".join(parts) + "\n"
    try:
        if tomllib.loads(text) == table:
            return text
    except tomllib.TOMLDecodeError:
        pass
    raise UsageError("a field of the form has characters that a recipe can't have.")


def _toml(value: object) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)


def verdict_of(printed: str) -> tuple[str, ...]:
    """Return the verdict with which `fusion plan` begins: the lines before the first empty one."""
    lines: Sequence[str] = printed.strip().splitlines()
    end = lines.index("") if "" in lines else len(lines)
    return tuple(line.rstrip() for line in lines[:end])
