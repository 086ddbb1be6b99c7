"""The peers that a member of a job admits: exactly the keys that the job owner's signed placement names.

The broker's tickets alone don't open a job's tensors, states and weights, because the broker could sign one for a key
of its own. A peer is checked against the placement of the member's present round. A neighbour that learned of a later
round first is checked against the signed placement it shows.

`transport.signed` checks signatures, `peer.door` asks, and members adopt the placement of each `Enlist`.
"""

from __future__ import annotations

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.signed import SignedPlacement, verify_placement
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


class Roster:
    """Admission list of one member. `owner` is the authenticated peer id of its driver."""

    def __init__(self, job: str, owner: PeerId, me: PeerId) -> None:
        self._job = job
        self._owner = owner
        self._me = me
        self._present: SignedPlacement | None = None
        self._early: dict[PeerId, Fence] = {}
        """Peers admitted by the placement of a round that this member had not yet entered, and that round's fence."""

    @property
    def named(self) -> frozenset[PeerId]:
        """All peers of the present round; empty before the first round."""
        return frozenset() if self._present is None else self._present.peers

    def adopt(self, enlist: wire.Enlist) -> None:
        """Adopt the placement of the round that begins. Raises `TrustError` if the owner did not sign it for this round
        of this job, or if it contradicts the rest of the message."""
        placement = verify_placement(enlist.placement, self._owner, job=self._job, fence=enlist.fence)
        told = tuple(sorted((one.stage, one.peer) for one in enlist.neighbours))
        if told != placement.stages:
            raise TrustError("the stages of this round differ from those in the job owner's signed placement.")
        guarded = tuple(stage for stage, peer in placement.guards if peer == self._me)
        if tuple(sorted(enlist.guards)) != guarded:
            raise TrustError("the guards of this round differ from those in the job owner's signed placement.")
        self._present = placement
        self._early = {peer: fence for peer, fence in self._early.items() if fence > enlist.fence}

    def check(self, peer: PeerId, opening: wire.OpenJob) -> None:
        """Raise `TrustError` if `peer` has no part in the round that it opens a connection for."""
        present = self._present
        early = present is None or opening.fence > present.fence
        if present is None or early:
            present = verify_placement(opening.placement, self._owner, job=self._job, fence=opening.fence)
        if peer not in present.peers:
            raise TrustError(
                f"the placement of {self._job} signed by its owner for {present.fence} does not name {short(peer)}."
            )
        if early:
            self._early[peer] = max(opening.fence, self._early.get(peer, opening.fence))

    def may_stay(self, peer: PeerId) -> bool:
        """Return whether a connection that passed `check` may stay open."""
        return peer in self.named or peer in self._early
