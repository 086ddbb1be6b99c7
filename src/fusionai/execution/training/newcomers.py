"""The state with which a replica begins later than others, or catches up: its stages get it from theirs, not from the
owner.

A stage of the newcomer asks its driver, which answers with a welcome: who sends, and how the parameters are divided
among them. Every sender waits until its stage has adopted the update of the round before the newcomer's first step,
then sends its share of the agreed parameters and outer momentum. The others can't go on to the next agreed state
meanwhile, because no round is decided without the newcomer. A stage of a replica that missed a round has asked for its
update, and gets a welcome instead: it continues from the agreed state and keeps its difference for the next round.

`twins` is the stages' side of rounds; `training.joint_exchange` sends the welcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from fusionai.coordination.training.twin_round import Span, spans
from fusionai.execution.host import Host
from fusionai.execution.training.exchange import (
    AGREED_SLOTS,
    Agreed,
    DifferenceForm,
    agreed_piece,
    begin_from,
    catch_up,
    keys_of,
)
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers

if TYPE_CHECKING:
    from fusionai.execution.training.runtime import StageRuntime

SENT_BYTES: Final = 2**22
"""Bytes after which what is read so far is sent (chosen)."""


@dataclass(slots=True)
class _Welcome:
    """The state as it arrives at a stage of the newcomer. `step`: the step that ended the round before. `pieces`:
    (sender, parameter) -> slot -> values."""

    number: int
    step: int
    divided: Mapping[str, tuple[Span, ...]]
    pieces: dict[tuple[int, str], Mapping[str, HostTensor]] = field(
        default_factory=dict[tuple[int, str], "Mapping[str, HostTensor]"]
    )

    @property
    def lacking(self) -> set[tuple[int, str]]:
        wanted = {
            (sender, key)
            for key, pieces in self.divided.items()
            for sender, (first, below) in enumerate(pieces)
            if first < below
        }
        return wanted - self.pieces.keys()

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for piece in self.pieces.values() for one in piece.values())

    def agreed(self, key: str) -> Agreed:
        held = [self.pieces[sender, key] for sender, (first, below) in enumerate(self.divided[key]) if first < below]
        return {slot: [piece[slot] for piece in held] for slot in AGREED_SLOTS}


class Newcomers:
    """Both sides of a welcome, for one stage."""

    def __init__(self, stage: StageRuntime, host: Host, sizes: Mapping[str, int]) -> None:
        """`sizes`: number of values of each trainable parameter, sorted by name."""
        self._stage = stage
        self._compute = host.compute
        self._memory = host.memory
        self._sizes = sizes
        begins_later = stage.options.sync_begun > 0
        self.entries = frozenset(f"model/{key}" for key in sizes if begins_later)
        """Entries of this stage's first state that come from stages of other replicas."""
        self._attempt: int | None = None
        """How often this stage has asked again; None if it does not wait for a state."""
        self._welcome: _Welcome | None = None
        self._early: list[tuple[wire.ExchangePart, Mapping[str, HostTensor]]] = []
        """Parts of a welcome that this stage has not heard of."""
        self._orders: dict[tuple[str, int], wire.ExchangeRound] = {}
        """(newcomer's job, stage) -> the last welcome with this stage among the senders."""
        host.memory.join(self)

    @property
    def nbytes(self) -> int:
        early_bytes = sum(one.nbytes for _, values in self._early for one in values.values())
        return early_bytes + (0 if self._welcome is None else self._welcome.nbytes)

    def begin_fence(self) -> None:
        self._attempt, self._welcome = None, None
        self._early.clear()
        self._orders.clear()

    # ------------------------------------------------------------------------------------------- of the newcomer

    def ask(self, attempt: int = 0) -> None:
        """Ask for the state that the others have agreed on, if this stage begins with it."""
        if not self.entries:
            return
        self._attempt = attempt
        stage = self._stage
        stage.member.to_driver(wire.StateWanted(fence=stage.fence, stage=stage.stage, attempt=attempt))

    def ask_again(self) -> None:
        """The connection of another stage's machine ended, and with it perhaps something on its way."""
        if self._attempt is not None:
            self.ask(self._attempt + 1)

    def order(self, message: wire.ExchangeRound, asked: int | None) -> None:
        """Follow a welcome. `asked`: step whose update this stage waits for."""
        if message.place < len(message.weights):
            twins = [twin for twin in message.twins if twin.wants and keys_of(twin, list(self._sizes))]
            self._orders |= {(twin.job, twin.stage): message for twin in twins}
            self.serve()
        elif self._attempt is not None or asked == message.step:
            divided = {key: spans(key, size, message.weights) for key, size in self._sizes.items()}
            self._welcome = _Welcome(message.number, message.step, divided)
            early, self._early = self._early, []
            for part, values in early:
                self.take(part, values, asked)

    def take(self, message: wire.ExchangePart, tensors: Mapping[str, HostTensor], asked: int | None) -> None:
        """Take a piece of the state. Raises `ExecutionError` for one that does not fit."""
        if self._attempt is None and asked is None:
            return
        self._memory.require(sum(one.nbytes for one in tensors.values()), f"stage {self._stage.stage}")
        welcome = self._welcome
        if welcome is None or message.number > welcome.number:
            self._early.append((message, tensors))
            return
        if message.number < welcome.number:
            return
        pieces: dict[str, dict[str, HostTensor]] = {}
        for name, tensor in tensors.items():
            slot, _, key = name.partition("/")
            pieces.setdefault(key, {})[slot] = tensor
        for key, piece in pieces.items():
            divided = welcome.divided.get(key, ())
            first, below = divided[message.member] if message.member < len(divided) else (0, 0)
            found = {slot: (one.dtype, one.shape) for slot, one in piece.items()}
            expected = dict.fromkeys(AGREED_SLOTS, ("float32", (below - first,)))
            if first == below or found != expected:
                raise ExecutionError(
                    f"expected the agreed state of {key} from sender {message.member} as {expected}, got {found}."
                )
            welcome.pieces[message.member, key] = piece
        if welcome.lacking:
            return
        if self._attempt is None:
            self._stage.agreed(welcome.step)
            return
        self._attempt = None
        self._stage.start(partial(self._begin, welcome))

    async def _begin(self, welcome: _Welcome) -> None:
        for key in welcome.divided:
            await self._compute.run(partial(begin_from, self._stage.program, key, welcome.agreed(key)))
            if self._welcome is not welcome:
                return
        self._welcome = None
        self._stage.begins()

    def catching_up(self, step: int, form: DifferenceForm) -> Callable[[], None] | None:
        """Return the work of adopting what the others agreed on after a step without this stage; None if it took
        part. The work runs in the compute thread."""
        welcome = self._welcome
        if welcome is None or welcome.step != step or welcome.lacking:
            return None
        self._welcome = None

        def work() -> None:
            for key in welcome.divided:
                catch_up(self._stage.program, key, welcome.agreed(key), form)

        return work

    # ------------------------------------------------------------------------------------------------ of the others

    def serve(self) -> None:
        """Send the state to newcomers as soon as this stage has it."""
        for to, message in list(self._orders.items()):
            if self._stage.adopted == message.step:
                del self._orders[to]
                for twin in message.twins:
                    if (twin.job, twin.stage) == to:
                        self._stage.start(partial(self._send, message, twin))

    async def _send(self, message: wire.ExchangeRound, twin: wire.TwinStage) -> None:
        keys = keys_of(twin, list(self._sizes))
        pending: dict[str, HostTensor] = {}
        for key in keys:
            span = spans(key, self._sizes[key], message.weights)[message.place]
            if span[0] < span[1]:
                piece, _ = await self._compute.run(partial(agreed_piece, self._stage.program, key, span))
                pending |= {f"{slot}/{key}": tensor for slot, tensor in piece.items()}
            if pending and (key == keys[-1] or sum(one.nbytes for one in pending.values()) >= SENT_BYTES):
                if self._stage.adopted != message.step:
                    return  # the newcomer has gone, and the others on
                await self._send_part(message, twin, pending)
                pending = {}

    async def _send_part(
        self, message: wire.ExchangeRound, twin: wire.TwinStage, tensors: Mapping[str, HostTensor]
    ) -> None:
        part = wire.ExchangePart(
            fence=twin.fence,
            job=twin.job,
            stage=twin.stage,
            number=message.number,
            member=message.place,
            kind="state",
            tensors=headers(tensors),
        )
        is_wanted = lambda: self._stage.adopted == message.step  # noqa: E731
        await self._stage.twins.deliver(twin, part, tuple(tensors.values()), is_wanted)
