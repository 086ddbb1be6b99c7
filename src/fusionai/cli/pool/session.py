"""Single requests to the pool this machine belongs to, for commands that ask, print and exit.

`client.pool.session` holds the connection; `cli.pool.members`, `cli.pool.broker` and `cli.planning.plan` use
this module."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fusionai.cli import console
from fusionai.cli.planning.pool_file import PoolOnPaper
from fusionai.cli.running import run
from fusionai.client.pool.job_trust import job_trust
from fusionai.client.pool.session import PoolSession, any_membership, near_links
from fusionai.primitives.errors import TransportError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Excluded, PeerProfile
from fusionai.transport.enrolment import Membership

_Answer = TypeVar("_Answer")

_PRESENT: Final = ("idle", "active")
_ABSENT: Final = {
    "silent": "its heartbeats have stopped.",
    "lost": "it is not connected.",
    "draining": "it is leaving.",
    "resting": "it was lost often lately and gets no work for now.",
}


def in_pool(
    home: Path, ask: Callable[[PoolSession], Awaitable[_Answer]], *, membership: Membership | None = None
) -> _Answer:
    """Open a session with the membership in `home` (or `membership`), return the answer of `ask`, close the session.
    Raises `TransportError` if the broker can't be reached."""
    known = membership or any_membership(home)

    async def asked() -> _Answer:
        async with PoolSession(known, trust=None) as session:
            try:
                return await ask(session)
            except TransportError as problem:
                raise TransportError(
                    f"the broker of pool {known.pool!r} can't be reached: {problem.message}",
                    hint="Check that `fusion broker` runs on its machine and that its port can be reached from here.",
                ) from problem

    return run(asked())


def pool_profiles(home: Path, *, trusted: bool = False) -> PoolOnPaper:
    """Return the connected peers of the pool, with this machine as job owner, for planning. Members that can't be
    planned with are listed in `absent`, with the reason. `trusted`: use only members on the owner's trust list. Raises
    `UsageError` if no peer is left."""
    members, barred = in_pool(home, lambda session: session.pool()), ()
    if trusted:
        names = {member.view.peer: member.profile.name for member in members}
        trust = job_trust(home, any_membership(home), "trusted", confidential=False)
        members = trust.among(members)
        barred = tuple(Excluded(peer=names[one.peer] or one.peer, reason=one.reason) for one in trust.barred)
    peers = tuple(member.profile for member in members if member.view.state in _PRESENT)
    absent = barred + tuple(
        Excluded(peer=member.profile.name or member.profile.peer, reason=_ABSENT.get(state, f"it is {state}."))
        for member in members
        if (state := member.view.state) not in _PRESENT
    )
    if not peers:
        who = "; ".join(f"{entry.peer}: {entry.reason.rstrip('.')}" for entry in absent)
        raise UsageError(
            f"no peer in the pool can be planned with{f' ({who})' if who else ''}.",
            hint="Let machines join the pool, or describe machines in a file: --pool POOL.toml.",
        )
    links = near_links([member for member in members if member.view.state in _PRESENT])
    return PoolOnPaper(peers, this_machine(any_membership(home).peer), links=links, absent=absent)


def this_machine(peer: PeerId) -> PeerProfile:
    """Measure this machine and return its profile as a job owner started here would have it, without its links."""
    from fusionai.backends.registry import open_backend
    from fusionai.client.pool.job_process import owner_profile

    console.note("Measuring this machine, which as job owner would feed the job and compute its loss.")
    report = open_backend("torch", device="auto", threads=None).probe()
    return msgspec.structs.replace(owner_profile(peer, report), name="this machine")
