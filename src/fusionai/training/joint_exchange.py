"""The owner's part in an exchange between the machines of replicas: it decides the rounds and passes on what it must.

`JointExchange` is for all replicas of a job; `stage_exchange` is the part of one replica's driver. A stage reports that
it waits; the book (`coordination.training.joint_rounds`) decides; the round is written to the disk and only then sent
to the stages, with where the other replicas' stages are. Differences and means go from stage to stage. What stages of
the owner's machine exchange, and what two machines have no link for, passes through the drivers.

A replica that begins later is welcomed: all others send its stages the state that they have agreed on, each a share.
So is one that missed a round's deadline; its difference counts in its next round.

The rounds that may be needed again are in `outer/rounds.json`, replaced atomically. `execution.training.twins` is the
stages' side of a round and `newcomers` of a welcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.coordination.training.exchanges import NO_EXCHANGES, Exchanges
from fusionai.coordination.training.joint_rounds import ExchangingReplica, JointRound, RoundBook
from fusionai.primitives.errors import FusionError, StorageError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.wire import messages as wire

if TYPE_CHECKING:
    from fusionai.training.stage_exchange import StageExchange

log = logging.getLogger(__name__)

ROUNDS: Final = "rounds.json"
"""Name of the file with the decided rounds."""


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A finished round. `number` counts from 1. `late`: participants that had missed the previous round. `nbytes`:
    bytes over the job owner's line. `steps`: for each of `jobs`, its own step that ended the round."""

    number: int
    jobs: tuple[str, ...]
    late: tuple[str, ...]
    nbytes: int
    steps: Mapping[str, int]


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


class Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the file: the fields of `RoundBook` that outlast a process."""

    last: Annotated[int, Meta(ge=0)]
    last_step: Annotated[int, Meta(ge=-1)]
    rounds: tuple[JointRound, ...]
    whole: Annotated[int, Meta(ge=0)]


class JointFiles:
    """Stores the decided rounds in a directory. Blocking. Only one process may use it at a time."""

    def __init__(self, directory: Path) -> None:
        """Open the directory, creating it if necessary. Raises `StorageError`."""
        self._path = directory / ROUNDS
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> RoundBook:
        """Return the book as it was saved last; an empty one if nothing was saved. Raises `StorageError`."""
        with storage_errors(self._path, "read"):
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return RoundBook()
        try:
            known = msgspec.json.decode(content, type=Decided)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise StorageError(
                f"{self._path} does not fit its schema: {problem}.", hint="It may have been written by a newer version."
            ) from problem
        rounds = {one.number: one for one in known.rounds}
        return RoundBook(rounds=rounds, last=known.last, last_step=known.last_step, whole=known.whole)

    def save(self, decided: Decided) -> None:
        """Save durably before returning."""
        write_atomic(self._path, msgspec.json.encode(decided))
