"""The daemon behind `fusion join`: joins the pool and lends the devices of this box until it is stopped.

Each device is a member of its own (`peer.device`): own key, own worker process, own place in plans. The first has the
machine's key; the others are certified on its behalf. They share the machine's line, clock, weights and schedule.
`run_peer` opens them and keeps them in the pool whenever the machine is lent. `peer.lending` says when that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from fusionai.peer.cards import OthersCardLoad, find_cards
from fusionai.peer.device import LentBox, LentDevice, OpenWorker, first_of, ready_worker
from fusionai.peer.lending import Lending, PeerOptions, PeerReady, options_of_devices
from fusionai.primitives.clock import Clock, PoolClock, SystemClock
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.problem.types import Link
from fusionai.storage.atomic import InUse, JobLock
from fusionai.storage.weight_manifest import WeightsInFiles
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.enrolment import Membership, enrol, further_membership, load_membership
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)
LOCK: Final = "lending.lock"
"""File in the machine's home that a lending process has locked."""


async def run_peer(
    options: PeerOptions,
    *,
    announce: Callable[[PeerReady], None],
    stop: asyncio.Event,
    notice: Callable[[str], None] = log.info,
) -> None:
    """Lend this machine until `stop` is set, the pool's broker refuses it, or its owner asks every device to leave.
    `announce` is called for each device whenever it has registered; `notice` gets a sentence when lending pauses or
    resumes."""
    with _lent_once(options.home):
        await _lend(options, announce, stop, notice)


@contextmanager
def _lent_once(home: Path) -> Iterator[None]:
    """Hold the lock of a lending process: a second one would take the first one's place in the pool, with its key.
    Raises `UsageError`."""
    try:
        lock = JobLock(home / LOCK)
    except InUse as busy:
        raise UsageError(
            f"this machine is lent already: process {busy.holder} runs `fusion join` with the home {home}.",
            hint="Stop that process first, or give this one a directory of its own with --home.",
        ) from None
    with lock:
        yield


async def _lend(
    options: PeerOptions, announce: Callable[[PeerReady], None], stop: asyncio.Event, notice: Callable[[str], None]
) -> None:
    machine = await join(options)
    clock = SystemClock()
    workers = await _ready_workers(options, clock)
    devices: list[LentDevice] = []
    try:
        box = _box(options, machine, clock, notice, len(workers))
        line: tuple[Link, Link] | None = None
        for worker in workers:
            home = worker.options.home
            own = machine if home == options.home else await further_membership(machine, home, "provider")
            devices.append(await LentDevice.open(box, worker, own, line))
            line = devices[0].profile.uplink, devices[0].profile.downlink
        for device in devices:
            device.siblings = tuple(
                wire.Near(other.membership.peer, other.addresses) for other in devices if other is not device
            )
        lending = Lending(
            options.schedule,
            pause_when_busy=options.pause_when_busy,
            clock=clock,
            card_load=_card_load(workers, notice) if options.pause_when_busy else None,
        )
        while await _lent(lending, stop, notice) and await _stay(devices, announce, lending, stop, notice):
            pass
    finally:
        for device in devices:
            await device.close()
        for worker in workers:
            await worker.close()


def _card_load(workers: Sequence[OpenWorker], notice: Callable[[str], None]) -> Callable[[float], float] | None:
    """Return what other programs use of the lent cards; None if none is lent, or none can be read."""
    lent = [worker for worker in workers if worker.backend.device != "cpu"]
    if not lent:
        return None
    cards = find_cards([worker.report.card for worker in lent])
    if not cards:
        notice("Other programs' use of the card can't be read here: --pause-when-busy watches the processor only.")
        return None
    return OthersCardLoad(cards, lambda: sum(worker.compute.busy_s for worker in lent)).measured


async def _ready_workers(options: PeerOptions, clock: Clock) -> list[OpenWorker]:
    """Start the workers at the same time: each is measured beside the others, as it will compute. Which devices `all`
    means is known once the first worker has loaded its framework."""
    workers = await _each(options_of_devices(options), clock)
    if options.device == "all":
        every = options_of_devices(options, workers[0].backend.devices)
        first = replace(workers[0], options=every[0])
        try:
            return [first, *await _each(every[1:], clock)]
        except BaseException:
            await first.close()
            raise
    return workers


async def _each(options: Sequence[PeerOptions], clock: Clock) -> list[OpenWorker]:
    """Start a worker for each. If one can't be started, the others are closed and its error is raised."""
    outcomes = await asyncio.gather(*(ready_worker(one, clock) for one in options), return_exceptions=True)
    workers = [one for one in outcomes if isinstance(one, OpenWorker)]
    for failure in outcomes:
        if isinstance(failure, BaseException):
            for worker in workers:
                await worker.close()
            raise failure
    return workers


def _box(
    options: PeerOptions, machine: Membership, clock: Clock, notice: Callable[[str], None], devices: int
) -> LentBox:
    beside = None if options.weights_beside is None else WeightsInFiles(options.weights_beside).find
    rates = TransferLimits(
        upload_bytes_per_s=options.upload_limit_bytes_per_s, download_bytes_per_s=options.download_limit_bytes_per_s
    )
    return LentBox(
        machine=machine,
        rates=rates,
        clock=PoolClock(clock),
        weights=WeightStore(options.home / "weights", options.weights_cache_bytes, keeps_free=True, beside=beside),
        host_memory_bytes=psutil.virtual_memory().available // 2 // devices,
        notice=notice,
    )


async def _lent(lending: Lending, stop: asyncio.Event, notice: Callable[[str], None]) -> bool:
    """Wait until the machine is lent. Return False if the daemon stops first."""
    if (why := lending.why_not()) is not None:
        notice(f"Not lent now: {why}.")
        await first_of(stop.wait(), lending.until(lent=True))
    return not stop.is_set()


async def _stay(
    devices: Sequence[LentDevice],
    announce: Callable[[PeerReady], None],
    lending: Lending,
    stop: asyncio.Event,
    notice: Callable[[str], None],
) -> bool:
    """Keep the devices in the pool until all have left, `stop` is set, or lending pauses. Return True if it only
    pauses."""
    pausing: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def watch() -> None:
        why = await lending.until(lent=False)
        handing = " Handing its work over." if any(device.acceptor.jobs for device in devices) else ""
        notice(f"Lending pauses: {why}.{handing}")
        pausing.set_result(why or "")

    watching = None if lending.always else asyncio.create_task(watch())
    staying = [asyncio.create_task(device.stay(announce, stop, pausing)) for device in devices]
    try:
        paused = await asyncio.gather(*staying)
    finally:
        for task in (*staying, *([] if watching is None else [watching])):
            task.cancel()
        await asyncio.wait(staying)
    return any(paused)


async def join(options: PeerOptions) -> Membership:
    """Join with the invitation, or load the kept membership if there is none."""
    if options.invitation is not None:
        return await enrol(options.invitation, options.home, "provider")
    return load_membership(options.home)
