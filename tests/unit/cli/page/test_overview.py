"""What the page shows of members, links, jobs and plans."""

from __future__ import annotations

import msgspec

from fusionai.cli.page.overview import MOST_EVENTS, MOST_JOBS, job_rows, link_rows, machine_rows, picture
from fusionai.client.pool.session import PoolMember
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement, Standby
from fusionai.wire.messages import JobView, LinkView, MemberView

A, B, C = ("a" * 52, "b" * 52, "c" * 52)


def member(peer: str, *links: LinkView, **changes: object) -> PoolMember:
    profile = PeerProfile(peer=peer, name=f"machine {peer[0]}", flops_per_s=1e9, memory_bytes=2 * 10**9)
    view = MemberView(peer=peer, state="idle", boot=1, addresses=(), profile=msgspec.Raw(b""), links=links)
    return PoolMember(msgspec.structs.replace(view, **changes), profile)


def link(peer: str, **changes: object) -> LinkView:
    return msgspec.structs.replace(LinkView(peer, "direct", 1, 0.01), **changes)


def job(name: str, **changes: object) -> JobView:
    view = JobView(job=name, title=name, owner=A, state="running", step=4, steps=10, plan_version=1, started_at_s=100.0)
    return msgspec.structs.replace(view, **changes)


PLAN = Plan(
    graph_hash="",
    stages=(
        StagePlacement(stage=0, peer=B, blocks=(0, 4), compute_s=0.1, memory_bytes=10, memory_limit_bytes=20),
        StagePlacement(stage=1, peer=A, blocks=(4, 5), roles=("loss",)),
    ),
    feed=A,
    standbys=(Standby(stage=0, peer=C),),
    spares=(C,),
    microbatches=1,
    step_time_s=1.0,
    tokens_per_s=256.0,
    certificate=Certificate(bound_tokens_per_s=256.0, optimality_gap=0.0, exact=True, method="search"),
)


def test_a_machine_says_what_it_lends_and_does():
    (row,) = machine_rows([member(A, state="active", job="j", stages=(2,))], {A: 50.0})
    assert (row.name, row.words, row.part, row.job, row.since_s) == ("machine a", "working", "runs 2", "j", 50.0)
    assert row.memory_bytes == 2 * 10**9


def test_a_link_appears_once_with_the_best_figures():
    slow, fast = link(B, bandwidth_bytes_per_s=1e6), link(A, route="lan", probed_bytes_per_s=1e8, round_trip_s=4e-4)
    rows = link_rows([member(A, slow, link("z" * 52)), member(B, fast, link(B))])
    assert [(row.ends, row.route, row.bytes_per_s, row.round_trip_s) for row in rows] == [((A, B), "lan", 1e8, 4e-4)]


def test_running_jobs_come_first_with_their_plan():
    ended = [job(f"old-{number}", state="done", step=9, started_at_s=float(number)) for number in range(40)]
    story = tuple(f"line {number}" for number in range(MOST_EVENTS + 5))
    rows = job_rows([*ended, job("new", story=story)], {JobId("new"): PLAN}, {A: "this machine"})
    assert len(rows) == MOST_JOBS
    assert [(row.job, row.state) for row in rows[:2]] == [("new", "running"), ("old-39", "done")]
    assert rows[0].plan is not None
    assert rows[1].plan is None
    assert rows[0].events == story[-MOST_EVENTS:]
    assert rows[0].owner == "this machine"
    assert job_rows([job("half", state="done")], {}, {})[0].state == "stopped"


def test_a_plan_names_its_machines():
    shown = picture(PLAN, {B: "attic", C: "tower"}, A)
    assert [(stage.name, stage.standby) for stage in shown.stages] == [("attic", "tower"), ("job owner", "")]
    assert shown.spares == ("tower",)
    assert shown.sentence == "Predicted: 256 tokens/s, 1 s per step."
