"""Size limits of a graph. `ir.validate` enforces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what a graph may request. A peer lowers the byte limits to what it lends to the job."""

    json_bytes: int = 16 * 2**20
    json_depth: int = 32
    nodes: int = 200_000
    values: int = 800_000
    params: int = 100_000
    blocks: int = 10_000
    interface: int = 4096
    """Limit on the number of inputs, and on the number of outputs."""
    symbols: int = 16
    symbol_size: int = 2**31
    rank: int = 16
    args: int = 32
    results: int = 4096
    list_items: int = 4096
    list_depth: int = 3
    name_characters: int = 512
    aliases: int = 64
    init_ops: int = 8
    value_bytes: int = 2**42
    """Limit on any single value at the symbols' largest sizes."""
    parameter_bytes: int = 2**44
    """Limit on all parameters and buffers together."""
    constant_bytes: int = 2**32
    """Limit on all constants together, because their bytes travel with the graph."""


DEFAULT_LIMITS: Final = Limits()
