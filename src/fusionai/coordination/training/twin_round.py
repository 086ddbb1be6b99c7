"""A stage's part in one exchange between replicas: what it sends to which stages, and when it sums and adopts.

Every stage makes its differences, sends each share of them to the replica that sums it, waits for the others'
differences of its own share, sums, sends the mean to all, and waits for the means of the other shares (reduce-scatter,
then all-gather). What was sent stays available: a stage that runs the round again after a fault is served from it.

The machine holds no tensor. `execution.training.twins` performs its commands, `joint_rounds` decides which replicas
take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from msgspec import Struct

from fusionai.coordination.machine import StatefulMachine, Table, Transition, in_each
from fusionai.wire.messages import Fence, PartKind


class TwinPhase(StrEnum):
    """`MAKING`: the differences are being computed. `COLLECTING`: it waits for differences of its share. `SUMMING`:
    these are being summed. `GATHERING`: it waits for the means of other shares. `AGREED`: everything is there."""

    MAKING = "making"
    COLLECTING = "collecting"
    SUMMING = "summing"
    GATHERING = "gathering"
    AGREED = "agreed"


class Receiver(Struct, frozen=True):
    """A stage of another replica, under the fence with which it began to wait. `attempt`: how often it asked again."""

    member: int
    job: str
    stage: int
    fence: Fence
    attempt: int = 0


class Located(Struct, frozen=True):
    """These stages wait for this round now."""

    receivers: frozenset[Receiver]


class PartsMade(Struct, frozen=True):
    """The differences are computed."""


class PartsArrived(Struct, frozen=True):
    """Pieces of these parameters came from a member."""

    kind: PartKind
    member: int
    keys: frozenset[str]


class ShareSummed(Struct, frozen=True):
    """The mean of the stage's own share is computed."""


class MakeParts(Struct, frozen=True):
    """Compute and pack the differences. Answer with `PartsMade`."""


class SendParts(Struct, frozen=True):
    """Send the parts of this kind to a stage, with the parameters that both hold."""

    kind: PartKind
    to: Receiver


class SumShare(Struct, frozen=True):
    """Sum the differences of the own share in the order of the members. Answer with `ShareSummed`."""


class Agree(Struct, frozen=True):
    """The update can be adopted."""


TwinCommand = MakeParts | SendParts | SumShare | Agree
TwinEvent = Located | PartsMade | PartsArrived | ShareSummed


@dataclass
class TwinRound(StatefulMachine[TwinPhase, TwinCommand]):
    """`place`: the stage's replica among the members. `shares`: parameter -> members that sum a part of it."""

    place: int
    shares: Mapping[str, frozenset[int]]
    members: int
    phase: TwinPhase = field(default=TwinPhase.MAKING, kw_only=True)
    receivers: frozenset[Receiver] = frozenset()
    due: dict[PartKind, set[tuple[int, str]]] = field(init=False)
    """(member, parameter) of the pieces that have not arrived."""
    _served: set[SendParts] = field(default_factory=set[SendParts])

    def __post_init__(self) -> None:
        others = [member for member in range(self.members) if member != self.place]
        own = [key for key, having in self.shares.items() if self.place in having]
        self.due = {
            "difference": {(member, key) for member in others for key in own},
            "mean": {(member, key) for key, having in self.shares.items() for member in having if member != self.place},
        }

    def handle(self, event: TwinEvent) -> list[TwinCommand]:
        """Apply one event and return the commands. An event that the phase does not expect changes nothing."""
        return self.react(TABLE, event) or []

    def lacks(self, event: PartsArrived) -> bool:
        """Return whether some of these pieces are still needed."""
        return any((event.member, key) in self.due[event.kind] for key in event.keys)

    def begin(self) -> list[TwinCommand]:
        return [MakeParts()]

    def on_located(self, event: Located) -> list[TwinCommand]:
        self.receivers = event.receivers
        return self._sending()

    def on_made(self, _: PartsMade) -> list[TwinCommand]:
        self.phase = TwinPhase.COLLECTING
        return [*self._sending(), *self._next()]

    def on_arrived(self, event: PartsArrived) -> list[TwinCommand]:
        self.due[event.kind] -= {(event.member, key) for key in event.keys}
        return self._next()

    def on_summed(self, _: ShareSummed) -> list[TwinCommand]:
        self.phase = TwinPhase.GATHERING
        return [*self._sending(), *self._next()]

    def _next(self) -> list[TwinCommand]:
        if self.phase is TwinPhase.COLLECTING and not self.due["difference"]:
            self.phase = TwinPhase.SUMMING
            return [SumShare()]
        if self.phase is TwinPhase.GATHERING and not self.due["mean"]:
            self.phase = TwinPhase.AGREED
            return [Agree()]
        return []

    def _sending(self) -> list[TwinCommand]:
        """Return what can be sent now and was not sent to these receivers under their present fences."""
        kinds: tuple[PartKind, ...] = ()
        if self.phase is not TwinPhase.MAKING:
            kinds = ("difference", "mean") if self.phase in (TwinPhase.GATHERING, TwinPhase.AGREED) else ("difference",)
        receivers = sorted(self.receivers, key=lambda one: ((one.member - self.place) % self.members, one.stage))
        sending = [send for kind in kinds for to in receivers if (send := SendParts(kind, to)) not in self._served]
        self._served.update(sending)
        return [*sending]


MAKING, COLLECTING, SUMMING, GATHERING, AGREED = TwinPhase

TABLE: Final = Table[TwinRound, list[TwinCommand]](
    "exchange between replicas",
    [
        *in_each(TwinPhase, Located, (), TwinRound.on_located),
        Transition((MAKING,), PartsMade, (COLLECTING, SUMMING), TwinRound.on_made),
        Transition((MAKING,), PartsArrived, (MAKING,), TwinRound.on_arrived),
        Transition((COLLECTING,), PartsArrived, (COLLECTING, SUMMING), TwinRound.on_arrived),
        Transition((SUMMING,), PartsArrived, (SUMMING,), TwinRound.on_arrived),
        Transition((GATHERING,), PartsArrived, (GATHERING, AGREED), TwinRound.on_arrived),
        Transition((SUMMING,), ShareSummed, (GATHERING, AGREED), TwinRound.on_summed),
    ],
    initial=(MAKING,),
)
