"""`fusion pool` lists the members and the recent events of running jobs; `fusion leave` takes this machine out.

`cli.pool.session` sends the requests to the broker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.options import home_option, json_option, write_json
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
TRUSTED = "yes"
_HISTORY_LINES = 8
"""Most recent events shown per running job; `fusion logs` shows all."""


@click.command()
@home_option
@json_option
def pool(home: Path, json_file: Path | None) -> None:
    """List the members of the pool, what they lend and do, and the recent events of running jobs."""
    from fusionai.cli.pool.session import in_pool

    async def ask(session: PoolSession) -> tuple[str, tuple[PoolMember, ...], list[JobView]]:
        members = await session.pool()
        running = [job for job in await session.jobs() if job.state not in ("done", "failed")]
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
        ("peer", "name", "device", "speed", "memory", "lent", "state", "job", "part", "links", "heard", "trusted")
        if trust_states
        else ("peer", "name", "device", "speed", "memory", "lent", "state", "job", "part", "links", "heard"),
        [(*_row(*_parts(member)), *([trust_states[member.view.peer]] if trust_states else [])) for member in members],
        title=f"Pool {console.printable(name)}",
        right=(3, 4, 5),
    )
    if any(link.route == "relay" for member in members for link in best_links(member.view.links).values()):
        console.line(
            "Relayed links pass the broker's machine; `fusion doctor` at either end says how to make one direct."
        )
    for job in jobs:
        console.line(f"{job.job}, {job.step + 1} steps done; recent events:")
        for entry in job.story[-_HISTORY_LINES:]:
            console.line(f"  {console.printable(entry)}")


@click.command()
@click.option("--now", is_flag=True, help="Leave at once, without handing over the current work.")
@home_option
def leave(now: bool, home: Path) -> None:
    """Take this machine out of the pool: its `fusion join` ends after handing over its current work."""
    from fusionai.cli.pool.session import in_pool

    async def ask(session: PoolSession) -> None:
        present = {member.view.peer for member in await session.pool() if member.view.state != "lost"}
        if session.membership.peer not in present:
            raise UsageError(
                "this machine is not lending itself to the pool now.",
                hint="There is nothing to leave; `fusion pool` lists the members.",
            )
        await session.leave(drain=not now)

    in_pool(home, ask)
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
        _state(member),
        member.job,
        _part(member),
        _links(member),
        f"{format_seconds(member.last_heard_s)} ago" if member.last_heard_s else "",
    )


def _state(member: MemberView) -> str:
    if member.state == "resting":
        # Lost too often lately; gets work again after this time.
        return f"resting {format_seconds(member.rests_s)}"
    if member.clears:
        return f"clearing {member.clears}"
    return _STATES.get(member.state, member.state)


def _part(member: MemberView) -> str:
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
        "addresses": list(member.addresses),
        "links": [
            {
                "peer": link.peer,
                "route": link.route,
                "way": link.route,  # its older name
                "channels": link.channels,
                "round_trip_s": link.round_trip_s or None,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s or None,
                "probed_bytes_per_s": link.probed_bytes_per_s or None,
                "loss": link.loss,
            }
            for link in member.links
        ],
        "device": profile.device,
        "device_name": profile.device_name,
        "flops_per_s": profile.flops_per_s,
        "pace": None if profile.pace is None else msgspec.to_builtins(profile.pace),
        "memory_bytes": profile.memory_bytes,
        "threads": profile.threads,
        "share": profile.share,
        "last_heard_s": member.last_heard_s,
    }
