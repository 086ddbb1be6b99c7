"""The daemon behind `fusion join`: joins the pool with an invitation and lends this machine until it is stopped.

`run_peer` joins, measures, listens, and stays in the pool whenever the machine is lent. `peer.acceptor` accepts jobs,
`peer.registration` keeps the lease, `peer.lending` says when the machine is lent, `transport.enrolment` joins the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fusionai.backends.interface import Backend, DeviceReport
from fusionai.backends.memory import return_code_pages, return_freed_memory
from fusionai.backends.worker.client import WorkerBackend, WorkerOptions
from fusionai.execution.host import ComputeThread, Host
from fusionai.peer.acceptor import JobAcceptor
from fusionai.peer.lending import Lending, PeerOptions, PeerReady
from fusionai.peer.profile import (
    UNMEASURED,
    NearLinks,
    lent_memory_bytes,
    make_profile,
    measured_device,
    measured_links,
)
from fusionai.peer.registration import Registration
from fusionai.primitives.clock import Clock, PoolClock, SystemClock
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.storage.weight_manifest import WeightsInFiles
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.enrolment import Membership, enrol, load_membership
from fusionai.transport.peer_transport import PeerTransport
from fusionai.transport.routes.addresses import relay_candidates
from fusionai.transport.routes.tcp import TcpListener
from fusionai.transport.security.trust import carried_endorsements
from fusionai.wire import messages as wire


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


log = logging.getLogger(__name__)

CLOCK_OFF_S: Final = 30.0
"""A clock this far from the broker's is reported: certificates and schedules still count by it."""
HAND_OVER_S: Final = 2.5
"""How long a drained peer stays at most after the broker released it, in seconds. Its next heartbeat would be
refused."""


async def run_peer(
    options: PeerOptions,
    *,
    announce: Callable[[PeerReady], None],
    stop: asyncio.Event,
    notice: Callable[[str], None] = log.info,
) -> None:
    """Lend this machine until `stop` is set, the pool's broker refuses it, or its owner asks it to leave. `notice`
    gets a sentence when lending pauses or resumes."""
    membership = await join(options)
    compute, clock = ComputeThread(options.share), SystemClock()
    backend, report, measured_at_s = await _ready_device(options, compute, clock)
    rates = TransferLimits(
        upload_bytes_per_s=options.upload_limit_bytes_per_s, download_bytes_per_s=options.download_limit_bytes_per_s
    )
    transport = PeerTransport(membership.credentials, membership.broker_addresses, rates=rates)
    links = await measured_links(transport, membership.broker_addresses, clock)
    if links[0] is not UNMEASURED:
        rates.uplink.measured(links[0].bandwidth_bytes_per_s)
    profile = make_profile(options, membership.peer, report, *links, carried_endorsements(options.home))
    beside = None if options.weights_beside is None else WeightsInFiles(options.weights_beside).find
    pool_clock = PoolClock(clock)
    host = Host(
        peer=membership.peer,
        backend=backend,
        compute=compute,
        transport=transport,
        fingerprint=report.fingerprint,
        clock=pool_clock,
        memory_limit_bytes=profile.memory_bytes,
        weights=WeightStore(options.home / "weights", beside=beside),
    )
    acceptor = JobAcceptor(host, membership.credentials.authority_key)
    listener = await transport.listen(acceptor.accept, host=options.host, port=options.port)
    near = NearLinks(transport=transport, clock=clock, is_busy=lambda: bool(acceptor.jobs))
    lent = _LentMachine(options, membership, transport, listener, acceptor, near, profile, notice, clock=pool_clock)
    lending = Lending(options.schedule, pause_when_busy=options.pause_when_busy, clock=clock)
    addresses = await lent.candidates()

    def registered(answer: wire.Registered) -> None:
        announce(PeerReady(membership.peer, answer.pool, addresses, profile, measured_at_s))
        near.look(answer.near)

    entering = partial(lent.registration, addresses, registered)
    try:
        while await _lent(lending, stop, notice) and await _stay(acceptor, entering, lending, stop, notice):
            pass
    finally:
        await near.close()
        await acceptor.close()
        await listener.close()
        await transport.close()
        await compute.run(backend.close)
        compute.close()


def open_worker(options: PeerOptions, *, confined: bool = True) -> Backend:
    """Start the process that computes for this machine. One that is not confined may write compiled kernels to disk,
    so it measures before any job is here, and is closed afterwards."""
    return WorkerBackend(
        WorkerOptions(backend=options.backend, device=options.device, threads=options.threads, confined=confined)
    )


async def _ready_device(
    options: PeerOptions, compute: ComputeThread, clock: Clock
) -> tuple[Backend, DeviceReport, float | None]:
    """Return the backend, warmed up, its report, and when its speeds were measured (None: now)."""

    def measured() -> tuple[Backend, DeviceReport, float | None]:
        backend = open_worker(options)
        report, measured_at_s = measured_device(
            backend,
            options.home,
            share=options.share,
            anew=options.measure,
            clock=clock,
            measuring=lambda: open_worker(options, confined=False),
        )
        backend.limit_memory(lent_memory_bytes(report, options.memory_limit_bytes))
        backend.warm_up()
        return backend, report, measured_at_s

    (backend, report, measured_at_s), _ = await compute.run(measured)
    compute.works_in(backend.works_in, backend.used_s)
    return_freed_memory()
    return_code_pages()
    return backend, report, measured_at_s


@dataclass(frozen=True, slots=True)
class _LentMachine:
    """What registers with the broker: this machine's addresses, profile and jobs."""

    options: PeerOptions
    membership: Membership
    transport: PeerTransport
    listener: TcpListener
    acceptor: JobAcceptor
    near: NearLinks
    profile: PeerProfile
    notice: Callable[[str], None]
    clock: PoolClock

    async def candidates(self) -> tuple[str, ...]:
        options, brokers = self.options, self.membership.broker_addresses
        return await candidates(
            self.transport, self.listener, brokers, advertise=options.advertise, relay=options.relay
        )

    def registration(
        self,
        addresses: tuple[str, ...],
        on_registered: Callable[[wire.Registered], None],
        on_leave: Callable[[bool], None],
    ) -> Registration:
        return Registration(
            self.transport,
            self.membership.broker_addresses,
            boot=time.time_ns(),
            profile=self.profile,
            addresses=addresses,
            jobs=lambda: self.acceptor.jobs,
            on_registered=on_registered,
            on_leave=on_leave,
            on_lost=self.acceptor.clear,
            on_meet=lambda notice, broker: self.transport.answer(notice, (broker.host, broker.port)),
            links=lambda: self.near.among(self.transport.links),
            addresses_now=self.candidates,
            moved=lambda: self.transport.moved,
            endorsements=lambda: carried_endorsements(self.options.home),
            on_time=self.set_clock,
        )

    def set_clock(self, broker_wall_s: float) -> None:
        before_s = self.clock.ahead_s
        self.clock.set_by(broker_wall_s)
        if abs(self.clock.ahead_s - before_s) > CLOCK_OFF_S:
            self.notice(clock_note(self.clock.ahead_s))


def clock_note(ahead_s: float) -> str:
    """Return the note for the machine's owner about a clock that is `ahead_s` ahead of the broker's."""
    if abs(ahead_s) <= CLOCK_OFF_S:
        return "This machine's clock agrees with the broker's again."
    off = f"{abs(ahead_s) / 60:.0f} minutes" if abs(ahead_s) < 7200 else f"{abs(ahead_s) / 3600:.1f} hours"
    return (
        f"This machine's clock is {off} {'ahead of' if ahead_s > 0 else 'behind'} the broker's. Jobs run all the same, "
        "by the broker's time. Set the clock (switch on its synchronisation): schedules and logs go by it."
    )


async def _lent(lending: Lending, stop: asyncio.Event, notice: Callable[[str], None]) -> bool:
    """Wait until the machine is lent. Return False if the daemon stops first."""
    if (why := lending.why_not()) is not None:
        notice(f"Not lent now: {why}.")
        await _first_of(stop.wait(), lending.until(lent=True))
    return not stop.is_set()


async def _stay(
    acceptor: JobAcceptor,
    entering: Callable[[Callable[[bool], None]], Registration],
    lending: Lending,
    stop: asyncio.Event,
    notice: Callable[[str], None],
) -> bool:
    """Register, stay, and leave. Return True if lending only pauses."""
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
    kept = asyncio.create_task(lending.until(lent=False) if not lending.always else asyncio.Event().wait())
    paused = False
    try:
        await _first_of(stop.wait(), _drained(leaving, acceptor), keeping, kept)
        if kept.done() and not (stop.is_set() or leaving.is_set() or keeping.done()):
            paused = True
            notice(f"Lending pauses: {kept.result()}.{' Handing its work over.' if acceptor.jobs else ''}")
            await registration.leave(drain=True)
            leave(drain=True)
            await _first_of(stop.wait(), _drained(leaving, acceptor), keeping)
        await registration.leave()
    finally:
        kept.cancel()
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    if paused:
        acceptor.clear()
    return paused and not stop.is_set()


async def join(options: PeerOptions) -> Membership:
    """Join with the invitation, or load the kept membership if there is none."""
    if options.invitation is not None:
        return await enrol(options.invitation, options.home, "provider")
    return load_membership(options.home)


async def _drained(leaving: asyncio.Event, acceptor: JobAcceptor) -> None:
    await leaving.wait()
    await acceptor.idle.wait()


async def _first_of(*waits: Coroutine[object, object, object] | asyncio.Task[Any]) -> None:
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
