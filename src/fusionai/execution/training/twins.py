"""A stage's exchange with the stages of other replicas that hold the same parameters.

Performs the commands of `coordination.training.twin_round`: computes and packs the differences, sends each share to
the replica that sums it, sums its own share, sends the mean, and hands the update to the stage machine. What was sent
in a round is kept until the owner says that no replica can need it again, because a stage that runs its steps again
after a fault must be served the same bits. A new fence ends a round that was not adopted, and the stage begins it
again: its differences follow from the state alone.

A part that a stage can't send over a link goes through the driver. `execution.training.exchange` has the arithmetic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

from fusionai.coordination.training import twin_round as machine
from fusionai.coordination.training.twin_round import Receiver, Span, TwinRound, spans
from fusionai.execution.host import Host
from fusionai.execution.tensors import chunks
from fusionai.execution.training.codecs import Carried, joined, split
from fusionai.execution.training.exchange import (
    DifferenceForm,
    DividedUpdate,
    Floats,
    OuterOptimizer,
    adopt_divided,
    check_values,
    divided_difference,
    keys_of,
    share_mean,
)
from fusionai.execution.training.newcomers import Newcomers
from fusionai.primitives.errors import ExecutionError, TransportError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import RoundPart

if TYPE_CHECKING:
    from fusionai.execution.training.runtime import StageRuntime

log = logging.getLogger(__name__)

ATTEMPTS: Final = 8
"""Attempts to reach a stage before a part goes through the driver (chosen)."""
RETRY_S: Final = 0.4
"""Pause between two attempts, in seconds. The other machine may learn of the round later than this one, and a lost
machine is noticed within some seconds (chosen)."""
BATCH_BYTES: Final = 2**16
"""Packed bytes for each other replica after which what is made so far is sent (chosen: a thirtieth of a second at 20
Mbit/s, and some hundred times a message's header)."""


@dataclass(slots=True)
class _Round:
    """One round as this stage takes part in it. `divided`: parameter -> span of each member."""

    number: int
    step: int
    own: int
    divided: Mapping[str, tuple[Span, ...]]
    machine: TwinRound
    twins: Mapping[Receiver, wire.TwinStage]
    parts: dict[int, dict[str, Carried]] = field(default_factory=dict[int, dict[str, Carried]])
    """Member -> this stage's pieces of that member's share."""
    arrived: dict[tuple[RoundPart, int], dict[str, Carried]] = field(
        default_factory=dict[tuple[RoundPart, int], dict[str, Carried]]
    )
    lines: dict[Receiver, asyncio.Lock] = field(default_factory=dict[Receiver, asyncio.Lock])
    """Held while something is sent to this receiver, so that what was ready first arrives first."""
    means: dict[str, Carried] = field(default_factory=dict[str, Carried])
    """Packed means of this stage's share."""
    wanted: dict[str, Floats] = field(default_factory=dict[str, Floats])
    """Means of this stage's share before packing."""
    nbytes: int = 0
    """Size of all that is kept, counted on the way: there may be thousands of pieces."""
    is_adopted: bool = False

    def adopted(self) -> None:
        """Keep what other stages may need again."""
        self.is_adopted = True
        self.nbytes -= sum(one.nbytes for values in self.arrived.values() for one in values.values())
        self.nbytes -= sum(values.nbytes for values in self.wanted.values())
        self.arrived.clear()
        self.wanted.clear()


class Twins:
    """Exchanges of one stage. Joins the machine's memory budget with everything that it holds."""

    def __init__(self, stage: StageRuntime, host: Host, trainable: Mapping[str, tuple[int, ...]]) -> None:
        self._stage = stage
        self._compute = host.compute
        self._memory = host.memory
        self._sizes = {key: prod(shape) for key, shape in sorted(trainable.items())}
        self._form = DifferenceForm(stage.options.sync_codec, overlapped=stage.options.sync_lag > 0)
        self._rounds: dict[int, _Round] = {}
        self._asked: int | None = None
        """Step whose update this stage waits for under its present fence."""
        self._attempt = 0
        self._early: list[tuple[wire.ExchangePart, Mapping[str, Carried]]] = []
        """Parts of a round that this stage has not heard of."""
        self.newcomers = Newcomers(stage, host, self._sizes)
        host.memory.join(self)

    @property
    def nbytes(self) -> int:
        early_bytes = sum(one.nbytes for _, values in self._early for one in values.values())
        return early_bytes + sum(one.nbytes for one in self._rounds.values())

    # -------------------------------------------------------------------------------------------------- the machine

    def begin_fence(self) -> None:
        """Forget rounds that were not adopted: their stage begins them again, and others send to it again."""
        self._rounds = {number: one for number, one in self._rounds.items() if one.is_adopted}
        self._asked, self._attempt = None, 0
        self._early.clear()
        self.newcomers.begin_fence()

    def ask(self, step: int) -> None:
        """Report that the stage waits for the update of a step."""
        self._asked = step
        self._report(step)

    def ask_again(self) -> None:
        """The connection of another stage's machine ended, and with it perhaps something on its way."""
        if self._asked is not None:
            self._attempt += 1
            self._report(self._asked)
        self.newcomers.ask_again()

    def _report(self, step: int) -> None:
        stage, attempt = self._stage, self._attempt
        stage.member.to_driver(wire.DifferenceReady(fence=stage.fence, stage=stage.stage, step=step, attempt=attempt))

    def order(self, message: wire.ExchangeRound) -> None:
        """Follow the owner's decision about a round, or a welcome."""
        if message.is_welcome:
            self.newcomers.order(message, self._asked)
            return
        for number in [number for number in self._rounds if number < message.kept_from]:
            del self._rounds[number]
        keys = list(self._sizes)
        held = {_receiver(twin): twin for twin in message.twins if keys_of(twin, keys)}
        known = self._rounds.get(message.number)
        former = next((one for one in self._rounds.values() if one.step == message.step and one is not known), None)
        if former is not None and former.is_adopted:
            self._miss(message.number)
            return
        if former is not None:  # decided again without a replica that ended
            del self._rounds[former.number]
        if known is None and self._asked == message.step:
            self._rounds[message.number] = known = self._begun(message, held)
            self._perform_all(known, known.machine.begin())
            early, self._early = self._early, []
            for part, values in early:
                self._keep(part, values)
        if known is None:
            if self._stage.adopted >= message.step:
                self._miss(message.number)
            return
        known.twins = held
        wanting = frozenset(receiver for receiver, twin in held.items() if twin.wants)
        self._perform_all(known, known.machine.locate(wanting))

    def commit(self, message: wire.ExchangeAdopt) -> None:
        """Adopt a round: every stage has had its means."""
        one = self._rounds.get(message.number)
        if one is not None and one.machine.is_agreed and not one.is_adopted:
            self._stage.agreed(one.step)

    def _miss(self, number: int) -> None:
        fence, stage = self._stage.fence, self._stage.stage
        self._stage.member.to_driver(wire.ExchangeMissing(fence=fence, stage=stage, number=number))

    def _begun(self, message: wire.ExchangeRound, held: Mapping[Receiver, wire.TwinStage]) -> _Round:
        if message.place >= len(message.weights):
            raise ExecutionError(f"round {message.number} has {len(message.weights)} members and none {message.place}.")
        divided = {key: spans(key, size, message.weights) for key, size in self._sizes.items()}
        shares = {
            key: frozenset(member for member, (first, below) in enumerate(pieces) if first < below)
            for key, pieces in divided.items()
        }
        return _Round(
            number=message.number,
            step=message.step,
            own=message.place,
            divided=divided,
            machine=TwinRound(message.place, shares, len(message.weights)),
            twins=held,
        )

    def _handle(self, one: _Round, event: machine.TwinEvent) -> None:
        if self._rounds.get(one.number) is one:
            self._perform_all(one, one.machine.handle(event))

    def _perform_all(self, one: _Round, commands: Sequence[machine.TwinCommand]) -> None:
        for command in commands:
            match command:
                case machine.MakeParts():
                    self._stage.start(partial(self._make, one))
                case machine.SendParts(kind, to, keys):
                    self._stage.start(partial(self._send, one, kind, to, keys))
                case machine.SumShares(keys):
                    self._stage.start(partial(self._sum, one, keys))
                case machine.Agree():
                    stage, fence = self._stage.stage, self._stage.fence
                    whole = wire.ExchangeWhole(fence=fence, stage=stage, number=one.number)
                    self._stage.member.to_driver(whole)

    # ------------------------------------------------------------------------------------------------ what arrives

    def take(self, message: wire.ExchangePart, tensors: Mapping[str, HostTensor]) -> None:
        """Take pieces of another stage. Raises `ExecutionError` for ones that do not fit the round or welcome."""
        if message.kind == "state":
            self.newcomers.take(message, tensors, self._asked)
            return
        values = joined(tensors, message.packed)
        if message.number in self._rounds:
            self._keep(message, values)
        elif self._asked is not None:
            self._memory.require(sum(one.nbytes for one in values.values()), f"stage {self._stage.stage}")
            self._early.append((message, values))

    def _keep(self, message: wire.ExchangePart, values: Mapping[str, Carried]) -> None:
        one = self._rounds.get(message.number)
        if one is None or message.kind == "state":
            return
        event = machine.PartsArrived(message.kind, message.member, frozenset(values))
        if not one.machine.lacks(event):
            return
        piece_of = one.own if message.kind == "difference" else message.member
        spans_of = {key: one.divided[key][piece_of] for key in values if key in one.divided}
        shapes = {key: (below - first,) for key, (first, below) in spans_of.items()}
        what = f"the {message.kind} of member {message.member} in round {message.number}"
        check_values(values, shapes, self._stage.options.sync_codec, what)
        arrived = one.arrived.setdefault((message.kind, message.member), {})
        fresh = {key: value for key, value in values.items() if key not in arrived}
        fresh_bytes = sum(value.nbytes for value in fresh.values())
        self._memory.require(fresh_bytes, f"stage {self._stage.stage}")
        arrived.update(fresh)
        one.nbytes += fresh_bytes
        self._handle(one, event)

    # ---------------------------------------------------------------------------------------------- pieces of work

    async def _make(self, one: _Round) -> None:
        program, form = self._stage.program, self._form
        batch_bytes = BATCH_BYTES * max(1, one.machine.members - 1)
        fresh, fresh_bytes = set[str](), 0
        for key, pieces in one.divided.items():
            made, _ = await self._compute.run(partial(divided_difference, program, key, pieces, one.own, form))
            if self._rounds.get(one.number) is not one:
                return
            made_bytes = sum(part.nbytes for part in made.values())
            self._memory.require(made_bytes, "what a stage sends in an exchange")
            one.nbytes += made_bytes
            for member, part in made.items():
                one.parts.setdefault(member, {})[key] = part
            fresh.add(key)
            fresh_bytes += made_bytes
            if fresh_bytes >= batch_bytes:
                self._handle(one, machine.PartsMade(frozenset(fresh)))
                fresh, fresh_bytes = set(), 0
        self._handle(one, machine.PartsMade(frozenset(fresh)))

    async def _sum(self, one: _Round, keys: frozenset[str]) -> None:
        program, own, form = self._stage.program, one.own, self._form
        for key in sorted(keys):
            span = one.divided[key][own]
            if span[0] == span[1]:
                continue
            others = {member: values[key] for (kind, member), values in one.arrived.items() if kind == "difference"}
            work = partial(share_mean, program, key, span, own, others, form)
            (mean, wanted), _ = await self._compute.run(work)
            if self._rounds.get(one.number) is not one:
                return
            one.means[key], one.wanted[key] = mean, wanted
            one.nbytes += mean.nbytes + wanted.nbytes
        self._handle(one, machine.SharesSummed(keys))

    async def adopt(self, step: int, complete_copies: Callable[[], None]) -> None:
        """Adopt the update of a step, for which the stage machine has got `OuterUpdateArrived`. `complete_copies` runs
        first in the compute thread: the state is about to change."""
        if (catching_up := self.newcomers.catching_up(step, self._form)) is not None:

            def caught_up() -> None:
                complete_copies()
                catching_up()

            await self._compute.run(caught_up)
            self._rounds = {number: one for number, one in self._rounds.items() if one.step != step}
            self._asked = None
            return
        (one,) = (one for one in self._rounds.values() if one.step == step)
        options, program = self._stage.options, self._stage.program
        outer = OuterOptimizer(learning_rate=options.sync_rate, momentum=options.sync_momentum)

        def work() -> None:
            complete_copies()
            for key, pieces in one.divided.items():
                means = {
                    member: values[key]
                    for (kind, member), values in one.arrived.items()
                    if kind == "mean" and key in values
                }
                if key in one.means:
                    means[one.own] = one.means[key]
                sent = {member: values[key] for member, values in one.parts.items() if key in values}
                wanted = one.wanted.get(key)
                update = DividedUpdate(divided=pieces, own=one.own, sent=sent, means=means, wanted=wanted)
                adopt_divided(program, key, update, self._form, outer)

        await self._compute.run(work)
        one.adopted()
        self._asked = None

    # ------------------------------------------------------------------------------------------------------ sending

    async def _send(self, one: _Round, kind: RoundPart, to: Receiver, keys: frozenset[str]) -> None:
        """Send a stage the pieces that both hold, as long as it waits for them."""
        values = one.means if kind == "mean" else one.parts.get(to.member, {})
        held = self._held(one, to) & keys

        def is_wanted() -> bool:
            return to in one.machine.receivers and self._rounds.get(one.number) is one

        async with one.lines.setdefault(to, asyncio.Lock()):
            for chunk in chunks([(key, value) for key, value in values.items() if key in held]):
                twin = one.twins.get(to)
                if twin is None or self._rounds.get(one.number) is not one:
                    return
                body, packed = split(dict(chunk))
                message = wire.ExchangePart(
                    fence=to.fence,
                    job=to.job,
                    stage=to.stage,
                    number=one.number,
                    member=one.own,
                    kind=kind,
                    packed=packed,
                    tensors=headers(body),
                )
                await self.deliver(twin, message, tuple(body.values()), is_wanted)

    async def deliver(
        self,
        twin: wire.TwinStage,
        message: wire.ExchangePart,
        tensors: Sequence[HostTensor],
        is_wanted: Callable[[], bool],
    ) -> None:
        """Send to a stage of another replica as long as it is wanted; through the driver if it can't be reached."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S)
            if not is_wanted():
                return
            try:
                await self._stage.member.to_twin(twin, message, tensors)
            except TransportError as error:
                log.info("stage %d of %s: %s", twin.stage, twin.job, error)
            else:
                return
        log.warning("stage %d of %s can't be reached; its parts go through the job's owner", twin.stage, twin.job)
        with suppress(TransportError):  # the loss of the driver ends the round
            await self._stage.member.state(message, tensors)

    def _held(self, one: _Round, to: Receiver) -> frozenset[str]:
        twin = one.twins.get(to)
        return frozenset(() if twin is None else keys_of(twin, list(self._sizes)))


def _receiver(twin: wire.TwinStage) -> Receiver:
    return Receiver(twin.member, twin.job, twin.stage, twin.fence, twin.attempt)
