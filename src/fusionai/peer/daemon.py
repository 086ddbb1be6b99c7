"""The daemon behind `fusion join`: from an invitation to a lent machine, until told to leave.

The loop is `run_peer`: join, measure, listen, register, then serve until `stop`. Decides nothing about jobs.

Neighbours: `peer.door` lets jobs in, `peer.registration` keeps the lease, `transport.enrolment` joins the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

from fusionai.backends.registry import open_backend
from fusionai.execution.compute import ComputeThread
from fusionai.execution.host import Host
from fusionai.peer.door import Door
from fusionai.peer.measurement import measured_device
from fusionai.peer.options import PeerOptions, PeerReady
from fusionai.peer.profile import make_profile, measured_link
from fusionai.peer.registration import Registration
from fusionai.primitives.clock import SystemClock
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.enrolment import Membership, enrol, load_membership
from fusionai.transport.tcp import TcpTransport
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

HAND_OVER_S: Final = 2.5
"""How long a peer that drained stays at most when the broker has let it go: its next heartbeat would be refused."""


async def run_peer(options: PeerOptions, *, announce: Callable[[PeerReady], None], stop: asyncio.Event) -> None:
    """Lend this machine until `stop` is set, the pool's broker refuses it, or its owner asks it to leave."""
    membership = await join(options)
    compute = ComputeThread(options.share)
    backend, _ = await compute.run(
        lambda: open_backend(options.backend, device=options.device, threads=options.threads)
    )
    clock = SystemClock()
    (report, measured_at_s), _ = await compute.run(
        lambda: measured_device(backend, options.home, share=options.share, anew=options.measure, clock=clock)
    )
    await compute.run(backend.warm_up)
    transport = TcpTransport(membership.credentials)
    link = await measured_link(transport, membership.broker_addresses, clock)
    profile = make_profile(options, membership.peer, report, link)
    host = Host(
        peer=membership.peer,
        backend=backend,
        compute=compute,
        transport=transport,
        fingerprint=report.fingerprint,
        clock=clock,
        memory_limit_bytes=profile.memory_bytes,
        weights=WeightStore(options.home / "weights"),
    )
    door = Door(host, membership.credentials.authority_key)
    listener = await transport.listen(door.accept, host=options.host, port=options.port)
    addresses = options.advertise or listener.addresses
    leaving = asyncio.Event()

    def registered(answer: wire.Registered) -> None:
        announce(PeerReady(membership.peer, answer.pool, addresses, profile, measured_at_s))

    def leave(drain: bool) -> None:
        door.closing = True
        log.info("asked to leave%s", " after the work at hand" if drain and door.jobs else "")
        if not drain and leaving.is_set() and door.jobs:
            # The plan without this peer is made; its driver says when it is in force.
            asyncio.get_running_loop().call_later(HAND_OVER_S, door.idle.set)
        elif not drain:
            door.idle.set()
        leaving.set()

    registration = Registration(
        transport,
        membership.broker_addresses,
        boot=time.time_ns(),
        profile=profile,
        addresses=addresses,
        jobs=lambda: door.jobs,
        on_registered=registered,
        on_leave=leave,
        on_lost=door.clear,
    )
    keeping = asyncio.create_task(registration.run())
    try:
        await _first_of(stop, _drained(leaving, door), keeping)
        await registration.leave()
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await door.close()
        await listener.close()
        compute.close()


async def join(options: PeerOptions) -> Membership:
    """With an invitation join (again); without one, be who this machine was before."""
    if options.invitation is not None:
        return await enrol(options.invitation, options.home, "provider")
    return load_membership(options.home)


async def _drained(leaving: asyncio.Event, door: Door) -> None:
    await leaving.wait()
    await door.idle.wait()


async def _first_of(stop: asyncio.Event, drained: Coroutine[object, object, None], keeping: asyncio.Task[None]) -> None:
    """Whichever comes first; what the registration raised is raised here."""
    waits: list[asyncio.Task[object]] = [asyncio.create_task(stop.wait()), asyncio.create_task(drained)]
    done, _ = await asyncio.wait({*waits, keeping}, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if keeping in done:
        keeping.result()
