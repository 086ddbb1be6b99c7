"""What the job owner's process does in both kinds of job: measure itself, name members, run tasks beside the job.

`client.training.train` and `client.serving.serve` run the jobs with it; `client.pool.session` talks to the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fusionai.backends.interface import Backend, DeviceReport
from fusionai.backends.registry import open_backend
from fusionai.client.pool.job_trust import job_trust
from fusionai.client.pool.session import OWNER_DIRECTORY, PoolMember, PoolSession
from fusionai.execution.host import ComputeThread, Host
from fusionai.execution.measurement import FILE, measured_device
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.ids import PeerId
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.transport.enrolment import Membership
from fusionai.wire.messages import StopNotice

STOPPED_BY_MEMBER: Final = "fusion stop"
GAVE_WAY: Final = "it gave way to a more urgent job"
"""Why the broker stopped a job, in words for its owner."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for the user about the progress."""

    text: str


@dataclass(frozen=True, slots=True)
class Met:
    """Names and addresses of machines that were not known before, by peer id."""

    names: dict[str, str]
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


class KnownMembers:
    """Names and profiles of the pool's members, from all listings so far. `on_met` receives new names."""

    def __init__(self, on_met: Callable[[Met], None]) -> None:
        self._on_met = on_met
        self.names: dict[str, str] = {}
        self.profiles: dict[str, PeerProfile] = {}

    def see(self, members: tuple[PoolMember, ...]) -> None:
        self.profiles.update((one.view.peer, one.profile) for one in members)
        new = {
            one.view.peer: one.profile.name for one in members if one.profile.name != self.names.get(one.view.peer, "")
        }
        if new:
            self.names.update(new)
            self._on_met(Met(new, {one.view.peer: one.view.addresses for one in members if one.view.peer in new}))


class OwnerProcess:
    """One job in its owner's process: its lines for the user, its trust, the members that it knows, its session with
    the pool. `stopped` is set when the broker asks the job to stop, because of `stop_reason`."""

    def __init__(
        self,
        home: Path,
        membership: Membership,
        level: PrivacyLevel,
        on_event: Callable[[Noted | Met], None],
        *,
        confidential: bool,
    ) -> None:
        self.peer = membership.peer
        self.trust = job_trust(home, membership, level, confidential=confidential)
        self.known = KnownMembers(on_event)
        self.clock = SystemClock()
        self.stopped = asyncio.Event()
        self.stop_reason = ""
        self.pool = PoolSession(membership, trust=self.trust, on_stop=self._stop, on_members=self.known.see)
        self._on_event = on_event

    def note(self, text: str) -> None:
        self._on_event(Noted(text))

    def _stop(self, notice: StopNotice) -> None:
        if notice.gives_way_to and self.stop_reason != STOPPED_BY_MEMBER:
            self.note(f"the broker asks this job to give way to {notice.gives_way_to}, which is more urgent")
            self.stop_reason = GAVE_WAY
        else:
            self.stop_reason = STOPPED_BY_MEMBER
        self.stopped.set()

    def note_trust(self, plan: Plan) -> None:
        """Note how many of the plan's machines are trusted, if the owner has a trust list."""
        if (sentence := self.trust.sentence(plan)) is not None:
            self.note(sentence)

    def host(self, machine: OwnMachine) -> Host:
        return Host(
            peer=self.peer,
            backend=machine.backend,
            compute=machine.compute,
            transport=self.pool.transport,
            fingerprint=machine.report.fingerprint,
            clock=self.clock,
            seal=self.trust.seal,
            authority_key=self.pool.membership.credentials.authority_key,
        )


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """This machine's backend with its measured speeds, and the thread that computes with it."""

    compute: ComputeThread
    backend: Backend
    report: DeviceReport


@asynccontextmanager
async def own_machine(
    device: str, threads: int | None, home: Path, note: Callable[[str], None], *, shared: Path | None = None
) -> AsyncIterator[OwnMachine]:
    """Open the torch backend and measure it, or take the measurement kept in the owner's part of `home`, which is said
    by `note`. It computes in a thread that lasts as long as the block. `shared`: see `measured_device`."""
    compute = ComputeThread()
    owner_home = home / OWNER_DIRECTORY

    def measured() -> tuple[Backend, DeviceReport, float | None]:
        backend = open_backend("torch", device=device, threads=threads)
        return backend, *measured_device(backend, owner_home, anew=False, clock=SystemClock(), shared=shared)

    try:
        (backend, report, measured_at_s), _ = await compute.run(measured)
        if measured_at_s is not None:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured_at_s))
            note(f"using this machine's speed as measured on {when}; delete {owner_home / FILE} to measure it again")
        yield OwnMachine(compute, backend, report)
    finally:
        compute.close()


def owner_profile(peer: PeerId, report: DeviceReport, memory_bytes: int | None = None) -> PeerProfile:
    """Return the profile of this machine as a job's owner. `memory_bytes`: memory for the job, None: all that it has,
    or on a card all that is free, because a card's memory can't be swapped out."""
    return PeerProfile(
        peer=peer,
        name="job owner",
        backend=report.backend,
        device=report.device,
        device_name=report.device_name,
        flops_per_s=report.flops_per_s,
        pace=report.pace,
        memory_bandwidth_bytes_per_s=report.memory_bandwidth_bytes_per_s,
        serving=report.serving,
        attention_flops_per_s=report.attention_flops_per_s,
        memory_bytes=(report.free_bytes if report.card else report.memory_bytes)
        if memory_bytes is None
        else memory_bytes,
        threads=report.threads,
        fingerprint=report.fingerprint,
        roles=("owner",),
    )


@contextmanager
def beside(*work: Coroutine[object, object, None]) -> Iterator[None]:
    """Run coroutines as tasks during the block and cancel them at its end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
