"""What every range of blocks takes with every set of levers, as arrays. Decides which sets are worth comparing.

`ways` are the sets of levers that a problem leaves to each stage. Ranges are [start, end) positions into a chain, the
arrays' last two axes. A way's seconds on a machine follow from its operations, the bytes of weights that it reads for
each microbatch, and the bytes that its update reads and writes.

Neighbours: `chain` has the sums, `levers` the prices of levers, `pipeline` adds machines and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fusionai.scheduling.chain import Chain
from fusionai.scheduling.levers import Levers

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageTables:
    """W ways, L blocks: arrays are [W, L, L + 1], 0 where a range is empty."""

    ways: tuple[Levers, ...]
    flops: Floats
    """Forward and backward of one microbatch."""
    read_bytes: Floats
    """Weights that one microbatch reads from where they lie."""
    slot_bytes: Floats
    """Optimizer state that an update reads and writes in a file."""
    trained_bytes: Floats
    """Weights that an update reads and writes where they lie."""
    resident_bytes: Floats
    flight_bytes: Floats
    """Of one microbatch in flight."""
    needless: Integers
    """[W]: mask of the ways that do all that this one does and more: none is better where this one has room for all
    microbatches."""

    def with_flight(self, chain: Chain) -> StageTables:
        """The same with what `chain` says of boundaries."""
        return replace(self, flight_bytes=np.array([chain.flight_table(way) for way in self.ways]))


def stage_tables(chain: Chain, ways: Sequence[Levers]) -> StageTables:
    """Of all ranges of `chain`."""
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
