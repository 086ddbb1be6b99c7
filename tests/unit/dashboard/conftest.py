from __future__ import annotations

import pytest

from fusionai.dashboard.report_data import ReportData, StepSpans
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem
from fusionai.wire.messages import Span


@pytest.fixture(scope="session")
def problem() -> Problem:
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9,
            backward_flops=2e9,
            parameter_bytes=10**6,
            trainable_bytes=10**6,
            activation_bytes=10**5,
            output_bytes=1000,
            gradient_bytes=1000,
        )
        for number in range(7)
    )
    peers = tuple(
        PeerProfile(peer=letter * 52, name=f"machine {letter}", flops_per_s=1e10, memory_bytes=10**8, device_name="CPU")
        for letter in "abcd"
    )
    owner = PeerProfile(peer="o" * 52, name="job owner", flops_per_s=1e10, memory_bytes=10**9)
    return Problem(
        graph_hash="g",
        blocks=blocks,
        peers=peers,
        owner=owner,
        stages=2,
        excluded=("d" * 52,),
        microbatches=4,
        microbatch_tokens=64,
    )


@pytest.fixture(scope="session")
def report_data(problem: Problem) -> ReportData:
    assert problem.owner is not None
    losses = (3.0, 2.5, 2.25)
    spans = {
        0: (Span("forward", 0, 5.0, 5.1), Span("send", 0, 5.1, 5.11), Span("backward", 0, 5.3, 5.5)),
        1: (Span("forward", 0, 5.11, 5.2), Span("backward", 0, 5.2, 5.3), Span("apply", 0, 5.5, 5.6)),
        2: (Span("wait", 0, 5.0, 5.6),),
    }
    return ReportData(
        title="A run",
        job="run-00000000",
        created="today",
        model="LlamaForCausalLM",
        model_params=1_234_567,
        steps=3,
        losses=losses,
        losses_reference=losses,
        tokens_per_s=1000.0,
        tokens_per_s_reference=2000.0,
        checkpoint="runs/checkpoint-3",
        checkpoint_loss_diff=0.0,
        generation_equal=True,
        plan=plan(problem),
        pool=(*problem.peers, problem.owner),
        timed_step=StepSpans(step=2, spans=spans),
        configuration={"optimizer": "AdamW"},
    )
