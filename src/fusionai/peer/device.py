"""One device of a box as a member of the pool: its key, its worker process, its listener, its place with the broker.

`LentDevice.open` joins, measures and listens; `stay` registers and stays until the device leaves or lending pauses.
`peer.acceptor` accepts jobs, `peer.registration` keeps the lease, `transport.enrolment` joins the pool. `peer.daemon`
lends all devices of a box.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from fusionai.backends.interface import Backend, DeviceReport
from fusionai.backends.memory import return_code_pages, return_freed_memory
from fusionai.backends.worker.client import WorkerBackend, WorkerOptions
from fusionai.execution.host import ComputeThread, Host
from fusionai.execution.measurement import measured_device
from fusionai.peer.acceptor import JobAcceptor
from fusionai.peer.cards import CardClaim, claim_card
from fusionai.peer.lending import PeerOptions, PeerReady
from fusionai.peer.profile import UNMEASURED, NearLinks, lent_memory_bytes, make_profile, measured_links
from fusionai.peer.registration import Registration
from fusionai.primitives.clock import Clock, PoolClock
from fusionai.primitives.environment import cards_directory
from fusionai.primitives.errors import FusionError
from fusionai.scheduling.problem.types import Link, PeerProfile
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.enrolment import Membership
from fusionai.transport.peer_transport import PeerTransport
from fusionai.transport.routes.addresses import relay_candidates
from fusionai.transport.routes.tcp import TcpListener
from fusionai.transport.security.trust import carried_endorsements
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

CLOCK_OFF_S: Final = 30.0
"""A clock this far from the broker's is reported: certificates and schedules still count by it."""
HAND_OVER_S: Final = 2.5
"""How long a drained peer stays at most after the broker released it, in seconds. Its next heartbeat would be
refused."""


async def candidates(
    transport: PeerTransport,
    listener: TcpListener,
    brokers: Sequence[str],
    *,
    advertise: tuple[str, ...] = (),
    relay: bool | None = None,
) -> tuple[str, ...]:
    """Return the addresses to announce, in order of preference. Advertised addresses replace those found: the machine's
    own, and those seen by the broker. `relay` None: offer the relay unless `advertise` is given."""
    found = advertise or (*listener.candidates_now(), *await transport.seen_at(listener))
    offers_relay = not advertise if relay is None else relay
    return (*found, *relay_candidates(brokers)) if offers_relay else found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWorker:
    """A device with the process that computes on it. `measured_at_s`: when its speeds were measured, in seconds since
    1970; None: now. `claim`: what is lent of a card."""

    options: PeerOptions
    compute: ComputeThread
    backend: Backend
    report: DeviceReport
    measured_at_s: float | None
    claim: CardClaim

    async def close(self) -> None:
        self.claim.release()
        await self.compute.run(self.backend.close)
        self.compute.close()


def open_worker(options: PeerOptions, *, confined: bool = True) -> Backend:
    """Start the process that computes on this device. One that is not confined may write compiled kernels to disk, so
    it measures before any job is here, and is closed afterwards."""
    return WorkerBackend(
        WorkerOptions(backend=options.backend, device=options.device, threads=options.threads, confined=confined)
    )


async def ready_worker(options: PeerOptions, clock: Clock) -> OpenWorker:
    """Start the worker of a device, measure it or take its kept measurement, and warm it up."""
    compute = ComputeThread(options.share)

    def lent(report: DeviceReport) -> int:
        return lent_memory_bytes(report, options.memory_limit_bytes, parts=options.parts)

    def measured() -> tuple[Backend, CardClaim, float | None]:
        backend = open_worker(options)
        report, measured_at_s = measured_device(
            backend,
            options.home,
            anew=options.measure,
            clock=clock,
            measuring=lambda: open_worker(options, confined=False),
            shared=options.measured_beside,
            parts=options.parts,
        )
        try:
            claim = claim_card(report, cards_directory(), lent, str(options.home), divided=options.parts > 1)
        except FusionError:
            backend.close()
            raise
        backend.limit_memory(lent(claim.report))
        backend.warm_up()
        return backend, claim, measured_at_s

    (backend, claim, measured_at_s), _ = await compute.run(measured, rests=False)
    compute.works_in(backend.works_in, backend.used_s)
    return_freed_memory()
    return_code_pages()
    return OpenWorker(
        options=options,
        compute=compute,
        backend=backend,
        report=claim.report,
        measured_at_s=measured_at_s,
        claim=claim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LentBox:
    """What the devices of one machine share: the membership of its first device, its line to the world, its clock, the
    weights on its disk, and `notice`, which gets sentences for the machine's owner. `host_memory_bytes`: what a device
    with a memory of its own may take of the machine's."""

    machine: Membership
    rates: TransferLimits
    clock: PoolClock
    weights: WeightStore
    host_memory_bytes: int
    notice: Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class LentDevice:
    """One member of the pool. `siblings`: the other devices of this box. `addresses`: where it can be reached; found
    when it is opened."""

    box: LentBox
    worker: OpenWorker
    membership: Membership
    transport: PeerTransport
    acceptor: JobAcceptor
    listener: TcpListener
    near: NearLinks
    profile: PeerProfile
    addresses: tuple[str, ...] = ()
    siblings: tuple[wire.Near, ...] = ()

    @classmethod
    async def open(
        cls, box: LentBox, worker: OpenWorker, membership: Membership, line: tuple[Link, Link] | None
    ) -> LentDevice:
        """Listen with the device's key. `line`: up- and downlink of this machine; None: measure them first."""
        options = worker.options
        transport = PeerTransport(membership.credentials, membership.broker, rates=box.rates)
        if line is None:
            line = await measured_links(transport, membership.broker, box.clock)
            if line[0] is not UNMEASURED:
                box.rates.uplink.measured(line[0].bandwidth_bytes_per_s)
        endorsements = carried_endorsements(options.home)
        profile = make_profile(options, membership.peer, worker.report, *line, endorsements, worker.backend.isolation)
        host_bytes = box.host_memory_bytes if worker.backend.device == "cuda" else None
        received = box.rates.received
        received.limit_bytes = (received.limit_bytes or 0) + (host_bytes or profile.memory_bytes)
        host = Host(
            peer=membership.peer,
            backend=worker.backend,
            compute=worker.compute,
            transport=transport,
            fingerprint=worker.report.fingerprint,
            clock=box.clock,
            memory_limit_bytes=profile.memory_bytes,
            host_memory_limit_bytes=host_bytes,
            weights=box.weights,
            authority_key=membership.credentials.authority_key,
        )
        acceptor = JobAcceptor(host, membership.credentials.authority_key)
        device = cls(
            box=box,
            worker=worker,
            membership=membership,
            transport=transport,
            acceptor=acceptor,
            listener=await transport.listen(acceptor.accept, host=options.host, port=options.port),
            near=NearLinks(transport=transport, clock=box.clock, is_busy=lambda: bool(acceptor.jobs)),
            profile=profile,
        )
        device.addresses = await device.candidates()
        return device

    async def candidates(self) -> tuple[str, ...]:
        options, brokers = self.worker.options, self.membership.broker.known
        return await candidates(
            self.transport, self.listener, brokers, advertise=options.advertise, relay=options.relay
        )

    async def stay(
        self, announce: Callable[[PeerReady], None], stop: asyncio.Event, pausing: asyncio.Future[str]
    ) -> bool:
        """See `stay`. `announce` is called after each registration."""
        return await stay(self.acceptor, lambda leave: self._registration(announce, leave), stop, pausing)

    def _registration(self, announce: Callable[[PeerReady], None], on_leave: Callable[[bool], None]) -> Registration:
        def registered(answer: wire.Registered) -> None:
            announce(
                PeerReady(self.membership.peer, answer.pool, self.addresses, self.profile, self.worker.measured_at_s)
            )
            self.near.look((*self.siblings, *answer.near))

        return Registration(
            self.transport,
            self.membership.broker,
            boot=time.time_ns(),
            profile=self.profile,
            addresses=self.addresses,
            jobs=lambda: self.acceptor.jobs,
            on_registered=registered,
            on_leave=on_leave,
            on_lost=self.acceptor.clear,
            on_meet=lambda notice, broker: self.transport.answer(notice, (broker.host, broker.port)),
            links=lambda: self.near.among(self.transport.links),
            addresses_now=self.candidates,
            moved=lambda: self.transport.moved,
            endorsements=lambda: carried_endorsements(self.worker.options.home),
            on_answer=self._answered,
            membership=self.membership,
        )

    def _answered(self, answer: wire.Registered | wire.HeartbeatAck) -> None:
        if answer.wall_s > 0:
            self._set_clock(answer.wall_s)
        if isinstance(answer, wire.HeartbeatAck):
            self.acceptor.placed(answer.job, answer.plan_version)

    def _set_clock(self, broker_wall_s: float) -> None:
        clock = self.box.clock
        before_s = clock.ahead_s
        clock.set_by(broker_wall_s)
        if abs(clock.ahead_s - before_s) > CLOCK_OFF_S:
            self.box.notice(clock_note(clock.ahead_s))

    async def close(self) -> None:
        await self.near.close()
        await self.acceptor.close()
        await self.listener.close()
        await self.transport.close()


async def stay(
    acceptor: JobAcceptor,
    entering: Callable[[Callable[[bool], None]], Registration],
    stop: asyncio.Event,
    pausing: asyncio.Future[str],
) -> bool:
    """Register, stay, and leave. Return True if lending only pauses, for the reason that `pausing` brings."""
    leaving = asyncio.Event()
    acceptor.closing = False

    def leave(drain: bool) -> None:
        acceptor.closing = True
        log.info("asked to leave%s", " after the work at hand" if drain and acceptor.jobs else "")
        if not drain and leaving.is_set() and acceptor.jobs:
            # A plan without this peer exists; its driver will put it into force.
            asyncio.get_running_loop().call_later(HAND_OVER_S, acceptor.idle.set)
        elif not drain:
            acceptor.idle.set()
        leaving.set()

    registration = entering(leave)
    keeping = asyncio.create_task(registration.run())
    paused = False
    try:
        await first_of(stop.wait(), _drained(leaving, acceptor), keeping, asyncio.wait([pausing]))
        if pausing.done() and not (stop.is_set() or leaving.is_set() or keeping.done()):
            paused = True
            await registration.leave(drain=True)
            leave(drain=True)
            await first_of(stop.wait(), _drained(leaving, acceptor), keeping)
        await registration.leave()
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    if paused:
        acceptor.clear()
    return paused and not stop.is_set()


def clock_note(ahead_s: float) -> str:
    """Return the note for the machine's owner about a clock that is `ahead_s` ahead of the broker's."""
    if abs(ahead_s) <= CLOCK_OFF_S:
        return "This machine's clock agrees with the broker's again."
    off = f"{abs(ahead_s) / 60:.0f} minutes" if abs(ahead_s) < 7200 else f"{abs(ahead_s) / 3600:.1f} hours"
    return (
        f"This machine's clock is {off} {'ahead of' if ahead_s > 0 else 'behind'} the broker's. Jobs run all the same, "
        "by the broker's time. Set the clock (switch on its synchronisation): schedules and logs go by it."
    )


async def _drained(leaving: asyncio.Event, acceptor: JobAcceptor) -> None:
    await leaving.wait()
    await acceptor.idle.wait()


async def first_of(*waits: Coroutine[object, object, object] | asyncio.Task[Any]) -> None:
    """Wait until one is done. Coroutines are cancelled then, tasks go on. Exceptions of tasks are raised here."""
    begun = {wait: asyncio.create_task(wait) for wait in waits if isinstance(wait, Coroutine)}
    tasks = [wait for wait in waits if isinstance(wait, asyncio.Task)]
    try:
        done, _ = await asyncio.wait([*begun.values(), *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in begun.values():
            task.cancel()
    for task in done:
        task.result()
