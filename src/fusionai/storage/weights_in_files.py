"""Finds tensors in files of this machine whose hashes are cached, so that they are read in place.

Processes on one machine that serve a local model (`fusion serve --local`) need not send the weights to each other: the
process that hashed the files has noted their tensors (`weight_memory`). A file counts as unchanged while its path, size
and modification time are. Nothing is hashed here: the cache is trusted like this machine's own files.

`weight_store` asks here for tensors it does not have.
"""

from __future__ import annotations

import threading
from pathlib import Path

from fusionai.primitives.errors import StorageError
from fusionai.storage.mapped_file import Stretch, Stretches
from fusionai.storage.safetensors_file import SafetensorsFile
from fusionai.storage.weight_memory import FileStamp, WeightMemory


class WeightsInFiles:
    """Index of the tensors in the cache file `memory`.

    The cache may be written or replaced later. Methods may be called from any thread.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._seen: tuple[int, int] | None = None
        """Modification time and size of the cache file when it was read."""
        self._stretches: dict[bytes, tuple[tuple[FileStamp, ...], Stretch | Stretches]] = {}

    def find(self, digest: bytes) -> Stretch | Stretches | None:
        """Return where the tensor is stored; None if no unchanged file has it."""
        with self._mutex:
            self._refresh()
            found = self._stretches.get(digest)
        if found is None:
            return None
        stamps, stretch = found
        return stretch if all(map(_unchanged, stamps)) else None

    def _refresh(self) -> None:
        try:
            stat = self._memory.stat()
        except OSError:
            return
        seen = stat.st_mtime_ns, stat.st_size
        if seen == self._seen:
            return
        self._seen = seen
        self._stretches.clear()
        memory = WeightMemory(self._memory)
        for stamp, tensors in memory.files():
            if not _unchanged(stamp):
                continue
            path = Path(stamp.path)
            try:
                file = SafetensorsFile(path)
                for name, spec in tensors.items():
                    _, _, offset, nbytes = file.span(name)
                    self._stretches[spec.digest] = (stamp,), Stretch(path, offset, nbytes)
            except StorageError:
                continue  # a file of another job that has been removed since
        for made, spec in memory.assembled():
            if all(map(_unchanged, made.files)):
                parts = (Stretch(Path(made.files[file].path), offset, nbytes) for file, offset, nbytes in made.parts)
                self._stretches[spec.digest] = made.files, Stretches(tuple(parts))


def _unchanged(stamp: FileStamp) -> bool:
    try:
        return FileStamp.of(Path(stamp.path)) == stamp
    except StorageError:
        return False
