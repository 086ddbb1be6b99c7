"""Reads checkpoints: their manifest, its verification, their entries, their removal. Decides which are intact.

A damaged checkpoint raises an error that names the file. An older one is used instead only if the caller asks for it.
`checkpoint` writes checkpoints, the manifest last; the driver streams their entries to stages that import state.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fusionai.coordination.training.evaluations import Evaluation
from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.problem.types import TolerantTakeover
from fusionai.storage.adapter_files import PREFIX, WEIGHTS_FILE
from fusionai.storage.assembly import Assembly, assembled
from fusionai.storage.atomic import PARTIAL_SUFFIX, storage_errors, write_atomic
from fusionai.storage.safetensors_file import SafetensorsFile

FORMAT: Final = "fusionai.checkpoint/1"
MANIFEST: Final = "fusion/manifest.json"
MANIFEST_HASH: Final = "fusion/manifest.sha256"
_STEP_NAME: Final = re.compile(r"^step-(\d{8,})$")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected hash and size of a file."""

    sha256: str
    size_bytes: Annotated[int, Meta(ge=0)]


class CheckpointHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What all checkpoints of a job have in common, except `tolerant_takeovers`.

    `recipe`: as converted by `msgspec.to_builtins`. `aliases`: other name -> key of the same tensor (ties).
    `private_keys`: model keys outside the Hugging Face layout (buffers that are not saved). `adapter_keys`: if only an
    adapter is trained, its model keys; `base`: SHA-256 of the files it adapts, by name. `layout`: name -> parts of
    keys, for tensors in the model's files that are not a whole key.
    """

    graph_hash: str
    data_fingerprint: str = ""
    recipe: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    private_keys: frozenset[str] = frozenset()
    adapter_keys: frozenset[str] = frozenset()
    base: dict[str, str] = {}
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Takeovers up to this checkpoint on machines with other numerics. Differs between checkpoints."""
    layout: dict[str, Assembly] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of a checkpoint. Of tied tensors only the key is stored. `entries`: state entry -> file. `files`: all
    files but this one. `step`: number of steps applied. `assembled`: entries made of parts of the model's tensors in
    several files or under other names; `tensors` maps those tensors to files."""

    format: str = FORMAT
    step: Annotated[int, Meta(ge=0)]
    graph_hash: str
    data_fingerprint: str
    recipe: dict[str, Any]
    aliases: dict[str, str]
    entries: dict[str, str]
    files: dict[str, FileRecord]
    base: dict[str, str] = {}
    """Required files outside the checkpoint: name -> SHA-256."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Steps from which machines with other numerics computed; empty if all bits are those of the job's first plan."""
    assembled: dict[str, Assembly] = {}
    tensors: dict[str, str] = {}


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps."""
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int | None:
    """Return the step in a directory's name; None if it is not a complete checkpoint."""
    match = _STEP_NAME.match(directory.name)
    return int(match[1]) if match else None


BEST_FILE: Final = "best.json"


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `best.json`. `checkpoint` is the name of the directory beside it."""

    step: int
    loss: float
    checkpoint: str


def name_best(root: Path, best: Evaluation) -> Path:
    """Write `best.json` and return the checkpoint's directory. Raises `StorageError`."""
    directory = step_directory(root, best.step)
    named = Best(step=best.step, loss=best.loss, checkpoint=directory.name)
    write_atomic(root / BEST_FILE, msgspec.json.encode(named) + b"\n")
    return directory


def best_checkpoint(root: Path, best: Evaluation | None) -> Path | None:
    """Return the complete checkpoint of the best evaluation, or None, and correct `best.json`. Raises
    `StorageError`."""
    if best is None or not step_directory(root, best.step).is_dir():
        with storage_errors(root / BEST_FILE, "removed"):
            (root / BEST_FILE).unlink(missing_ok=True)
        return None
    return name_best(root, best)


_CHUNK_BYTES: Final = 2**20
_NEWER: Final = "A newer version of FusionAI may have written it: update this machine."
_HINT: Final = "Delete this checkpoint to go on from the one before it."


class CheckpointReader:
    """State entries of one checkpoint, mapped and read on access. Call `verify` before using them."""

    def __init__(self, directory: Path) -> None:
        """Read only the manifest. Raises `StorageError` if it is missing, damaged or of another format."""
        self.directory = directory
        self.manifest = self._read_manifest()
        self._open: dict[str, SafetensorsFile] = {}

    @property
    def step(self) -> int:
        """Number of optimizer steps applied."""
        return self.manifest.step

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all state entries, sorted."""
        return tuple(sorted(self.manifest.entries))

    def verify(self) -> None:
        """Hash every file. Raises `StorageError` naming the first that does not match the manifest."""
        for name, record in self.manifest.files.items():
            path = self._inside(name)
            digest, size = hashlib.sha256(), 0
            with storage_errors(path, "read"), path.open("rb") as handle:
                while chunk := handle.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
            if size != record.size_bytes:
                raise StorageError(f"{path} is damaged: expected {record.size_bytes} bytes, got {size}.", hint=_HINT)
            if digest.hexdigest() != record.sha256:
                raise StorageError(
                    f"{path} is damaged: expected SHA-256 {record.sha256}, got {digest.hexdigest()}.", hint=_HINT
                )

    def read(self, entry: str) -> HostTensor:
        """Return one state entry. Raises `StorageError` if the checkpoint has no such entry."""
        file = self.manifest.entries.get(entry)
        if file is None:
            raise StorageError(f"{self.directory}: the checkpoint has no entry {entry!r}.")
        made_of = self.manifest.assembled.get(entry)
        if made_of is not None:
            return assembled(entry, made_of, self._tensor)
        name = entry.partition("/")[2]
        return self._file(file).read(PREFIX + name if file == WEIGHTS_FILE else name)

    def _tensor(self, name: str) -> HostTensor:
        file = self.manifest.tensors.get(name)
        if file is None:
            raise StorageError(f"{self.directory / MANIFEST} does not say which file holds {name!r}.", hint=_HINT)
        return self._file(file).read(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._open:
            self._open[name] = SafetensorsFile(self._inside(name))
        return self._open[name]

    def _inside(self, name: str) -> Path:
        """Return the path of a file of the checkpoint. Raises `StorageError` if the manifest names one outside it."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise StorageError(f"{self.directory / MANIFEST} names {name!r}, which is outside the checkpoint.")
        return self.directory / path

    def _read_manifest(self) -> Manifest:
        path = self.directory / MANIFEST
        with storage_errors(path, "read"):
            content = path.read_bytes()
        hash_path = self.directory / MANIFEST_HASH
        with storage_errors(hash_path, "read"):
            expected = hash_path.read_bytes()[:64]
        if hashlib.sha256(content).hexdigest().encode() != expected:
            raise StorageError(f"{path} is damaged: its SHA-256 is not the one in manifest.sha256.", hint=_HINT)
        try:
            manifest = msgspec.json.decode(content, type=Manifest)
        except msgspec.DecodeError as problem:
            raise StorageError(f"{path}: can't be decoded ({problem}).", hint=_NEWER) from None
        if manifest.format != FORMAT:
            raise StorageError(f"{path}: expected format {FORMAT}, got {manifest.format!r}.", hint=_NEWER)
        return manifest


def complete_checkpoints(root: Path) -> tuple[Path, ...]:
    """Return all checkpoints that were completed, newest first."""
    if not root.is_dir():
        return ()
    found = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None]
    return tuple(path for _, path in sorted(found, reverse=True))


def latest(root: Path) -> Path | None:
    """Return the newest checkpoint, or None."""
    return next(iter(complete_checkpoints(root)), None)


def open_latest(root: Path, *, fall_back: bool = False) -> CheckpointReader | None:
    """Return the newest checkpoint, verified; None if there is none. Raises `StorageError` if it is damaged or, with
    `fall_back`, if all are."""
    first_problem: StorageError | None = None
    for directory in complete_checkpoints(root):
        try:
            reader = CheckpointReader(directory)
            reader.verify()
        except StorageError as problem:
            first_problem = first_problem or problem
            if not fall_back:
                break
        else:
            return reader
    if first_problem is not None:
        raise first_problem
    return None


def sweep(root: Path) -> tuple[Path, ...]:
    """Remove the half-written files of an interrupted start and return them. Call only while holding the job's lock."""
    if not root.is_dir():
        return ()
    left = tuple(sorted(path for path in root.iterdir() if path.name.endswith(PARTIAL_SUFFIX)))
    for path in left:
        with storage_errors(path, "removed"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return left


def prune(root: Path, keep: int, best: int | None = None, since: int | None = None) -> tuple[Path, ...]:
    """Remove all checkpoints but the `keep` newest, that of step `best` and the newest of at most `since` steps. Return
    the removed ones. An interrupted removal leaves a directory that ends in `.partial`."""
    if keep < 1:
        raise ValueError(f"at least one checkpoint is kept, got {keep}")
    found = complete_checkpoints(root)
    steps = [step for path in found if (step := step_of(path)) is not None and since is not None and step <= since]
    kept = {best, max(steps, default=None)}
    return _remove(tuple(path for path in found[keep:] if step_of(path) not in kept))


def forget_after(root: Path, step: int) -> tuple[Path, ...]:
    """Remove the checkpoints of more than `step` steps and return them."""
    return _remove(tuple(path for path in complete_checkpoints(root) if (step_of(path) or 0) > step))


def _remove(old: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in old:
        doomed = path.with_name(path.name + PARTIAL_SUFFIX)
        with storage_errors(path, "removed"):
            path.replace(doomed)
        with suppress(OSError):
            shutil.rmtree(doomed)
    return old
