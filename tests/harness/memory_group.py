"""A memory limit that the kernel holds for processes of a test, from outside: a control group, version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VERSION_1: Final = Path("/sys/fs/cgroup/memory")
_VERSION_2: Final = Path("/sys/fs/cgroup")
_ENTER: Final = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "fusionai", *sys.argv[2:]])
"""


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

    def begin(self) -> None:
        """Count the peak from now on; version 2 keeps that of the group's whole life."""
        with suppress(OSError):
            (self.path / self.peak).write_text("0")

    @property
    def fusion(self) -> tuple[str, ...]:
        """What Python is told in place of `-m fusionai`, so that the program and its children are in the group from
        their first page on."""
        return ("-c", _ENTER, str(self.path / "cgroup.procs"))


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
