"""One invitation into a pool, and how often it may still be used.

Only the SHA-256 of the token is known here. `admission` checks the expiry date.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from fusionai.coordination.broker.events import InvitationIssued, PeerEnrolled
from fusionai.coordination.machine import Machine, State, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation(State):
    digest: str
    uses_left: int
    expires_at_s: float
    """Seconds since 1970."""
    peers: tuple[str, ...] = ()
    """Members that joined with it. The same key may ask again without a further use."""


def issued(fact: InvitationIssued) -> Invitation:
    return Invitation(
        entity=f"invitation {fact.invitation[:8]}",
        phase="open",
        story=("InvitationIssued -> open",),
        digest=fact.invitation,
        uses_left=fact.uses,
        expires_at_s=fact.expires_at_s,
    )


def _use(invitation: Invitation, fact: PeerEnrolled) -> tuple[Invitation, tuple[Any, ...]]:
    left = invitation.uses_left - 1
    phase = "open" if left > 0 else "used up"
    return replace(invitation, phase=phase, uses_left=left, peers=(*invitation.peers, fact.peer)), ()


INVITATION: Final[Machine[Invitation, Any]] = Machine(
    "invitation",
    (Transition(("open",), PeerEnrolled, ("open", "used up"), _use),),
    initial=("open",),
    final=("used up",),
)
