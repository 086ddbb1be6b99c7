"""The job table, row by row, and the story it tells people."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fusionai.coordination.broker import events
from fusionai.coordination.broker.job import JOB, MOST_NOTES, Job, requested
from fusionai.coordination.machine import ForbiddenTransition
from fusionai.primitives.ids import PeerId

OWNER = PeerId("o" * 52)
ASKED = events.JobRequested(at_s=10.0, job="job-1", title="a title", owner=OWNER, steps=100)
EVENTS = {
    "request": ASKED,
    "plan": events.PlanMinted(
        at_s=11.0, job="job-1", version=3, plan=b"", members=(events.MemberPlacement("p", (0,)),)
    ),
    "queue": events.JobQueued(
        at_s=10.5,
        job="job-1",
        title="a title",
        owner=OWNER,
        steps=100,
        machines=2,
        memory_bytes=10**9,
        excluded=(),
        priority="normal",
    ),
    "miss": events.TurnMissed(at_s=10.7, job="job-1"),
    "start": events.JobStarted(at_s=12.0, job="job-1"),
    "stop": events.JobStopAsked(at_s=13.0, job="job-1", by=OWNER),
    "unattend": events.JobUnattended(at_s=14.0, job="job-1", reason="gone"),
    "attend": events.JobAttended(at_s=15.0, job="job-1"),
    "note": events.JobNoted(at_s=16.0, job="job-1", text="a note"),
    "done": events.JobDone(at_s=17.0, job="job-1", step=99, detail=""),
    "fail": events.JobFailed(at_s=18.0, job="job-1", step=5, detail="why"),
}
OPEN = ("requested", "running", "stopping", "queued")
STAY = ("unattend", "attend", "note")
ALLOWED = {
    ("requested", "plan"): "requested",
    ("running", "plan"): "running",
    ("requested", "start"): "running",
    ("requested", "stop"): "stopping",
    ("running", "stop"): "stopping",
    ("stopping", "stop"): "stopping",
    **{(phase, event): phase for phase in OPEN for event in STAY},
    **{(phase, "done"): "done" for phase in OPEN},
    **{(phase, "fail"): "failed" for phase in OPEN},
    ("queued", "queue"): "queued",
    ("queued", "miss"): "queued",
    ("queued", "request"): "requested",
    ("done", "queue"): "queued",
    ("failed", "queue"): "queued",
    ("done", "request"): "requested",
    ("failed", "request"): "requested",
}
PHASES = (*OPEN, "done", "failed")


def _job(phase: str) -> Job:
    return replace(requested(ASKED), phase=phase, plan_version=2, attended=phase != "failed")


@pytest.mark.parametrize(("phase", "event"), [*product(PHASES, EVENTS)])
def test_every_pair_of_phase_and_event(phase: str, event: str):
    target = ALLOWED.get((phase, event))
    if target is None:
        with pytest.raises(ForbiddenTransition):
            JOB.advance(_job(phase), EVENTS[event])
        return
    moved = JOB.advance(_job(phase), EVENTS[event])
    assert moved.phase == target
    assert moved.live == (target in ("requested", "running", "stopping"))
    assert (moved.queued, moved.ended) == (target == "queued", target in ("done", "failed"))
    assert len(moved.notes) == 2


def test_a_job_tells_its_story():
    job = requested(ASKED)
    for name in ("plan", "start", "unattend", "attend", "note", "stop", "fail"):
        job = JOB.advance(job, EVENTS[name])
    assert [line.text for line in job.notes] == [
        "asked for by oooooooo",
        "plan version 3 on 1 members",
        "running",
        "unattended: gone",
        "attended again",
        "a note",
        "oooooooo asked it to stop",
        "failed: why",
    ]
    assert (job.plan_version, job.step, job.phase) == (3, 5, "failed")


def test_a_with_standby_plan_says_so():
    members = (events.MemberPlacement("p", (0,)), events.MemberPlacement("q", (), (0,)))
    job = JOB.advance(requested(ASKED), events.PlanMinted(at_s=1.0, job="job-1", version=4, plan=b"", members=members))
    assert job.notes[-1].text == "plan version 4 on 1 members, with a standby by 1 more"


def test_resuming_keeps_the_last_plan_version_so_that_versions_only_grow():
    again = JOB.advance(_job("failed"), ASKED)
    assert (again.phase, again.plan_version, again.attended) == ("requested", 2, True)


def test_the_story_is_bounded():
    job = requested(ASKED)
    for _ in range(MOST_NOTES + 50):
        job = JOB.advance(job, EVENTS["note"])
    assert len(job.notes) == MOST_NOTES
