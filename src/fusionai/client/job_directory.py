"""The directory of one job: who may go on in it. Decides what a job's identity is and which changes end its history.

A recipe binds a directory from the first official step on: until then a mistake in it may be mended and tried again.
Neighbours: `client.train` opens it, `corpus.resume` compares recipes, `storage` keeps the files.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

from fusionai.client.preparation import Prepared
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.resume import check_resumable, encode_recipe
from fusionai.primitives.errors import RecipeError, StorageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import CheckpointReader, latest
from fusionai.storage.rundir import RunDirectory

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def has_directory(recipe: Recipe) -> bool:
    """Whether something stands where the job's directory is to be."""
    return Path(recipe.directory).exists()


def open_directory(recipe: Recipe) -> RunDirectory:
    """Raises `RecipeError` where no directory can be, `StorageError` where there is no space for one."""
    try:
        return RunDirectory(Path(recipe.directory))
    except StorageError as problem:
        cause = problem.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise
        raise RecipeError(
            f"{Path(recipe.path).name}: the job's directory: {problem.message}",
            hint="Name a directory you may write to: [job] directory.",
        ) from problem


def check_recipe(recipe: Recipe, directory: RunDirectory, journal: CommitJournal) -> None:
    """Raises `RecipeError` if steps of another recipe were made here."""
    kept = directory.kept_recipe()
    if kept is not None and (journal.committed or latest(directory.checkpoints) is not None):
        check_resumable(kept, recipe)


def keep_recipe(recipe: Recipe, directory: RunDirectory) -> None:
    """From now on steps may be made here, of this recipe. Raises `StorageError`."""
    directory.keep_recipe(encode_recipe(recipe))


def check_checkpoint(prepared: Prepared, reader: CheckpointReader) -> None:
    """Raises `RecipeError` if the model's code or the data changed since `reader`'s checkpoint, although the recipe
    did not: going on would be another training under the same name."""
    manifest = reader.manifest
    if manifest.graph_hash != prepared.graph_hash:
        raise RecipeError(
            f"the model is another one than that of {reader.directory}: its code, its files or the version of a "
            "library changed since.",
            hint="Undo that, or give the job another name or directory.",
        )
    for name, digest in manifest.base.items():
        if prepared.base.get(name) != digest:
            raise RecipeError(
                f"the base model's {name} is not what {reader.directory} was trained on: it changed since.",
                hint="Restore it, or give the job another name or directory.",
            )
    if manifest.data_fingerprint != prepared.source.fingerprint:
        raise RecipeError(
            f"the data is not what {reader.directory} was trained on: a file changed since.",
            hint="Restore it, or give the job another name or directory.",
        )


def job_id(recipe: Recipe, owner: PeerId, directory: RunDirectory) -> JobId:
    """The same for every run of one owner in one directory."""
    digest = hashlib.sha256(f"{owner}\n{directory.root.resolve()}".encode()).hexdigest()
    return JobId(f"{recipe.job.name}-{digest[:8]}")
