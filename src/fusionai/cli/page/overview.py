"""What the broker's page shows, as one value: machines, links, jobs with their plans, and what happened.

Computed from the broker's own views at every look; nothing is kept here. `desk` collects the input, `app` sends the
result, `files/page.js` draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from fusionai.cli.pool.members import isolation_words, job_state, part_words, state_words
from fusionai.client.pool.session import PoolMember
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem.types import Plan, StagePlacement
from fusionai.transport.routes.addresses import best_links
from fusionai.wire.messages import JobView

MOST_JOBS: Final = 30
"""Jobs that are sent, those that run first, then the newest (chosen)."""
MOST_EVENTS: Final = 60
"""Events of a running job, and notices, that are sent (chosen)."""
ENDED: Final = ("done", "failed")


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A member and what it lends. `since_s`: when the page first saw its present state, in seconds since 1970."""

    peer: str
    name: str
    device: str
    memory_bytes: int
    share: float
    flops_per_s: float
    isolated: str
    state: str
    words: str
    since_s: float
    job: str
    part: str


class RefusedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that asked to lend itself and was refused, because its key is not endorsed."""

    peer: str
    name: str


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A measured link between two members, with the figures of the end that measured more. 0: not measured."""

    ends: tuple[str, str]
    route: str
    round_trip_s: float
    bytes_per_s: float


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a plan. `name`: of its machine."""

    stage: int
    name: str
    blocks: tuple[int, int]
    roles: tuple[str, ...]
    replica: int
    compute_s: float
    send_s: float
    memory_bytes: int
    memory_limit_bytes: int
    standby: str = ""
    """Machine that stands by for the stage."""


class PlanPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as the page draws it."""

    sentence: str
    stages: tuple[StageRow, ...]
    spares: tuple[str, ...]
    bottleneck: str


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job. `plan` and `events`: of a job that runs."""

    job: str
    title: str
    owner: str
    state: str
    is_live: bool
    steps_done: int
    steps: int
    started_at_s: float
    plan: PlanPicture | None
    events: tuple[str, ...]


class ProgramRow(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was started from the page. `url`: of the gateway that it runs."""

    number: int
    kind: Literal["train", "serve"]
    title: str
    command: str
    state: Literal["running", "ending", "ended"]
    since_s: float
    exit_code: int | None
    url: str
    last: str
    """Last line that it printed."""


class RecipeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe that was made on the page and started."""

    name: str
    is_running: bool
    has_checkpoint: bool


class PageNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of the broker. `at_s`: seconds since 1970."""

    at_s: float
    text: str


class PageOverview(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows by itself. `approves`: refused machines can be endorsed here."""

    pool: str
    addresses: tuple[str, ...]
    announces: bool
    machines: tuple[MachineRow, ...]
    refused: tuple[RefusedMachine, ...]
    approves: bool
    links: tuple[LinkRow, ...]
    jobs: tuple[JobRow, ...]
    programs: tuple[ProgramRow, ...]
    recipes: tuple[RecipeRow, ...]
    notices: tuple[PageNotice, ...]


def machine_rows(members: Sequence[PoolMember], since_s: Mapping[str, float]) -> tuple[MachineRow, ...]:
    """Return a row per member. `since_s`: by peer, when its present state was first seen."""
    return tuple(
        MachineRow(
            peer=member.view.peer,
            name=member.named,
            device=member.profile.device_name or member.profile.device,
            memory_bytes=member.profile.memory_bytes,
            share=member.profile.share,
            flops_per_s=member.profile.flops_per_s,
            isolated=isolation_words(member.profile.isolation),
            state=member.view.state,
            words=state_words(member.view),
            since_s=since_s.get(member.view.peer, 0.0),
            job=member.view.job,
            part=part_words(member.view),
        )
        for member in members
    )


def link_rows(members: Sequence[PoolMember]) -> tuple[LinkRow, ...]:
    """Return the best link of each pair of members, once."""
    known = {member.view.peer for member in members}
    found: dict[tuple[str, str], LinkRow] = {}
    for member in members:
        for peer, link in best_links(member.view.links).items():
            if peer not in known or peer == member.view.peer:
                continue
            first, second = sorted((member.view.peer, peer))
            row = LinkRow(
                ends=(first, second),
                route=link.route,
                round_trip_s=link.round_trip_s,
                bytes_per_s=link.probed_bytes_per_s or link.bandwidth_bytes_per_s,
            )
            other = found.get(row.ends)
            if other is None or (row.bytes_per_s, row.round_trip_s) > (other.bytes_per_s, other.round_trip_s):
                found[row.ends] = row
    return tuple(found[ends] for ends in sorted(found))


def job_rows(jobs: Sequence[JobView], plans: Mapping[JobId, Plan], names: Mapping[str, str]) -> tuple[JobRow, ...]:
    """Return the jobs, those that run first. `names`: of members and of this machine as a job owner, by peer."""
    ordered = sorted(jobs, key=lambda job: (job.state in ENDED, -job.started_at_s))
    return tuple(
        JobRow(
            job=job.job,
            title=job.title,
            owner=_named(job.owner, names),
            state=job_state(job),
            is_live=job.state not in ENDED,
            steps_done=job.step + 1,
            steps=job.steps,
            started_at_s=job.started_at_s,
            plan=picture(plan, names, job.owner) if (plan := plans.get(JobId(job.job))) is not None else None,
            events=job.story[-MOST_EVENTS:],
        )
        for job in ordered[:MOST_JOBS]
    )


def picture(plan: Plan, names: Mapping[str, str], owner: str) -> PlanPicture:
    """Return what the page draws of a plan."""
    standbys = {one.stage: one.peer for one in plan.standbys}

    def name(peer: str) -> str:
        return _named(peer, names) if peer != owner else "job owner"

    return PlanPicture(
        sentence=_speed(plan),
        stages=tuple(
            _stage_row(
                stage,
                stage.stage,
                name(stage.peer),
                name(standbys[stage.stage]) if stage.stage in standbys else "",
            )
            for stage in plan.stages
        ),
        spares=tuple(name(peer) for peer in plan.spares),
        bottleneck=plan.bottleneck,
    )


class _PlannedStage(msgspec.Struct):
    peer: str
    replica: int
    blocks: tuple[int, int]
    roles: tuple[str, ...]
    compute_s: float
    send_s: float
    memory_bytes: int
    memory_limit_bytes: int


class _PlannedStandby(msgspec.Struct):
    stage: int
    peer: str


class _Planned(msgspec.Struct):
    """What is read of the file that `fusion plan --json` writes."""

    stages: tuple[_PlannedStage, ...]
    tokens_per_s: float
    step_time_s: float
    bottleneck: str
    spares: tuple[str, ...]
    standbys: tuple[_PlannedStandby, ...]


def planned_picture(content: bytes) -> PlanPicture:
    """Return the picture of the plan in the file that `fusion plan --json` wrote."""
    found = msgspec.json.decode(content, type=_Planned)
    standbys = {one.stage: one.peer for one in found.standbys}
    return PlanPicture(
        sentence=f"{format_speed(found.tokens_per_s)} tokens/s, {format_seconds(found.step_time_s)} per step.",
        stages=tuple(
            _stage_row(one, number, one.peer, standbys.get(number, "")) for number, one in enumerate(found.stages)
        ),
        spares=found.spares,
        bottleneck=found.bottleneck,
    )


def _stage_row(stage: StagePlacement | _PlannedStage, number: int, name: str, standby: str) -> StageRow:
    return StageRow(
        stage=number,
        name=name,
        blocks=stage.blocks,
        roles=stage.roles,
        replica=stage.replica,
        compute_s=stage.compute_s,
        send_s=stage.send_s,
        memory_bytes=stage.memory_bytes,
        memory_limit_bytes=stage.memory_limit_bytes,
        standby=standby,
    )


def _speed(plan: Plan) -> str:
    if plan.serving is not None:
        return (
            f"Predicted: {format_speed(plan.tokens_per_s)} tokens/s for one session, "
            f"{format_speed(plan.serving.tokens_per_s_together)} for {plan.serving.sessions} together."
        )
    return f"Predicted: {format_speed(plan.tokens_per_s)} tokens/s, {format_seconds(plan.step_time_s)} per step."


def _named(peer: str, names: Mapping[str, str]) -> str:
    return names.get(peer) or short(PeerId(peer))
