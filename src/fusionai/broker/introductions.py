"""Brings two members together who can't dial each other. Decides who may be introduced and draws their meeting.

Each side gets a pairing token of its own, good for one connection to this broker's relay within half a minute. A member
that announced no relay is not told: it is an older one, or wants none. Of the places the asking side names, only those
at the address its question comes from are passed on, or a member could make another send to anybody. Holds nothing and
journals nothing; the relay keeps count.
Neighbours: `service` asks, `transport.pairing` signs, `transport.relay` honours the tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from fusionai.coordination.broker.requests import Refusal
from fusionai.coordination.broker.state import Desk
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.addresses import RELAY_SCHEME, host_of
from fusionai.transport.authority import Authority
from fusionai.transport.interface import Remote
from fusionai.transport.pairing import LIFETIME_S, MEETING_BYTES, PairingToken, Side, sign_pairing
from fusionai.wire.messages import Introduced, Meet, MeetNotice


def draw_meeting() -> bytes:
    return secrets.token_bytes(MEETING_BYTES)


@dataclass(frozen=True, slots=True)
class Introducer:
    """`relays`: whether this broker has a relay to meet at. `draw`: the source of meetings' numbers."""

    authority: Authority
    relays: bool = False
    draw: Callable[[], bytes] = draw_meeting

    def introduce(
        self, desk: Desk, remote: Remote, message: Meet, *, now_wall_s: float
    ) -> tuple[Introduced, int, MeetNotice]:
        """The answer, and the other side's connection with what to tell it. Raises `Refusal`."""
        asking = remote.peer
        if asking is None:
            raise Refusal("not_authorised", "Only members are introduced.")
        member = desk.pool.members.get(PeerId(message.peer))
        if member is None or member.peer == asking:
            raise Refusal("unknown_peer", "There is no such other peer in this pool.")
        connection = desk.links.get(member.peer)
        if connection is None or not desk.reachable(member):
            raise Refusal("unknown_peer", f"Peer {short(member.peer)} is not connected to the broker now.")
        if not any(address.startswith(f"{RELAY_SCHEME}://") for address in member.addresses):
            raise Refusal("not_authorised", f"Peer {short(member.peer)} wants to be dialled only.")
        meeting, expires_at_s = self.draw(), now_wall_s + LIFETIME_S

        def token(peer: PeerId, other: PeerId, side: Side) -> bytes:
            if not self.relays:
                return b""
            return sign_pairing(PairingToken(meeting, peer, other, side, expires_at_s), self.authority.key)

        answer = Introduced(token=token(asking, member.peer, "dials"), addresses=member.addresses)
        notice = MeetNotice(peer=asking, token=token(member.peer, asking, "answers"), addresses=_own(remote, message))
        return answer, connection, notice


def _own(remote: Remote, message: Meet) -> tuple[str, ...]:
    return tuple(address for address in message.addresses if remote.host and host_of(address) == remote.host)
