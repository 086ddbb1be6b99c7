"""A closed form's numbers as a planning problem: equal peers and equal blocks that take exactly what it says.

A plan of such a problem has the closed form's stages, so that whatever predicts or simulates plans can
be held against it; so do passes in serving. Only replicas have no place in it: a problem is one pipeline.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fusionai.scheduling.analysis.closed_form import GenerationTerms, PipelineTerms
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import (
    BlockCost,
    Certificate,
    Link,
    PeerProfile,
    Plan,
    Problem,
    RolePlacement,
    ServingNeeds,
    ServingSizes,
    StagePlacement,
)

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


def passes_plan_of(terms: GenerationTerms) -> Plan:
    """The plan of `passes_problem_of`. Passes end where they begin again: on the first stage, or nowhere in particular
    if the terms have no way back."""
    stages = tuple(
        StagePlacement(stage=number, peer=f"p{number}", blocks=(number, number + 1)) for number in range(terms.stages)
    )
    return Plan(
        task="serve",
        graph_hash="closed form",
        stages=stages,
        feed=stages[0].peer if terms.returns else "",
        microbatches=1,
        step_time_s=terms.trip_s,
        tokens_per_s=1 / terms.round_s,
        certificate=Certificate(
            method="closed form", exact=False, bound_tokens_per_s=1 / terms.round_s, optimality_gap=0.0
        ),
        serving=ServingSizes(
            weights="fp16",
            cache="fp16",
            page_tokens=1,
            pages=1,
            sessions=terms.sessions,
            context_tokens=1,
            pass_tokens=1,
            passes_in_flight=terms.passes,
            tokens_per_s_together=terms.tokens_per_s / terms.replicas,
        ),
    )


def passes_problem_of(terms: GenerationTerms) -> Problem:
    """One pipeline of `terms`: peers of one operation per second and `BYTES_PER_S` of memory bandwidth, on links as in
    `problem_of`. What a pass costs besides reading and computing is part of either."""
    link = Link(bandwidth_bytes_per_s=BYTES_PER_S, latency_s=terms.latency_s / 2)
    row_bytes = round(terms.transfer_s / terms.rows * BYTES_PER_S)
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=(terms.compute_s + terms.overhead_s) / terms.rows,
            backward_flops=0.0,
            parameter_bytes=round((terms.weights_s + terms.overhead_s) * BYTES_PER_S),
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=row_bytes,
            gradient_bytes=0,
        )
        for number in range(terms.stages)
    )
    peers = tuple(
        PeerProfile(
            peer=f"p{number}",
            flops_per_s=1.0,
            memory_bytes=ROOM_BYTES,
            memory_bandwidth_bytes_per_s=BYTES_PER_S,
            uplink=link,
            downlink=link,
        )
        for number in range(terms.stages)
    )
    return Problem(
        task="serve",
        graph_hash="closed form",
        blocks=blocks,
        peers=peers,
        roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
        stages=terms.stages,
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(context_tokens=1, sessions=terms.sessions, result_bytes=row_bytes if terms.returns else 0),
    )
