"""A memory limit that the kernel holds for processes of a test, from outside: a control group, version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VERSION_1: Final = Path("/sys/fs/cgroup/memory")
_VERSION_2: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A group and its files' names."""

    path: Path
    limit: str
    usage: str
    peak: str

    @property
    def used_bytes(self) -> int:
        return int((self.path / self.usage).read_text())

    @property
    def peak_bytes(self) -> int:
        return int((self.path / self.peak).read_text())

    def hold(self, nbytes: int) -> None:
        """Limit the group from now on; beyond it the kernel kills its processes."""
        (self.path / self.limit).write_text(str(nbytes))

    def add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            (self.path / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup | None]:
    """A new group; None where this process may make none."""
    for root, names in (
        (_VERSION_1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")),
        (_VERSION_2, ("memory.max", "memory.current", "memory.peak")),
    ):
        path = root / f"{name}-{os.getpid()}"
        group = MemoryGroup(path, *names)
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            if (path / group.peak).exists() and os.access(path / group.limit, os.W_OK):
                yield group
                return
        finally:
            with suppress(OSError):  # processes that have not ended yet
                path.rmdir()
    yield None
