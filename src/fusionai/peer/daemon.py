"""The daemon behind `fusion join`: joins the pool with an invitation and lends this machine until it is stopped.

`run_peer` joins, measures, listens, and stays in the pool whenever the machine is lent. `peer.door` accepts jobs,
`peer.registration` keeps the lease, `peer.lending` says when the machine is lent, `transport.enrolment` joins the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from fusionai.backends.registry import open_backend
from fusionai.execution.host import ComputeThread, Host, return_code_pages, return_freed_memory
from fusionai.peer.door import JobAcceptor
from fusionai.peer.lending import Lending, PeerOptions, PeerReady
from fusionai.peer.profile import UNMEASURED, NearLinks, make_profile, measured_device, measured_links
from fusionai.peer.registration import Registration
from fusionai.primitives.clock import PoolClock, SystemClock
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
    compute = ComputeThread(options.share)
    backend, _ = await compute.run(
        lambda: open_backend(options.backend, device=options.device, threads=options.threads)
    )
    compute.works_in(backend.works_in)
    clock = SystemClock()
    pool_clock = PoolClock(clock)
    (report, measured_at_s), _ = await compute.run(
        lambda: measured_device(backend, options.home, share=options.share, anew=options.measure, clock=clock)
    )
    await compute.run(backend.warm_up)
    return_freed_memory()
    return_code_pages()
    rates = TransferLimits(
        upload_bytes_per_s=options.upload_limit_bytes_per_s, download_bytes_per_s=options.download_limit_bytes_per_s
    )
    transport = PeerTransport(membership.credentials, membership.broker_addresses, rates=rates)
    links = await measured_links(transport, membership.broker_addresses, clock)
    if links[0] is not UNMEASURED:
        rates.uplink.measured(links[0].bandwidth_bytes_per_s)
    profile = make_profile(options, membership.peer, report, *links, carried_endorsements(options.home))
    host = Host(
        peer=membership.peer,
        backend=backend,
        compute=compute,
        transport=transport,
        fingerprint=report.fingerprint,
        clock=pool_clock,
        memory_limit_bytes=profile.memory_bytes,
        weights=WeightStore(
            options.home / "weights",
            beside=None if options.weights_beside is None else WeightsInFiles(options.weights_beside).find,
        ),
    )
    door = JobAcceptor(host, membership.credentials.authority_key)
    listener = await transport.listen(door.accept, host=options.host, port=options.port)

    async def candidates_now() -> tuple[str, ...]:
        return await candidates(
            *(transport, listener, membership.broker_addresses), advertise=options.advertise, relay=options.relay
        )

    addresses = await candidates_now()
    near = NearLinks(transport=transport, clock=clock, is_busy=lambda: bool(door.jobs))
    lending = Lending(options.schedule, pause_when_busy=options.pause_when_busy, clock=clock)

    def set_clock(broker_wall_s: float) -> None:
        before_s = pool_clock.ahead_s
        pool_clock.set_by(broker_wall_s)
        if abs(pool_clock.ahead_s - before_s) > CLOCK_OFF_S:
            notice(clock_note(pool_clock.ahead_s))

    def registered(answer: wire.Registered) -> None:
        announce(PeerReady(membership.peer, answer.pool, addresses, profile, measured_at_s))
        near.look(answer.near)

    def entering(leave: Callable[[bool], None]) -> Registration:
        return Registration(
            transport,
            membership.broker_addresses,
            boot=time.time_ns(),
            profile=profile,
            addresses=addresses,
            jobs=lambda: door.jobs,
            on_registered=registered,
            on_leave=leave,
            on_lost=door.clear,
            on_meet=lambda notice, broker: transport.answer(notice, (broker.host, broker.port)),
            links=lambda: near.among(transport.links),
            addresses_now=candidates_now,
            moved=lambda: transport.moved,
            endorsements=lambda: carried_endorsements(options.home),
            on_time=set_clock,
        )

    try:
        while await _lent(lending, stop, notice) and await _stay(door, entering, lending, stop, notice):
            pass
    finally:
        await near.close()
        await door.close()
        await listener.close()
        await transport.close()
        compute.close()


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
    door: JobAcceptor,
    entering: Callable[[Callable[[bool], None]], Registration],
    lending: Lending,
    stop: asyncio.Event,
    notice: Callable[[str], None],
) -> bool:
    """Register, stay, and leave. Return True if lending only pauses."""
    leaving = asyncio.Event()
    door.closing = False

    def leave(drain: bool) -> None:
        door.closing = True
        log.info("asked to leave%s", " after the work at hand" if drain and door.jobs else "")
        if not drain and leaving.is_set() and door.jobs:
            # A plan without this peer exists; its driver will put it into force.
            asyncio.get_running_loop().call_later(HAND_OVER_S, door.idle.set)
        elif not drain:
            door.idle.set()
        leaving.set()

    registration = entering(leave)
    keeping = asyncio.create_task(registration.run())
    kept = asyncio.create_task(lending.until(lent=False) if not lending.always else asyncio.Event().wait())
    paused = False
    try:
        await _first_of(stop.wait(), _drained(leaving, door), keeping, kept)
        if kept.done() and not (stop.is_set() or leaving.is_set() or keeping.done()):
            paused = True
            notice(f"Lending pauses: {kept.result()}.{' Handing its work over.' if door.jobs else ''}")
            await registration.leave(drain=True)
            leave(drain=True)
            await _first_of(stop.wait(), _drained(leaving, door), keeping)
        await registration.leave()
    finally:
        kept.cancel()
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    if paused:
        door.clear()
    return paused and not stop.is_set()


async def join(options: PeerOptions) -> Membership:
    """Join with the invitation, or load the kept membership if there is none."""
    if options.invitation is not None:
        return await enrol(options.invitation, options.home, "provider")
    return load_membership(options.home)


async def _drained(leaving: asyncio.Event, door: JobAcceptor) -> None:
    await leaving.wait()
    await door.idle.wait()


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
