"""Predictions beside observations: which steps count, what a stage took, and who shares whose cores."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.cli.training.observation import MOST_SHOWN, Observation, own_hosts, shared_cores, show_observation
from fusionai.dashboard.report_data import PlanObservation
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement
from fusionai.training.progress import StepDone
from fusionai.wire.messages import CommitRecord, Fence, Span

NAMES = {"a": "ada", "b": "bob", "o": "job owner"}


def plan(version: int, *peers: str) -> Plan:
    return Plan(
        version=version,
        graph_hash="g",
        stages=tuple(
            StagePlacement(stage=number, peer=peer, blocks=(number, number + 1), compute_s=0.1 * (number + 1))
            for number, peer in enumerate(peers)
        ),
        feed="o",
        microbatches=2,
        step_time_s=1.5,
        tokens_per_s=100.0,
        bottleneck="compute on bob (200 ms per microbatch)",
        certificate=Certificate(method="m", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )


def step(step_s: float, spans: dict[int, tuple[Span, ...]] | None = None) -> StepDone:
    record = CommitRecord(
        step=0,
        scale=1.0,
        learning_rate=1e-3,
        total_norm=1.0,
        norms_hash="h",
        fence=Fence(1, 1, 1),
        loss=1.0,
    )
    return StepDone(record, (1.0,), step_s, 200.0 / step_s, False, spans or {})


def work(forward_s: float, backward_s: float) -> tuple[Span, ...]:
    """Two microbatches, the first with deferred weight gradients as long as its forward pass, and a step of Adam."""
    return (
        Span("forward", 0, 10.0, 10.0 + forward_s),
        Span("forward", 1, 11.0, 11.0 + forward_s),
        Span("backward", 0, 12.0, 12.0 + backward_s),
        Span("backward", 1, 13.0, 13.0 + backward_s),
        Span("wait", 0, 14.0, 19.0),
        Span("apply", 0, 20.0, 20.5),
    )


def observed(*events: Plan | float) -> tuple[PlanObservation, ...]:
    seen = Observation()
    for event in events:
        match event:
            case Plan():
                seen.plan(event)
            case _:
                seen.step(step(event))
    return seen.rows()


def test_each_plan_has_the_median_of_its_own_steps_without_the_first() -> None:
    rows = observed(plan(3, "a", "b"), 9.0, 2.0, 2.2, 2.1, plan(4, "a", "a"), plan(5, "b", "a"), 8.0)
    assert [(row.version, row.steps, row.measured_step_s) for row in rows] == [(3, 4, 2.1), (5, 1, 8.0)]
    assert rows[0].measured_tokens_per_s == pytest.approx(200 / 2.1)
    assert (rows[0].predicted_step_s, rows[0].predicted_tokens_per_s) == (1.5, 100.0)


def test_a_stage_took_what_its_passes_took_and_not_what_it_waited() -> None:
    seen = Observation()
    seen.plan(plan(1, "a", "b", "a"))
    seen.step(step(99.0, {0: work(5.0, 5.0)}))  # warms caches up
    for factor in (1.0, 1.2, 0.9):
        seen.step(step(4.0, {0: work(0.1 * factor, 0.3 * factor), 1: work(0.25, 0.5)}))
    (row,) = seen.rows()
    assert [stage.predicted_compute_s for stage in row.stages] == pytest.approx([0.1, 0.2, 0.3])
    first, second, third = row.stages
    assert first.measured_compute_s == pytest.approx(0.4)
    assert second.measured_compute_s == pytest.approx(0.75)
    assert third.measured_compute_s is None
    assert row.busiest == "b"
    assert row.busy == pytest.approx((2 * 0.75 + 0.5) / 4.0)


def test_deferred_weight_gradients_are_part_of_a_microbatch() -> None:
    seen = Observation()
    seen.plan(plan(1, "a"))
    seen.step(step(4.0, {0: (*work(0.1, 0.3), Span("weights", 0, 30.0, 30.2), Span("weights", 1, 31.0, 31.2))}))
    assert seen.rows()[0].stages[0].measured_compute_s == pytest.approx(0.6)


def test_without_a_step_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show_observation(observed(plan(1, "a")), NAMES, "")
    assert capsys.readouterr().out == ""


def test_both_tables_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Observation()
    seen.plan(plan(1, "a", "b"))
    seen.step(step(3.0))
    seen.plan(plan(2, "a", "b"))
    for _ in range(3):
        seen.step(step(2.0, {0: work(0.1, 0.3)}))
    show_observation(seen.rows(), NAMES, "they share.")
    told = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in told]
    bottleneck = ["compute", "on", "bob", "(200", "ms", "per", "microbatch)"]
    assert ["1", "1", "1.5", "s", "3", "s", "100", "66.67", *bottleneck] in rows
    assert ["2", "3", "1.5", "s", "2", "s", "100", "100", *bottleneck] in rows
    assert ["0", "ada", "100", "ms", "400", "ms"] in rows
    assert ["1", "bob", "200", "ms", "-"] in rows
    assert told[-2:] == ["Busiest: ada, computing 65% of a step.", "they share."]


def test_of_many_plans_those_with_most_steps_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Plan | float] = []
    for version in range(MOST_SHOWN + 2):
        events += [plan(version, "a"), *([1.0] * (1 if version in (2, 4) else 2))]
    show_observation(observed(*events), NAMES, "")
    told = capsys.readouterr().out.splitlines()
    versions = [int(line.split()[0]) for line in told[2 : 2 + MOST_SHOWN]]
    assert versions == [0, 1, 3, 5, 6, 7, 8, 9]
    assert "2 more plans with fewer steps are in the file of --json." in told


HERE = ("tcp://127.0.0.1:5",)


def peer(name: str, threads: int = 1, **more: object) -> PeerProfile:
    profile = PeerProfile(peer=name, flops_per_s=1.0, memory_bytes=1, threads=threads)
    return msgspec.structs.replace(profile, **more)


def said(addresses: dict[str, tuple[str, ...]], *profiles: PeerProfile, cores: int = 2, here: str = "10.0.0.7") -> str:
    peers = {profile.peer for profile in profiles} | set(addresses)
    known = {profile.peer: profile for profile in profiles}
    return shared_cores(peers, addresses, known, NAMES, here={here}, cores=cores)


def test_processes_of_this_machine_share_its_cores() -> None:
    owner = peer("o", roles=("owner",))
    assert said({"a": HERE, "b": HERE}, peer("a"), peer("b"), owner) == (
        "ada, bob, job owner share the 2 cores of this machine; the plan's predictions assume that each has its own."
    )
    assert said({"a": HERE}, peer("a"), owner) == ""
    assert said({"a": HERE}, peer("a", threads=2), owner) != ""
    assert said({"a": HERE, "b": HERE, "c": HERE}, peer("a"), peer("b")) != ""  # one that joined later
    assert said({"a": HERE}, peer("a", threads=64)) == ""
    assert "share the only core" in said({"a": HERE}, peer("a"), owner, cores=1)


def test_only_what_can_mean_no_other_machine_counts() -> None:
    owner = peer("o", threads=2, roles=("owner",))
    assert said({"a": ("tcp://10.0.0.7:5", "tcp://127.0.0.1:5")}, peer("a"), owner) != ""
    assert said({"a": ("tcp://10.0.0.8:5", "tcp://127.0.0.1:5")}, peer("a"), owner) == ""
    assert said({"a": ("tcp://ada.example:5",)}, peer("a"), owner) == ""
    assert said({"a": HERE}, peer("a", device="cuda"), owner) == ""
    assert said({}, peer("a"), owner) == ""


def test_this_machine_knows_its_own_addresses() -> None:
    assert "127.0.0.1" in own_hosts()
