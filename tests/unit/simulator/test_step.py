"""A simulated step does what the shipped machine of a stage says, and takes what its work and transfers take."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, SavingMode
from fusionai.scheduling.training.prediction import predict
from fusionai.simulator.network import Weather
from fusionai.simulator.step import BARE, Durations, Recorded, Rules, simulate_steps


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000_000,
        trainable_bytes=1_000_000,
        activation_bytes=500_000,
        output_bytes=1_000_000,
        gradient_bytes=1_000_000,
    )
    return msgspec.structs.replace(base, **changes)


def peer(name: str, **changes: object) -> PeerProfile:
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=0.002)
    base = PeerProfile(peer=name, flops_per_s=1e10, memory_bytes=10**9, fingerprint="cpu", uplink=link, downlink=link)
    return msgspec.structs.replace(base, **changes)


def problem(**changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=(*(block(n) for n in range(4)), block(4, parameter_bytes=0, trainable_bytes=0)),
        peers=tuple(peer(name) for name in "abcd"),
        owner=peer("owner"),
        stages=4,
        microbatches=8,
        microbatch_tokens=100,
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture(scope="module")
def posed() -> Problem:
    return problem()


@pytest.fixture(scope="module")
def planned(posed: Problem) -> Plan:
    return plan(posed)


def test_every_microbatch_crosses_every_stage_twice(posed: Problem, planned: Plan) -> None:
    run = simulate_steps(planned, posed, Rules(steps=2, weight_lag=False))
    done = [(span.stage, span.kind, span.step, span.microbatch) for span in run.spans]
    assert len(done) == len(set(done))
    for stage in range(len(planned.stages)):
        for kind in ("forward", "backward"):
            assert [d[2:] for d in done if d[:2] == (stage, kind)] == [(s, m) for s in range(2) for m in range(8)]


def test_nothing_starts_before_what_it_needs_has_come(posed: Problem, planned: Plan) -> None:
    run = simulate_steps(planned, posed, Rules(steps=2))
    ends = {(span.stage, span.kind, span.step, span.microbatch): span.end_s for span in run.spans}
    starts = {(span.stage, span.kind, span.step, span.microbatch): span.start_s for span in run.spans}
    hop_s = 0.004  # of latency at least
    for (stage, kind, step, microbatch), start_s in starts.items():
        if kind == "forward" and stage > 0:
            assert start_s >= ends[stage - 1, "forward", step, microbatch] + hop_s
        if kind == "backward" and stage < 4:
            assert start_s >= ends[stage + 1, "backward", step, microbatch] + hop_s
        if kind == "forward" and step == 1:
            assert start_s >= ends[stage, "update", 0, 0]
    for step in (0, 1):
        last_s = max(end_s for (_, kind, at, _), end_s in ends.items() if at == step and kind != "update")
        assert run.committed_s[step] >= last_s


def test_credit_bounds_what_is_in_flight(posed: Problem, planned: Plan) -> None:
    scarce = msgspec.structs.replace(
        planned, stages=tuple(msgspec.structs.replace(stage, in_flight=2) for stage in planned.stages)
    )
    free, bound = simulate_steps(planned, posed, BARE), simulate_steps(scarce, posed, BARE)
    assert max(bound.in_flight) == 2
    assert all(most <= stage.in_flight for most, stage in zip(free.in_flight, planned.stages, strict=True))
    assert bound.step_s > 1.2 * free.step_s


def test_one_compute_lane_does_one_thing_at_a_time() -> None:
    posed = problem(peers=tuple(peer(name) for name in "ab"), stages=2)
    both = plan(posed)
    # As after a takeover by somebody who works already: both stages on one machine.
    stacked = msgspec.structs.replace(
        both, stages=tuple(msgspec.structs.replace(s, peer="a") if s.peer == "b" else s for s in both.stages)
    )
    run = simulate_steps(stacked, posed, BARE)
    mine = sorted((span.start_s, span.end_s) for span in run.spans if span.peer == "a")
    assert all(after[0] >= before[1] - 1e-9 for before, after in pairwise(mine))
    assert run.step_s >= 8 * 2 * both.stages[0].compute_s


def test_a_lagging_weight_gradient_shortens_the_step_and_adds_no_work(posed: Problem, planned: Plan) -> None:
    late = simulate_steps(planned, posed, Rules(steps=1, bare=True, weight_lag=True))
    whole = simulate_steps(planned, posed, BARE)
    assert late.step_s < whole.step_s

    def busy(run_spans: tuple) -> dict[int, float]:
        seconds: defaultdict[int, float] = defaultdict(float)
        for span in run_spans:
            seconds[span.stage] += span.end_s - span.start_s
        return seconds

    assert busy(late.spans) == pytest.approx(busy(whole.spans))


def test_the_commit_costs_a_round_trip_the_journal_and_the_update(posed: Problem, planned: Plan) -> None:
    def step_s(journal_s: float, latency_s: float, bandwidth: float) -> float:
        link = Link(bandwidth_bytes_per_s=1e8, latency_s=latency_s)
        slow = msgspec.structs.replace(
            posed,
            owner=peer("owner", uplink=link, downlink=link),
            peers=tuple(peer(name, memory_bandwidth_bytes_per_s=bandwidth) for name in "abcd"),
        )
        return simulate_steps(planned, slow, Rules(steps=4, journal_s=journal_s)).step_s

    base_s = step_s(0.0, 0.0, 0.0)
    assert step_s(0.5, 0.0, 0.0) == pytest.approx(base_s + 0.5, rel=0.02)
    assert step_s(0.0, 0.5, 0.0) >= base_s + 1.0
    # 1 MB of weights and two slots per stage, gone over 7/3 times at 10 MB/s.
    assert step_s(0.0, 0.0, 1e7) == pytest.approx(base_s + 0.7, rel=0.05)


def test_utilisation_is_work_over_time(posed: Problem, planned: Plan) -> None:
    run = simulate_steps(planned, posed, BARE)
    for stage in planned.stages[:4]:
        assert run.utilisation[stage.peer] == pytest.approx(8 * stage.compute_s / run.step_s)


def test_the_same_inputs_give_the_same_run_and_another_seed_another_one(posed: Problem, planned: Plan) -> None:
    def run(seed: int) -> tuple:
        return simulate_steps(planned, posed, Rules(weather=Weather(jitter_s=0.01), seed=seed)).spans

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_what_crosses_the_links_is_counted(posed: Problem, planned: Plan) -> None:
    run = simulate_steps(planned, posed, BARE)
    first, second = planned.stages[0].peer, planned.stages[1].peer
    assert run.sent_bytes[first] == 8 * 1_000_000
    assert run.sent_bytes[second] == 2 * 8 * 1_000_000


def test_one_stage_alone_needs_no_simulation(posed: Problem) -> None:
    alone = problem(peers=(peer("a"),), stages=1)
    single = plan(alone)
    run = simulate_steps(single, alone, BARE)
    assert run.step_s == pytest.approx(predict(single.stages, StageCosts(alone)).step_s, rel=0.05)


def test_activations_made_again_lengthen_backwards_by_a_forward_and_nothing_else() -> None:
    """On GPUs: there nothing is lost by giving memory back."""
    peers = tuple(msgspec.structs.replace(one, device="cuda") for one in problem().peers)

    def lengths(recompute: SavingMode) -> dict[tuple[int, str], float]:
        posed = problem(recompute=recompute, peers=peers)
        run = simulate_steps(plan(posed), posed, Rules(steps=1, weight_lag=False))
        return {(span.stage, span.kind): span.end_s - span.start_s for span in run.spans}

    kept, again = lengths("never"), lengths("always")
    for stage in range(4):
        assert again[stage, "forward"] == pytest.approx(kept[stage, "forward"])
        assert again[stage, "backward"] == pytest.approx(kept[stage, "backward"] + kept[stage, "forward"])


def test_recorded_work_is_taken_step_by_step_and_its_scatter_costs_time(posed: Problem, planned: Plan) -> None:
    """One slow piece of work a step, each time at another stage: medians know nothing of it."""
    stages, microbatches = len(planned.stages), planned.microbatches
    usual = Durations(forward_s=0.1, backward_s=0.2, update_s=0.05)

    def recorded(slow_s: float) -> dict[int, Recorded]:
        pieces = {("forward", m): 0.1 for m in range(microbatches)} | {
            ("backward", m): 0.2 for m in range(microbatches)
        }
        pieces |= {("apply", 0): 0.05}
        return {
            stage: Recorded(
                tuple(pieces | ({("forward", 2): slow_s} if step == stage else {}) for step in range(stages))
            )
            for stage in range(stages)
        }

    rules = Rules(steps=stages + 1, weight_lag=False)
    steady = simulate_steps(planned, posed, rules, dict.fromkeys(range(stages), usual))
    assert simulate_steps(planned, posed, rules, recorded(0.1)).committed_s == steady.committed_s
    scattered = simulate_steps(planned, posed, rules, recorded(1.1))
    slow = {
        (span.stage, span.step, span.microbatch)
        for span in scattered.spans
        if span.kind == "forward" and span.end_s - span.start_s > 1
    }
    # The recorded steps are gone through again and again.
    assert slow == {(step % stages, step, 2) for step in range(stages + 1)}
    assert scattered.step_s > steady.step_s + 0.5
