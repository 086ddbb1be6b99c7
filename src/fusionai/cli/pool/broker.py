"""`fusion broker` runs the broker of a pool; `fusion invite` makes, lists and withdraws invitations to it; `fusion
evict` sends a member away.

`broker.server` runs the broker, `client` sends it requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from fusionai.cli import console
from fusionai.cli import options as flags
from fusionai.cli.options import attributes, write_json
from fusionai.cli.running import lifeline_option, run_until_stopped
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.primitives.units import format_seconds, parse_rate_limit_bytes_per_s
from fusionai.transport.security.trust import parse_key

if TYPE_CHECKING:
    from fusionai.client.pool.session import PoolMember, PoolSession
    from fusionai.wire.messages import InvitationView

ID_CHARACTERS: Final = 12
"""Shown of an invitation's id and of a member's id where several fit."""


@click.command()
@click.option("--pool", "name", metavar="NAME", help="Name of the pool.  [default: the name it has, or `pool`]")
@flags.host_option()
@flags.port_option("Listen on this TCP port; 0: any free one.", default=None, shown="4711")
@flags.address_option
@click.option(
    "--invite/--no-invite",
    default=None,
    help="Print an invitation at the start.  [default: only when the pool is new; `fusion invite` makes further ones]",
)
@flags.invitation_options(uses=100)
@flags.number_option(
    "--rest-after",
    "Give a machine no new work for 5 minutes after its connection was lost N times within 10 minutes; 0: always give "
    "it work.",
    5,
    0,
    16,
)
@click.option(
    "--relay/--no-relay",
    default=True,
    show_default=True,
    help="Relay the encrypted traffic of machines that can't connect to each other directly.",
)
@flags.quantity_option(
    "--relay-limit",
    parse_rate_limit_bytes_per_s,
    "RATE",
    "Limit the relayed traffic between two machines, in each direction.",
    "100Mbit",
)
@click.option(
    "--trusted-only",
    "trusted_only",
    multiple=True,
    metavar="SIGNING_KEY",
    help="Let only machines lend themselves whose keys this signing key has endorsed. May be repeated.",
)
@flags.path_option(
    "--trust-file",
    "FILE",
    "Let only machines lend themselves that a signing key in this file has endorsed and that are not revoked in it. "
    "`fusion trust` writes such a file: trust.json in its --home.",
    dir_okay=False,
    exists=True,
)
@lifeline_option
@flags.home_option
@flags.json_option
def broker(
    name: str | None,
    host: str,
    port: int | None,
    addresses: tuple[str, ...],
    invite: bool | None,
    uses: int,
    lifetime: float,
    rest_after: int,
    relay: bool,
    relay_limit: float,
    trusted_only: tuple[str, ...],
    trust_file: Path | None,
    lifeline: bool,
    home: Path,
    json_file: Path | None,
) -> None:
    """Run the broker of a pool until Ctrl-C. Prints its addresses and, at its first start, an invitation. Restarted
    with the same --home it is the same pool: members reconnect by themselves, and running jobs continue while the
    broker is away."""
    from fusionai.broker.server import DEFAULT_PORT, Announcement, BrokerOptions, run_broker

    options = BrokerOptions(
        home=home,
        pool=name,
        host=host,
        port=DEFAULT_PORT if port is None else port,
        advertise=addresses,
        invites=invite,
        invitation_uses=uses,
        invitation_lifetime_s=lifetime,
        losses_before_rest=rest_after,
        relay_bytes_per_s=relay_limit if relay else None,
        trusted_keys=frozenset(parse_key(text) for text in trusted_only),
        trust_file=trust_file,
    )

    def opened(pool: Announcement) -> None:
        write_json(json_file, "broker", attributes(pool, "pool peer addresses invitation healed"), is_secret=True)
        for line in pool.healed:
            console.line(f"Repaired: {line}")
        console.line(f"Pool {pool.pool} is open; broker {short(pool.peer)}.")
        if pool.members or pool.jobs:
            console.line(f"Restored: {pool.members} members, {pool.jobs} jobs.")
        if trusted_only or trust_file is not None:
            console.line("Only machines whose keys are endorsed by a trusted signing key may join to lend themselves.")
        console.line(f"Reachable at {', '.join(pool.addresses)}")
        if pool.invitation:
            _print_invitation(pool.invitation, uses, lifetime)
        else:
            console.line("`fusion invite` makes an invitation for further machines.")
        console.line("Press Ctrl-C to close the pool.")

    run_until_stopped(lambda stop: run_broker(options, announce=opened, stop=stop), lifeline=lifeline)
    console.line("The pool is closed; run `fusion broker` again to reopen it.")


@click.command()
@flags.invitation_options(uses=1)
@click.option("--list", "listing", is_flag=True, help="List the invitations that are still valid.")
@click.option(
    "--revoke",
    metavar="ID",
    help="Withdraw an invitation; --list shows its id. Machines that have joined with it stay: `fusion evict` sends "
    "them away.",
)
@flags.home_option
@flags.json_option
def invite(uses: int, lifetime: float, listing: bool, revoke: str | None, home: Path, json_file: Path | None) -> None:
    """Print a new invitation to the pool whose broker runs on this machine. Keep it secret: it lets machines join."""
    from fusionai.cli.pool.session import in_pool

    if listing and revoke is not None:
        raise UsageError("--list shows invitations and --revoke withdraws one: give one of them.")
    if listing:
        _list_invitations(in_pool(home, lambda session: session.invitations()), json_file)
        return
    if revoke is not None:
        if not revoke:
            raise UsageError("--revoke: expected the id of an invitation.", hint="`fusion invite --list` shows them.")
        in_pool(home, lambda session: session.revoke_invitation(revoke))
        console.line("The invitation is withdrawn: no further machine can join with it.")
        return
    invitation = in_pool(home, lambda session: session.invite(uses=uses, lifetime_s=lifetime))
    figures = {"invitation": invitation, "uses": uses, "lifetime_s": lifetime}
    write_json(json_file, "invite", figures, is_secret=True)
    _print_invitation(invitation, uses, lifetime)


def _list_invitations(found: Sequence[InvitationView], json_file: Path | None) -> None:
    rows = [
        (
            one.invitation[:ID_CHARACTERS],
            str(one.uses_left),
            datetime.fromtimestamp(one.expires_at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M"),
            ", ".join(short(PeerId(peer)) for peer in one.peers),
        )
        for one in found
    ]
    figures = [
        {"id": row[0], **attributes(one, "uses_left expires_at_s peers")} for row, one in zip(rows, found, strict=True)
    ]
    write_json(json_file, "invitations", {"invitations": figures})
    if not found:
        console.line("No invitation is valid. `fusion invite` makes one.")
        return
    console.table(("id", "uses left", "valid until", "joined with it"), rows, right=(1,))


@click.command()
@click.argument("member")
@flags.home_option
@flags.json_option
def evict(member: str, home: Path, json_file: Path | None) -> None:
    """Send MEMBER (a name or id from `fusion pool`) away from the pool for good, with all keys of its machine. Its
    jobs end, jobs of others go on without it, and no member accepts it any more, whatever its certificate says. Only
    the broker's machine may do that. A machine that was evicted by mistake joins as a new one, with an invitation and
    another --home."""
    from fusionai.cli.pool.session import in_pool

    async def ask(session: PoolSession) -> tuple[PeerId, ...]:
        return await session.evict(_found(member, await session.pool()))

    evicted = in_pool(home, ask)
    write_json(json_file, "evict", {"evicted": list(evicted)})
    console.line(f"Evicted: {', '.join(map(short, evicted))}. Invitations stay valid; see `fusion invite --list`.")


def _found(text: str, members: Sequence[PoolMember]) -> PeerId:
    """Return the member with this name or id, or with an id that begins like this. An id in full need not be listed:
    a member may be away."""
    if len(text) == PEER_ID_LENGTH:
        return PeerId(text)
    found = [PeerId(one.view.peer) for one in members if text and (one.named == text or one.view.peer.startswith(text))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no member is named {text!r} or has such an id.", hint="`fusion pool` lists the members.")
    ids = ", ".join(peer[:ID_CHARACTERS] for peer in found)
    raise UsageError(f"{len(found)} members fit {text!r}: {ids}.", hint="Give more characters of the id.")


def _print_invitation(invitation: str, uses: int, lifetime_s: float) -> None:
    machines = "one machine" if uses == 1 else f"{uses} machines"
    console.line(f"Invitation for {machines}, valid for {format_seconds(lifetime_s)}; keep it secret:")
    console.line(f"  fusion join {invitation}")
