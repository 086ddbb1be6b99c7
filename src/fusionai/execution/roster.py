"""Whom one member of a job lets in: the keys that the job owner's signed placement names, and nobody else.

The broker's tickets alone open no door to a job's tensors, states and weights: it could sign one for a key of its own.
Decides by the placement of the round this member is in, and for a neighbour that heard of a later round first, by the
one it shows. Neighbours: `transport.placements` checks signatures, `peer.door` asks, members adopt at each `Enlist`.
"""

from __future__ import annotations

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.placements import SignedPlacement, verify_placement
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


class Roster:
    """One member's; `owner` is whom its driver proved to be."""

    def __init__(self, job: str, owner: PeerId, me: PeerId) -> None:
        self._job = job
        self._owner = owner
        self._me = me
        self._present: SignedPlacement | None = None
        self._early: dict[PeerId, Fence] = {}
        """Who showed the placement of a round that this member had not heard of, and of which."""

    @property
    def named(self) -> frozenset[PeerId]:
        """Everybody in the present round; nobody before the first."""
        return frozenset() if self._present is None else self._present.peers

    def adopt(self, enlist: wire.Enlist) -> None:
        """The placement of the round that begins. Raises `TrustError` when it is not signed by the owner for this round
        of this job, or says other things than the rest of the message."""
        placement = verify_placement(enlist.placement, self._owner, job=self._job, fence=enlist.fence)
        told = tuple(sorted((one.stage, one.peer) for one in enlist.neighbours))
        if told != placement.stages:
            raise TrustError("expected the stages where the job owner's signed placement has them, got others.")
        guarded = tuple(stage for stage, peer in placement.guards if peer == self._me)
        if tuple(sorted(enlist.guards)) != guarded:
            raise TrustError("expected the guards that the job owner's signed placement names, got others.")
        self._present = placement
        self._early = {peer: fence for peer, fence in self._early.items() if fence > enlist.fence}

    def check(self, peer: PeerId, opening: wire.OpenJob) -> None:
        """Raises `TrustError` when `peer` has no part in the round that it opens a connection for."""
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
        """Whether a connection that `check` let in is still one of the job's."""
        return peer in self.named or peer in self._early
