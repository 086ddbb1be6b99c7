"""`fusion join`: lend this machine to a pool, or become one of its job owners.

Decides how text becomes options and what is printed. Neighbours: `peer.daemon` does the lending, `transport.enrolment`
trades the invitation for a certificate.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import click
import msgspec

from fusionai.backends.registry import BACKENDS
from fusionai.cli import console
from fusionai.cli.json_output import json_option, write_json
from fusionai.cli.lifeline import lifeline_option
from fusionai.cli.options import address_option, home_option, quantity
from fusionai.cli.running import run_until_stopped
from fusionai.primitives.garbage import loading
from fusionai.primitives.ids import short
from fusionai.primitives.units import format_bytes, parse_bytes, parse_rate_limit_bytes_per_s, parse_share


@click.command()
@click.argument("invitation", metavar="[INVITE]", required=False)
@click.option("--owner", is_flag=True, help="Only run jobs from this machine; lend nothing.")
@click.option(
    "--backend",
    type=click.Choice(("auto", *BACKENDS)),
    default="auto",
    show_default=True,
    help="What computes; auto takes what is installed. jax needs fusionai[jax], onnxruntime (which serves and can't "
    "train) fusionai[onnxruntime].",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", show_default=True, help="Where."
)
@click.option(
    "--max-memory",
    callback=quantity(parse_bytes),
    metavar="SIZE",
    help="Lend at most so much of the device's memory, e.g. 8GB.  [default: most of what is free]",
)
@click.option("--threads", type=click.IntRange(min=1), help="Compute with so many threads.  [default: all cores]")
@click.option(
    "--share",
    callback=quantity(parse_share),
    default="100%",
    show_default=True,
    metavar="PERCENT",
    help="Lend only so much of the time.",
)
@click.option(
    "--upload-limit",
    callback=quantity(parse_rate_limit_bytes_per_s),
    metavar="RATE",
    help="Send at most so much, over all connections, e.g. 20Mbit.  [default: what the line takes]",
)
@click.option(
    "--download-limit",
    callback=quantity(parse_rate_limit_bytes_per_s),
    metavar="RATE",
    help="Receive at most so much, e.g. 100Mbit.  [default: what the line gives]",
)
@click.option(
    "--schedule",
    multiple=True,
    metavar="TIMES",
    help="Lend only then, e.g. 22:00-07:00, mon-fri 18:00-23:30 or sat,sun; may be given several times.",
)
@click.option("--pause-when-busy", is_flag=True, help="Do not lend while other programs use the processor.")
@click.option("--name", default="", help="What people see.  [default: the host's name]")
@click.option("--host", default="0.0.0.0", show_default=True, help="Listen on this address of the machine.")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="Listen on this port.  [default: a free one]")
@click.option(
    "--relay/--no-relay",
    default=None,
    help="Let others come over the broker's relay when they can't dial this machine.  [default: unless --address says "
    "where they can]",
)
@click.option(
    "--weights-beside",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The weights.json of a job owner's home on this machine: model files it lists are read in place, not fetched.",
)
@click.option("--measure", is_flag=True, help="Measure this machine's speed even if it was done in the last 7 days.")
@address_option
@lifeline_option
@home_option
@json_option
def join(
    invitation: str | None,
    owner: bool,
    backend: str,
    device: str,
    max_memory: int | None,
    threads: int | None,
    share: float,
    upload_limit: float | None,
    download_limit: float | None,
    schedule: tuple[str, ...],
    pause_when_busy: bool,
    name: str,
    host: str,
    port: int,
    relay: bool | None,
    weights_beside: Path | None,
    measure: bool,
    addresses: tuple[str, ...],
    lifeline: bool,
    home: Path,
    json_file: Path | None,
) -> None:
    """Enter a pool with an invitation and lend this machine until Ctrl-C.

    INVITE is needed the first time only; `-` reads it from standard input, where no list of processes shows it.
    """
    if invitation == "-":
        invitation = sys.stdin.readline()
    if owner:
        _become_owner(invitation, home)
        return
    with loading():
        from fusionai.peer.daemon import run_peer
        from fusionai.peer.options import PeerOptions, PeerReady
        from fusionai.peer.schedule import parse_schedule

    options = PeerOptions(
        home=home,
        invitation=invitation,
        backend=backend,
        device=device,
        threads=threads,
        memory_limit_bytes=max_memory,
        share=share,
        upload_limit_bytes_per_s=upload_limit,
        download_limit_bytes_per_s=download_limit,
        schedule=parse_schedule(schedule) if schedule else None,
        pause_when_busy=pause_when_busy,
        name=name,
        host=host,
        port=port,
        advertise=addresses,
        relay=relay,
        measure=measure,
        weights_beside=weights_beside,
    )

    def ready(announced: PeerReady) -> None:
        profile = announced.profile
        rates = (("sending", upload_limit), ("receiving", download_limit))
        limited = "".join(f", {what} at most {format_bytes(rate)}/s" for what, rate in rates if rate is not None)
        if json_file is not None:
            write_json(json_file, "join", msgspec.to_builtins(announced))
        console.line(
            f"In pool {console.printable(announced.pool)} as {profile.name} ({short(announced.peer)}): lending "
            f"{profile.device} ({profile.device_name}), {format_bytes(profile.memory_bytes)}, "
            f"{profile.share:.0%} of the time{limited}; reachable at {', '.join(announced.addresses)}. Ctrl-C leaves."
        )
        if announced.measured_at_s is not None:
            measured = time.strftime("%Y-%m-%d %H:%M", time.localtime(announced.measured_at_s))
            console.note(f"Using the speed measured on {measured}; `--measure` measures it again.")

    run_until_stopped(lambda stop: run_peer(options, announce=ready, stop=stop, tell=console.line), lifeline=lifeline)
    console.line("Left the pool.")


def _become_owner(invitation: str | None, home: Path) -> None:
    from fusionai.client.owner import owner_membership

    membership = asyncio.run(owner_membership(home, invitation))
    console.line(
        f"This machine is a job owner of pool {console.printable(membership.pool)} ({short(membership.peer)}). "
        "Next: `fusion pool`, `fusion train RECIPE.toml`."
    )
