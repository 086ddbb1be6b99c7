"""Members of a serving job: which are enlisted, of which stages each is the standby, and whose weights are loaded.

Neighbours: `coordination.serving.driver` enlists, asks and dismisses by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusionai.coordination.serving.roles import ServingRoles
from fusionai.wire.base import Fence


@dataclass(slots=True)
class StandbyRoster:
    members: set[str] = field(default_factory=set[str])
    """Whoever was enlisted and not dismissed since."""
    enlisted: set[str] = field(default_factory=set[str])
    """Of them, those that answered in this round."""
    _beside: dict[str, Fence] = field(default_factory=dict[str, Fence])
    """Members brought in beside the round, with the fence they got."""
    _announced: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Stages that a member was told, when it was last enlisted, to stand by for: it takes no others."""
    _asked: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """(stage, standby) that was to load, in this round."""
    _warm: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """(stage, standby) whose weights are there."""

    def begin(self, roles: ServingRoles) -> None:
        """A round: all its members are enlisted."""
        self.void()
        self.members |= roles.members
        for peer in roles.members:
            self._announce(peer, roles)

    def void(self) -> None:
        """The round is over. Weights stay where they are."""
        self.enlisted.clear()
        self._beside.clear()
        self._announced.clear()
        self._asked.clear()

    def bring(self, peer: str, fence: Fence, roles: ServingRoles) -> None:
        """It is enlisted beside the round: what it was asked to load before, it may have dropped."""
        self.members.add(peer)
        self.enlisted.discard(peer)
        self._beside[peer] = fence
        self._asked = {one for one in self._asked if one[1] != peer}
        self._announce(peer, roles)

    def strike(self, peer: str) -> None:
        self.members.discard(peer)
        self.enlisted.discard(peer)
        self._beside.pop(peer, None)
        self._announced.pop(peer, None)
        self._asked = {one for one in self._asked if one[1] != peer}
        self._warm = {one for one in self._warm if one[1] != peer}

    def _announce(self, peer: str, roles: ServingRoles) -> None:
        """It forgets what it neither runs nor standbys."""
        self._announced[peer] = kept = frozenset(roles.standby_of(peer))
        self._warm = {(stage, one) for stage, one in self._warm if one != peer or stage in kept}

    # ------------------------------------------------------------------------------------------------------ weights

    def ask(self, stage: int, peer: str) -> None:
        self._asked.add((stage, peer))

    def loaded(self, stage: int, peer: str) -> None:
        self._warm.add((stage, peer))

    def took_over(self, places: Mapping[int, str]) -> None:
        """These run their stages now; they are nobody's standbys."""
        self._warm -= set(places.items())

    def drop_weights(self) -> None:
        """Weights of stages of another cut are of no use."""
        self._warm.clear()

    # ------------------------------------------------------------------------------------------------------ looking

    def fence_of(self, peer: str, fence: Fence) -> Fence:
        """What its messages carry, in the round of `fence`."""
        return self._beside.get(peer, fence)

    def may_hold(self, stage: int, peer: str) -> bool:
        """Whether it was told that it is the standby of the stage."""
        return stage in self._announced.get(peer, ())

    def was_asked(self, stage: int, peer: str) -> bool:
        """To load the stage, since it was last enlisted."""
        return (stage, peer) in self._asked

    def is_warm(self, stage: int, peer: str) -> bool:
        """Whether it could run the stage now."""
        return (stage, peer) in self._warm
