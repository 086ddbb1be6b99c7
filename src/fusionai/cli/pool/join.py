"""`fusion join`: lends this machine to a pool, or makes it one of the pool's job owners.

`peer.daemon` lends the machine; `transport.enrolment` exchanges the invitation for a certificate.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from fusionai.backends.registry import BACKENDS
from fusionai.cli import console
from fusionai.cli import options as flags
from fusionai.cli.options import write_json
from fusionai.cli.pool.nearby import invitation_from_nearby, join_code
from fusionai.cli.pool.remembered import RememberingCommand, added_flags, remember
from fusionai.cli.running import lifeline_option, run, run_until_stopped
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.process import loading
from fusionai.primitives.units import format_bytes, parse_bytes, parse_rate_limit_bytes_per_s, parse_share

if TYPE_CHECKING:
    from fusionai.peer.lending import PeerOptions, PeerReady


def _device_names(text: str) -> str:
    with loading():
        from fusionai.peer.lending import parse_devices
    return ",".join(parse_devices(text))


_REMEMBERED: Final = frozenset(
    {
        "backend",
        "device",
        "memory_limit_bytes",
        "threads",
        "share",
        "upload_limit_bytes_per_s",
        "download_limit_bytes_per_s",
        "schedule",
        "pause_when_busy",
        "name",
        "host",
        "port",
        "relay",
        "weights_cache_bytes",
        "addresses",
    }
)


@click.command(cls=RememberingCommand, remembered=_REMEMBERED)
@click.argument("invitation", metavar="[INVITE]", nargs=-1, callback=flags.converted(flags.secret_text))
@click.option("--pool", metavar="NAME", help="Without INVITE: join this pool of the local network, by its name or key.")
@click.option(
    "--code",
    metavar="CODE",
    callback=flags.converted(lambda text: join_code(flags.secret_text(text))),
    help="Without INVITE: the six digits that the broker shows. - reads them from standard input, @FILE from a file.  "
    "[default: ask for them]",
)
@click.option("--owner", is_flag=True, help="Only run jobs from this machine; don't lend it.")
@flags.choice_option(
    "--backend",
    "Compute with this framework; auto: one that is installed. jax needs fusionai[jax]; onnxruntime, which can serve "
    "but not train, needs fusionai[onnxruntime].",
    ("auto", *BACKENDS),
    "auto",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICES",
    callback=flags.converted(_device_names),
    help="Lend these devices, each as a member of its own: cpu, cuda, mps, cards by number such as cuda:0,cuda:1, or "
    "all: every card, or the CPU if there is none. cpu,cpu lends the CPU as two members. auto: the first card, or the "
    "CPU.",
)
@flags.quantity_option(
    "--max-memory",
    parse_bytes,
    "SIZE",
    "Lend at most this much of each device's memory, e.g. 8GB.  [default: most of what is free]",
    name="memory_limit_bytes",
)
@flags.threads_option("Compute with this many threads")
@flags.quantity_option(
    "--share",
    parse_share,
    "PERCENT",
    "Compute only this share of the time; measuring and loading are not slowed down.",
    "100%",
)
@flags.quantity_option(
    "--upload-limit",
    parse_rate_limit_bytes_per_s,
    "RATE",
    "Send at most at this rate, over all connections together, e.g. 20Mbit.  [default: unlimited]",
    name="upload_limit_bytes_per_s",
)
@flags.quantity_option(
    "--download-limit",
    parse_rate_limit_bytes_per_s,
    "RATE",
    "Receive at most at this rate, over all connections together, e.g. 100Mbit.  [default: unlimited]",
    name="download_limit_bytes_per_s",
)
@click.option(
    "--schedule",
    multiple=True,
    metavar="TIMES",
    help="Lend only at these times, e.g. '22:00-07:00', 'mon-fri 18:00-23:30' or 'sat,sun'. May be repeated.",
)
@click.option(
    "--pause-when-busy", is_flag=True, help="Don't compute while other programs keep the CPU or the graphics card busy."
)
@click.option("--name", default="", metavar="NAME", help="Show this name for the machine.  [default: the host name]")
@flags.host_option()
@flags.port_option("Listen on this TCP port, further devices on the next ones; 0: any free one.", shown="0")
@click.option(
    "--relay/--no-relay",
    default=None,
    help="Accept connections over the broker's relay from machines that can't dial this one.  [default: yes, unless "
    "--address is given]",
)
@flags.quantity_option(
    "--weights-cache",
    parse_bytes,
    "SIZE",
    "Keep at most this much of fetched weights on the disk, e.g. 50GB; those unused for longest are dropped first. 5 % "
    "of the disk, at most 5 GB, always stay free.  [default: half of the free space]",
    name="weights_cache_bytes",
)
@flags.path_option(
    "--weights-beside",
    "FILE",
    "Read weights from the files of a job owner on this machine, instead of fetching a copy. FILE: weights.json in the "
    "owner's --home.",
    dir_okay=False,
)
@click.option(
    "--measure", is_flag=True, help="Measure this machine's speed even if it was measured in the last 7 days."
)
@click.option("--fresh", is_flag=True, help="Forget the flags of earlier calls, which hold until they are given anew.")
@flags.address_option
@lifeline_option
@flags.home_option
@flags.json_option
@click.pass_context
def join(
    context: click.Context,
    invitation: tuple[str, ...],
    pool: str | None,
    code: str | None,
    owner: bool,
    fresh: bool,
    schedule: tuple[str, ...],
    addresses: tuple[str, ...],
    lifeline: bool,
    home: Path,
    json_file: Path | None,
    **lent: Any,
) -> None:
    """Join a pool and lend this machine until Ctrl-C. INVITE is needed only the first time. `-` reads it from standard
    input, `@FILE` from a file, and without it FUSION_INVITE is used: lists of processes, which all users see, don't
    show it then. Without any of them, pools in the local network are listed, and the six-digit code is asked for that
    the broker shows. Later calls lend the machine as before, unless flags say otherwise."""
    if owner:
        _become_owner(invited(invitation, pool, code, home, as_owner=True), home)
        return
    del fresh  # the command's class reads it
    if added := added_flags(context):
        console.note(f"As in earlier calls: {' '.join(added)} (--fresh forgets this)")
    with loading():
        from fusionai.execution.measurement import FILE as MEASUREMENT
        from fusionai.peer.daemon import run_peer
        from fusionai.peer.lending import PeerOptions, parse_schedule

    if lent["measure"] or not (home / MEASUREMENT).exists():
        console.note("The first start measures this machine for a minute or two; the result is kept for a week.")
    lent_when = parse_schedule(schedule) if schedule else None
    options = PeerOptions(
        home=home,
        invitation=invited(invitation, pool, code, home, as_owner=False),
        schedule=lent_when,
        advertise=addresses,
        **lent,
    )

    announced: dict[PeerId, Any] = {}

    @functools.cache
    def keep() -> None:
        remember(context, home)

    def notice(text: str) -> None:
        keep()
        console.line(text)

    def ready(device: PeerReady) -> None:
        keep()
        announced[device.peer] = msgspec.to_builtins(device)
        write_json(json_file, "join", {**next(iter(announced.values())), "devices": list(announced.values())})
        _announce(device, options)

    run_until_stopped(lambda stop: run_peer(options, announce=ready, stop=stop, notice=notice), lifeline=lifeline)
    console.line("Left the pool.")


def invited(given: tuple[str, ...], pool: str | None, code: str | None, home: Path, *, as_owner: bool) -> str | None:
    """Return the invitation to join with; None if the membership in `home` is meant. An invitation that was pasted with
    its command or in pieces comes as several arguments."""
    nearby = pool is not None or code is not None
    if given:
        if nearby:
            raise UsageError("--pool and --code find a pool without INVITE: leave either them or INVITE out.")
        return " ".join(given)
    if not nearby:
        if _has_joined(home, as_owner=as_owner):
            return None
        if (kept := environment.invitation()) is not None:
            return kept
    return invitation_from_nearby(pool, code)


def _has_joined(home: Path, *, as_owner: bool) -> bool:
    from fusionai.client.pool.session import OWNER_DIRECTORY
    from fusionai.transport.enrolment import MEMBERSHIP_FILE

    places = (home, home / OWNER_DIRECTORY) if as_owner else (home,)
    return any((place / MEMBERSHIP_FILE).is_file() for place in places)


def _announce(announced: PeerReady, options: PeerOptions) -> None:
    profile = announced.profile
    rates = (("sending", options.upload_limit_bytes_per_s), ("receiving", options.download_limit_bytes_per_s))
    limited = "".join(f", {what} at most {format_bytes(rate)}/s" for what, rate in rates if rate is not None)
    console.line(
        f"In pool {console.printable(announced.pool)} as {profile.name} ({short(announced.peer)}): lending "
        f"{profile.device} ({profile.device_name}), {format_bytes(profile.memory_bytes)}, "
        f"{profile.share:.0%} of the time{limited}; reachable at {', '.join(announced.addresses)}. Ctrl-C leaves."
    )
    if announced.measured_at_s is not None:
        measured = time.strftime("%Y-%m-%d %H:%M", time.localtime(announced.measured_at_s))
        console.note(f"Using the speed measured on {measured}; --measure measures it again.")


def _become_owner(invitation: str | None, home: Path) -> None:
    from fusionai.client.pool.session import owner_membership

    membership = run(owner_membership(home, invitation))
    console.line(
        f"This machine is a job owner of pool {console.printable(membership.pool)} ({short(membership.peer)}). "
        "Next: `fusion pool`, `fusion train RECIPE.toml`."
    )
