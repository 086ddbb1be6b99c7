"""`fusion join`: lends this machine to a pool, or makes it one of the pool's job owners.

Flags are remembered in the machine's home: a later call without a flag means what the last one with it meant. Otherwise
a machine that lends 2 GB would lend all of its memory after a restart. Without an invitation, the command finds pools
in the local network, asks for the code that a broker shows, and gets an invitation for it.

`peer.daemon` lends the machine; `transport.enrolment` exchanges the invitation for a certificate,
`transport.discovery` finds pools, `transport.enrolment` asks the broker for the invitation.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from fusionai.backends.registry import BACKENDS
from fusionai.cli import console
from fusionai.cli import options as flags
from fusionai.cli.options import given_options, write_json, written_option
from fusionai.cli.running import lifeline_option, run, run_until_stopped
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.process import loading
from fusionai.primitives.units import format_bytes, parse_bytes, parse_rate_limit_bytes_per_s, parse_share
from fusionai.storage.atomic import write_atomic

if TYPE_CHECKING:
    from fusionai.peer.lending import PeerOptions, PeerReady
    from fusionai.transport.discovery import NearbyPool

LENDING_FILE: Final = "lending.json"
MOST_JOBS: Final = 8
"""Most jobs that a device works for at a time (chosen): a machine may have 16 further keys certified."""
_KEPT: Final = "fusionai.cli.pool.kept"
_ADDED: Final = "fusionai.cli.pool.added"


class RememberingCommand(click.Command):
    """Completes the flags of a call by remembered ones, unless it has `--fresh`. `remembered`: names of parameters."""

    def __init__(self, *args: Any, remembered: frozenset[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remembered = remembered

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = given_options(self, ctx, args)
        home = Path(str(given.get("home") or environment.fusion_home()))
        known = {} if "fresh" in given or "owner" in given else self._read(home / LENDING_FILE)
        own = {name: value for name, value in given.items() if name in self._remembered}
        options = {param.name or "": param for param in self.params if isinstance(param, click.Option)}
        added = [
            text for name, value in known.items() if name not in own for text in written_option(options[name], value)
        ]
        ctx.meta[_KEPT], ctx.meta[_ADDED] = {**known, **own}, added
        return super().parse_args(ctx, [*added, *args])

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            known = msgspec.json.decode(file.read_bytes(), type=dict[str, str | bool | list[str]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as problem:
            raise _unreadable(file, str(problem)) from problem
        if unknown := sorted(known.keys() - self._remembered):
            raise _unreadable(file, f"unknown settings {', '.join(unknown)}")
        return known


def _unreadable(file: Path, problem: str) -> UsageError:
    return UsageError(
        f"{file}: the settings of earlier calls can't be used: {problem}.", hint="Give --fresh to forget them."
    )


def added_flags(context: click.Context) -> Sequence[str]:
    """Return the remembered flags that the call did not have."""
    return context.meta[_ADDED]


def remember(context: click.Context, home: Path) -> None:
    """Keep the call's flags and those that were remembered. Raises `StorageError`."""
    write_atomic(home / LENDING_FILE, msgspec.json.format(msgspec.json.encode(context.meta[_KEPT]), indent=2) + b"\n")


def _device_names(text: str) -> str:
    with loading():
        from fusionai.peer.lending import parse_devices
    return ",".join(parse_devices(text))


_REMEMBERED: Final = frozenset(
    {
        "backend",
        "device",
        "jobs",
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
@click.option(
    "--jobs",
    type=click.IntRange(1, MOST_JOBS),
    default=1,
    show_default=True,
    metavar="N",
    help="Let each device work for up to N jobs at a time, as N members that lend equal parts of its memory.",
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
@flags.path_option(
    "--measured-beside",
    "DIRECTORY",
    "Use the speed that another `fusion join` on this machine measured and keeps in DIRECTORY. Those with the same "
    "DIRECTORY measure one after the other, and only if there is no measurement of the last 7 days.",
    file_okay=False,
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


_CODE: Final = re.compile(r"\d{6}")
_NOT_FOUND: Final = (
    "Pass an invitation (`fusion invite` on the broker's machine prints one). Or check that both machines are in the "
    "same network, that the broker listens beyond its own machine and was not started with --no-announce, and that no "
    "firewall stops UDP port 5353 and TCP port 4711."
)
_ASK_FOR_CODE: Final = "`fusion invite --code` on the broker's machine shows one; pass it as --code CODE."


def join_code(text: str) -> str:
    """Return the six digits of a code, which may be grouped. Raises `UsageError`."""
    digits = re.sub(r"[\s-]", "", text)
    if not _CODE.fullmatch(digits):
        raise UsageError("expected a code of six digits.", hint=_ASK_FOR_CODE)
    return digits


def invitation_from_nearby(name: str | None, code: str | None) -> str:
    """Return an invitation from a pool nearby: the one called `name`, the only one, or one that the user chooses.
    Raises `UsageError` (none found, several, no code), `TransportError`, `TrustError`, `RefusedError` (a wrong
    code)."""
    from fusionai.transport.discovery import nearby_pools
    from fusionai.transport.enrolment import format_invitation, invitation_by_code

    console.note("Looking for pools in the local network.")
    found = run(nearby_pools())
    if not found:
        raise UsageError(
            "this machine has not joined a pool, and none was found in the local network.", hint=_NOT_FOUND
        )
    _show(found)
    pool = _chosen(found, name)
    if code is None:
        if not sys.stdin.isatty():
            raise UsageError(f"pool {pool.name!r} was found, and a code is needed to join it.", hint=_ASK_FOR_CODE)
        code = join_code(click.prompt(f"Code of pool {console.printable(pool.name)} (six digits)", err=True))
    return format_invitation(run(invitation_by_code(pool, code)))


def _show(found: Sequence[NearbyPool]) -> None:
    rows = [
        (pool.name, "" if pool.machines is None else str(pool.machines), pool.fingerprint, ", ".join(pool.addresses))
        for pool in found
    ]
    console.table(("pool", "machines", "key", "addresses"), rows, title="Pools nearby", right=(1,))


def _chosen(found: Sequence[NearbyPool], name: str | None) -> NearbyPool:
    """Return the pool with this name or key, the only one, or the one that the user names."""
    if name is None:
        if len(found) == 1:
            return found[0]
        if not sys.stdin.isatty():
            raise UsageError(f"{len(found)} pools were found.", hint="Choose one with --pool NAME or --pool KEY.")
        name = str(click.prompt("Name or key of the pool", err=True)).strip()
    fitting = [pool for pool in found if name in (pool.name, pool.fingerprint)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UsageError(f"no pool named {name!r} was found in the local network.", hint=_NOT_FOUND)
    raise UsageError(
        f"{len(fitting)} pools named {name!r} were found.", hint="Compare their keys with the broker's: --pool KEY."
    )
