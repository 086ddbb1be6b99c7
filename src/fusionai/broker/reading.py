"""Reads what the broker relies on in messages: profiles and plans against their schemas and limits, as requests.

`service` passes messages on, `coordination.broker` decides the requests."""

from __future__ import annotations

from math import isfinite
from typing import Final

import msgspec

from fusionai.coordination.broker import requests
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.requests import Refusal
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.wire import messages as wire

MAX_PROFILE_BYTES: Final = 16_384
MAX_PLAN_BYTES: Final = 4 * 2**20
MAX_STAGES: Final = 1024


def job_request(owner: PeerId, connection: int, message: wire.JobRequest) -> requests.RequestJob:
    """Decode the plan against its schema and check what the broker relies on. Raises `Refusal`."""
    try:
        plan = msgspec.msgpack.decode(message.plan, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("bad_message", f"The plan does not fit its schema: {error}.") from error
    if len(bytes(message.plan)) > MAX_PLAN_BYTES:
        raise Refusal("bad_message", f"Expected a plan of at most {MAX_PLAN_BYTES} bytes.")
    if not 1 <= len(plan.stages) <= MAX_STAGES:
        raise Refusal("bad_message", f"Expected a plan of 1 to {MAX_STAGES} stages, got {len(plan.stages)}.")
    if len({(placement.stage, placement.replica) for placement in plan.stages}) != len(plan.stages):
        raise Refusal("bad_message", "A stage of the plan is placed twice.")
    if plan.version < 0 or any(not 0 <= placement.stage < MAX_STAGES for placement in plan.stages):
        raise Refusal("bad_message", "A number of the plan is out of range.")
    _check_standbys(plan)
    members = _placements(plan, owner)
    if not members:
        raise Refusal("bad_message", "The plan places nothing on a member; it needs no pool.")
    unversioned = msgspec.msgpack.encode(msgspec.structs.replace(plan, version=0))
    return requests.RequestJob(
        owner=owner,
        connection=connection,
        job=JobId(message.job),
        title=message.title,
        steps=message.steps,
        plan=unversioned,
        plan_version=plan.version,
        members=members,
    )


def place_request(owner: PeerId, connection: int, message: wire.QueueRequest) -> requests.AskPlace:
    return requests.AskPlace(
        owner=owner,
        connection=connection,
        job=JobId(message.job),
        title=message.title,
        steps=message.steps,
        machines=message.machines,
        memory_bytes=message.memory_bytes,
        excluded=message.excluded,
        priority=message.priority,
        again=message.again,
    )


def work_report(sender: PeerId, message: wire.WorkReport) -> requests.ReportWork:
    return requests.ReportWork(
        sender, JobId(message.job), message.run, message.sequence, message.steps, message.tokens, message.shares
    )


def _check_standbys(plan: Plan) -> None:
    """Raise `Refusal` unless each stage has at most one standby, on a machine that does not run the stage."""
    runs: dict[int, set[str]] = {}
    for placement in plan.stages:
        runs.setdefault(placement.stage, set()).add(placement.peer)
    if len({standby.stage for standby in plan.standbys}) != len(plan.standbys):
        raise Refusal("bad_message", "A stage of the plan has two standbys.")
    for standby in plan.standbys:
        if standby.peer in runs.get(standby.stage, {standby.peer}):
            raise Refusal("bad_message", f"Stage {standby.stage} is not in the plan or would be its own standby.")
    if plan.snapshot_every < 0 or (plan.standbys and not plan.snapshot_every and plan.task == "train"):
        raise Refusal("bad_message", "A plan with standbys needs a number of steps between two snapshots.")


def _placements(plan: Plan, owner: PeerId) -> tuple[MemberPlacement, ...]:
    """Return the stages and standbys that the plan places on each member. Stages of the owner's process (feed, loss)
    reserve no member. Standbys are reserved like members with stages, because another job could otherwise take
    them just when they are needed."""
    stages: dict[str, list[int]] = {}
    standbys: dict[str, list[int]] = {}
    for placement in plan.stages:
        own = placement.peer == owner and ("loss" in placement.roles or "feed" in placement.roles)
        if not own:
            stages.setdefault(placement.peer, []).append(placement.stage)
    for standby in plan.standbys:
        standbys.setdefault(standby.peer, []).append(standby.stage)
    return tuple(
        MemberPlacement(peer, tuple(stages.get(peer, ())), tuple(sorted(standbys.get(peer, ()))))
        for peer in dict.fromkeys((*stages, *standbys))
    )


def fastest_flops_per_s(profile: PeerProfile) -> float:
    """Return the highest speed that the profile says was measured, times the share of the time that it lends; 0 for one
    that is no number."""
    speeds = [profile.flops_per_s, *(one.flops_per_s for one in profile.serving)]
    if profile.pace is not None:
        speeds += [profile.pace.flops_per_s, profile.pace.half_flops_per_s]
    fastest = max((one for one in speeds if isfinite(one)), default=0.0) * profile.share
    return max(0.0, fastest) if isfinite(fastest) else 0.0


def read_profile(profile: msgspec.Raw, peer: PeerId) -> PeerProfile:
    """Decode the profile that `peer` registers. Raises `Refusal`."""
    if len(bytes(profile)) > MAX_PROFILE_BYTES:
        raise Refusal("bad_message", f"Expected a profile of at most {MAX_PROFILE_BYTES} bytes.")
    try:
        decoded = msgspec.msgpack.decode(profile, type=PeerProfile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("bad_message", f"The profile does not fit its schema: {error}.") from error
    if decoded.peer != peer:
        raise Refusal("not_authorised", f"Expected the profile of {short(peer)}, got another's.")
    return decoded
