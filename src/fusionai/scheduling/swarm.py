"""Converts a problem to the coverage planner's arrays: costs of blocks, capacities of peers.

Only access links are modelled: with hundreds of holders of each block, the next peer changes with every microbatch.

`coverage` uses this module, `coverage_kernels` computes with the arrays, and `chain` has the costs of ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionai.scheduling.kernels.coverage import Integers, Layout, Swarm
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.types import PeerProfile


def swarm_of(chain: Chain, peers: Sequence[PeerProfile], in_flight: int, *, loss_elsewhere: bool) -> Swarm:
    """Return the arrays of `peers` in the given order, each with room for `in_flight` microbatches.

    `loss_elsewhere`: whether the last boundary is sent on.
    """
    length = chain.length
    needed = needed_bytes(chain, in_flight)
    # If a short stage needs more memory than a longer one, count the longer one as large too: intervals may be cut
    # freely.
    needed = np.maximum.accumulate(needed, axis=1)
    lent = np.array([float(peer.memory_bytes) for peer in peers])
    reach = np.zeros((len(peers), length), dtype=np.int64)
    for start in range(length):
        reach[:, start] = start + np.searchsorted(needed[start, start + 1 :], lent, side="right")
    forward, gradient = np.array(chain.forward_bytes), np.array(chain.gradient_bytes)
    if not loss_elsewhere:
        forward[length] = gradient[length] = 0.0
    return Swarm(
        work=np.array([chain.flops(0, end) for end in range(length + 1)]),
        speed=np.array([peer.effective_flops_per_s for peer in peers]),
        up=np.array([peer.uplink.bandwidth_bytes_per_s for peer in peers]),
        down=np.array([peer.downlink.bandwidth_bytes_per_s for peer in peers]),
        forward_bytes=forward,
        gradient_bytes=gradient,
        reach=reach,
    )


def needed_bytes(chain: Chain, in_flight: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return [L, L + 1]: bytes of a stage [a, b) with `in_flight` microbatches in flight; 0 if b <= a."""
    return np.array(
        [
            [
                chain.resident_bytes(a, b) + in_flight * chain.in_flight_bytes(a, b) if a < b else 0.0
                for b in range(chain.length + 1)
            ]
            for a in range(chain.length)
        ]
    )


def idle(swarm: Swarm) -> Layout:
    """Return the layout in which no peer holds a block."""
    peers, length = swarm.reach.shape
    return Layout(
        start=np.zeros(peers, dtype=np.int64),
        end=np.zeros(peers, dtype=np.int64),
        rate=np.zeros(peers, dtype=np.float64),
        cover=np.zeros(length, dtype=np.float64),
    )


def stretches(swarm: Swarm) -> Integers:
    """Return [N, L]: number of blocks, from each block on, that a peer can hold."""
    starts: Integers = np.arange(swarm.reach.shape[1], dtype=np.int64)
    return swarm.reach - starts
