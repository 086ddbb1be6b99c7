"""Sentences for the broker's owner about machines that come and go. `service` makes one of each fact it journals."""

from __future__ import annotations

import msgspec

from fusionai.coordination.broker.events import Fact, MemberLeft, MemberLost, MemberRegistered
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.state import PRESENT
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.types import PeerProfile


def coming_or_going(fact: Fact, before: Pool, after: Pool) -> str | None:
    """Return a sentence about a machine that has come or gone, None for other facts and for one that was here."""
    match fact:
        case MemberRegistered(peer=peer, profile=encoded):
            known = before.members.get(PeerId(peer))
            if known is not None and known.phase in PRESENT:
                return None
            profile = msgspec.msgpack.decode(encoded, type=PeerProfile)
            what = f"lends {profile.device_name or profile.device} with {format_bytes(profile.memory_bytes)}"
        case MemberLeft(peer=peer):
            what = "has left"
        case MemberLost(peer=peer, reason=reason):
            what = f"is lost ({reason.rstrip('.')})"
        case _:
            return None
    member = after.members[PeerId(peer)]
    name = msgspec.msgpack.decode(member.profile, type=PeerProfile).name if member.profile else ""
    here = sum(one.phase in PRESENT for one in after.members.values())
    return f"{name or short(PeerId(peer))} {what}; {here} {'machine is' if here == 1 else 'machines are'} here."
