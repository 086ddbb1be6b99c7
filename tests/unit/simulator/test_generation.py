"""One session's tokens come exactly as predicted; many sessions share what the busiest machine can do."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds
from fusionai.simulator.generation import simulate_tokens
from fusionai.simulator.network import Weather

LINK = Link(bandwidth_bytes_per_s=1e8, latency_s=0.01)


def peer(name: str) -> PeerProfile:
    return PeerProfile(
        peer=name,
        flops_per_s=1e10,
        memory_bytes=700_000_000,
        memory_bandwidth_bytes_per_s=1e10,
        fingerprint="cpu",
        uplink=LINK,
        downlink=LINK,
    )


def problem(sessions: int, latency_s: float = 0.01) -> Problem:
    blocks = tuple(
        BlockCost(
            block=n,
            forward_flops=2e7,
            backward_flops=0.0,
            parameter_bytes=200_000_000,
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=4000,
            gradient_bytes=0,
            cache_token_bytes=1000,
        )
        for n in range(8)
    )
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=latency_s)
    everyone = [msgspec.structs.replace(peer(name), uplink=link, downlink=link) for name in ("a", "b", "c", "d", "me")]
    return Problem(
        task="serve",
        graph_hash="g",
        blocks=blocks,
        peers=tuple(everyone[:4]),
        owner=everyone[4],
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss")),
        microbatches=1,
        microbatch_tokens=1,
        takeover="tolerant",
        serving=ServingNeeds(context_tokens=256, sessions=sessions, result_bytes=128_000),
    )


@pytest.mark.parametrize("latency_s", [0.0, 0.01, 0.1])
def test_one_session_gets_a_token_per_trip_as_predicted(latency_s: float) -> None:
    posed = problem(1, latency_s)
    found = plan(posed)
    run = simulate_tokens(found, posed, 1)
    assert run.passes == 1
    assert run.token_s == pytest.approx(found.step_time_s)
    assert run.tokens_per_s == pytest.approx(found.tokens_per_s)


@pytest.mark.parametrize("sessions", [2, 7, 16])
def test_many_sessions_get_what_is_predicted_within_a_tenth_and_never_more_than_the_busiest_can(sessions: int) -> None:
    posed = problem(sessions)
    found = plan(posed)
    assert found.serving is not None
    run = simulate_tokens(found, posed, sessions, rounds=40)
    assert run.passes == min(found.serving.passes_in_flight, sessions)
    assert max(run.utilisation.values()) <= 1 + 1e-9
    assert 0.9 <= run.tokens_per_s / found.serving.tokens_per_s_together <= 1.1


def test_jitter_costs_time_and_depends_on_the_seed() -> None:
    posed = problem(4)
    found = plan(posed)
    calm = simulate_tokens(found, posed, 4)
    stormy = simulate_tokens(found, posed, 4, weather=Weather(jitter_s=0.02), seed=1)
    assert stormy.tokens_per_s < calm.tokens_per_s
    assert stormy == simulate_tokens(found, posed, 4, weather=Weather(jitter_s=0.02), seed=1)


def test_a_training_plan_does_not_generate() -> None:
    posed = problem(1)
    trained = msgspec.structs.replace(plan(posed), serving=None)
    with pytest.raises(PlanError, match="serving plan"):
        simulate_tokens(trained, posed, 1)
