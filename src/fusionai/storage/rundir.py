"""File names in a job's directory. The modules that write the files decide their content.

recipe.json          the recipe with which this job was started
tokens/              derived data (`corpus.tokens`, `corpus.chat_file`), and bad_rows.jsonl
journal.sqlite       commits (`commits`); journal.sqlite.lock names the process that drives the job
checkpoints/         `checkpoint`
deployment.msgpack   which peer runs what, with tickets; readable by the owner only
telemetry.jsonl      steps and metrics
faults.jsonl         faults, which peer took over, and how long that took
distrusted.json      peers that returned wrong results and get no more work of this job
tensorboard/         event files
report.html          the report
"""

from __future__ import annotations

from pathlib import Path

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic


class RunDirectory:
    """Paths below `root`. Creates the directories."""

    def __init__(self, root: Path) -> None:
        """Raises `StorageError` if a directory can't be created."""
        self.root = root
        self.tokens = root / "tokens"
        self.checkpoints = root / "checkpoints"
        self.journal = root / "journal.sqlite"
        self.telemetry = root / "telemetry.jsonl"
        self.deployment = root / "deployment.msgpack"
        self.faults = root / "faults.jsonl"
        self.distrusted = root / "distrusted.json"
        self.tensorboard = root / "tensorboard"
        self.recipe = root / "recipe.json"
        if root.exists() and not root.is_dir():
            raise StorageError(f"{root} is a file, not a directory.", hint="Choose another directory for the job.")
        for directory in (root, self.tokens, self.checkpoints):
            with storage_errors(directory, "made"):
                directory.mkdir(parents=True, exist_ok=True)

    def keep_recipe(self, content: bytes) -> None:
        """Store the job's recipe, replacing a stored one. Raises `StorageError`."""
        write_atomic(self.recipe, content)

    def kept_recipe(self) -> bytes | None:
        """Return the recipe with which this job was started; None in a new directory. Raises `StorageError`."""
        if not self.recipe.is_file():
            return None
        with storage_errors(self.recipe, "read"):
            return self.recipe.read_bytes()
