"""Memory of the device that a torch backend computes on: what is free, the process's own limit, and running out of it.

A card's memory is used by every program of the machine, so what is free there can change at any time, and estimates
are no guarantee. If an allocation fails, the allocator's unused blocks go back to the card and the work is tried once
more. If it fails again, an `ExecutionError` gives the figures, and the job plans without this machine's stage.

Neighbours: `backend` reports what is free, `program` and `serving` run their work through `with_memory`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, TypeVar

import psutil
import torch

from fusionai.backends.binding import first_line
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.units import format_bytes

T = TypeVar("T")


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of memory that no program uses, this process's unused blocks included, and the whole. On a card
    it begins this process's context, so that what the context takes is no longer free."""
    match device.type:
        case "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(device)
        case "mps":
            memory_bytes = torch.mps.recommended_max_memory()
            return min(memory_bytes, psutil.virtual_memory().available), memory_bytes
        case _:
            memory = psutil.virtual_memory()
            return memory.available, memory.total


BEYOND_LENT: Final = 1.1
"""What a process may allocate on a card, as a multiple of what is lent. The tenth is for what estimates leave out:
blocks between tensors, libraries' workspaces, and a session's keys and values, which serving reads as float32 one layer
at a time. It is part of the reserve that is not lent (`peer.profile`)."""


def limit_card_memory(device: torch.device, memory_bytes: int) -> None:
    """Let this process allocate little more than `memory_bytes` on a card: an estimate that is too low then fails here
    and takes no memory from other programs. The context is not counted."""
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        # The function refuses a device without a number; None stands for the present card.
        torch.cuda.set_per_process_memory_fraction(min(1.0, BEYOND_LENT * memory_bytes / total_bytes), device.index)


def with_memory(device: torch.device, what: str, work: Callable[[], T], *, again: bool = True) -> T:
    """Return what `work` returns. If the device's memory runs out, release unused blocks and, with `again`, try once
    more. Raises `ExecutionError` with the figures if that fails. With `again`, `work` must not have changed anything
    when it runs out of memory."""
    if device.type == "cpu":
        return work()
    problem = ""
    for _ in range(1 + again):
        try:
            return work()
        except torch.OutOfMemoryError as error:
            problem = first_line(error)
        # Here the failed work's frames are gone, and with them the tensors they held.
        release_unused(device)
    raise ExecutionError(
        f"{what}: the memory of {device} ran out{' twice' if again else ''}. {_figures(device)} PyTorch: {problem}",
        hint="Close other programs that use the card, or lend less of its memory (--max-memory).",
    )


def release_unused(device: torch.device) -> None:
    """Give the allocator's unused blocks back to the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def _figures(device: torch.device) -> str:
    free_bytes, total_bytes = free_and_total_bytes(device)
    held_bytes = 0
    if device.type == "cuda":
        held_bytes = torch.cuda.memory_allocated(device)
    elif device.type == "mps":
        held_bytes = torch.mps.current_allocated_memory()
    return (
        f"Of {format_bytes(total_bytes)}, {format_bytes(free_bytes)} are free and {format_bytes(held_bytes)} are held "
        "by this process's stages; other programs have the rest."
    )
