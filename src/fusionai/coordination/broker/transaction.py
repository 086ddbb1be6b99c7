"""One decision in progress: the broker state so far, its facts and commands, and steps that several decisions share.

The transaction is dropped if the decision refuses. `decisions`, `presence` and `assignment` decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from fusionai.coordination.broker import events
from fusionai.coordination.broker.events import Fact
from fusionai.coordination.broker.job import Job
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.pool import Pool, advance
from fusionai.coordination.broker.requests import (
    Command,
    Notify,
    Refusal,
)
from fusionai.coordination.broker.state import PRESENT, BrokerRules, BrokerState, Lease
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.wire.messages import LeaveNotice, StopNotice

LARGE: Final = 64
"""Entries from which a table is overlaid instead of copied (chosen)."""
OVERLAID: Final = 32
"""Entries of an overlay after which the table is copied: about the square root of 1,000 members."""

K = TypeVar("K")
V = TypeVar("V")


class Transaction:
    """The transaction of one request. Mutable until the request is decided."""

    def __init__(self, desk: BrokerState, now_s: float, wall_s: float) -> None:
        self.desk = desk
        self.now_s = now_s
        self.wall_s = wall_s
        self.facts: list[Fact] = []
        self.commands: list[Command] = []

    @property
    def pool(self) -> Pool:
        return self.desk.pool

    @property
    def rules(self) -> BrokerRules:
        return self.desk.rules

    def record(self, fact: Fact) -> None:
        self.desk = replace(self.desk, pool=advance(self.pool, fact))
        self.facts.append(fact)

    def keep(self, **tables: Any) -> None:
        """Put these tables into the desk. Nothing is copied if they are the desk's own."""
        changed = {name: table for name, table in tables.items() if getattr(self.desk, name) is not table}
        if changed:
            self.desk = replace(self.desk, **changed)

    def put(self, table: str, key: str, value: object) -> None:
        """Set an entry of one of the desk's tables."""
        self.keep(**{table: with_entry(getattr(self.desk, table), key, value)})

    def drop(self, key: str, *tables: str) -> None:
        """Remove an entry from these tables of the desk."""
        self.keep(**{table: without_entry(getattr(self.desk, table), key) for table in tables})

    def member(self, peer: PeerId) -> Member:
        member = self.pool.members.get(peer)
        if member is None:
            raise Refusal("unknown_peer", f"{short(peer)} has not joined this pool; join with an invitation first.")
        return member

    def note_job(self, member: Member, text: str) -> None:
        if member.job is not None:
            self.record(events.JobNoted(at_s=self.wall_s, job=member.job, text=text))

    def forget(self, peer: PeerId) -> None:
        self.drop(peer, "leases", "links", "leftovers", "dismissed")

    def see_off(self) -> None:
        """Notify members that drained and are now released that their processes may end."""
        for peer in [peer for peer in self.desk.leases if self.pool.members[peer].phase not in PRESENT]:
            link = self.desk.links.get(peer)
            if link is not None:
                self.commands.append(Notify(link, LeaveNotice(drain=False)))
            self.forget(peer)

    def attend(self, name: JobId, connection: int) -> None:
        """Record that the job's driver, or the owner of a queued job, uses this connection. `StopNotice` is sent
        there."""
        if not self.pool.jobs[name].attended:
            self.record(events.JobAttended(at_s=self.wall_s, job=name))
        self.put("drivers", name, connection)
        self.drop(name, "waits")

    def stop(self, job: Job, sender: PeerId, *, gives_way_to: str = "", notify: bool = True) -> None:
        """Record that the job was asked to stop, and `notify` its driver. The first stop starts the driver's grace
        period, which no later one prolongs. A job without an owner in touch ends at once."""
        self.record(events.JobStopAsked(at_s=self.wall_s, job=job.job, by=sender, gives_way_to=gives_way_to))
        if job.job not in self.desk.stops:
            self.put("stops", job.job, Lease(self.rules.stop_grace_s, self.now_s))
        driver = self.desk.drivers.get(job.job)
        if not notify:
            return
        if driver is not None:
            self.ask_driver_to_stop(job.job, driver)
        elif not job.attended:
            self.fail(job, "stopped while nobody attended to it")

    def ask_driver_to_stop(self, name: JobId, connection: int) -> None:
        notice = StopNotice(job=name, gives_way_to=self.pool.jobs[name].gives_way_to)
        self.commands.append(Notify(connection, notice))

    def dismiss(self, name: JobId) -> None:
        """Forget what is kept in memory about a job that has ended."""
        self.drop(name, "drivers", "waits", "stops", "progress", "turns")
        self.see_off()

    def fail(self, job: Job, why: str) -> None:
        step = self.desk.progress.get(job.job, job.step)
        self.record(events.JobFailed(at_s=self.wall_s, job=job.job, step=step, detail=why))
        self.dismiss(job.job)


class _Overlaid(Mapping[K, V]):
    """A large table with other values for a few of its keys, so that one heartbeat does not copy the leases of all
    members."""

    def __init__(self, base: Mapping[K, V], recent: Mapping[K, V]) -> None:
        self.base = base
        self.recent = recent

    def __getitem__(self, key: K) -> V:
        return self.recent[key] if key in self.recent else self.base[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def with_entry(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """Return the mapping with this entry. Keys keep their order."""
    known = mapping.get(key)
    if known == value and known is not None:
        return mapping
    if known is None or len(mapping) < LARGE:
        return {**mapping, key: value}
    if not isinstance(mapping, _Overlaid):
        return _Overlaid(mapping, {key: value})
    if len(mapping.recent) < OVERLAID:
        return _Overlaid(mapping.base, {**mapping.recent, key: value})
    return {**mapping.base, **mapping.recent, key: value}


def without_entry(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    if key not in mapping:
        return mapping
    others = {**mapping.base, **mapping.recent} if isinstance(mapping, _Overlaid) else dict(mapping)
    del others[key]
    return others
