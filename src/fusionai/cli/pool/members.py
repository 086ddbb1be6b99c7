"""`fusion pool` and `fusion jobs` list a pool's members and jobs, `fusion logs` shows the history of one job, `fusion
stop` stops it, `fusion leave` takes this machine out of the pool.

`cli.pool.session` sends the requests to the broker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
import msgspec

from fusionai.backends.worker.confinement import Measure
from fusionai.cli import console
from fusionai.cli.options import attributes, home_option, json_option, path_option, write_json
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.routes.addresses import best_links
from fusionai.transport.security.trust import TRUST_FILE, TrustListFile
from fusionai.wire.messages import JobView, MemberView

if TYPE_CHECKING:
    from fusionai.client.pool.session import PoolMember, PoolSession

_STATES = {"idle": "standing by", "active": "working", "draining": "leaving", "silent": "silent", "lost": "lost"}
_QUEUED = "queued"
_ENDED = ("done", "failed")
TRUSTED = "yes"
_COLUMNS = ("peer", "name", "device", "speed", "memory", "lent", "isolated", "state", "job", "part", "links", "heard")
_HISTORY_LINES = 8
"""Most recent events shown per running job; `fusion logs` shows all."""


@click.command()
@click.option("--ledger", is_flag=True, help="Show what the machines have lent to whose jobs instead.")
@path_option(
    "--csv", "FILE", "Also write the ledger to FILE, a row per machine and owner.", name="csv_file", dir_okay=False
)
@path_option(
    "--verify",
    "FILE",
    "Check a ledger that was written with --json, without the broker.",
    name="exported",
    dir_okay=False,
)
@home_option
@json_option
def pool(home: Path, json_file: Path | None, csv_file: Path | None, exported: Path | None, *, ledger: bool) -> None:
    """List the members of the pool, what they lend and do, and the recent events of running jobs."""
    if ledger or csv_file is not None or exported is not None:
        _ledger(home, json_file, csv_file, exported, ledger=ledger)
        return
    from fusionai.cli.pool.session import in_pool

    async def ask(session: PoolSession) -> tuple[str, tuple[PoolMember, ...], list[JobView]]:
        members = await session.pool()
        running = [job for job in await session.jobs() if job.state not in (*_ENDED, _QUEUED)]
        # Requested one by one, because the broker sends a job's story only when asked about that job.
        return session.membership.pool, members, [view for job in running for view in await session.jobs(job.job)]

    name, members, jobs = in_pool(home, ask)
    trust_states = _trust_states(home, members)
    if json_file is not None:
        figures = [
            {**_figures(*_parts(member)), "trusted": trust_states.get(member.view.peer) == TRUSTED}
            for member in members
        ]
        stories = [{"job": job.job, "state": job.state, "story": list(job.story[-_HISTORY_LINES:])} for job in jobs]
        write_json(json_file, "pool", {"pool": name, "members": figures, "jobs": stories})
    if not members:
        console.line(
            f"Pool {console.printable(name)} has no members yet. `fusion invite` on the broker's machine prints an "
            "invitation."
        )
        return
    console.table(
        (*_COLUMNS, "trusted") if trust_states else _COLUMNS,
        [(*_row(*_parts(member)), *([trust_states[member.view.peer]] if trust_states else [])) for member in members],
        title=f"Pool {console.printable(name)}",
        right=(3, 4, 5),
        spare=("isolated", "links", "lent", "heard", "speed", "device", "trusted", "memory"),
    )
    if any(link.route == "relay" for member in members for link in best_links(member.view.links).values()):
        console.line(
            "Relayed links pass the broker's machine; `fusion doctor` at either end says how to make one direct."
        )
    for job in jobs:
        console.line(f"{job.job}, {job.step + 1} steps done; recent events:")
        for entry in job.story[-_HISTORY_LINES:]:
            console.line(f"  {console.printable(entry)}")


def _ledger(home: Path, json_file: Path | None, csv_file: Path | None, exported: Path | None, *, ledger: bool) -> None:
    from fusionai.cli.pool.ledger import check_ledger, show_ledger

    if not ledger:
        raise UsageError("expected --ledger beside --csv and --verify.", hint="`fusion pool --ledger --csv FILE`")
    if exported is None:
        show_ledger(home, csv_file, json_file)
        return
    if csv_file is not None or json_file is not None:
        raise UsageError("expected --verify alone, got it with a file to write.", hint="Leave --csv and --json out.")
    check_ledger(home, exported)


@click.command()
@click.option("--now", is_flag=True, help="Leave at once, without handing over the current work.")
@home_option
def leave(now: bool, home: Path) -> None:
    """Take this machine out of the pool, with all its devices: its `fusion join` ends after handing over its current
    work."""
    from fusionai.cli.pool.session import in_pool
    from fusionai.client.pool.session import any_membership
    from fusionai.peer.lending import device_homes
    from fusionai.transport.enrolment import load_membership

    async def ask(session: PoolSession) -> bool:
        present = {member.view.peer for member in await session.pool() if member.view.state != "lost"}
        lent = session.membership.peer in present
        if lent:
            await session.leave(drain=not now)
        return lent

    machine = any_membership(home)
    further = [load_membership(one) for one in device_homes(home)]
    own = [machine, *(one for one in further if one.credentials.authority == machine.credentials.authority)]
    left = [in_pool(home, ask, membership=one) for one in own]
    if not any(left):
        raise UsageError(
            "this machine is not lending itself to the pool now.",
            hint="There is nothing to leave; `fusion pool` lists the members.",
        )
    console.line("Left the pool." if now else "Leaving: `fusion join` here ends when its work is handed over.")


def _trust_states(home: Path, members: Sequence[PoolMember]) -> dict[str, str]:
    """Return, by peer, `TRUSTED` or why the peer is not trusted; empty if this machine has no trust list."""
    path = home / TRUST_FILE
    if not path.exists():
        return {}
    trust_list = TrustListFile(path, time.time)
    trust_states: dict[str, str] = {}
    for member in members:
        try:
            trust_list.check(PeerId(member.view.peer), member.profile.endorsements)
            trust_states[member.view.peer] = TRUSTED
        except TrustError as error:
            trust_states[member.view.peer] = f"no: {error.message.rstrip('.')}"
    return trust_states


def _parts(member: PoolMember) -> tuple[MemberView, PeerProfile]:
    return member.view, member.profile


def _row(member: MemberView, profile: PeerProfile) -> tuple[str, ...]:
    return (
        short(PeerId(member.peer)),
        profile.name,
        profile.device_name or profile.device,
        f"{profile.flops_per_s / 1e9:.3g} GFLOP/s",
        format_bytes(profile.memory_bytes),
        f"{profile.share:.0%}",
        isolation_words(profile.isolation),
        state_words(member),
        member.job,
        part_words(member),
        _links(member),
        f"{format_seconds(member.last_heard_s)} ago" if member.last_heard_s else "",
    )


def state_words(member: MemberView) -> str:
    if member.state == "resting":
        # Lost too often lately; gets work again after this time.
        return f"resting {format_seconds(member.rests_s)}"
    if member.clears:
        return f"clearing {member.clears}"
    if member.kept_for:
        return f"kept for {member.kept_for}"
    return _STATES.get(member.state, member.state)


def isolation_words(measures: Sequence[str]) -> str:
    """Return how well the member's machine is protected from jobs: `yes`, `no`, or the measures that hold."""
    held = [one for one in get_args(Measure) if one in measures]
    return "yes" if len(held) == len(get_args(Measure)) else ", ".join(held) or "no"


def part_words(member: MemberView) -> str:
    """Return what the member does in its job: the stages it runs, and those it is warm standby of."""
    runs = " ".join(str(stage) for stage in member.stages)
    standbys = " ".join(str(stage) for stage in member.standbys)
    return ", ".join(
        part for part in (f"runs {runs}" if runs else "", f"standby of {standbys}" if standbys else "") if part
    )


def _links(member: MemberView) -> str:
    """Return the number of peers reached per route, such as `2 direct, 1 relay`."""
    routes = Counter[str](link.route for link in best_links(member.links).values())
    return ", ".join(f"{count} {route}" for route, count in sorted(routes.items()))


def _figures(member: MemberView, profile: PeerProfile) -> dict[str, object]:
    return {
        "peer": member.peer,
        "name": profile.name,
        "state": member.state,
        "job": member.job or None,
        "stages": list(member.stages),
        "standby_of": list(member.standbys),
        "guards": list(member.standbys),  # its older name
        "rests_s": member.rests_s,
        "clears": member.clears or None,
        "kept_for": member.kept_for or None,
        "addresses": list(member.addresses),
        "links": [
            {
                **attributes(link, "peer route"),
                "way": link.route,  # its older name
                "channels": link.channels,
                "round_trip_s": link.round_trip_s or None,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s or None,
                "probed_bytes_per_s": link.probed_bytes_per_s or None,
                "loss": link.loss,
            }
            for link in member.links
        ],
        **attributes(profile, "device device_name flops_per_s"),
        "pace": None if profile.pace is None else msgspec.to_builtins(profile.pace),
        **attributes(profile, "memory_bytes threads share"),
        "isolation": list(profile.isolation),
        "last_heard_s": member.last_heard_s,
    }


@click.command()
@home_option
@json_option
def jobs(home: Path, json_file: Path | None) -> None:
    """List the jobs of the pool and their progress."""
    from fusionai.cli.pool.session import in_pool

    found = in_pool(home, lambda session: session.jobs())
    write_json(json_file, "jobs", {"jobs": [_job_figures(job) for job in found]})
    if not found:
        console.line("No jobs yet. `fusion train RECIPE.toml` starts one.")
        return
    console.table(
        ("job", "title", "owner", "state", "step", "plan", "started"),
        [_job_row(job) for job in found],
        right=(4, 5),
        spare=("plan", "owner", "started"),
    )


@click.command()
@click.argument("job")
@home_option
@json_option
def logs(job: str, home: Path, json_file: Path | None) -> None:
    """Show the event history of JOB as the broker knows it. JOB: a name or title from `fusion jobs`, or how one begins.
    Losses and speeds are in the run's directory on the job owner's machine."""
    from fusionai.cli.pool.session import in_pool

    found = in_pool(home, lambda session: _one(session, job))
    write_json(json_file, "logs", {**_job_figures(found), "story": list(found.story)})
    console.line(f"{found.job}: {job_state(found)}, {_steps(found)}, plan version {found.plan_version}")
    for entry in found.story:
        console.line(console.printable(entry))


@click.command()
@click.argument("job")
@home_option
def stop(job: str, home: Path) -> None:
    """Stop JOB cleanly: it writes a last checkpoint and can be resumed. JOB: a name or title from `fusion jobs`, or how
    one begins. Only the machines of the job's owner and of the broker may stop a job."""
    from fusionai.cli.pool.session import in_pool
    from fusionai.client.pool.session import OWNER_DIRECTORY
    from fusionai.transport.enrolment import MEMBERSHIP_FILE, load_membership

    found = in_pool(home, lambda session: _one(session, job))
    job = found.job
    if found.state in _ENDED:
        console.line(f"{job} has already ended ({job_state(found)}, {_steps(found)} steps).")
        return
    # Jobs belong to the machine's owner key, which differs from the key that it lends itself under.
    own_home = home / OWNER_DIRECTORY
    own = load_membership(own_home) if (own_home / MEMBERSHIP_FILE).is_file() else None
    mine = own is not None and own.peer == found.owner
    in_pool(home, lambda session: session.stop(job), membership=own if mine else None)
    if found.state == _QUEUED:
        console.line(f"{job} is taken out of the queue.")
        return
    console.line(f"{job} was asked to stop; `fusion jobs` shows when it has stopped.")


async def _one(session: PoolSession, text: str) -> JobView:
    """Return the job with this name or title, or the only one whose name or title begins like this; of several with one
    title, the only one that runs. The broker sends a job's story only when asked about that job."""
    known = await session.jobs()
    fits = (
        [one for one in known if one.job == text],
        [one for one in known if one.title == text],
        [one for one in known if one.title == text and one.state not in _ENDED],
        [one for one in known if text and one.job.startswith(text)],
        [one for one in known if text and one.title.startswith(text)],
    )
    found = next((fit for fit in fits if len(fit) == 1), None)
    if found is not None:
        return (await session.jobs(found[0].job) or tuple(found))[0]
    several = next((fit for fit in fits if fit), None)
    if several is None:
        raise UsageError(
            f"there is no job {text!r} in this pool, by name or by title.", hint="`fusion jobs` lists them."
        )
    names = ", ".join(one.job for one in several)
    raise UsageError(f"{len(several)} jobs fit {text!r}: {names}.", hint="Give one of these names.")


def _job_row(job: JobView) -> tuple[str, ...]:
    return (
        job.job,
        job.title,
        short(PeerId(job.owner)),
        f"{job_state(job)}, place {job.place}" if job.place else job_state(job),
        _steps(job),
        str(job.plan_version),
        datetime.fromtimestamp(job.started_at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
        if job.started_at_s
        else "",
    )


def job_state(job: JobView) -> str:
    """Return the job's state. The broker reports a stopped job as done; fewer steps than planned tell them apart."""
    return "stopped" if job.state == "done" and job.steps and job.step + 1 < job.steps else job.state


def _steps(job: JobView) -> str:
    done = job.step + 1
    return f"{done} of {job.steps}" if job.steps else str(done)


def _job_figures(job: JobView) -> dict[str, object]:
    return {
        **attributes(job, "job title owner"),
        "state": job_state(job),
        "steps_done": job.step + 1,
        **attributes(job, "steps plan_version started_at_s"),
        "place": job.place or None,
    }
