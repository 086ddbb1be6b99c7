"""One job as the pool sees it: asked for, running, over. Decides when it holds members and when it lets them go.

The broker never sees a step commit: what happens within the job is its driver's and its stages' business. `unattended`
is no phase: a running job whose driver is out of touch runs on. Neighbours: `plan_version` holds its plans,
`assignment` turns messages into these facts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from fusionai.coordination.broker.events import (
    JobAttended,
    JobDone,
    JobFailed,
    JobNoted,
    JobRequested,
    JobStarted,
    JobStopAsked,
    JobUnattended,
    PlanMinted,
)
from fusionai.coordination.machine import Machine, State, Transition
from fusionai.primitives.ids import JobId, PeerId, short

LIVE: Final = ("requested", "running", "stopping")
TOLD_LINES: Final = 200


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a job's story for people; `at_s` since 1970."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(State):
    job: JobId
    title: str
    owner: PeerId
    steps: int
    requested_at_s: float
    attended: bool = True
    plan_version: int = 0
    """0 before the first plan is minted."""
    step: int = -1
    """Last step the driver reported at the end; progress on the way is kept in memory only."""
    told: tuple[Line, ...] = ()

    @property
    def live(self) -> bool:
        return self.phase in LIVE


def requested(fact: JobRequested) -> Job:
    """A job nobody knew."""
    return Job(
        entity=f"job {fact.job}",
        phase="requested",
        story=("JobRequested -> requested",),
        job=JobId(fact.job),
        title=fact.title,
        owner=PeerId(fact.owner),
        steps=fact.steps,
        requested_at_s=fact.at_s,
        told=(Line(fact.at_s, f"asked for by {short(PeerId(fact.owner))}"),),
    )


def _request_again(job: Job, fact: JobRequested) -> tuple[Job, tuple[Any, ...]]:
    renewed = replace(
        job, phase="requested", title=fact.title, steps=fact.steps, requested_at_s=fact.at_s, attended=True
    )
    return _tell(renewed, fact.at_s, "asked for again"), ()


def _plan(job: Job, fact: PlanMinted) -> tuple[Job, tuple[Any, ...]]:
    working = sum(bool(member.stages) for member in fact.members)
    spares = len(fact.members) - working
    text = f"plan version {fact.version} on {working} members"
    if spares:
        text += f", guarded by {spares} more"
    return _tell(replace(job, plan_version=fact.version), fact.at_s, text), ()


def _start(job: Job, fact: JobStarted) -> tuple[Job, tuple[Any, ...]]:
    return _tell(replace(job, phase="running"), fact.at_s, "running"), ()


def _stop(job: Job, fact: JobStopAsked) -> tuple[Job, tuple[Any, ...]]:
    return _tell(replace(job, phase="stopping"), fact.at_s, f"{short(PeerId(fact.by))} asked it to stop"), ()


def _unattend(job: Job, fact: JobUnattended) -> tuple[Job, tuple[Any, ...]]:
    return _tell(replace(job, attended=False), fact.at_s, f"unattended: {fact.reason}"), ()


def _attend(job: Job, fact: JobAttended) -> tuple[Job, tuple[Any, ...]]:
    return _tell(replace(job, attended=True), fact.at_s, "attended again"), ()


def _note(job: Job, fact: JobNoted) -> tuple[Job, tuple[Any, ...]]:
    return _tell(job, fact.at_s, fact.text), ()


def _done(job: Job, fact: JobDone) -> tuple[Job, tuple[Any, ...]]:
    return _tell(replace(job, phase="done", step=fact.step), fact.at_s, _end("done", fact.detail)), ()


def _fail(job: Job, fact: JobFailed) -> tuple[Job, tuple[Any, ...]]:
    return _tell(replace(job, phase="failed", step=fact.step), fact.at_s, _end("failed", fact.detail)), ()


def _end(how: str, detail: str) -> str:
    return f"{how}: {detail}" if detail else how


def _tell(job: Job, at_s: float, text: str) -> Job:
    return replace(job, told=(*job.told, Line(at_s, text))[-TOLD_LINES:])


JOB: Final[Machine[Job, Any]] = Machine(
    "job",
    (
        Transition(("requested",), PlanMinted, ("requested",), _plan),
        Transition(("running",), PlanMinted, ("running",), _plan, "new placement"),
        Transition(("requested",), JobStarted, ("running",), _start, "the driver says so"),
        Transition(("requested", "running", "stopping"), JobStopAsked, ("stopping",), _stop),
        Transition(("requested",), JobUnattended, ("requested",), _unattend),
        Transition(("running",), JobUnattended, ("running",), _unattend),
        Transition(("stopping",), JobUnattended, ("stopping",), _unattend),
        Transition(("requested",), JobAttended, ("requested",), _attend),
        Transition(("running",), JobAttended, ("running",), _attend),
        Transition(("stopping",), JobAttended, ("stopping",), _attend),
        Transition(("requested",), JobNoted, ("requested",), _note),
        Transition(("running",), JobNoted, ("running",), _note),
        Transition(("stopping",), JobNoted, ("stopping",), _note),
        Transition(LIVE, JobDone, ("done",), _done),
        Transition(LIVE, JobFailed, ("failed",), _fail, "the driver says so, or nobody attends"),
        Transition(("done", "failed"), JobRequested, ("requested",), _request_again, "its owner resumes it"),
    ),
    initial=("requested",),
)
