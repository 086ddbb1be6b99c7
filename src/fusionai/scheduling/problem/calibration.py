"""Converts a problem's costs so that one speed per machine describes measured training or serving performance.

In training, an operator takes a fixed time per call, its operations at the speed of a training block, and the bytes it
reads and writes (`primitives.pace`). The planner models a block's time as operations divided by speed. Therefore calls
and bytes are converted to the number of operations that a typical (median) machine of the pool computes in the same
time, and every machine gets the speed at which the whole model takes as long as its own measurements predict. Models
consist mostly of similar layers, so the error is small.

In serving, a machine gets the compute speed and the memory bandwidth measured for the requested weight format, if they
were measured. Attention has its own speed (`StageCosts.attention_s`). Converting twice has no further effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

import msgspec

from fusionai.primitives.pace import ServingSpeed, TrainingSpeed
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem


def paced(problem: Problem) -> Problem:
    """Return `problem` with converted costs and speeds. Returns `problem` itself if no machine has a measured pace, and
    an equal problem if it was converted before."""
    if problem.task == "serve":
        return _served(problem)
    measured = [machine.pace for machine in problem.everyone if machine.pace is not None and machine.flops_per_s > 0]
    paces = [pace.at(problem.precision) for pace in measured]
    flops = sum(block.forward_flops + block.backward_flops for block in problem.blocks)
    calls = sum(block.calls for block in problem.blocks)
    moved_bytes = sum(block.moved_bytes for block in problem.blocks)
    if not paces or not flops > 0:
        return problem
    call_flops = median_low([pace.call_s * pace.flops_per_s for pace in paces])
    byte_flops = median_low([pace.byte_s * pace.flops_per_s for pace in paces])

    def at_pace(peer: PeerProfile) -> PeerProfile:
        if not peer.flops_per_s > 0:
            return peer
        # An unmeasured machine is assumed to be typical at its own speed.
        pace = TrainingSpeed(
            flops_per_s=peer.flops_per_s, call_s=call_flops / peer.flops_per_s, byte_s=byte_flops / peer.flops_per_s
        )
        if peer.pace is not None:
            pace = peer.pace.at(problem.precision)
        counted_flops = flops + calls * call_flops + moved_bytes * byte_flops
        whole_s = pace.seconds(flops, calls, moved_bytes)
        return msgspec.structs.replace(peer, flops_per_s=counted_flops / whole_s, pace=None)

    def counted(block: BlockCost) -> BlockCost:
        return _with_flops(block, block.calls * call_flops + block.moved_bytes * byte_flops)

    return _with_profiles(
        msgspec.structs.replace(problem, blocks=tuple(counted(block) for block in problem.blocks)), at_pace
    )


def _with_profiles(problem: Problem, at_pace: Callable[[PeerProfile], PeerProfile]) -> Problem:
    peers, owner = tuple(at_pace(peer) for peer in problem.peers), problem.owner
    return msgspec.structs.replace(problem, peers=peers, owner=None if owner is None else at_pace(owner))


def _with_flops(block: BlockCost, added: float) -> BlockCost:
    """Replace the block's calls and bytes by `added` operations, two thirds of them in backward if there is one."""
    share = 1 / 3 if block.backward_flops > 0 else 1.0
    return msgspec.structs.replace(
        block,
        calls=0,
        moved_bytes=0.0,
        forward_flops=block.forward_flops + share * added,
        backward_flops=block.backward_flops + (1 - share) * added if block.backward_flops > 0 else 0.0,
    )


def _served(problem: Problem) -> Problem:
    needs = problem.serving
    if needs is None or not any(machine.serving for machine in problem.everyone):
        return problem

    def at_pace(peer: PeerProfile) -> PeerProfile:
        pace = next((one for one in peer.serving if one.form == needs.weights), None)
        if pace is None or not (peer.flops_per_s > 0 and pace.flops_per_s > 0):
            return msgspec.structs.replace(peer, serving=())
        return msgspec.structs.replace(
            peer, flops_per_s=pace.flops_per_s, memory_bandwidth_bytes_per_s=pace.bytes_per_s, serving=()
        )

    return _with_profiles(problem, at_pace)


def typical_serving(profiles: Sequence[PeerProfile]) -> tuple[ServingSpeed, ...]:
    """Return the median measured serving speeds for each weight format that all profiles have."""
    measured = [{one.form: one for one in profile.serving} for profile in profiles]
    if not measured:
        return ()
    return tuple(
        msgspec.structs.replace(
            one,
            flops_per_s=median_low(known[form].flops_per_s for known in measured),
            bytes_per_s=median_low(known[form].bytes_per_s for known in measured),
        )
        for form, one in measured[0].items()
        if all(form in known for known in measured)
    )
