"""A driver's part in the exchange of its replica with others: what its stages report goes to the joint exchange, and
what is decided there goes to its stages.

`joint_exchange` is for all replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusionai.coordination.round.interface import CommandFailed
from fusionai.coordination.training.state import DriverPhase
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.training.joint_exchange import JointSeat, Order
from fusionai.training.rounds import JobRound
from fusionai.wire import messages as wire


class StageExchange:
    """A driver's part in an exchange between replicas' machines."""

    def __init__(self, present: JobRound, seat: JointSeat) -> None:
        self._present = present
        self._seat = seat
        self._attempts: dict[int, int] = {}
        """Stage -> how often it has asked again under the present fence."""

    @property
    def job(self) -> str:
        """Name of the replica's seat."""
        return self._seat.job

    @property
    def runs(self) -> str:
        """Id of the replica's job."""
        return self._present.job.job

    @property
    def owner(self) -> PeerId:
        """The machine that this driver runs on."""
        return self._present.job.owner

    @property
    def begun(self) -> int:
        """Steps of the whole run that were over when the replica began."""
        return self._present.job.options.sync_begun

    @property
    def is_waiting(self) -> bool:
        """Whether a stage of this replica has no machine."""
        return self._present.machine.phase is DriverPhase.WAITING

    def reached(self, stage: int) -> object:
        """Return what changes when a stage has to be sent everything again."""
        return self._present.fence, self._attempts.get(stage, 0)

    def begin_round(self) -> None:
        """The driver begins a round."""
        self._attempts.clear()
        stages = [stage for stage, one in enumerate(self._present.cut.stages) if one.trainable]
        self.saved(max(0, self._present.machine.saved))
        self._seat.exchange.place(self, stages, self._seat.weight)

    def forget(self, below: int) -> None:
        """No stage of this replica runs steps before `below` again."""
        self._seat.exchange.needed_from(self.job, self.begun + below)

    def saved(self, step: int) -> int:
        """A checkpoint of `step` steps is complete. Return the steps from which this job may have to run again because
        of others."""
        return max(0, self._seat.exchange.saved(self.job, self.begun + step) - self.begun)

    def heard(self, message: wire.Message) -> None:
        """Follow what a stage reported."""
        exchange = self._seat.exchange
        match message:
            case wire.DifferenceReady(stage=stage, step=step, attempt=attempt):
                self._attempts[stage] = attempt
                exchange.waits(self.job, stage, self.begun + step)
            case wire.StateWanted(stage=stage, attempt=attempt):
                self._attempts[stage] = attempt
                exchange.wants_state(self.job, stage)
            case wire.Applied(stage=stage, step=step):
                exchange.applied(self.job, stage, self.begun + step + 1)
            case wire.Ready(stage=stage, applied=applied):
                exchange.applied(self.job, stage, self.begun + applied, restored=True)
            case wire.ExchangeWhole(stage=stage, number=number):
                exchange.agrees(self.job, stage, number)
            case wire.ExchangeMissing(number=number):
                exchange.lacks(self.job, number)
            case _:
                pass

    async def pass_on(self, peer: PeerId, message: wire.ExchangePart, tensors: Mapping[str, HostTensor]) -> None:
        """Pass a part on to a stage of another replica. Raises `ExecutionError` if it is not expected from `peer`."""
        if not self._present.machine.roles.stages_of(peer):
            raise ExecutionError(f"got a part of an exchange from peer {short(peer)}, which runs no stage.")
        await self._seat.exchange.pass_on(message, tensors, peer)

    async def deliver(self, message: wire.ExchangePart, tensors: Mapping[str, HostTensor]) -> bool:
        """Send a part to a stage of this replica, unless its round is over. Return whether it left this machine."""
        if message.fence != self._present.fence or message.stage not in self._present.machine.roles.stages:
            return False
        await self._present.send_state(message.stage, message, tuple(tensors.values()))
        return self._present.peer_of(message.stage) != self.owner

    def send(
        self, order: Order, place: int, others: Sequence[tuple[int, StageExchange]], *, only: int | None = None
    ) -> None:
        """Send an order to the stages of this replica, or to one. `others`: (place, part) of the others that it
        concerns."""
        for stage in self._present.machine.roles.stages:
            own = sorted(self._present.cut.stages[stage].trainable)
            is_meant = only in (None, stage) and (place < len(order.members) or (self.job, stage) in order.waiting)
            if not own or not is_meant:
                continue
            twins = [twin for at, other in others for twin in other.twins_of(own, at, order.waiting)]
            message = wire.ExchangeRound(
                fence=self._present.fence,
                stage=stage,
                step=max(0, order.step - self.begun),
                number=order.number,
                place=place,
                weights=tuple(member.weight for member in order.members),
                twins=tuple(twins),
                kept_from=order.kept_from,
                is_welcome=order.is_welcome,
            )
            self._present.to(stage, message)
            if self._present.peer_of(stage) != self.owner:
                self._seat.exchange.line_bytes += len(wire.encode(message))

    def twins_of(self, keys: list[str], place: int, waiting: frozenset[tuple[str, int]]) -> list[wire.TwinStage]:
        """Return the stages of this replica that hold some of these parameters, for a stage of another replica."""
        present, twins = self._present, list[wire.TwinStage]()
        for stage in present.machine.roles.stages:
            held = _ranges(keys, present.cut.stages[stage].trainable)
            if held:
                peer = present.peer_of(stage)
                twins.append(
                    wire.TwinStage(
                        member=place,
                        job=present.job.job,
                        stage=stage,
                        peer=peer,
                        fence=present.fence,
                        ticket=present.deployment.contacts.get(peer, b""),
                        wants=(self.job, stage) in waiting,
                        attempt=self._attempts.get(stage, 0),
                        keys=held,
                    )
                )
        return twins

    def adopt(self, number: int, stage: int) -> None:
        """Let a stage adopt a round."""
        message = wire.ExchangeAdopt(fence=self._present.fence, stage=stage, number=number)
        self._present.to(stage, message)
        if self._present.peer_of(stage) != self.owner:
            self._seat.exchange.line_bytes += len(wire.encode(message))

    def fail(self, reason: str) -> None:
        """End this replica's job."""
        self._present.post(CommandFailed(reason))

    def close(self) -> None:
        """The driver ends: no stage of this replica waits any more."""
        self._seat.exchange.place(self, (), self._seat.weight)


def _ranges(keys: list[str], held: Mapping[str, object]) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of places in `keys` whose parameters are also in `held`."""
    found: list[tuple[int, int]] = []
    for place, key in enumerate(keys):
        if key not in held:
            continue
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return tuple(found)
