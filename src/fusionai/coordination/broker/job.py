"""One job as the pool sees it: requested, running, ended; and when it holds members.

The broker never sees a step commit, because that is between the job's driver and stages. `unattended` is no phase: a
running job whose driver is not connected runs on. `plan_version` holds its plans, `assignment` turns messages into
these facts.
"""

from __future__ import annotations

from collections.abc import Callable
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
MOST_NOTES: Final = 200


@dataclass(frozen=True, slots=True)
class JobNote:
    """One line of a job's history. `at_s` is in seconds since 1970."""

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
    """Last step, reported by the driver at the end. Progress before that is kept in memory only."""
    notes: tuple[JobNote, ...] = ()

    @property
    def live(self) -> bool:
        return self.phase in LIVE


def requested(fact: JobRequested) -> Job:
    """Return a job that was unknown before."""
    return Job(
        entity=f"job {fact.job}",
        phase="requested",
        story=("JobRequested -> requested",),
        job=JobId(fact.job),
        title=fact.title,
        owner=PeerId(fact.owner),
        steps=fact.steps,
        requested_at_s=fact.at_s,
        notes=(JobNote(fact.at_s, f"asked for by {short(PeerId(fact.owner))}"),),
    )


def _request_again(job: Job, fact: JobRequested) -> tuple[Job, tuple[Any, ...]]:
    renewed = replace(
        job, phase="requested", title=fact.title, steps=fact.steps, requested_at_s=fact.at_s, attended=True
    )
    return _noted(renewed, fact.at_s, "asked for again"), ()


def _plan(job: Job, fact: PlanMinted) -> tuple[Job, tuple[Any, ...]]:
    working = sum(bool(member.stages) for member in fact.members)
    spares = len(fact.members) - working
    text = f"plan version {fact.version} on {working} members"
    if spares:
        text += f", with a standby by {spares} more"
    return _noted(replace(job, plan_version=fact.version), fact.at_s, text), ()


def _moved(text: Callable[[Any], str], **changes: Any) -> Callable[[Job, Any], tuple[Job, tuple[Any, ...]]]:
    """Return an action that makes these changes and adds the fact's text to the history. The end of a job also sets its
    last step."""

    def act(job: Job, fact: Any) -> tuple[Job, tuple[Any, ...]]:
        step = fact.step if isinstance(fact, JobDone | JobFailed) else job.step
        return _noted(replace(job, step=step, **changes), fact.at_s, text(fact)), ()

    return act


_start: Final = _moved(lambda _fact: "running", phase="running")
_stop: Final = _moved(lambda fact: f"{short(PeerId(fact.by))} asked it to stop", phase="stopping")
_unattend: Final = _moved(lambda fact: f"unattended: {fact.reason}", attended=False)
_attend: Final = _moved(lambda _fact: "attended again", attended=True)
_note: Final = _moved(lambda fact: fact.text)
_done: Final = _moved(lambda fact: f"done: {fact.detail}" if fact.detail else "done", phase="done")
_fail: Final = _moved(lambda fact: f"failed: {fact.detail}" if fact.detail else "failed", phase="failed")


def _noted(job: Job, at_s: float, text: str) -> Job:
    return replace(job, notes=(*job.notes, JobNote(at_s, text))[-MOST_NOTES:])


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
