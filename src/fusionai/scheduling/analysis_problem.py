"""The same numbers as a planning problem: equal peers and equal blocks that take exactly what a closed form says.

Decides nothing. A plan of such a problem has the closed form's stages, so that whatever predicts or simulates plans can
be held against it. Only replicas' synchronisation has no place in it: a problem is one pipeline.

Neighbours: `closed_form` has the terms; `planner` and the simulator take the problem.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fusionai.scheduling.closed_form import PipelineTerms
from fusionai.scheduling.planner import plan
from fusionai.scheduling.types import BlockCost, Link, PeerProfile, Plan, Problem, RolePlacement

BYTES_PER_S: Final = 1e9
"""Of every link: so a second of transfer is that many bytes."""
ROOM_BYTES: Final = 10**18
"""More than any number of microbatches in flight takes."""


def plan_of(terms: PipelineTerms) -> Plan:
    """The one plan of `problem_of`, every stage with as many microbatches in flight as the closed form takes for
    granted."""
    found = plan(problem_of(terms))
    stages = tuple(msgspec.structs.replace(stage, in_flight=terms.in_flight) for stage in found.stages)
    return msgspec.structs.replace(found, stages=stages)


def problem_of(terms: PipelineTerms) -> Problem:
    """One pipeline of `terms`, sending beside computing: `stages` blocks for as many peers of one operation per second,
    with links of `BYTES_PER_S` and half the latency at either end. Nothing is bound by memory."""
    link = Link(bandwidth_bytes_per_s=BYTES_PER_S, latency_s=terms.latency_s / 2)
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=terms.forward_s,
            backward_flops=terms.backward_s,
            parameter_bytes=1,
            trainable_bytes=1,
            activation_bytes=1,
            output_bytes=round(terms.activation_s * BYTES_PER_S),
            gradient_bytes=round(terms.gradient_s * BYTES_PER_S),
        )
        for number in range(terms.stages)
    )
    peers = tuple(
        PeerProfile(
            peer=f"p{number}", flops_per_s=1.0, memory_bytes=ROOM_BYTES, uplink=link, downlink=link, fingerprint="equal"
        )
        for number in range(terms.stages)
    )
    return Problem(
        graph_hash="closed form",
        blocks=blocks,
        peers=peers,
        roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
        stages=terms.stages,
        microbatches=terms.microbatches,
        microbatch_tokens=1,
    )
