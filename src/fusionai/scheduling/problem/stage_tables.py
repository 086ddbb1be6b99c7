"""Compute and memory of every range of blocks with every set of levers, as arrays.

`ways` are the sets of levers that a problem allows each stage. Ranges are [start, end) positions in a chain, the
arrays' last two axes. The seconds of a way on a machine follow from its operations, the weight bytes it reads for each
microbatch, and the bytes its update reads and writes.

`chain` has the sums, `levers` the costs of levers; `pipeline` adds machines and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusionai.scheduling.kernels.compiled import Floats, Integers
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.levers import Levers


@dataclass(frozen=True, slots=True)
class StageTables:
    """Costs for W ways and L blocks. Arrays are [W, L, L + 1], 0 for an empty range."""

    ways: tuple[Levers, ...]
    flops: Floats
    """Operations of forward and backward of one microbatch."""
    read_bytes: Floats
    """Weights that one microbatch reads from a file or host memory."""
    slot_bytes: Floats
    """Optimizer state that an update reads and writes in a file."""
    trained_bytes: Floats
    """Weights that an update reads and writes in a file or host memory."""
    resident_bytes: Floats
    flight_bytes: Floats
    """Memory of one microbatch in flight."""
    needless: Integers
    """[W]: mask of the ways with all levers of this way and more. They are useless if this way has room for all
    microbatches."""

    def with_flight(self, chain: Chain) -> StageTables:
        """Return a copy with the boundary sizes of `chain`."""
        return replace(self, flight_bytes=np.array([chain.flight_table(way) for way in self.ways]))


def stage_tables(chain: Chain, ways: Sequence[Levers]) -> StageTables:
    """Return the tables of all ranges of `chain`."""
    none = np.zeros((chain.length, chain.length + 1))
    return StageTables(
        ways=tuple(ways),
        flops=np.array([chain.flops_table(way) for way in ways]),
        read_bytes=np.array([2 * chain.weights_table() if way.offload_weights else none for way in ways]),
        slot_bytes=np.array([2 * chain.slots_table() if way.offload else none for way in ways]),
        trained_bytes=np.array([2 * chain.trained_table() if way.offload_weights else none for way in ways]),
        resident_bytes=np.array([chain.resident_table(way) for way in ways]),
        flight_bytes=np.array([chain.flight_table(way) for way in ways]),
        needless=np.array(
            [
                sum(1 << index for index, other in enumerate(ways) if other != way and set(way.names) <= {*other.names})
                for way in ways
            ],
            dtype=np.int64,
        ),
    )
