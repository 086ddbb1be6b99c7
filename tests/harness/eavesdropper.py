"""Everything a job's connections carry before it is encrypted, and what lies in other processes' memory.

What is looked for is written in every form in which tokens could travel or lie: integers of four widths, msgpack's
lists, text. A test that finds nothing must have found all of it with the same eavesdropper where it is sent.

Neighbours: `tests/integration/test_privacy_wire.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from fusionai.transport.channels.framed import FramedChannel
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.wire.frame import Frame
from harness.memory_transport import MemoryChannel

PAGE_BYTES = 4096
MEMORY_READABLE = sys.platform == "linux" and Path("/proc/self/mem").exists()
NOT_READABLE = "the memory of other processes can be read on Linux alone"


def forms_of_tokens(tokens: Sequence[int]) -> dict[str, bytes]:
    """A run of token ids as bytes: by the name of the form."""
    array = np.array(tokens)
    forms = {kind: array.astype(kind).tobytes() for kind in ("<i8", "<i4", "<i2")}
    forms["msgpack"] = b"".join(msgspec.msgpack.encode(int(token)) for token in tokens)
    forms["decimal"] = ", ".join(str(token) for token in tokens).encode()
    return forms


@dataclass
class Eavesdropper:
    """`heard`: all bytes of all connections of this process, both ways. `widths`: last sizes of the tensors sent."""

    heard: list[bytes] = field(default_factory=list)
    widths: set[int] = field(default_factory=set)

    def note(self, message: object, tensors: Any) -> None:
        self.heard.append(msgspec.msgpack.encode(message))
        for tensor in tensors.values() if isinstance(tensors, Mapping) else tensors:
            self.heard.append(bytes(tensor.data))
            self.widths.update(tensor.shape[-1:])

    @property
    def heard_bytes(self) -> int:
        return sum(len(data) for data in self.heard)

    def found(self, wanted: Mapping[str, bytes]) -> set[str]:
        """Names of those that were heard."""
        # With a gap: nothing is found that two messages make together.
        everything = b"\xff\x00eavesdropper\x00\xff".join(self.heard)
        return {name for name, data in wanted.items() if re.search(re.escape(data), everything, re.DOTALL)}


@contextmanager
def listening() -> Iterator[Eavesdropper]:
    """To every channel of this process, on TCP and in memory."""
    ear = Eavesdropper()
    send, at_once, arrived, memory = (
        TcpChannel.send,
        TcpChannel.send_at_once,
        FramedChannel._arrived,
        MemoryChannel.send,
    )

    async def heard_send(self: TcpChannel, message: Any, tensors: Any = ()) -> None:
        ear.note(message, tensors)
        await send(self, message, tensors)

    def heard_at_once(self: TcpChannel, message: Any, tensors: Any = ()) -> bool:
        ear.note(message, tensors)
        return at_once(self, message, tensors)

    async def heard_in_memory(self: MemoryChannel, message: Any, tensors: Any = ()) -> None:
        ear.note(message, tensors)
        await memory(self, message, tensors)

    def heard_arrived(self: FramedChannel, frame: Frame) -> None:
        ear.note(frame.message, frame.tensors)
        arrived(self, frame)

    with (
        patch.object(TcpChannel, "send", heard_send),
        patch.object(TcpChannel, "send_at_once", heard_at_once),
        patch.object(MemoryChannel, "send", heard_in_memory),
        patch.object(FramedChannel, "_arrived", heard_arrived),
    ):
        yield ear


def found_in_memory(pid: int, wanted: Mapping[str, bytes]) -> set[str]:
    """Names of those that lie in memory that the process may write to. Raises `PermissionError` where it may not be
    looked at."""
    found: set[str] = set()
    # Not `in`: its search grows slow over memory that is mostly zeros, as the needles are.
    patterns = {name: re.compile(re.escape(needle), re.DOTALL).search for name, needle in wanted.items()}
    with Path(f"/proc/{pid}/maps").open() as regions, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in regions:
            place, rights, _, _, _, *name = line.split()
            if not rights.startswith("rw") or name[:1] == ["[vvar]"]:
                continue
            start, end = (int(address, 16) for address in place.split("-"))
            memory.seek(start)
            try:
                data = memory.read(end - start)
            except OSError:  # protection pages, or gone meanwhile
                continue
            for written in _written(data):
                found |= {name for name, search in patterns.items() if name not in found and search(written)}
    return found


def _written(region: bytes) -> Iterator[bytes]:
    """Its stretches of pages that are not all zero: most of what a process has reserved was never touched."""
    whole = len(region) // PAGE_BYTES * PAGE_BYTES
    pages = np.frombuffer(region, np.uint64, whole // 8).reshape(-1, PAGE_BYTES // 8)
    sketches = np.diff(pages.any(axis=1).astype(np.int8), prepend=0, append=0)
    for start, end in zip(np.flatnonzero(sketches == 1), np.flatnonzero(sketches == -1), strict=True):
        yield region[start * PAGE_BYTES : end * PAGE_BYTES]
