"""The memory that a machine lends to jobs, and everything there that draws on it.

A program counts with its size at the largest inputs (`ProgramSize`) from the moment it is loaded until the last
reference to it is gone. A store of tensors (tensors that wait for work, messages retained after sending, snapshots)
counts with what it holds now. Programs are loaded one at a time, so that two loads never count on the same memory.

The budget only refuses. What is received and not stored yet is limited by `transport.channels.framed`, and a worker
process can't take more than its own limit (`backends.worker`), whatever this budget counts.

Sketches are small and no plan counts them: the first `BESIDE_BYTES` of all of them are free.

`execution.host` has it; stages, verifiers and snapshot stores of all jobs draw on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

import psutil

from fusionai.backends.state import ProgramSize
from fusionai.primitives.errors import ExecutionError

BESIDE_BYTES: Final = 2**24
"""Bytes that the sketches of all stages may take beside what is lent (chosen): 130,000 positions."""


class MeasuredProgram(Protocol):
    """A program that was loaded."""

    size: ProgramSize


class Holding(Protocol):
    """A store of tensors."""

    @property
    def nbytes(self) -> int: ...


class MemoryBudget:
    """`limit_bytes`: what the provider lends; None on the job owner's own machine, whose programs are not limited and
    whose stores may take half of the memory (chosen). `host_limit_bytes`: limit on stores if programs have a memory of
    their own, a graphics card's; None if both share one. All methods are called on the event loop."""

    def __init__(self, limit_bytes: int | None, host_limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._host_limit_bytes = host_limit_bytes
        self._half_bytes = psutil.virtual_memory().total // 2
        self._stores = WeakSet[Holding]()
        self._sketches = WeakSet[Holding]()
        self._in_use = WeakKeyDictionary[MeasuredProgram, int | None]()
        """Program -> bytes beside it that are in use with it; None for a program that takes no part in its job yet."""
        self._loading = asyncio.Lock()

    @property
    def stores_bytes(self) -> int:
        return sum(store.nbytes for store in self._stores) + max(0, self._sketches_bytes - BESIDE_BYTES)

    @property
    def _sketches_bytes(self) -> int:
        return sum(store.nbytes for store in self._sketches)

    @property
    def room_for_sketches_bytes(self) -> int:
        """Memory for further sketches."""
        return max(0, self.room_bytes) + max(0, BESIDE_BYTES - self._sketches_bytes)

    @property
    def programs_bytes(self) -> int:
        return sum(map(self._reserved_bytes, self._in_use))

    @property
    def left_bytes(self) -> int | None:
        """Memory for a further program; None without a limit. Negative if more is held than lent."""
        if self.limit_bytes is None:
            return None
        return self.limit_bytes - self.programs_bytes - (self.stores_bytes if self._host_limit_bytes is None else 0)

    @property
    def room_bytes(self) -> int:
        """Memory for further tensors."""
        if self._host_limit_bytes is not None:
            return self._host_limit_bytes - self.stores_bytes
        left_bytes = self.left_bytes
        return self._half_bytes - self.stores_bytes if left_bytes is None else left_bytes

    def join(self, store: Holding) -> None:
        """Count a store as long as it lives."""
        self._stores.add(store)

    def join_sketches(self, store: Holding) -> None:
        """Count sketches as long as `store` lives."""
        self._sketches.add(store)

    def require_for_sketches(self, nbytes: int, what: str) -> None:
        """Raise `ExecutionError` if sketches can't take `nbytes` more."""
        self._check(nbytes, self.room_for_sketches_bytes, what)

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[int | None]:
        """Give the memory for one program that is loaded inside the context and then added. Others wait."""
        async with self._loading:
            yield self.left_bytes

    def add(self, program: MeasuredProgram) -> None:
        """Count a program as long as it lives. It takes no part in its job yet. Raises `ExecutionError` if it does not
        fit beside what came while it was loaded, and does not count it then."""
        self._check(program.size.kept_bytes, self.left_bytes, "a loaded stage")
        self._in_use[program] = None

    @property
    def is_one(self) -> bool:
        """Whether stores take memory from programs, so that dropping what is stored makes room for a program."""
        return self.limit_bytes is not None and self._host_limit_bytes is None

    def lacking_bytes(self, program: MeasuredProgram) -> int:
        """Return what stores would have to give up for a program to take part in its job; 0 or less: nothing."""
        left_bytes = self.left_bytes
        if left_bytes is None or not self.is_one:
            return 0
        return program.size.kept_bytes + program.size.in_use_bytes - self._reserved_bytes(program) - left_bytes

    def use(self, program: MeasuredProgram, beside_bytes: int = 0) -> None:
        """Count a program as taking part in its job, with `beside_bytes` of tensors. Raises `ExecutionError` if these
        or what it keeps while it runs do not fit."""
        needed_bytes = program.size.kept_bytes + program.size.in_use_bytes + beside_bytes
        more_bytes = max(0, needed_bytes - self._reserved_bytes(program))
        self._check(more_bytes, self.left_bytes, "a stage that begins to take part in its job")
        self._in_use[program] = beside_bytes

    def require(self, nbytes: int, what: str) -> None:
        """Raise `ExecutionError` if a store can't take `nbytes` more."""
        self._check(nbytes, self.room_bytes, what)

    def _check(self, nbytes: int, left_bytes: int | None, what: str) -> None:
        if left_bytes is None or nbytes <= left_bytes:
            return
        raise ExecutionError(
            f"{what} would make this machine hold {nbytes - left_bytes} bytes more than it lends to all jobs together. "
            f"Its stages take {self.programs_bytes} bytes, and tensors kept for later work {self.stores_bytes}; "
            f"{max(0, left_bytes)} are left, expected at least {nbytes}.",
            hint="Lend more memory, or give this machine fewer or smaller stages.",
        )

    def _reserved_bytes(self, program: MeasuredProgram) -> int:
        if program not in self._in_use:
            return 0
        beside_bytes = self._in_use[program]
        return program.size.kept_bytes + (0 if beside_bytes is None else program.size.in_use_bytes + beside_bytes)
