"""`fusion pool` and `fusion leave`: who is there; take this machine out.

Decides how members read. Neighbours: `cli.session` asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusionai.cli import console
from fusionai.cli.json_output import json_option, write_json
from fusionai.cli.options import home_option
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.types import PeerProfile
from fusionai.wire.messages import MemberView

if TYPE_CHECKING:
    from fusionai.client.pool_session import Member, PoolSession

_STATES = {"idle": "standing by", "active": "working", "draining": "leaving", "silent": "silent", "lost": "lost"}


@click.command()
@home_option
@json_option
def pool(home: Path, json_file: Path | None) -> None:
    """Who is in the pool, what they lend, and what they are doing."""
    from fusionai.cli.session import in_pool

    async def ask(session: PoolSession) -> tuple[str, tuple[Member, ...]]:
        return session.membership.pool, await session.pool()

    name, members = in_pool(home, ask)
    if json_file is not None:
        write_json(json_file, "pool", {"pool": name, "members": [_figures(*_parts(member)) for member in members]})
    if not members:
        console.line(
            f"Nobody is in pool {console.printable(name)} yet. `fusion invite` on the broker's machine prints an "
            "invitation."
        )
        return
    console.table(
        ("peer", "name", "device", "speed", "memory", "lent", "state", "job", "stages", "heard"),
        [_row(*_parts(member)) for member in members],
        title=f"Pool {console.printable(name)}",
        right=(3, 4, 5),
    )


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for the work at hand to be handed over.")
@home_option
def leave(now: bool, home: Path) -> None:
    """Take this machine out of the pool: its `fusion join` ends after the work at hand."""
    from fusionai.cli.session import in_pool

    async def ask(session: PoolSession) -> None:
        present = {member.view.peer for member in await session.pool() if member.view.state != "lost"}
        if session.membership.peer not in present:
            raise UsageError(
                "this machine lends nothing to the pool now.",
                hint="Nothing has to be done; `fusion pool` shows who is there.",
            )
        await session.leave(drain=not now)

    in_pool(home, ask)
    console.line("Left." if now else "Leaving; this machine's `fusion join` ends when its work is handed over.")


def _parts(member: Member) -> tuple[MemberView, PeerProfile]:
    return member.view, member.profile


def _row(member: MemberView, profile: PeerProfile) -> tuple[str, ...]:
    return (
        short(PeerId(member.peer)),
        profile.name,
        profile.device_name or profile.device,
        f"{profile.flops_per_s / 1e9:.3g} GFLOP/s",
        format_bytes(profile.memory_bytes),
        f"{profile.share:.0%}",
        _STATES.get(member.state, member.state),
        member.job,
        " ".join(str(stage) for stage in member.stages),
        f"{format_seconds(member.last_heard_s)} ago" if member.last_heard_s else "",
    )


def _figures(member: MemberView, profile: PeerProfile) -> dict[str, object]:
    return {
        "peer": member.peer,
        "name": profile.name,
        "state": member.state,
        "job": member.job or None,
        "stages": list(member.stages),
        "addresses": list(member.addresses),
        "device": profile.device,
        "device_name": profile.device_name,
        "flops_per_s": profile.flops_per_s,
        "memory_bytes": profile.memory_bytes,
        "threads": profile.threads,
        "share": profile.share,
        "last_heard_s": member.last_heard_s,
    }
