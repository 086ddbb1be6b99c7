"""The closed forms of the analysis against discrete-event runs of the shipped stage machines, from the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusionai.cli.catalogue_file import shipped_catalogue
from fusionai.scheduling.analysis import Assumptions, Fleet, Network, Outcome, train
from fusionai.scheduling.analysis_cases import (
    BERT,
    BEST,
    GPT3_24,
    LLAMA_8B,
    LLAMA_70B_ADAPTERS,
    MBIT,
    TRAINING_LEVERS,
)
from fusionai.scheduling.analysis_problem import plan_of, problem_of
from fusionai.scheduling.closed_form import PipelineTerms
from fusionai.simulator.step import BARE, simulate_steps

MOST = 0.05
MOST_TOO_SLOW = 0.055
"""The closed form is pessimistic where filling is a quarter of a step and links set the period: as long as only
activations flow, uplinks take two microbatches in the time of one there and back."""


@pytest.mark.slow
@pytest.mark.parametrize("place", [(10, 100), (100, 50), (1_000, 20), (10_000, 1)], ids=str)
@pytest.mark.parametrize("levers", ["overlap, 8-bit", BEST])
@pytest.mark.parametrize("shape", [BERT, GPT3_24, LLAMA_8B, LLAMA_70B_ADAPTERS], ids=lambda shape: shape.name)
def test_a_step_takes_as_long_event_by_event(shape, levers: str, place: tuple[int, int]):
    fleet = Fleet(device=shipped_catalogue().find("RTX 3080"), count=50)
    network = Network(bandwidth_bytes_per_s=place[0] * MBIT, latency_s=place[1] / 1e3)
    outcome = train(shape, fleet, network, TRAINING_LEVERS[levers], Assumptions())
    assert isinstance(outcome, Outcome)
    terms = outcome.terms
    assert isinstance(terms, PipelineTerms)
    run = simulate_steps(plan_of(terms), problem_of(terms), BARE)
    pipeline_s = replace(terms, sync_s=0.0).step_s
    filling = terms.transfer_s > terms.compute_s and terms.fill_s > 0.2 * pipeline_s
    assert -(MOST_TOO_SLOW if filling else MOST) <= run.step_s / pipeline_s - 1 <= MOST
    assert max(run.in_flight) <= terms.in_flight
