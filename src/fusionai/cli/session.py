"""One question to the pool this machine is in, for commands that ask, print and end.

Neighbours: `client.pool_session` asks; `cli.pool`, `cli.jobs`, `cli.broker` and `cli.plan` use this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fusionai.cli import console
from fusionai.cli.pool_file import PoolOnPaper
from fusionai.client.job_trust import job_trust
from fusionai.client.near_links import near_links
from fusionai.client.owner import any_membership
from fusionai.client.pool_session import PoolSession
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.types import Excluded, PeerProfile
from fusionai.transport.enrolment import Membership
from fusionai.transport.event_loop import run

_Answer = TypeVar("_Answer")

_PRESENT: Final = ("idle", "active")
_ABSENT: Final = {
    "silent": "nothing has been heard from it lately.",
    "lost": "it is not connected.",
    "draining": "it is leaving.",
    "resting": "it rests, having been lost often lately.",
}


def in_pool(
    home: Path, ask: Callable[[PoolSession], Awaitable[_Answer]], *, membership: Membership | None = None
) -> _Answer:
    """Open a session with the membership in `home` (or another one), ask, close."""
    known = membership or any_membership(home)

    async def asked() -> _Answer:
        async with PoolSession(known, trust=None) as session:
            return await ask(session)

    return run(asked())


def pool_profiles(home: Path, *, trusted: bool = False) -> PoolOnPaper:
    """The pool's present machines and this one as job owner, for planning; who is a member but can't be planned with is
    named. `trusted`: only those of the owner's circle. Raises `UsageError` when nobody is there."""
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
            f"there is no peer in the pool that could be planned with{f' ({who})' if who else ''}.",
            hint="Let machines join, or describe some in a file: --pool POOL.toml.",
        )
    links = near_links([member for member in members if member.view.state in _PRESENT])
    return PoolOnPaper(peers, this_machine(any_membership(home).peer), links=links, absent=absent)


def this_machine(peer: PeerId) -> PeerProfile:
    """The job owner's machine as a job started here would have it: measured now, its links not counted."""
    from fusionai.backends.registry import open_backend
    from fusionai.client.train import owner_profile

    console.note("Measuring this machine, which would feed the job and take its loss.")
    report = open_backend("torch", device="auto", threads=None).probe()
    return msgspec.structs.replace(owner_profile(peer, report), name="this machine")
