"""A stage's part in one exchange between replicas: what it sends to which stages, and when it sums and adopts.

Every stage makes its differences, sends each share of them to the replica that sums it, sums the shares that it has
got from all others, sends their means to all, and waits for the means of the other shares (reduce-scatter and
all-gather). Each parameter goes this way by itself, so that means of the first ones travel beside differences of the
last. What was sent stays available: a stage that runs the round again after a fault is served from it.

`spans` divides the parameters among the replicas that sum them. Each parameter is flat and cut into rows of `ROW`
numbers, so that groups of a codec never cross two shares. Every replica sums one run of rows of each parameter, in
proportion to its weight. The division follows from names, sizes and weights alone, so every stage of every replica
computes the same, whatever its cut.

The machine holds no tensor. `execution.training.twins` performs its commands, `joint_rounds` decides which replicas
take part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import floor
from typing import Final
from zlib import crc32

from msgspec import Struct

from fusionai.coordination.machine import StatefulMachine, Table, Transition
from fusionai.wire.messages import Fence, RoundPart


class TwinPhase(StrEnum):
    """Phases of one parameter. `MAKING`: its difference is being computed. `COLLECTING`: differences of the stage's
    share are outstanding. `SUMMING`: these are being summed. `GATHERING`: means of other shares are outstanding.
    `AGREED`: it has all means."""

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


class PartsMade(Struct, frozen=True):
    """The differences of these parameters are computed."""

    keys: frozenset[str]


class PartsArrived(Struct, frozen=True):
    """Pieces of these parameters came from a member."""

    kind: RoundPart
    member: int
    keys: frozenset[str]


class SharesSummed(Struct, frozen=True):
    """The means of the stage's own shares of these parameters are computed."""

    keys: frozenset[str]


class MakeParts(Struct, frozen=True):
    """Compute and pack all differences. Answer with `PartsMade`, as often as some are ready."""


class SendParts(Struct, frozen=True):
    """Send the parts of this kind to a stage, of those of these parameters that both hold."""

    kind: RoundPart
    to: Receiver
    keys: frozenset[str]


class SumShares(Struct, frozen=True):
    """Sum the differences of the own shares of these parameters in the order of the members. Answer with
    `SharesSummed`."""

    keys: frozenset[str]


class Agree(Struct, frozen=True):
    """All means are there: the update can be adopted once every other stage has said the same."""


TwinCommand = MakeParts | SendParts | SumShares | Agree
TwinEvent = PartsMade | PartsArrived | SharesSummed


@dataclass
class _Parameter(StatefulMachine[TwinPhase, SumShares]):
    """One parameter's way through a round. `having`: members that sum a part of it."""

    key: str
    place: int
    having: frozenset[int]
    members: int
    phase: TwinPhase = field(default=TwinPhase.MAKING, kw_only=True)
    due: dict[RoundPart, set[int]] = field(init=False)
    """Members whose piece has not arrived."""

    def __post_init__(self) -> None:
        others = set(range(self.members)) - {self.place}
        is_summing = self.place in self.having
        self.due = {"difference": others if is_summing else set(), "mean": others & self.having}

    @property
    def ready(self) -> frozenset[RoundPart]:
        """Kinds that can be sent."""
        if self.phase in (TwinPhase.GATHERING, TwinPhase.AGREED):
            return frozenset[RoundPart](("difference", "mean"))
        return frozenset[RoundPart](() if self.phase is TwinPhase.MAKING else ("difference",))

    def handle(self, event: TwinEvent) -> list[SumShares]:
        return self.react(TABLE, event) or []

    def brief(self, event: object) -> str:
        return type(event).__name__

    def on_made(self, _: PartsMade) -> list[SumShares]:
        self.phase = TwinPhase.COLLECTING
        return self._next()

    def on_arrived(self, event: PartsArrived) -> list[SumShares]:
        self.due[event.kind].discard(event.member)
        return self._next()

    def on_summed(self, _: SharesSummed) -> list[SumShares]:
        self.phase = TwinPhase.GATHERING
        return self._next()

    def _next(self) -> list[SumShares]:
        if self.phase is TwinPhase.COLLECTING and not self.due["difference"]:
            self.phase = TwinPhase.SUMMING
            return [SumShares(frozenset({self.key}))]
        if self.phase is TwinPhase.GATHERING and not self.due["mean"]:
            self.phase = TwinPhase.AGREED
        return []


class TwinRound:
    """`place`: the stage's replica among the members. `shares`: parameter -> members that sum a part of it."""

    def __init__(self, place: int, shares: Mapping[str, frozenset[int]], members: int) -> None:
        self.place, self.members = place, members
        self.receivers: frozenset[Receiver] = frozenset()
        self._parameters = {key: _Parameter(key, place, having, members) for key, having in shares.items()}
        self._served = dict[tuple[RoundPart, Receiver], frozenset[str]]()
        self._left = set(self._parameters)
        """Parameters that are not agreed."""

    @property
    def is_agreed(self) -> bool:
        """Return whether the update can be adopted."""
        return not self._left

    def lacks(self, event: PartsArrived) -> bool:
        """Return whether some of these pieces are still needed."""
        return any(
            event.member in one.due[event.kind] for key in event.keys if (one := self._parameters.get(key)) is not None
        )

    def begin(self) -> list[TwinCommand]:
        return [MakeParts()]

    def locate(self, receivers: frozenset[Receiver]) -> list[TwinCommand]:
        """These stages, and no others, wait for this round now."""
        self.receivers = receivers
        return self._sending(self._parameters)

    def handle(self, event: TwinEvent) -> list[TwinCommand]:
        """Apply one event to the parameters that it names and return the commands. An event that a parameter's phase
        does not expect changes nothing."""
        named = [one for key in sorted(event.keys) if (one := self._parameters.get(key)) is not None]
        was_agreed = self.is_agreed
        summing = [key for one in named for command in one.handle(event) for key in command.keys]
        self._left -= {one.key for one in named if one.phase is TwinPhase.AGREED}
        commands = self._sending(event.keys)
        if summing:
            commands.append(SumShares(frozenset(summing)))
        return [*commands, Agree()] if self.is_agreed and not was_agreed else commands

    def _sending(self, keys: Iterable[str]) -> list[TwinCommand]:
        """Return what of these parameters can be sent now and was not sent to these receivers under their present
        fences."""
        ready: dict[RoundPart, set[str]] = {"difference": set(), "mean": set()}
        for key in keys:
            for kind in self._parameters[key].ready if key in self._parameters else ():
                ready[kind].add(key)
        receivers = sorted(self.receivers, key=lambda one: ((one.member - self.place) % self.members, one.stage))
        sending: list[TwinCommand] = []
        for kind, some in ready.items():
            for to in receivers:
                served = self._served.get((kind, to), frozenset[str]())
                if left := some - served:
                    self._served[kind, to] = served | left
                    sending.append(SendParts(kind, to, frozenset(left)))
        return sending


MAKING, COLLECTING, SUMMING, GATHERING, AGREED = TwinPhase

TABLE: Final = Table[_Parameter, list[SumShares]](
    "one parameter in an exchange between replicas",
    [
        Transition((MAKING,), PartsMade, (COLLECTING, SUMMING), _Parameter.on_made),
        Transition((MAKING,), PartsArrived, (MAKING,), _Parameter.on_arrived),
        Transition((COLLECTING,), PartsArrived, (COLLECTING, SUMMING), _Parameter.on_arrived),
        Transition((SUMMING,), PartsArrived, (SUMMING,), _Parameter.on_arrived),
        Transition((GATHERING,), PartsArrived, (GATHERING, AGREED), _Parameter.on_arrived),
        Transition((SUMMING,), SharesSummed, (GATHERING, AGREED), _Parameter.on_summed),
    ],
    initial=(MAKING,),
)


ROW: Final = 4096
"""Numbers of a row: a multiple of every codec's group size (chosen: a larger row divides small parameters unevenly)."""

Span = tuple[int, int]
"""Half-open range of numbers of one flat parameter."""


def spans(key: str, size: int, weights: Sequence[float]) -> tuple[Span, ...]:
    """Return each member's span of the parameter; together they cover it. A parameter of few rows goes to few members,
    which differ from parameter to parameter."""
    rows, whole = -(-size // ROW), sum(weights)
    shift = crc32(key.encode()) / 2**32
    ends: list[int] = []
    before = 0.0
    for weight in weights[:-1]:
        before += weight
        ends.append(min(size, ROW * floor(rows * (before / whole) + shift)))
    return tuple(zip([0, *ends], [*ends, size], strict=True))
