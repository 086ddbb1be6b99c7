"""The story of a run with faults, from its events to lines and to the report's figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusionai.cli.training.run_report import RunReport, Tenures
from fusionai.client.pool.job_process import Met, Noted
from fusionai.client.training.kills import Kill, Killed, PeerReturned
from fusionai.client.training.outcome import TrainingResult
from fusionai.client.training.train import Planned
from fusionai.dashboard.report_data import ReportData, Tenure
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement, Standby
from fusionai.training import progress
from fusionai.wire.messages import CommitRecord, Fence

TOWER, LAPTOP, ATTIC, OWNER = "a" * 52, "b" * 52, "c" * 52, "o" * 52
NAMES = {TOWER: "tower", LAPTOP: "laptop", ATTIC: "attic", OWNER: "job owner"}


def plan(version: int, first: str, second: str, standby: str = "") -> Plan:
    return Plan(
        version=version,
        graph_hash="g",
        stages=(
            StagePlacement(stage=0, peer=first, blocks=(0, 1), fingerprint="x"),
            StagePlacement(stage=1, peer=second, blocks=(1, 2), fingerprint="x"),
            StagePlacement(stage=2, peer=OWNER, blocks=(2, 3), roles=("loss",), fingerprint="x"),
        ),
        feed=OWNER,
        standbys=(Standby(stage=1, peer=standby),) if standby else (),
        microbatches=2,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="m", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )


def done(step: int, *, step_s: float = 1.0, replayed: bool = False) -> progress.StepDone:
    record = CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=1e-3,
        total_norm=1.0,
        norms_hash="h",
        fence=Fence(1, 1, 1),
        loss=3.0 - step,
    )
    return progress.StepDone(record, (record.loss,), step_s, 1.0, replayed, {})


class Told:
    """A story and all it had to say."""

    def __init__(self) -> None:
        self.at_s = 100.0
        self.story = RunReport(now_s=lambda: self.at_s)
        self.lines: list[str] = []

    def see(self, at_s: float, event: Any) -> None:
        self.at_s = 100.0 + at_s
        self.lines += self.story.see(event)


@pytest.fixture
def told() -> Told:
    """Stage 1 is killed in step 2, attic takes over; later the broker."""
    run = Told()
    run.see(-5.0, Noted("looking for the pool"))
    members = tuple(PeerProfile(peer=peer, name=name, flops_per_s=1.0, memory_bytes=1) for peer, name in NAMES.items())
    prepared = SimpleNamespace(
        captured=SimpleNamespace(graph=SimpleNamespace(name="Llama"), n_parameters=7), tokens_per_microbatch=10
    )
    run.see(0.0, Planned(JobId("job"), plan(1, TOWER, LAPTOP, ATTIC), members, cast(Any, prepared)))
    run.see(1.0, done(0))
    run.see(1.5, Killed(Kill(2, 1), "laptop", LAPTOP))
    run.see(1.6, progress.FaultSeen("peer", LAPTOP, (1,), 1, "connection closed"))
    run.see(1.7, progress.PlanChanged(plan(2, TOWER, ATTIC), "connection closed"))
    run.see(1.8, progress.Restored(1, 1, (1,), False))
    run.see(2.5, done(0, replayed=True))
    run.see(3.0, done(1, step_s=9.0))
    run.see(3.0, progress.Recovered(1, 1.4))
    run.see(4.0, PeerReturned("laptop", LAPTOP))
    run.see(4.5, Killed(Kill(3, "broker"), "broker", ""))
    run.see(4.6, progress.BrokerAway("refused"))
    run.see(5.0, done(2))
    run.see(5.5, progress.BrokerBack())
    run.see(5.6, PeerReturned("broker", ""))
    return run


def test_a_line_for_each_thing_that_happened(told: Told) -> None:
    assert told.lines == [
        "step 2: SIGKILL for laptop (stage 1)",
        "step 2: laptop was killed (stage 1)",
        "step 2: laptop was killed (stage 1); attic takes over from its snapshot of step 1; recovered after 1.4 s "
        "(step 2 committed)",
        "laptop is restarted and rejoins the pool",
        "step 3: SIGKILL for the broker",
        "step 3: the broker can't be reached (refused); the job continues without it",
        "the broker is back after 1 s",
        "the broker is restarted; all its members are registered again",
    ]


def data(told: Told) -> ReportData:
    recipe = SimpleNamespace(
        job=SimpleNamespace(name="tiny", steps=3, seed=1),
        train=SimpleNamespace(
            batch_size=1,
            microbatches=2,
            optimizer=SimpleNamespace(kind="sgd"),
            learning_rate=1.0,
            schedule="constant",
            clip_norm=None,
            precision="float32",
            compression="none",
        ),
        describe=lambda: "a recipe",
    )
    result = TrainingResult(
        job=JobId("job"),
        steps=3,
        stopped=None,
        checkpoint=None,
        directory=cast(Any, None),
        losses=(3.0, 2.0, 1.0),
    )
    made = told.story.data(cast(Any, recipe), result)
    assert made is not None
    return made


def test_the_report_has_the_time_line(told: Told) -> None:
    told.at_s = 180.0  # the judge's time is none of the job's
    made = data(told)
    assert made.commits == ((1.0, 1), (3.0, 2), (5.0, 3))
    first, second = made.faults
    assert (first.who, first.what, first.step) == ("laptop, stage 1", "killed", 2)
    assert first.outcome == "attic takes over from its snapshot of step 1"
    assert (round(first.at_s, 6), first.over_s, first.recovery_s) == (1.6, 3.0, 1.4)
    assert (second.who, second.what, second.outcome) == (
        "the broker",
        "killed",
        "the job continued without it; it is back",
    )
    shown = {(one.peer, one.part, one.stage, round(one.from_s, 6), round(one.to_s, 6)) for one in made.tenures}
    assert shown == {
        ("", "stage", None, 0.0, 4.5),
        ("", "away", None, 4.5, 5.5),
        (TOWER, "stage", 0, 0.0, 5.5),
        (LAPTOP, "stage", 1, 0.0, 1.5),
        (LAPTOP, "away", None, 1.5, 4.0),
        (ATTIC, "standby", 1, 0.0, 1.7),
        (ATTIC, "stage", 1, 1.7, 5.5),
    }


def test_speed_counts_what_faults_cost_and_the_drawn_step_has_none(told: Told) -> None:
    made = data(told)
    assert made.tokens_per_s == 10 * 2 * 2 / 4.0
    assert made.timed_step is not None
    assert made.timed_step.step != 2


def test_whoever_joins_while_the_job_runs_has_a_name_too() -> None:
    story = RunReport()
    story.see(Met({ATTIC: "attic"}))
    (line,) = story.see(progress.FaultSeen("peer", ATTIC, (1,), 4, "gone"))
    assert line == "step 5: attic is lost (stage 1): gone"


def test_a_peer_away_that_a_plan_names_again_is_back() -> None:
    rows = Tenures()
    rows.plan(plan(1, TOWER, LAPTOP), 0.0)
    rows.lost(LAPTOP, 1.0)
    rows.lost(LAPTOP, 1.1)
    rows.plan(plan(2, TOWER, LAPTOP), 3.0)
    assert [one for one in rows.until(4.0) if one.peer == LAPTOP] == [
        Tenure(peer=LAPTOP, part="stage", stage=1, from_s=0.0, to_s=1.0),
        Tenure(peer=LAPTOP, part="away", from_s=1.0, to_s=3.0),
        Tenure(peer=LAPTOP, part="stage", stage=1, from_s=3.0, to_s=4.0),
    ]
