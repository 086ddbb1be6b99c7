"""Opens the directory of a job and checks whether the recipe, model and data may continue the job in it.

A recipe is bound to a directory from the first committed step on; until then errors in it can be corrected.
`client.training.train` calls this, `corpus.resume` compares recipes, `storage` keeps the files.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

from fusionai.client.training.preparation import Prepared
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.resume import check_resumable, encode_recipe
from fusionai.primitives.errors import RecipeError, StorageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import CheckpointReader, latest
from fusionai.storage.rundir import RunDirectory

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def has_directory(recipe: Recipe) -> bool:
    """Return whether the path of the job's directory exists."""
    return Path(recipe.directory).exists()


def open_directory(recipe: Recipe) -> RunDirectory:
    """Open or create the job's directory. Raises `RecipeError` if the path can't be used, `StorageError` if the disk is
    full."""
    try:
        return RunDirectory(Path(recipe.directory))
    except StorageError as problem:
        cause = problem.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise
        raise RecipeError(
            f"{Path(recipe.path).name}: the job's directory: {problem.message}",
            hint="Set [job] directory to a directory that you may write to.",
        ) from problem


def check_recipe(recipe: Recipe, directory: RunDirectory, journal: CommitJournal) -> None:
    """Raise `RecipeError` if the directory has steps of a different recipe."""
    kept = directory.kept_recipe()
    if kept is not None and (journal.committed or latest(directory.checkpoints) is not None):
        check_resumable(kept, recipe)


def keep_recipe(recipe: Recipe, directory: RunDirectory) -> None:
    """Store the recipe, which binds the directory to it once a step is committed. Raises `StorageError`."""
    directory.keep_recipe(encode_recipe(recipe))


def check_checkpoint(prepared: Prepared, reader: CheckpointReader) -> None:
    """Raise `RecipeError` if the model's code or the data changed since `reader`'s checkpoint although the recipe did
    not: continuing would be a different training under the same name."""
    manifest = reader.manifest
    if manifest.graph_hash != prepared.graph_hash:
        raise RecipeError(
            f"the model differs from that of {reader.directory}: its code, its files or the version of a library "
            "changed since.",
            hint="Undo the change, or give the job another name or directory.",
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
            hint="Restore the file, or give the job another name or directory.",
        )


def job_id(recipe: Recipe, owner: PeerId, directory: RunDirectory) -> JobId:
    """Return the job's id, which is the same for every run of one owner in one directory."""
    digest = hashlib.sha256(f"{owner}\n{directory.root.resolve()}".encode()).hexdigest()
    return JobId(f"{recipe.job.name}-{digest[:8]}")
