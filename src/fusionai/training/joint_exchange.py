"""The owner's part in an exchange between the machines of replicas: it decides the rounds and passes on what it must.

`JointExchange` is for all replicas of a job, `StageExchange` is the part of one replica's driver. A stage reports that
it waits; the book (`coordination.training.joint_rounds`) decides; the round is written to the disk and only then sent
to the stages, with where the other replicas' stages are. Differences and means go from stage to stage. What stages of
the owner's machine exchange, and what two machines have no link for, passes through the drivers.

A replica that begins later is welcomed: all others send its stages the state that they have agreed on, each a share.
So is one that missed a round's deadline; its difference counts in its next round.

`joint_disk` stores the rounds. `execution.training.twins` is the stages' side of a round and `newcomers` of a welcome;
`training.outer` is the exchange that the owner sums itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusionai.coordination.round.interface import CommandFailed
from fusionai.coordination.training.exchanges import NO_EXCHANGES, Exchanges
from fusionai.coordination.training.joint_rounds import ExchangingReplica
from fusionai.coordination.training.state import DriverPhase
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.training.joint_disk import Decided, JointFiles
from fusionai.training.outer import LocalUpdates, RoundDone
from fusionai.training.rounds import JobRound
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)


class JointExchange:
    """Exchanges of all replicas. Call `seat` for each and `close` at the end."""

    def __init__(
        self,
        files: JointFiles,
        *,
        exchanges: Exchanges = NO_EXCHANGES,
        deadline_s: float = 60.0,
        on_round: Callable[[RoundDone], None] = lambda _round: None,
    ) -> None:
        """`exchanges`: of the whole run. `deadline_s`: how long the first replica that waits for a round waits for
        others, in seconds."""
        self._files = files
        self._deadline_s = deadline_s
        self._timer: tuple[int, asyncio.TimerHandle] | None = None
        """Step of the round that is waited for, and when it goes on without those that are missing."""
        self._held = False
        self.behind: dict[str, str] = {}
        """Replica -> why the others went on without it. It can begin again as one that begins later."""
        self._begun: dict[str, int] = {}
        """Replica -> steps of the whole run that were over when it began."""
        self._book = files.load()
        self._book.exchanges = exchanges
        self._journalled = self._book.last
        self._whole = self._book.whole
        """Number of the last round that is journalled as whole."""
        self._journalling = self._book.whole
        self._turn = asyncio.Lock()
        """Held while the rounds are written."""
        self._on_round = on_round
        self._parts: dict[str, StageExchange] = {}
        self._welcomed: dict[tuple[str, int], tuple[object, Order]] = {}
        """(replica that begins later, stage) -> what its welcome followed from, the welcome."""
        self._welcomes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.line_bytes = 0
        """Bytes of exchanges over the owner's line since the last round was reported."""
        self._reported = self._book.last
        self._changed = asyncio.Event()
        """Set and replaced whenever a stage waits no more."""

    @property
    def round(self) -> int:
        """Number of decided rounds."""
        return self._book.last

    def seat(self, job: str, begun: int = 0) -> JointSeat:
        """Return the seat of a replica that begins at step `begun` of the whole run. From now on no round that ends
        later is decided without it."""
        self._book.expected[job] = self._begun[job] = begun
        self.behind.pop(job, None)
        return JointSeat(self, job)

    def is_joining(self, job: str) -> bool:
        """Return whether this replica waits for the state to begin with."""
        return self._book.is_joining(job)

    def leave(self, job: str) -> None:
        """Stop expecting this replica."""
        self._parts.pop(job, None)
        self._welcomed = {key: known for key, known in self._welcomed.items() if key[0] != job}
        for number in self._book.leave(job):
            self._fail(number, f"{job} ended in round {number}, which others of its replicas have completed")
        self._follow(())

    def leave_behind(self, job: str, reason: str) -> None:
        """Go on without a replica, which can begin again as one that begins later."""
        self.behind[job] = reason
        self.leave(job)

    def hold(self) -> None:
        """Decide only complete rounds from now on, because all replicas are being stopped."""
        self._held = True
        self._wait_no_longer()

    def waits_in_vain(self, jobs: Iterable[str]) -> bool:
        """Return whether all of these replicas wait for a round that another one is missing from."""
        return self._book.waits_in_vain(jobs)

    async def close(self) -> None:
        self._wait_no_longer()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settled(self, job: str) -> None:
        """Wait until no stage of another replica needs what this replica's stages sent."""
        while not self._book.is_settled(job):
            await self._changed.wait()

    # ------------------------------------------------------------------------------------------------ of one replica

    def place(self, part: StageExchange, stages: Iterable[int], weight: float) -> None:
        """A replica's driver begins a round with these stages."""
        self._parts[part.job] = part
        self._follow(self._book.place(part.job, stages, weight))

    def waits(self, job: str, stage: int, step: int) -> None:
        """A stage waits for the update of a step."""
        if self._book.is_lost(job, step):
            self.leave_behind(job, f"the exchange after step {step + 1} took place without it, or is no longer kept")
            return
        self._follow(self._book.waits(job, stage, step))

    def wants_state(self, job: str, stage: int) -> None:
        """A stage of a replica that begins later needs the agreed state."""
        self._book.joins(job, stage)
        self._follow(())

    def applied(self, job: str, stage: int, below: int, *, restored: bool = False) -> None:
        """A stage has applied the first `below` steps. `restored`: its state came from elsewhere or was kept over a
        fault, so it must hear which of its rounds others wait for."""
        past = self._book.applied(job, stage, below)
        self._follow(())
        if restored:
            self._remind(job, stage)
        for number in past if restored else ():
            self._send(number, only=job)
        last = self._book.rounds.get(self._book.last)
        if last is not None and last.number > self._reported and not self._book.is_awaited(last.number):
            self._reported, nbytes, self.line_bytes = last.number, self.line_bytes, 0
            jobs = tuple(member.job for member in last.members)
            own_steps = {job: last.step - self._begun.get(job, 0) for job in jobs}
            late = tuple(job for job in jobs if job in self._book.caught_up)
            self._book.caught_up.difference_update(late)
            self._on_round(RoundDone(last.number, jobs, late, nbytes, own_steps))

    def lacks(self, job: str, number: int) -> None:
        """A stage has lost what it sent in a round: replicas that run the round again can't continue."""
        if number in self._book.rounds:
            self._fail(
                number, f"{job} no longer has what it sent in round {number}, which this replica runs again", job
            )

    def _fail(self, number: int, reason: str, but: str = "") -> None:
        """Leave the replicas behind that wait for a round which can't be completed."""
        for job in sorted({job for job, _ in self._book.waiting(number)} - {but}):
            self.leave_behind(job, reason)

    def saved(self, job: str, steps: int) -> int:
        """A replica has a checkpoint after `steps` steps of the whole run. Return the fewest that one has: after a loss
        of power all may have to begin there."""
        return self._book.saved_by(job, steps)

    def needed_from(self, job: str, step: int) -> None:
        """No stage of this replica runs steps before `step` again."""
        self._book.needed_from(job, step)

    async def pass_on(self, message: wire.ExchangePart, tensors: Mapping[str, HostTensor], sender: PeerId) -> None:
        """Pass a part on to the stage it is for."""
        part = next((one for one in self._parts.values() if one.runs == message.job), None)
        if part is not None:
            crossed = await part.deliver(message, tensors)
            own = part.owner
            self.line_bytes += sum(one.nbytes for one in tensors.values()) * (crossed + (sender != own))

    # --------------------------------------------------------------------------------------------------- decisions

    def _follow(self, numbers: Iterable[int]) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for number in numbers:
            self._send(number)
        self._welcome()
        self._watch()
        if self._book.decide() is not None:
            self._start_journal()
            for job in sorted(self._book.overtaken()):
                self.leave_behind(job, "the others have gone on to their next exchange but one")

    def agrees(self, job: str, stage: int, number: int) -> None:
        """A stage has all means of a round."""
        part = self._parts.get(job)
        if part is None or not self._book.agrees(job, stage, number):  # left behind, or others are outstanding
            return
        if number <= self._whole:
            part.adopt(number, stage)
        elif number > self._journalling:
            self._start_journal()

    def _start_journal(self) -> None:
        book = self._book
        self._journalling = book.whole
        rounds = tuple(book.rounds.values())
        task = asyncio.create_task(
            self._journal(Decided(last=book.last, last_step=book.last_step, rounds=rounds, whole=book.whole))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self) -> None:
        """Start to wait for what is missing from the next round, or from the last one."""
        step = self._book.awaited_step
        if self._timer is not None and self._timer[0] != step:
            self._wait_no_longer()
        if step is not None and not self._held and self._timer is None:
            self._timer = step, asyncio.get_running_loop().call_later(self._deadline_s, self._go_on, step)

    def _wait_no_longer(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
        self._timer = None

    def _go_on(self, step: int) -> None:
        """Go on without what the others have waited for: replicas that have not come to the exchange after `step`, or
        that have lost a machine in it. Those that can't catch up are left behind."""
        self._timer = None
        if self._book.awaited_step == step:
            lost = frozenset(job for job, part in self._parts.items() if part.is_waiting)
            for job in sorted(self._book.left_out(step, lost)):
                reason = f"the others waited {self._deadline_s:g} s for it after step {step + 1} and went on"
                log.info("%s is late: %s", job, reason)
                if self._book.may_catch_up(job, step):
                    self._book.misses(job, step)
                else:
                    self.leave_behind(job, reason)
        self._follow(())

    async def _journal(self, decided: Decided) -> None:
        """Save what is decided, and only then let the stages hear of it."""
        try:
            async with self._turn:
                await asyncio.to_thread(self._files.save, decided)
        except FusionError as error:
            for part in self._parts.values():
                part.fail(str(error))
            return
        if decided.last > self._journalled:
            self._journalled = decided.last
            self._send(decided.last)
            self._welcome()
        if decided.whole > self._whole:
            self._whole = decided.whole
            for job, stage in sorted(self._book.waiting(self._whole)):
                self._parts[job].adopt(self._whole, stage)

    def _send(self, number: int, *, only: str = "") -> None:
        """Send a journalled round to the stages of all its members, or of one."""
        if number > self._journalled or (one := self._book.rounds.get(number)) is None:
            return
        order = Order(one.number, one.step, one.members, self._book.kept_from, self._book.waiting(number))
        places = {member.job: place for place, member in enumerate(one.members)}
        for job, place in places.items():
            if (part := self._parts.get(job)) is not None and only in ("", job):
                others = [self._parts[other] for other in places if other != job and other in self._parts]
                part.send(order, place, [(places[other.job], other) for other in others])

    def _welcome(self) -> None:
        """Have the agreed state sent to stages of replicas that begin later: once, and again if they or the senders
        are others."""
        for one in self._book.newcomers():
            newcomer, place = self._parts[one.job], len(one.senders)
            for stage in sorted(one.stages) if one.round <= self._journalled else ():
                cause = (one.begun, newcomer.reached(stage), one.senders)
                if (known := self._welcomed.get((one.job, stage))) is not None and known[0] == cause:
                    continue
                self._welcomes += 1
                waiting = frozenset({(one.job, stage)})
                order = Order(self._welcomes, one.begun - 1, one.senders, 0, waiting, is_welcome=True)
                self._welcomed[one.job, stage] = cause, order
                if not one.senders:
                    self.leave_behind(one.job, f"the others have trained beyond step {one.begun}, at which it begins")
                    return
                senders = [self._parts[sender.job] for sender in one.senders]
                newcomer.send(order, place, list(enumerate(senders)))
                for at, sender in enumerate(senders):
                    sender.send(order, at, [(place, newcomer)])

    def _remind(self, job: str, stage: int) -> None:
        """Repeat the present welcomes to a stage that began again, and has lost what it was to send."""
        part = self._parts.get(job)
        joining = {(one.job, other) for one in self._book.newcomers() for other in one.stages}
        for (newcomer, other), (_, order) in self._welcomed.items():
            places = {member.job: at for at, member in enumerate(order.members)}
            if part is not None and (newcomer, other) in joining and job in places:
                to = [(len(order.members), self._parts[newcomer])]
                part.send(order, places[job], to, only=stage)


@dataclass(frozen=True, slots=True)
class Order:
    """What the stages of several replicas do together: a round, or a welcome. `waiting`: (job, stage) of the stages
    that wait for it. The other fields are those of `wire.ExchangeRound`; `step` is one of the whole run."""

    number: int
    step: int
    members: tuple[ExchangingReplica, ...]
    kept_from: int
    waiting: frozenset[tuple[str, int]]
    is_welcome: bool = False


@dataclass(slots=True)
class JointSeat:
    """A replica's place in the exchange. `weight`: relative size of the share that its stages sum, such as the bytes
    per second of its slowest uplink."""

    exchange: JointExchange
    job: str
    weight: float = 1.0

    async def settled(self) -> None:
        """Wait until no other replica needs what this one's stages sent."""
        await self.exchange.settled(self.job)


class StageExchange(LocalUpdates):
    """A driver's part in an exchange between replicas' machines."""

    def __init__(self, present: JobRound, seat: JointSeat) -> None:
        super().__init__(present, None)
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
        self._attempts.clear()
        stages = [stage for stage, one in enumerate(self._present.cut.stages) if one.trainable]
        self.saved(max(0, self._present.machine.saved))
        self._seat.exchange.place(self, stages, self._seat.weight)

    def forget(self, below: int) -> None:
        self._seat.exchange.needed_from(self.job, self.begun + below)

    def saved(self, step: int) -> int | None:
        return max(0, self._seat.exchange.saved(self.job, self.begun + step) - self.begun)

    def heard(self, message: wire.Message) -> None:
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
