"""Base of the members of training and serving jobs: follows the driver's connection and reports failures.

It adopts the fence and placement of each round, and admits exactly the keys that the job owner's signed placement names
(`Roster`). The broker's tickets alone don't open a job's tensors, states and weights, because the broker could sign one
for a key of its own. A peer is checked against the placement of the member's present round. A neighbour that learned of
a later round first is checked against the signed placement it shows.

It keeps the tensor links to other members. Stages belong to the subclasses: `execution.training.member` trains,
`execution.serving.member` serves. `peer.acceptor` opens members for drivers that show a ticket;
`execution.connections` holds the driver's own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from fusionai.coordination.round.liveness import PING_S
from fusionai.execution.host import Host
from fusionai.execution.links import Links, Outbox, dials
from fusionai.ir.partition import FEED
from fusionai.primitives.errors import (
    ChannelClosed,
    ExecutionError,
    FusionError,
    GraphError,
    OutOfMemoryError,
    TransportError,
    TrustError,
)
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.transport.security.signed import SignedPlacement, verify_placement
from fusionai.wire import messages as wire
from fusionai.wire.frame import by_name
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

MAX_UNREAD: Final = 1024
"""Messages that may wait for a driver that does not read them (chosen)."""
MOST_ORDERS_BYTES: Final = 2**26
"""Bytes that the driver's orders with graphs may take together while they wait or are followed (chosen): one of the
largest size, or many ordinary ones."""
_DIGEST_BYTES: Final = 128
"""Bytes that a hash and what belongs to it take in memory, about."""


def refusal_of(error: Exception) -> tuple[wire.RefusalCode, str]:
    """Return how a stage's failure is reported to the driver: the code and the reason."""
    match error:
        case GraphError():
            return "bad_graph", str(error)
        case OutOfMemoryError():
            return "out_of_memory", str(error)
        case FusionError():
            return "failed", str(error)
        case MemoryError():
            return "out_of_memory", f"MemoryError: {error}"
        case _:
            return "failed", f"{type(error).__name__}: {error}"


class RoundMember(ABC):
    """Takes part in one job. `owner` is the driver's peer id, `opened` the fence with which it opened the job."""

    def __init__(self, task: Task, host: Host, job: str, owner: PeerId, opened: Fence) -> None:
        self.task: Task = task
        self.job = job
        self.owner = owner
        self.fence = opened
        """Highest fence received from the driver; messages of lower fences are refused."""
        self.stale_dropped = 0
        """Messages dropped because they belonged to another round (normal after a change of plan)."""
        self._host = host
        self._placement = RoundPlacement(job=job, me=host.peer, owner=owner, fence=opened, task=task)
        self._roster = Roster(job, owner, host.peer)
        self._enlisted = False
        """Whether `_placement` came with an `Enlist`."""
        self._failed: dict[int, Fence] = {}
        self._links_reported: set[tuple[Fence, PeerId]] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._orders_bytes = 0
        """Bytes of the driver's orders that tasks hold."""
        self._driver: Outbox | None = None
        self._closed = False
        self._links = Links(
            host.transport,
            memory=host.memory,
            on_message=self._from_link,
            on_lost=self._link_lost,
            now_s=host.clock.now_s,
        )

    @property
    def driven(self) -> bool:
        """Return whether a driver's connection is being served."""
        return self._driver is not None

    def admit(self, opened: Fence) -> bool:
        """Return whether a driver that opens the job with this fence may take over; later, lower fences are refused."""
        if opened < self.fence:
            return False
        self.fence = opened
        return True

    def check(self, peer: PeerId, opening: wire.OpenJob) -> None:
        """Raise `TrustError` for a peer that the owner's signed placement does not name."""
        self._roster.check(peer, opening)

    # ---------------------------------------------------------------------------------------------- with the driver

    async def serve_control(self, channel: Channel) -> bool:
        """Follow the driver's messages until it detaches, breaks the protocol, or the connection ends. A connection
        served earlier is closed, because the driver has reconnected. Return True if the job is over for this member,
        False if it waits for its driver to come back."""
        driver = Outbox(channel, self._driver_lost)
        former, self._driver = self._driver, driver
        if former is not None:
            former.abandon()
            self._start(former.channel.close())
        with self._served():
            try:
                while True:
                    envelope = await channel.receive()
                    if isinstance(envelope.message, wire.Detach):
                        if envelope.message.fence >= self.fence:
                            await self._detach()
                            return True
                        self.stale_dropped += 1
                    else:
                        self._obey(envelope, driver)
                    if driver.waiting > MAX_UNREAD:
                        raise ExecutionError(f"the driver of {self.job} does not read its control connection.")
            except ChannelClosed:
                log.info("the connection to the driver of %s ended", self.job)
            except FusionError as error:
                log.warning("closing the connection to the driver of %s, which broke the protocol: %s", self.job, error)
                self._report(error)
                return self._driver is driver
            finally:
                if self._driver is driver:
                    self._driver = None
                await driver.close()
        return False

    @property
    @abstractmethod
    def stages(self) -> tuple[int, ...]:
        """Numbers of the stages loaded here, ascending."""

    @property
    def snapshots(self) -> tuple[wire.SnapshotAt, ...]:
        """Complete snapshots kept here; only training keeps any."""
        return ()

    @abstractmethod
    async def serve_state(self, channel: Channel) -> None:
        """Serve the driver's state connection until it ends."""

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """Serve the tensor connection of a neighbour that dialled this machine and passed `check`."""
        with self._served():
            await self._links.serve(peer, channel)

    @abstractmethod
    async def serve_snapshots(self, peer: PeerId, channel: Channel) -> None:
        """Serve the state connection of another member that passed `check`."""

    @abstractmethod
    async def close(self) -> None:
        """End all work of this member. Does nothing if it is closed already."""

    def _obey(self, envelope: Envelope, driver: Outbox) -> None:
        """Handle one message of the driver without waiting; longer work goes on in tasks."""
        match envelope.message:
            case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                driver.post(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
            case wire.Enlist() as enlist:
                self.to_driver(self.enlist(enlist))
            case message:
                if self._orders_bytes and self._orders_bytes + _order_bytes(envelope) > MOST_ORDERS_BYTES:
                    raise ExecutionError(
                        f"the driver sent a {type(message).__name__} while orders of {self._orders_bytes} bytes waited "
                        f"here; together they may take {MOST_ORDERS_BYTES} bytes."
                    )
                if not self._order(envelope):
                    name = type(message).__name__
                    raise ExecutionError(
                        f"the driver sent a {name} on its control connection, where it does not belong."
                    )

    @abstractmethod
    def enlist(self, enlist: wire.Enlist) -> wire.Enlisted | wire.Refused:
        """Begin a round: adopt its fence and placement, and drop the stages that have no place here."""

    @abstractmethod
    def _order(self, envelope: Envelope) -> bool:
        """Follow an order about stages. Returns False for a message that is no order of this kind of job."""

    @abstractmethod
    async def _detach(self) -> None:
        """End the job here and drop its stages."""

    def _adopt(self, enlist: wire.Enlist) -> wire.Refused | None:
        """Adopt the fence and placement of a new round. Return a refusal if it is not a newer round of this job."""
        if enlist.job != self.job:
            return wire.Refused(code="unknown_job", reason=f"this connection is for job {self.job}.")
        known = self._placement.fence
        if enlist.fence < self.fence or (self._enlisted and enlist.fence <= known):
            self.stale_dropped += 1
            return wire.Refused(code="stale_fence", reason=f"{self.job} is at {self.fence}")
        try:
            self._roster.adopt(enlist)
        except TrustError as error:
            return wire.Refused(code="bad_placement", reason=str(error))
        self._placement = RoundPlacement(
            job=self.job,
            me=self._host.peer,
            owner=self.owner,
            fence=enlist.fence,
            neighbours={neighbour.stage: neighbour for neighbour in enlist.neighbours},
            standbys=frozenset(enlist.standbys),
            ticket=enlist.ticket,
            signed=enlist.placement,
            named=self._roster.named,
            task=self.task,
        )
        self.fence = enlist.fence
        if not self._enlisted:
            self._enlisted = True
            self._start(self._beat())
        return None

    def _is_present(self, order: wire.Attach | wire.Load, refuse: Callable[[wire.RefusalCode, str], None]) -> bool:
        """Return whether an order to load a stage belongs to the present round; refuse it otherwise. Raises
        `ExecutionError` for an order of another job."""
        if order.job != self.job:
            what = type(order).__name__.lower()
            raise ExecutionError(f"this connection is for job {self.job}, the {what} is for {order.job}.")
        if order.fence < self.fence:
            self.stale_dropped += 1
            refuse("stale_fence", f"{self.job} is at {self.fence}")
            return False
        if not self._enlisted or order.fence != self._placement.fence:
            refuse("bad_message", f"this member was not enlisted under {order.fence}")
            return False
        return True

    def to_driver(self, message: wire.Message) -> None:
        if self._driver is not None:
            self._driver.post(message)

    def _driver_lost(self, reason: str) -> None:
        log.info("the control connection to the driver of %s was lost: %s", self.job, reason)

    # ------------------------------------------------------------------------------------------------------- links

    @property
    def _own(self) -> frozenset[int]:
        """Stages that the round places here."""
        return frozenset(stage for stage, peer in self._placement.places.items() if peer == self._host.peer)

    @abstractmethod
    async def _from_link(self, peer: PeerId, envelope: Envelope) -> None:
        """Handle one message of another member. Raises `ExecutionError` for one that it may not send."""

    def _only_the_driver(self, peer: PeerId, message: wire.Message) -> ExecutionError:
        return ExecutionError(f"peer {short(peer)} sent a {type(message).__name__}; only the driver may send it.")

    def _is_of_round(self, peer: PeerId, message: wire.Message, sender: int | None) -> bool:
        """Return whether a message of another member belongs to the present round. `sender`: the stage that it names as
        its sender, None for a standby. Raises `ExecutionError` if the stage is not the peer's."""
        if getattr(message, "fence", None) != self._placement.fence:
            self.stale_dropped += 1  # from another placement, whose senders may differ
            return False
        if sender is not None and self._placement.peer_of(sender) != peer:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__} as stage {sender}, not its own.")
        return True

    def _dials(self, other: PeerId) -> bool:
        """Return whether this side opens the link to `other`."""
        return dials(self._host.peer, other, self.owner)

    def _dial(self, neighbour: wire.Neighbour) -> None:
        """Open the link to a neighbour if this side dials and the link does not exist."""
        other = PeerId(neighbour.peer)
        if other != self._host.peer and self._dials(other):
            try:
                self._links.dial(
                    other, self._host.addresses_of(other, self.job, neighbour.ticket), self._placement.opening
                )
            except TrustError as error:
                self._link_lost(other, str(error))

    async def _is_linked(self, peer: PeerId, fence: Fence) -> bool:
        """Wait for the link to `peer`. A missing one is reported, unless the round of `fence` is over."""
        try:
            await self._links.up(peer)
        except TransportError as error:
            if fence == self._placement.fence:
                self._link_lost(peer, str(error))
            return False
        return True

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        """Send to a stage. One of this machine gets the message in the event loop's next turn."""
        peer = self._placement.peer_of(stage)
        if peer != self._host.peer:
            self._post(peer, message, tensors)
        else:
            asyncio.get_running_loop().call_soon(self._deliver, stage, message, by_name(message, tensors))

    @abstractmethod
    def _deliver(self, number: int, message: wire.Message, tensors: Mapping[str, HostTensor]) -> None:
        """Pass a message to a stage if it is of the stage's round."""

    def _post(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor]) -> None:
        """Post a message to another member. A missing link is reported to the driver, not raised. A message of an
        earlier round is dropped, because its receiver may run elsewhere now."""
        if getattr(message, "fence", None) != self._placement.fence:
            self.stale_dropped += 1
            return
        try:
            self._links.post(peer, message, tensors)
        except TransportError as error:
            self._link_lost(peer, str(error))

    async def _beat(self) -> None:
        for beat in itertools.count():
            await asyncio.sleep(PING_S)
            self._links.beat()
            self._on_beat(beat)

    @abstractmethod
    def _on_beat(self, beat: int) -> None:
        """Do what a member does at each ping besides pinging its links. `beat` counts the pings."""

    # ---------------------------------------------------------------------------------------------------- failures

    def failed(self, stage: int, fence: Fence, code: wire.RefusalCode, reason: str) -> None:
        """Report to the driver, once per stage and fence: the first failure ends the attempt."""
        if self._failed.get(stage) != fence:
            self._failed[stage] = fence
            self.to_driver(wire.StageFailed(fence=fence, stage=stage, code=code, reason=reason[:4000]))

    @abstractmethod
    def _report(self, error: FusionError) -> None:
        """Report an error in a message that names no stage: every stage here fails."""

    def _link_lost(self, peer: PeerId, reason: str) -> None:
        """Report a lost link once per round and peer. No stage fails because of it."""
        fence = self._placement.fence
        if self._closed or peer not in self._placement.peers or (fence, peer) in self._links_reported:
            return
        self._links_reported = {reported for reported in self._links_reported if reported[0] == fence} | {(fence, peer)}
        log.info("link to peer %s lost: %s", short(peer), reason)
        self.to_driver(wire.LinkLost(fence=fence, peer=peer, reason=reason[:4000]))

    # -------------------------------------------------------------------------------------------------------- tasks

    @contextmanager
    def _served(self) -> Iterator[None]:
        """Cancel the current task when this member closes, if it is still inside this context."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def _start(self, work: Coroutine[object, object, None], holds: Envelope | None = None) -> asyncio.Task[None]:
        """Start a task. `holds`: the order that it keeps in memory until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if holds is not None:
            nbytes = _order_bytes(holds)
            self._orders_bytes += nbytes
            task.add_done_callback(lambda _: self._forget_order(nbytes))
        return task

    def _forget_order(self, nbytes: int) -> None:
        self._orders_bytes -= nbytes

    async def _end_tasks(self) -> None:
        """Cancel and await all tasks except the current one."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _order_bytes(order: Envelope) -> int:
    """Return the bytes that an order takes in memory, about."""
    nbytes = sum(tensor.nbytes for tensor in order.tensors.values())
    if isinstance(order.message, wire.Load):
        digests = sum(2 + len(weight.pieces) for weight in order.message.weights)
        digests += sum(1 + len(source.digests) for source in order.message.sources)
        nbytes += _DIGEST_BYTES * digests
    return nbytes


Task = Literal["train", "serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlacement:
    """Where the stages of a round run. It has no stages before the first `Enlist`."""

    job: str
    me: PeerId
    owner: PeerId
    fence: Fence
    neighbours: dict[int, wire.Neighbour] = field(default_factory=dict[int, wire.Neighbour])
    standbys: frozenset[int] = frozenset()
    ticket: bytes = b""
    signed: bytes = b""
    """The placement signed by the owner, to show to other members."""
    named: frozenset[PeerId] = frozenset()
    """All peers that the signed placement names, including standbys."""
    task: Task = "train"

    @property
    def places(self) -> dict[int, PeerId]:
        return {stage: PeerId(neighbour.peer) for stage, neighbour in self.neighbours.items()}

    @property
    def peers(self) -> frozenset[PeerId]:
        """All other peers that have a stage, and the owner."""
        return frozenset({*self.places.values(), self.owner} - {self.me})

    @property
    def opening(self) -> wire.OpenJob:
        """The message with which this member opens connections to others."""
        return wire.OpenJob(job=self.job, fence=self.fence, ticket=self.ticket, placement=self.signed, task=self.task)

    def peer_of(self, stage: int) -> PeerId:
        """Return the peer that runs `stage`. Raises `ExecutionError` for a stage outside the plan."""
        if stage == FEED:
            return self.owner
        neighbour = self.neighbours.get(stage)
        if neighbour is None:
            raise ExecutionError(f"job {self.job} has no stage {stage} in its plan.")
        return PeerId(neighbour.peer)


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
        announced = tuple(sorted((one.stage, one.peer) for one in enlist.neighbours))
        if announced != placement.stages:
            raise TrustError("the stages of this round differ from those in the job owner's signed placement.")
        standby_of = tuple(stage for stage, peer in placement.standbys if peer == self._me)
        if tuple(sorted(enlist.standbys)) != standby_of:
            raise TrustError("the standbys of this round differ from those in the job owner's signed placement.")
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
