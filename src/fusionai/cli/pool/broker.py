"""`fusion broker` runs the broker of a pool; `fusion invite` makes, lists and withdraws invitations to it; `fusion
evict` sends a member away.

`broker.server` runs the broker, `client` sends it requests.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fusionai.cli import console
from fusionai.cli import options as flags
from fusionai.cli.options import attributes, write_json
from fusionai.cli.running import lifeline_option, run_until_stopped
from fusionai.coordination.broker.join_code import CODE_LIFETIME_S
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.primitives.units import format_seconds, parse_rate_limit_bytes_per_s
from fusionai.transport.security.trust import parse_key

if TYPE_CHECKING:
    from fusionai.broker.options import BrokerOptions
    from fusionai.broker.server import Announcement, BrokerServer
    from fusionai.cli.page.run import OpenPage
    from fusionai.cli.pool.monitoring import OpenMonitoring
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
    "--announce/--no-announce",
    default=True,
    show_default=True,
    help="Announce the pool's name, key and addresses in the local network (mDNS), so that machines there find it.",
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
@flags.path_option(
    "--policy",
    "FILE",
    "Priority classes of the queue and quotas of owners, in TOML. Read at the start.  [default: classes high, normal, "
    "low and idle, no quotas]",
    name="policy_file",
    dir_okay=False,
)
@click.option(
    "--journal",
    metavar="URL",
    help="Keep the pool's journal in this engine: postgresql://HOST/DATABASE, etcd://HOST,HOST,HOST, or sqlite for "
    "files in --home.  [default: where it is; at first sqlite]",
)
@click.option(
    "--journal-from",
    metavar="URL",
    help="Move the journal from this place to --journal first, which must be empty, and end the old one.",
)
@flags.options(
    click.option(
        "--page",
        is_flag=True,
        help="Also keep a web page, on which the pool is watched and set up. Its address is printed.",
    ),
    click.option(
        "--page-host",
        metavar="ADDRESS",
        help="Let the page listen on this address; others than loopback need a password and TLS.  [default: 127.0.0.1]",
    ),
    flags.number_option(
        "--page-port",
        "Let the page listen on this TCP port; 0: any free one.  [default: 4780]",
        None,
        0,
        65_535,
        metavar="PORT",
    ),
    flags.path_option(
        "--page-password-file",
        "FILE",
        "Let the page ask for the password on the first line of this file. Beyond loopback and without this flag, "
        "the password is asked for on the terminal.",
        dir_okay=False,
    ),
    flags.path_option(
        "--page-tls-cert",
        "FILE",
        "Let the page speak HTTPS with this certificate: a PEM file with the chain up to an authority that browsers "
        "trust.",
        dir_okay=False,
    ),
    flags.path_option("--page-tls-key", "FILE", "The PEM file of the certificate's private key.", dir_okay=False),
)
@flags.options(
    flags.number_option(
        "--metrics-port",
        "Answer /metrics (Prometheus), /health and /ready on this TCP port; 0: any free one.  [default: don't]",
        None,
        0,
        65_535,
        metavar="PORT",
    ),
    click.option(
        "--metrics-host",
        metavar="ADDRESS",
        help="Answer them on this address: counts and times, in clear text, for all that reach it.  [default: "
        "127.0.0.1]",
    ),
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
    announce: bool,
    trusted_only: tuple[str, ...],
    trust_file: Path | None,
    policy_file: Path | None,
    journal: str | None,
    journal_from: str | None,
    page: bool,
    metrics_port: int | None,
    metrics_host: str | None,
    lifeline: bool,
    home: Path,
    json_file: Path | None,
    **of_page: Any,
) -> None:
    """Run the broker of a pool until Ctrl-C. Prints its addresses and, at its first start, an invitation. Restarted
    with the same --home it is the same pool: members reconnect by themselves, and running jobs continue while the
    broker is away."""
    from fusionai.broker.options import DEFAULT_PORT, BrokerOptions

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
        policy_file=policy_file,
        journal=journal,
        journal_from=journal_from,
        announces=announce,
    )

    def announced(pool: Announcement) -> None:
        figures = attributes(pool, "pool peer addresses invitation code fingerprint healed")
        write_json(json_file, "broker", figures, is_secret=True)
        _say_open(pool, uses, lifetime, endorsed=bool(trusted_only) or trust_file is not None, page=found)

    found = _page(page, home, of_page)
    watched = _monitoring(metrics_host, metrics_port)
    run_until_stopped(lambda stop: _keep(options, announced, stop, found, watched), lifeline=lifeline)
    console.line("The pool is closed; run `fusion broker` again to reopen it.")


async def _keep(
    options: BrokerOptions,
    announce: Callable[[Announcement], None],
    stop: asyncio.Event,
    page: OpenPage | None,
    watched: OpenMonitoring | None,
) -> None:
    """Run the broker with what runs beside it."""
    from fusionai.broker.server import run_broker

    async def run(opened: Callable[[BrokerServer], None]) -> None:
        if page is None:
            await run_broker(options, announce=announce, stop=stop, notice=_say, opened=opened)
            return
        from fusionai.cli.page.run import run_with_page

        await run_with_page(options, page, announce=announce, stop=stop, notice=_say, opened=opened)

    if watched is None:
        await run(lambda _: None)
        return
    from fusionai.cli.pool.monitoring import run_monitored

    _say(f"Metrics: {watched.url}/metrics, and /health and /ready beside it.")
    await run_monitored(watched, run)


def _monitoring(host: str | None, port: int | None) -> OpenMonitoring | None:
    """Return the address of the metrics, reserved; None without `--metrics-port`. Raises `UsageError`."""
    if port is None:
        if host is not None:
            raise UsageError("--metrics-host is for a broker with metrics.", hint="Add --metrics-port PORT.")
        return None
    from fusionai.cli.pool.monitoring import open_monitoring

    return open_monitoring(host or "127.0.0.1", port)


def _page(wanted: bool, home: Path, given: Mapping[str, Any]) -> OpenPage | None:
    """Return the page with its address reserved, None without `--page`. Raises `UsageError`."""
    named = {name.removeprefix("page_"): value for name, value in given.items() if value is not None}
    if not wanted:
        if named:
            flag = f"--page-{next(iter(named)).replace('_', '-')}"
            raise UsageError(f"{flag} is for a broker with a page.", hint="Add --page.")
        return None
    from fusionai.cli.page.run import PageOptions, open_page

    return open_page(PageOptions(**named), home)


def _say(sentence: str) -> None:
    """Print a sentence. A broker whose output is closed goes on."""
    with suppress(OSError):
        console.line(console.printable(sentence))


def _say_open(pool: Announcement, uses: int, lifetime_s: float, *, endorsed: bool, page: OpenPage | None) -> None:
    """Print what a broker's owner needs. `endorsed`: only machines with endorsed keys may lend themselves; `page`: the
    broker's page, if there is one."""
    for line in pool.healed:
        console.line(f"Repaired: {line}")
    console.line(f"Pool {pool.pool} is open; broker {short(pool.peer)}, key of the pool {pool.fingerprint}.")
    if pool.members or pool.jobs:
        console.line(f"Restored: {pool.members} members, {pool.jobs} jobs.")
    if endorsed:
        console.line("Only machines whose keys are endorsed by a trusted signing key may join to lend themselves.")
    console.line(f"Reachable at {', '.join(pool.addresses)}")
    if pool.invitation:
        _print_invitation(pool.invitation, uses, lifetime_s)
        if pool.code:
            _print_code(pool.code, CODE_LIFETIME_S)
    else:
        console.line("`fusion invite` makes an invitation for further machines, `fusion invite --code` a code.")
    if page is not None:
        console.line(f"Page: {page.link}")
    console.line("Press Ctrl-C to close the pool.")


@click.command()
@flags.invitation_options(uses=1)
@click.option("--list", "listing", is_flag=True, help="List the invitations that are still valid.")
@click.option(
    "--revoke",
    metavar="ID",
    help="Withdraw an invitation; --list shows its id. Machines that have joined with it stay: `fusion evict` sends "
    "them away.",
)
@click.option(
    "--code",
    "by_code",
    is_flag=True,
    help="Print a six-digit code instead, with which one machine in the same network can join within 10 minutes. An "
    "earlier code ends.",
)
@click.option("--qr", is_flag=True, help="Also print the invitation as a QR code.")
@flags.home_option
@flags.json_option
def invite(
    uses: int,
    lifetime: float,
    listing: bool,
    revoke: str | None,
    by_code: bool,
    qr: bool,
    home: Path,
    json_file: Path | None,
) -> None:
    """Print a new invitation to the pool whose broker runs on this machine. Keep it secret: it lets machines join."""
    from fusionai.cli.pool.session import in_pool

    if listing + (revoke is not None) + by_code + qr > 1:
        raise UsageError(
            "--list shows invitations, --revoke withdraws one, --code and --qr make one: give one of these flags."
        )
    if by_code:
        _make_code(home, json_file)
        return
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
    if qr:
        console.line(_as_qr(invitation))


def _make_code(home: Path, json_file: Path | None) -> None:
    from fusionai.cli.pool.session import in_pool

    made = in_pool(home, lambda session: session.make_code())
    write_json(json_file, "code", {"code": made.code, "lifetime_s": made.lifetime_s}, is_secret=True)
    _print_code(made.code, made.lifetime_s)
    if not made.announced:
        console.warning("the broker does not announce itself, so that no machine can find it to use the code.")


def _as_qr(invitation: str) -> str:
    """Return a QR code of the invitation, drawn with block characters. Raises `UsageError` if standard output has
    none."""
    import segno

    drawn = io.StringIO()
    segno.make(invitation, error="l").terminal(drawn, compact=True)
    text = drawn.getvalue().rstrip("\n")
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a QR code needs block characters, and this terminal's encoding, {sys.stdout.encoding}, has none.",
            hint="Set PYTHONIOENCODING=utf-8, or use the printed invitation.",
        ) from error
    return text


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


def _print_code(code: str, lifetime_s: float) -> None:
    console.line(f"Code for one machine in this network, valid for {format_seconds(lifetime_s)}; it asks for it:")
    console.line(f"  fusion join    (code {code[:3]} {code[3:]})")
