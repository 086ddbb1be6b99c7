"""One decision under way: the desk so far, its facts and commands. Thrown away when the decision refuses.

Decides nothing; holds what several decisions do alike. Neighbours: `admission`, `presence` and `assignment` decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

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
from fusionai.coordination.broker.state import PRESENT, Desk, DeskRules
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.wire.messages import LeaveNotice

K = TypeVar("K")
V = TypeVar("V")


class Turn:
    """Mutable while one request is decided, never longer."""

    def __init__(self, desk: Desk, now_s: float, wall_s: float) -> None:
        self.desk = desk
        self.now_s = now_s
        self.wall_s = wall_s
        self.facts: list[Fact] = []
        self.commands: list[Command] = []

    @property
    def pool(self) -> Pool:
        return self.desk.pool

    @property
    def rules(self) -> DeskRules:
        return self.desk.rules

    def record(self, fact: Fact) -> None:
        self.desk = replace(self.desk, pool=advance(self.pool, fact))
        self.facts.append(fact)

    def keep(self, **tables: Any) -> None:
        """Put these tables into the desk. Copies nothing where they are the desk's own: most heartbeats change one."""
        changed = {name: table for name, table in tables.items() if getattr(self.desk, name) is not table}
        if changed:
            self.desk = replace(self.desk, **changed)

    def member(self, peer: PeerId) -> Member:
        member = self.pool.members.get(peer)
        if member is None:
            raise Refusal("unknown_peer", f"{short(peer)} has not joined this pool; join with an invitation first.")
        return member

    def note_job(self, member: Member, text: str) -> None:
        if member.job is not None:
            self.record(events.JobNoted(at_s=self.wall_s, job=member.job, text=text))

    def forget(self, peer: PeerId) -> None:
        self.desk = replace(
            self.desk,
            leases=without_entry(self.desk.leases, peer),
            links=without_entry(self.desk.links, peer),
            leftovers=without_entry(self.desk.leftovers, peer),
            dismissed=without_entry(self.desk.dismissed, peer),
        )

    def see_off(self) -> None:
        """Members that drained and were released have left now: their processes may end."""
        for peer in [peer for peer in self.desk.leases if self.pool.members[peer].phase not in PRESENT]:
            link = self.desk.links.get(peer)
            if link is not None:
                self.commands.append(Notify(link, LeaveNotice(drain=False)))
            self.forget(peer)

    def dismiss(self, name: JobId) -> None:
        """Nothing is kept in memory about a job that has ended."""
        self.desk = replace(
            self.desk,
            drivers=without_entry(self.desk.drivers, name),
            waits=without_entry(self.desk.waits, name),
            progress=without_entry(self.desk.progress, name),
        )
        self.see_off()

    def fail(self, job: Job, why: str) -> None:
        step = self.desk.progress.get(job.job, job.step)
        self.record(events.JobFailed(at_s=self.wall_s, job=job.job, step=step, detail=why))
        self.dismiss(job.job)


def with_entry(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return mapping if mapping.get(key) == value else {**mapping, key: value}


def without_entry(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return mapping if key not in mapping else {other: value for other, value in mapping.items() if other != key}
