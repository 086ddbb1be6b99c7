"""One question to the pool this machine is in, for commands that ask, print and end.

Neighbours: `client.pool_session` asks; `cli.pool`, `cli.jobs`, `cli.broker` and `cli.plan` use this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from fusionai.cli.pool_file import PoolOnPaper
from fusionai.client.pool_session import PoolSession
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.types import PeerProfile
from fusionai.transport.event_loop import run
from fusionai.wire.frame import decode_part
from fusionai.wire.messages import MemberView

_Answer = TypeVar("_Answer")
_PROFILES = msgspec.msgpack.Decoder(PeerProfile)


def in_pool(home: Path, ask: Callable[[PoolSession], Awaitable[_Answer]]) -> _Answer:
    """Open a session with the membership in `home`, ask, close."""

    async def asked() -> _Answer:
        async with PoolSession.at(home) as session:
            return await ask(session)

    return run(asked())


def profile_of(member: MemberView) -> PeerProfile:
    """What a member registered with. Raises `WireError` when it is no profile."""
    return decode_part(member.profile, _PROFILES, "a peer's profile")


def pool_profiles(home: Path) -> PoolOnPaper:
    """The pool's present machines, for planning. Raises `UsageError` when nobody is there."""
    view = in_pool(home, lambda session: session.pool())
    peers = tuple(profile_of(member) for member in view.members if member.state in ("idle", "active"))
    if not peers:
        raise UsageError(
            "there is no peer in the pool.", hint="Let machines join, or describe some in a file: --pool POOL.toml."
        )
    return PoolOnPaper(peers, None)
