"""A training problem in which a machine's speed is what it makes of training. Decides how calls and bytes are
counted.

An operator takes some time whatever its size, its operations at the speed of a training block, and the bytes it reads
and writes (`primitives.pace`); in a small model the first is most of it, in a narrow one the last is a good part.
Serving: a machine has the two speeds that were measured for the weight format that is wanted, where they were;
attention has its own (`StageCosts.attention_s`).

Everything that plans knows operations over speed, one number per block and one per machine. So calls and bytes are
turned into operations, as many as a typical machine of the pool computes meanwhile, and every machine gets the speed at
which the whole model takes it as long as its own figures say. That is exact where blocks have the same calls and bytes
per operation, or machines the same operations in a call's and a byte's time; models are made of layers that are alike.

Pure. `replicated`, `planner` and `StageCosts` begin with it; said twice it changes nothing. Neighbours: `backends.pace`
measured, `ir.cost` counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import msgspec

from fusionai.primitives.pace import Pace, ServingPace
from fusionai.scheduling.types import BlockCost, PeerProfile, Problem


def paced(problem: Problem) -> Problem:
    """`problem` itself where nobody's pace was measured, and where it is paced already."""
    if problem.task == "serve":
        return _served(problem)
    machines = (*problem.peers, *(() if problem.owner is None else (problem.owner,)))
    paces = [machine.pace for machine in machines if machine.pace is not None and machine.flops_per_s > 0]
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
        # Who was not measured is typical, at its own speed.
        pace = peer.pace or Pace(
            flops_per_s=peer.flops_per_s, call_s=call_flops / peer.flops_per_s, byte_s=byte_flops / peer.flops_per_s
        )
        counted_flops = flops + calls * call_flops + moved_bytes * byte_flops
        whole_s = pace.seconds(flops, calls, moved_bytes)
        return msgspec.structs.replace(peer, flops_per_s=counted_flops / whole_s, pace=None)

    def counted(block: BlockCost) -> BlockCost:
        return _with_flops(block, block.calls * call_flops + block.moved_bytes * byte_flops)

    return msgspec.structs.replace(
        problem,
        blocks=tuple(counted(block) for block in problem.blocks),
        peers=tuple(at_pace(peer) for peer in problem.peers),
        owner=None if problem.owner is None else at_pace(problem.owner),
    )


def _with_flops(block: BlockCost, added: float) -> BlockCost:
    """In place of its calls and bytes. Backward takes two of three parts of their time, where there is one."""
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
    machines = (*problem.peers, *(() if problem.owner is None else (problem.owner,)))
    if needs is None or not any(machine.serving for machine in machines):
        return problem

    def at_pace(peer: PeerProfile) -> PeerProfile:
        pace = next((one for one in peer.serving if one.form == needs.weights), None)
        if pace is None or not (peer.flops_per_s > 0 and pace.flops_per_s > 0):
            return msgspec.structs.replace(peer, serving=())
        return msgspec.structs.replace(
            peer, flops_per_s=pace.flops_per_s, memory_bandwidth_bytes_per_s=pace.bytes_per_s, serving=()
        )

    return msgspec.structs.replace(
        problem,
        peers=tuple(at_pace(peer) for peer in problem.peers),
        owner=None if problem.owner is None else at_pace(problem.owner),
    )


def typical_serving(profiles: Sequence[PeerProfile]) -> tuple[ServingPace, ...]:
    """The median of what was measured, for each weight format that all of them have."""
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
