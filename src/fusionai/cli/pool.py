"""`fusion pool` and `fusion leave`: who is there; take this machine out.

Decides how members read. Neighbours: `cli.session` asks.
"""

from __future__ import annotations

from pathlib import Path

import click

from fusionai.cli import console
from fusionai.cli.json_output import json_option, write_json
from fusionai.cli.options import home_option
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.types import PeerProfile
from fusionai.wire.messages import MemberView

_STATES = {"idle": "standing by", "active": "working", "draining": "leaving", "silent": "silent", "lost": "lost"}


@click.command()
@home_option
@json_option
def pool(home: Path, json_file: Path | None) -> None:
    """Who is in the pool, what they lend, and what they are doing."""
    from fusionai.cli.session import in_pool, profile_of

    view = in_pool(home, lambda session: session.pool())
    members = [(member, profile_of(member)) for member in view.members]
    if json_file is not None:
        write_json(json_file, "pool", {"pool": view.pool, "members": [_figures(*member) for member in members]})
    console.table(
        ("peer", "name", "device", "speed", "memory", "lent", "state", "job", "stages", "heard"),
        [_row(*member) for member in members],
        title=f"Pool {console.printable(view.pool)}",
        right=(3, 4, 5),
    )
    if not members:
        console.line("Nobody is here yet. `fusion invite` on the broker's machine prints an invitation.")


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for the work at hand to be handed over.")
@home_option
def leave(now: bool, home: Path) -> None:
    """Take this machine out of the pool: its `fusion join` ends after the work at hand."""
    from fusionai.cli.session import in_pool

    in_pool(home, lambda session: session.leave(drain=not now))
    console.line("Left." if now else "Leaving; this machine's `fusion join` ends when its work is handed over.")


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
