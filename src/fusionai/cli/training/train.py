"""`fusion train RECIPE.toml` trains a model on the pool; `fusion data RECIPE.toml` shows what it would train on.

Running `fusion train` again resumes (`cli.training.run`). `fusion data` needs no pool; the tokenised data stays in the
job's directory, so that the job starts sooner (`corpus.source`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fusionai.cli import console
from fusionai.cli import options as flags
from fusionai.cli.options import write_json
from fusionai.cli.running import lifeline_option
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import PrivacyLevel

if TYPE_CHECKING:
    from fusionai.corpus.chat_source import ChatSource
    from fusionai.corpus.source import RowPreview


@click.command()
@flags.recipe_argument
@flags.own_part_options("the loss")
@flags.privacy_option("the recipe's level, or split")
@lifeline_option
@flags.home_option
@flags.json_option
def train(recipe: Path, privacy: PrivacyLevel | None, lifeline: bool, json_file: Path | None, **given: Any) -> int:
    """Train the model of RECIPE.toml on the pool. After an interruption or a stop, run the same command again to
    resume. Exit code: 0 if it is done or was stopped with `fusion stop`, 130 after Ctrl-C."""
    from fusionai.corpus.recipe import load_recipe

    flags.check_waiting(given, True)
    # A mistake in the recipe is said before PyTorch is imported, which takes seconds.
    loaded = load_recipe(recipe, privacy=privacy)
    if given["wait"] and loaded.replicas is not None:
        raise UsageError(
            "--wait is for a job of one pipeline; each replica of this recipe is a job of its own.",
            hint="Leave [replicas] out, or start the job when its machines are free.",
        )
    from fusionai.cli.training.run import run_recipe
    from fusionai.client.training.train import TrainOptions

    return run_recipe(loaded, TrainOptions(**given), json_file, lifeline=lifeline)


OPEN: Final = "[["
CLOSE: Final = "]]"
"""Brackets around the tokens trained on, where the output has no colours."""


@click.command()
@flags.recipe_argument
@flags.number_option("--rows", "Show this many sample rows.", 3, 0, 1000)
@flags.json_option
def data(recipe: Path, rows: int, json_file: Path | None) -> None:
    """Show the data that RECIPE.toml trains on: counts, bad rows, and sample rows with the tokens trained on marked.
    Sends nothing to the pool: the rows' text goes only to this terminal and to FILE."""
    from fusionai.corpus.chat_source import ChatSource
    from fusionai.corpus.recipe import load_recipe
    from fusionai.corpus.source import TokenSource, open_source, preview
    from fusionai.storage.rundir import RunDirectory

    loaded = load_recipe(recipe)
    source = open_source(loaded, RunDirectory(Path(loaded.directory)).tokens)
    per_epoch = -(-source.samples // loaded.train.batch_size)
    console.line(console.printable(source.describe()))
    console.line(
        f"{source.samples} rows are {per_epoch} steps of {loaded.train.batch_size} rows; the job has {loaded.job.steps}"
    )
    figures: dict[str, object] = {"rows": source.samples, "steps_per_epoch": per_epoch}
    if isinstance(source, ChatSource):
        for note in source.notes:
            console.line(console.printable(note))
        figures |= _conversations(source)
    shown = preview(loaded, source, rows) if isinstance(source, TokenSource | ChatSource) else []
    for number, row in enumerate(shown, start=1):
        console.line()
        console.line(f"row {number}: {row.tokens} tokens, {row.labels} of them trained on")
        console.line(_marked(row))
    figures["preview"] = shown
    write_json(json_file, "data", figures)


def _conversations(source: ChatSource) -> dict[str, object]:
    manifest = source.manifest
    return {
        "rows_read": manifest.rows,
        "bad_rows": {
            "count": manifest.bad_rows,
            "first": manifest.first_bad,
            "list": source.bad_rows_file if manifest.bad_rows else None,
        },
        "conversations": manifest.written,
    }


def _marked(row: RowPreview) -> str:
    """Return the row's text with the tokens trained on in green on a terminal, in brackets elsewhere. Control
    characters are replaced, so that the data can't move the cursor."""
    colours = sys.stdout.isatty()
    written = ""
    for text, trained in row.pieces:
        lines = "\n".join(console.printable(line) for line in text.split("\n"))
        if trained:
            lines = click.style(lines, fg="green") if colours else f"{OPEN}{lines}{CLOSE}"
        written += lines
    return written
