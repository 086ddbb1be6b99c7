"""What stands where in a job's directory. Decides names; each file's content is its writer's business.

recipe.json          the recipe this job was started with
tokens/              derived data (`corpus.tokens`, `corpus.chat_file`), and bad_rows.jsonl
journal.sqlite       commits (`commits`), with journal.sqlite.lock: who drives
checkpoints/         `checkpoint`
deployment.msgpack   who runs what where, with tickets; for its owner only
telemetry.jsonl      steps and metrics
faults.jsonl         what broke, who took over, how long it took
distrusted.json      whose results were wrong: they get no work of this job again
tensorboard/         event files
report.html          the report
"""

from __future__ import annotations

from pathlib import Path

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic


class RunDirectory:
    """Paths below `root`; makes the directories it names."""

    def __init__(self, root: Path) -> None:
        """Raises `StorageError` when it can't be made or written."""
        self._root = root
        if root.exists() and not root.is_dir():
            raise StorageError(f"{root} is a file, not a directory.", hint="Choose another directory for the job.")
        for directory in (root, self.tokens, self.checkpoints):
            with storage_errors(directory, "made"):
                directory.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        return self._root

    @property
    def tokens(self) -> Path:
        return self._root / "tokens"

    @property
    def checkpoints(self) -> Path:
        return self._root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self._root / "journal.sqlite"

    @property
    def telemetry(self) -> Path:
        return self._root / "telemetry.jsonl"

    @property
    def deployment(self) -> Path:
        return self._root / "deployment.msgpack"

    @property
    def faults(self) -> Path:
        return self._root / "faults.jsonl"

    @property
    def distrusted(self) -> Path:
        return self._root / "distrusted.json"

    @property
    def tensorboard(self) -> Path:
        return self._root / "tensorboard"

    @property
    def recipe(self) -> Path:
        return self._root / "recipe.json"

    def keep_recipe(self, content: bytes) -> None:
        """Keep the recipe of this job, replacing the one kept. Raises `StorageError`."""
        write_atomic(self.recipe, content)

    def kept_recipe(self) -> bytes | None:
        """The recipe this job was started with; None in a new directory. Raises `StorageError`."""
        if not self.recipe.is_file():
            return None
        with storage_errors(self.recipe, "read"):
            return self.recipe.read_bytes()
