"""The closed forms of the analysis against discrete-event runs of the shipped machines, from the same numbers."""

from __future__ import annotations

from itertools import product

import pytest

from fusionai.cli.planning.pool_file import shipped_catalogue
from fusionai.scheduling.analysis.cases import (
    BERT,
    BEST,
    DECODED,
    DECODING_OPTIMISATIONS,
    FORWARD_OPTIMISATIONS,
    FORWARDED,
    GPT3_24,
    HALF,
    INT4_INT8,
    LLAMA_8B,
    LLAMA_70B_ADAPTERS,
    MBIT,
    TRAINING_OPTIMISATIONS,
)
from fusionai.scheduling.analysis.closed_form import GenerationTerms, PipelineTerms
from fusionai.scheduling.analysis.fleets import (
    Assumptions,
    Fleet,
    FleetNetwork,
    Misfit,
    PredictedSpeed,
    Shape,
    forward,
    generate,
    train,
)
from fusionai.simulator.generation import simulate_tokens
from fusionai.simulator.step import BARE, simulate_steps
from harness.closed_form_plans import passes_plan_of, passes_problem_of, plan_of, problem_of

MOST = 0.05
PLACES = [(10, 100), (100, 50), (1_000, 20), (10_000, 1)]
FEW_PLACES = [PLACES[0], *(pytest.param(place, marks=pytest.mark.long) for place in PLACES[1:3]), PLACES[3]]
"""The ends in every run of the tests, the middle in long ones."""


def fleet() -> Fleet:
    return Fleet(device=shipped_catalogue().find("RTX 3080"), count=50)


def network(place: tuple[int, int]) -> FleetNetwork:
    return FleetNetwork(bandwidth_bytes_per_s=place[0] * MBIT, latency_s=place[1] / 1e3)


@pytest.mark.slow
@pytest.mark.parametrize("place", FEW_PLACES, ids=str)
@pytest.mark.parametrize("optimisations", ["overlap, 8-bit", BEST])
@pytest.mark.parametrize("shape", [BERT, GPT3_24, LLAMA_8B, LLAMA_70B_ADAPTERS], ids=lambda shape: shape.name)
def test_a_step_takes_as_long_event_by_event(shape: Shape, optimisations: str, place: tuple[int, int]):
    outcome = train(shape, fleet(), network(place), TRAINING_OPTIMISATIONS[optimisations], Assumptions())
    assert isinstance(outcome, PredictedSpeed)
    terms = outcome.terms
    assert isinstance(terms, PipelineTerms)
    run = simulate_steps(plan_of(terms), problem_of(terms), BARE)
    assert abs(run.step_s / terms.pipeline_s - 1) <= MOST
    assert max(run.in_flight) <= terms.in_flight


@pytest.mark.parametrize("latency_s", [0.0, 0.1])
@pytest.mark.parametrize("transfer_s", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_short_pipelines_take_as_long_event_by_event(stages: int, transfer_s: float, latency_s: float):
    """Between two stages no uplink carries activations and gradients."""
    terms = PipelineTerms(
        stages=stages,
        replicas=1,
        microbatches=64,
        forward_s=0.1,
        backward_s=0.2,
        activation_s=0.0 if stages == 1 else transfer_s,
        gradient_s=0.0 if stages == 1 else transfer_s,
        latency_s=latency_s,
        sync_s=0.0,
        overlapped=True,
    )
    assert terms.step_s == terms.pipeline_s
    run = simulate_steps(plan_of(terms), problem_of(terms), BARE)
    assert abs(run.step_s / terms.pipeline_s - 1) <= MOST


def generated_event_by_event(terms: GenerationTerms) -> float:
    """Tokens per second of one pipeline. Fewer rounds where there are many stages and passes."""
    rounds = 8 if terms.stages * terms.passes < 5_000 else 4
    run = simulate_tokens(passes_plan_of(terms), passes_problem_of(terms), terms.sessions, rounds=rounds)
    assert run.passes == terms.passes
    return run.tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("place", FEW_PLACES, ids=str)
@pytest.mark.parametrize("shape", DECODED, ids=lambda shape: shape.name)
def test_decoding_gives_as_many_tokens_event_by_event(shape: Shape, place: tuple[int, int]):
    """As it stands and with all optimisations; equal outcomes are simulated once."""
    found: set[GenerationTerms] = set()
    for optimisations in (DECODING_OPTIMISATIONS[HALF], DECODING_OPTIMISATIONS[INT4_INT8]):
        outcome = generate(shape, fleet(), network(place), optimisations, Assumptions())
        assert isinstance(outcome, PredictedSpeed)
        assert isinstance(outcome.terms, GenerationTerms)
        assert outcome.tokens_per_s == outcome.terms.tokens_per_s
        found.add(outcome.terms)
    for terms in found:
        assert abs(generated_event_by_event(terms) * terms.replicas / terms.tokens_per_s - 1) <= MOST, terms


@pytest.mark.slow
@pytest.mark.parametrize("shape", FORWARDED, ids=lambda shape: shape.name)
def test_whole_sequences_pass_as_fast_event_by_event(shape: Shape):
    for place, optimisations in product(PLACES, FORWARD_OPTIMISATIONS.values()):
        outcome = forward(shape, fleet(), network(place), optimisations, Assumptions())
        if isinstance(outcome, Misfit):
            continue
        terms = outcome.terms
        assert isinstance(terms, GenerationTerms)
        assert terms.rows == shape.sequence_tokens
        assert abs(generated_event_by_event(terms) * terms.replicas / outcome.tokens_per_s - 1) <= MOST, terms


def test_too_few_passes_in_flight_are_seen_event_by_event():
    """Neither side takes a full pipeline for granted."""
    terms = GenerationTerms(
        stages=4,
        replicas=1,
        passes=2,
        rows=8,
        weights_s=0.01,
        compute_s=0.002,
        overhead_s=0.001,
        transfer_s=0.005,
        latency_s=0.02,
        hops=4,
    )
    assert terms.round_s == terms.trip_s == pytest.approx(4 * 0.011 + 4 * 0.025)
    assert generated_event_by_event(terms) == pytest.approx(16 / terms.trip_s, rel=0.01)
