"""A training problem in which a machine's speed is what it makes of training. Decides how calls are counted.

An operator takes `call_s` whatever its size, and its operations at the speed of a training block; in a small model the
first is most of it. Everything that plans knows operations over speed, one number per block and one per machine. So
calls are turned into operations, as many as a typical machine of the pool computes in a call's time, and every machine
gets the speed at which the whole model takes it as long as its own two figures say. That is exact where blocks have the
same operations per call, or machines the same operations in a call's time; models are made of layers that are alike.

Pure. `replicated`, `planner` and `StageCosts` begin with it; said twice it changes nothing. Neighbours: `backends.pace`
measured, `ir.cost` counted.
"""

from __future__ import annotations

from statistics import median_low

import msgspec

from fusionai.scheduling.types import BlockCost, PeerProfile, Problem


def paced(problem: Problem) -> Problem:
    """`problem` itself where nobody's pace was measured, in serving, and where it is paced already."""
    calls = sum(block.calls for block in problem.blocks)
    flops = sum(block.forward_flops + block.backward_flops for block in problem.blocks)
    machines = (*problem.peers, *(() if problem.owner is None else (problem.owner,)))
    worth = [one.call_s * _block_flops_per_s(one) for one in machines if _is_measured(one) and one.flops_per_s > 0]
    if problem.task != "train" or not worth or not flops > 0:
        return problem
    typical = median_low(worth)

    def at_pace(peer: PeerProfile) -> PeerProfile:
        if not peer.flops_per_s > 0:
            return peer
        speed = _block_flops_per_s(peer)
        call_s = peer.call_s if _is_measured(peer) else typical / speed
        whole_s = flops / speed + calls * call_s
        return msgspec.structs.replace(
            peer, flops_per_s=(flops + calls * typical) / whole_s, block_flops_per_s=0.0, call_s=0.0
        )

    return msgspec.structs.replace(
        problem,
        blocks=tuple(_with_calls(block, typical) for block in problem.blocks),
        peers=tuple(at_pace(peer) for peer in problem.peers),
        owner=None if problem.owner is None else at_pace(problem.owner),
    )


def _is_measured(peer: PeerProfile) -> bool:
    return peer.block_flops_per_s > 0


def _block_flops_per_s(peer: PeerProfile) -> float:
    return peer.block_flops_per_s if _is_measured(peer) else peer.flops_per_s


def _with_calls(block: BlockCost, worth: float) -> BlockCost:
    """Backward takes two of three parts of a call's time, where there is one."""
    added = block.calls * worth
    share = 1 / 3 if block.backward_flops > 0 else 1.0
    return msgspec.structs.replace(
        block,
        calls=0,
        forward_flops=block.forward_flops + share * added,
        backward_flops=block.backward_flops + (1 - share) * added if block.backward_flops > 0 else 0.0,
    )
