"""`fusion join` without an invitation: finds pools in the local network, asks for the code that a broker shows, and
gets an invitation for it.

`transport.discovery` finds, `transport.code_enrolment` asks the broker, `cli.pool.join` joins."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from fusionai.cli import console
from fusionai.cli.running import run
from fusionai.primitives.errors import UsageError

if TYPE_CHECKING:
    from fusionai.transport.discovery import NearbyPool

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
    from fusionai.transport.code_enrolment import invitation_by_code
    from fusionai.transport.discovery import nearby_pools
    from fusionai.transport.enrolment import format_invitation

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
