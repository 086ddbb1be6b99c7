"""The budget of one machine: programs and stores together, loads one at a time, cards with a memory of their own."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fusionai.backends.state import ProgramSize
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.primitives.errors import ExecutionError


class Program:
    def __init__(self, kept_bytes: int, in_use_bytes: int = 0) -> None:
        self.size = ProgramSize(kept_bytes, in_use_bytes)


class Store:
    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes


def test_programs_and_stores_draw_on_one_limit_as_long_as_they_live() -> None:
    memory = MemoryBudget(100)
    program, store = Program(30, 20), Store(10)
    memory.add(program)
    memory.join(store)
    assert memory.left_bytes == 60
    memory.use(program, beside_bytes=5)
    assert (memory.left_bytes, memory.room_bytes) == (35, 35)
    with pytest.raises(ExecutionError, match="a snapshot would make this machine hold 1 bytes more than it lends"):
        memory.require(36, "a snapshot")
    memory.require(35, "a snapshot")
    del program
    gc.collect()
    assert memory.left_bytes == 90
    del store
    gc.collect()
    assert memory.left_bytes == 100


def test_a_program_that_does_not_fit_any_more_is_not_counted() -> None:
    memory = MemoryBudget(100)
    large, small = Program(101), Program(60, 50)
    with pytest.raises(ExecutionError, match="a loaded stage"):
        memory.add(large)
    assert memory.programs_bytes == 0
    memory.add(small)
    with pytest.raises(ExecutionError, match="begins to take part"):
        memory.use(small)
    assert memory.programs_bytes == 60, "it stays loaded and takes no part"


def test_a_program_taken_into_use_twice_counts_once() -> None:
    memory = MemoryBudget(100)
    program = Program(60, 40)
    memory.add(program)
    memory.use(program)
    memory.use(program)
    assert memory.left_bytes == 0


def test_two_loads_never_count_on_the_same_memory() -> None:
    async def story() -> None:
        memory = MemoryBudget(100)
        programs: list[Program] = []

        async def load() -> int | None:
            async with memory.loading() as left_bytes:
                await asyncio.sleep(0)
                programs.append(Program(60))
                if left_bytes is not None and left_bytes >= 60:
                    memory.add(programs[-1])
                return left_bytes

        assert await asyncio.gather(load(), load()) == [100, 40]

    asyncio.run(story())


def test_a_card_has_a_memory_of_its_own() -> None:
    memory = MemoryBudget(100, host_limit_bytes=50)
    program, store = Program(90), Store(30)
    memory.add(program)
    memory.join(store)
    assert (memory.left_bytes, memory.room_bytes) == (10, 20)
    with pytest.raises(ExecutionError):
        memory.require(21, "a snapshot")


def test_the_owners_own_machine_limits_no_program() -> None:
    memory = MemoryBudget(None)
    program = Program(2**60)
    memory.add(program)
    memory.use(program)
    assert memory.left_bytes is None
    with pytest.raises(ExecutionError, match="a snapshot"):
        memory.require(2**60, "a snapshot")


def test_stores_give_way_only_where_that_makes_room() -> None:
    """Not on a machine without a limit, nor for what a card lacks."""
    program = Program(60, 50)
    assert MemoryBudget(100).lacking_bytes(program) == 10
    assert MemoryBudget(200).lacking_bytes(program) < 0
    assert MemoryBudget(None).lacking_bytes(program) == 0
    assert MemoryBudget(100, host_limit_bytes=1).lacking_bytes(program) == 0
