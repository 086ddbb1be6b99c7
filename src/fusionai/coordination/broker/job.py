"""One job as the pool sees it: queued, requested, running, ended; when it holds members; the versions of its plans.

The broker never sees a step commit, because that is between the job's driver and stages. `unattended` is no phase: a
running job whose driver is not connected runs on. `assignment` turns messages into these facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from fusionai.coordination.broker import events
from fusionai.coordination.machine import Machine, State, Transition, in_each
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.units import format_bytes

LIVE: Final = ("requested", "running", "stopping")
QUEUED: Final = "queued"
OPEN: Final = (QUEUED, *LIVE)
MOST_NOTES: Final = 200


@dataclass(frozen=True, slots=True)
class JobNote:
    """One line of a job's history. `at_s` is in seconds since 1970."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a job that waits needs at least: `machines` that lend `memory_bytes` together, none of them `excluded`.
    `priority` is its priority class."""

    machines: int = 1
    memory_bytes: int = 0
    excluded: tuple[str, ...] = ()
    priority: str = ""


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
    begun_at_step: int = 0
    """Steps that were done when it was asked for last."""
    need: Need = Need()
    """What it waits for, while it is queued."""
    queued_at_s: float = 0.0
    """When it got its place in the queue, in seconds since 1970."""
    missed: int = 0
    """Turns that it let pass since."""
    gives_way_to: str = ""
    """Job for which it was asked to stop; empty if it was asked by a member, or not at all."""
    ended_at_s: float = 0.0
    held_bytes: int = 0
    held_flops_per_s: float = 0.0
    """Once it has ended: when, in seconds since 1970, and what the machines that it had at last lend together."""

    @property
    def live(self) -> bool:
        return self.phase in LIVE

    @property
    def queued(self) -> bool:
        return self.phase == QUEUED

    @property
    def ended(self) -> bool:
        return self.phase not in OPEN


def requested(fact: events.JobRequested) -> Job:
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


def queued(fact: events.JobQueued) -> Job:
    """Return a job that was unknown before and waits in the queue."""
    return Job(
        entity=f"job {fact.job}",
        phase=QUEUED,
        story=("JobQueued -> queued",),
        job=JobId(fact.job),
        title=fact.title,
        owner=PeerId(fact.owner),
        steps=fact.steps,
        requested_at_s=fact.at_s,
        need=_need(fact),
        queued_at_s=fact.at_s,
        notes=(JobNote(fact.at_s, f"queued by {short(PeerId(fact.owner))}: {_words(fact)}"),),
    )


def _need(fact: events.JobQueued) -> Need:
    return Need(fact.machines, fact.memory_bytes, fact.excluded, fact.priority)


def _words(fact: events.JobQueued) -> str:
    machines = "1 machine" if fact.machines == 1 else f"{fact.machines} machines"
    return f"needs at least {machines}" + (f" with {format_bytes(fact.memory_bytes)}" if fact.memory_bytes else "")


def _queue(job: Job, fact: events.JobQueued) -> Job:
    """Give an ended job a place, or change what a queued one needs: it keeps its place."""
    changed = replace(job, phase=QUEUED, title=fact.title, steps=fact.steps, need=_need(fact))
    if not job.queued:
        changed = replace(changed, requested_at_s=fact.at_s, queued_at_s=fact.at_s, missed=0, attended=True)
    return _noted(changed, fact.at_s, f"queued: {_words(fact)}")


def _miss(job: Job, fact: events.TurnMissed) -> Job:
    return _noted(replace(job, missed=job.missed + 1), fact.at_s, "its turn passed")


def _request_again(job: Job, fact: events.JobRequested) -> Job:
    renewed = replace(
        job,
        phase="requested",
        title=fact.title,
        steps=fact.steps,
        requested_at_s=fact.at_s,
        begun_at_step=job.step + 1,
        attended=True,
        gives_way_to="",
    )
    return _noted(renewed, fact.at_s, "its turn was taken" if job.queued else "asked for again")


def _plan(job: Job, fact: events.PlanMinted) -> Job:
    working = sum(bool(member.stages) for member in fact.members)
    spares = len(fact.members) - working
    text = f"plan version {fact.version} on {working} members"
    if spares:
        text += f", with a standby by {spares} more"
    return _noted(replace(job, plan_version=fact.version), fact.at_s, text)


def _moved(text: Callable[[Any], str], **changes: Any) -> Callable[[Job, Any], Job]:
    """Return an action that makes these changes and adds the fact's text to the history. The end of a job also sets its
    last step."""

    def act(job: Job, fact: Any) -> Job:
        step = fact.step if isinstance(fact, events.JobDone | events.JobFailed) else job.step
        return _noted(replace(job, step=step, **changes), fact.at_s, text(fact))

    return act


def _stop(job: Job, fact: events.JobStopAsked) -> Job:
    """Stop the job. One that gives way and is then stopped by a member does not come back."""
    text = f"{short(PeerId(fact.by))} asked it to stop"
    if fact.gives_way_to:
        text = f"gives way to {fact.gives_way_to}, which is more urgent"
    return _noted(replace(job, phase="stopping", gives_way_to=fact.gives_way_to), fact.at_s, text)


_start: Final = _moved(lambda _fact: "running", phase="running")
_unattend: Final = _moved(lambda fact: f"unattended: {fact.reason}", attended=False)
_attend: Final = _moved(lambda _fact: "attended again", attended=True)
_note: Final = _moved(lambda fact: fact.text)
_done: Final = _moved(lambda fact: f"done: {fact.detail}" if fact.detail else "done", phase="done")
_fail: Final = _moved(lambda fact: f"failed: {fact.detail}" if fact.detail else "failed", phase="failed")


def _noted(job: Job, at_s: float, text: str) -> Job:
    return replace(job, notes=(*job.notes, JobNote(at_s, text))[-MOST_NOTES:])


JOB: Final[Machine[Job]] = Machine(
    "job",
    (
        Transition((QUEUED,), events.JobQueued, (QUEUED,), _queue, "needs other machines"),
        Transition((QUEUED,), events.TurnMissed, (QUEUED,), _miss),
        Transition((QUEUED,), events.JobRequested, ("requested",), _request_again, "its turn"),
        Transition(("requested",), events.PlanMinted, ("requested",), _plan),
        Transition(("running",), events.PlanMinted, ("running",), _plan, "new placement"),
        Transition(("requested",), events.JobStarted, ("running",), _start, "the driver says so"),
        Transition(("requested", "running", "stopping"), events.JobStopAsked, ("stopping",), _stop),
        *in_each(OPEN, events.JobUnattended, (), _unattend),
        *in_each(OPEN, events.JobAttended, (), _attend),
        *in_each(OPEN, events.JobNoted, (), _note),
        Transition(OPEN, events.JobDone, ("done",), _done),
        Transition(OPEN, events.JobFailed, ("failed",), _fail, "the driver says so, or nobody attends"),
        Transition(("done", "failed"), events.JobRequested, ("requested",), _request_again, "its owner resumes it"),
        Transition(("done", "failed"), events.JobQueued, (QUEUED,), _queue, "its owner resumes it and waits"),
    ),
    initial=("requested", QUEUED),
)


FIRST_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVersion:
    """A plan and its version. One counter serves the whole pool, so no two plans share a version, not even plans of two
    jobs. A version becomes known only when its `PlanMinted` is on disk; peers compare it as the first part of a
    fence."""

    version: int
    job: JobId
    plan: bytes
    members: tuple[events.MemberPlacement, ...]


def mint(fact: events.PlanMinted, newest: int) -> PlanVersion:
    """Raises `FusionError` unless the fact's version is the one after the pool's `newest`."""
    if fact.version != newest + 1:
        raise FusionError(f"expected plan version {newest + 1} to be minted next, got {fact.version} for {fact.job}.")
    return PlanVersion(version=fact.version, job=JobId(fact.job), plan=fact.plan, members=fact.members)
