"""Another plan for a running job: in place of peers that are lost, or because the pool offers something better.

Decides who may be asked: machines that stand by, those of the job itself, and a lost machine only when nobody else will
do and the broker has heard it since. Whether a machine of other numerics may stand in, the recipe says. A plan is
journalled, and kept with its tickets, before anybody acts on it (recovery rule 16).

Neighbours: `training.driver` asks, `client.pool_watch` looks out for better plans, `scheduling.takeover` makes them,
`client.pool_session` asks the broker.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import msgspec

from fusionai.client.deployments import keep_deployment
from fusionai.client.distrusted import distrust
from fusionai.client.pool_session import Member
from fusionai.execution.deployment import Deployment
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import ExecutionError, RefusedError, TransportError, TrustError
from fusionai.primitives.ids import JobId
from fusionai.scheduling import settling
from fusionai.scheduling.ends import check_ends
from fusionai.scheduling.straggling import slowed
from fusionai.scheduling.takeover import Waiting, replaced
from fusionai.scheduling.types import Excluded, PeerProfile, Plan, Problem
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory

LOOK_S: Final = 0.5
"""Between two looks at a pool where nobody fits, or for a broker that is away."""
FORGOTTEN_S: Final = 600.0
"""How long a machine counts as as slow as it was found; then it may show itself again."""
RETRIED: Final = ("busy", "unknown_peer", "untrusted", "leaving", "stale_fence", "bad_message")
"""Refusals that another look at the pool answers."""


class Pool(Protocol):
    """What is asked of the broker; `client.pool_session.PoolSession` is one."""

    async def pool(self) -> tuple[Member, ...]: ...

    async def request(self, job: JobId, title: str, plan: Plan, steps: int) -> Deployment: ...


@dataclass(frozen=True, slots=True)
class _Pace:
    """Found at `at_s`: `factor` times slower than the machine's profile says."""

    at_s: float
    factor: float


@dataclass(kw_only=True)
class PoolReplanner:
    """One job's. `problem`: what its plans are made from; may be replaced when speeds are measured anew. Keeps nothing:
    for jobs that begin anew after a restart, such as serving."""

    pool: Pool
    job: JobId
    title: str
    steps: int
    problem: Problem
    policy: Literal["exact", "tolerant", "refuse"]
    excluded: Callable[[tuple[Member, ...]], frozenset[str]]
    """Those that the recipe keeps out."""
    clock: Clock
    barred: Callable[[], tuple[Excluded, ...]] = tuple
    """Those that the job's trust kept out at the last look."""
    liars: set[str] = field(default_factory=set[str])
    """Whose results were wrong."""
    _newest_version: int = 0
    _losses: dict[str, settling.Loss] = field(default_factory=dict[str, settling.Loss])
    _missing: set[str] = field(default_factory=set[str])
    """Lost, and in no plan made real since: one that is named again was not lost again."""
    _paces: dict[str, _Pace] = field(default_factory=dict[str, _Pace])
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        """See `execution.deployment`. Raises `ExecutionError` where the recipe refuses who is there."""
        for peer in lost - self._missing:
            self.note_lost(peer)
        while True:
            try:
                members = await self.pool.pool()
                plan = self._replaced(present.plan, lost, members)
                if isinstance(plan, Plan):
                    return await self.make_real(plan)
                waiting(plan.sentence)
            except RefusedError as error:
                if error.code not in RETRIED:
                    raise
                by = "the job's trust" if error.code == "untrusted" else "the broker"
                waiting(f"{by} refused a plan: {error.message}")
            except (TransportError, TimeoutError) as error:
                why = error.message if isinstance(error, TransportError) else "it does not answer"
                waiting(f"the broker is needed for another plan and can't be reached: {why}")
            await asyncio.sleep(LOOK_S)

    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[Member, ...]) -> Plan | Waiting:
        unversioned = msgspec.structs.replace(plan, version=0)
        present = frozenset(member.view.peer for member in members if is_present(member))
        # Whoever else the broker has lost meanwhile would only be lost again.
        gone = lost | ({stage.peer for stage in plan.stages} - present - {plan.feed})
        gone |= {guard.peer for guard in plan.guards} - present
        others = [one.profile for one in self.usable(members) if one.view.peer not in gone]
        found = replaced(unversioned, self.problem, gone, others)
        if isinstance(found, Waiting):
            returned = [one.profile for one in self.usable(members) if one.view.peer in lost and self.is_there(one)]
            if returned:
                found = replaced(unversioned, self.problem, gone, [*others, *returned])
        if isinstance(found, Waiting) and self.policy == "refuse":
            self._refuse(found, unversioned, gone, others)
        return found

    def _refuse(self, waiting: Waiting, plan: Plan, gone: frozenset[str], others: Sequence[PeerProfile]) -> None:
        """Ends the job where it is other numerics alone that keep everybody from standing in."""
        tolerant = msgspec.structs.replace(self.problem, takeover="tolerant")
        if isinstance(replaced(plan, tolerant, gone, others), Plan):
            raise ExecutionError(
                f"{waiting.sentence}; those that are there compute other bits, and the recipe refuses them.",
                hint='Set takeover = "tolerant" in [faults], or run it again when such a machine has joined.',
            )

    def note_lost(self, peer: str) -> None:
        """The job has lost it just now: it counts as there when the broker has heard it since."""
        self._missing.add(peer)
        self._losses[peer] = settling.lost(self._losses.get(peer), self.clock.now_s())

    def is_back(self, member: Member) -> bool:
        """Whether it was never lost, or has been heard long enough since."""
        loss = self._losses.get(member.view.peer)
        return loss is None or loss.is_over(self.clock.now_s() - member.view.last_heard_s)

    def is_there(self, member: Member) -> bool:
        """Whether it may be asked where nobody else can be."""
        loss = self._losses.get(member.view.peer)
        return loss is None or loss.is_there(self.clock.now_s() - member.view.last_heard_s)

    def usable(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Who stands by for this job, or has a part in it already; as fast as this job has found them."""
        kept_out = self.excluded(members) | self.liars
        return tuple(
            dataclasses.replace(member, profile=slowed(member.profile, self._slowness(member.view.peer)))
            for member in members
            if member.view.peer not in kept_out
            and (
                (member.view.state == "idle" and member.view.rests_s == 0 and not self.clears(member))
                or (member.view.state == "active" and member.view.job == self.job)
            )
        )

    def learn(self, slow: Mapping[str, float]) -> None:
        """Peer -> how many times slower it was found than `usable` said. What was found is remembered, or a stage would
        go back to a slow machine as soon as another one is slow too."""
        now_s = self.clock.now_s()
        for peer, factor in slow.items():
            self._paces[peer] = _Pace(now_s, self._slowness(peer) * factor)

    def keep_in_mind(self, peers: Iterable[str]) -> None:
        """These run stages planned at their found pace: it counts for as long as they do. What was forgotten when the
        stage was planned stays forgotten."""
        now_s = self.clock.now_s()
        for peer in peers:
            if (factor := self._slowness(peer)) != 1.0:
                self._paces[peer] = _Pace(now_s, factor)

    def _slowness(self, peer: str) -> float:
        pace = self._paces.get(peer)
        return 1.0 if pace is None or self.clock.now_s() - pace.at_s > FORGOTTEN_S else pace.factor

    def clears(self, member: Member) -> bool:
        """Whether it still holds something of another job: the broker gives it to nobody yet."""
        return member.view.clears not in ("", self.job)

    async def make_real(self, plan: Plan) -> Deployment:
        """`plan` (version 0) with the version and the tickets the broker gives it. Raises `RefusedError`,
        `TransportError`, `StorageError`."""
        async with self._turn:
            granted = await self._granted(plan)
            # Members let in whom the newest placement names: an old one must never be the newest again.
            if granted.plan.version <= self._newest_version:
                raise TrustError(
                    f"the broker gave a new plan of job {self.job} version {granted.plan.version}, after version "
                    f"{self._newest_version}."
                )
            self._newest_version = granted.plan.version
            await asyncio.to_thread(self.adopt, granted)
            self._missing -= {one.peer for one in (*granted.plan.stages, *granted.plan.guards)}
            return granted

    def adopt(self, deployment: Deployment) -> None:
        """A plan that is in force now. Blocking."""

    def keep(self, deployment: Deployment) -> None:
        """New tickets for the plan in force. Blocking."""

    def distrust(self, peer: str, reason: str) -> None:  # noqa: ARG002
        """It gave wrong results: nothing of this job is for it any more."""
        self.liars.add(peer)

    async def renewed(self, deployment: Deployment) -> Deployment:
        """The plan in force with new tickets and the addresses of today. Raises `RefusedError` (`unknown_job` or
        `stale_fence`: it is not in force any more), `TransportError`."""
        async with self._turn:
            granted = await self._granted(deployment.plan)
            await asyncio.to_thread(self.keep, granted)
            return granted

    async def _granted(self, plan: Plan) -> Deployment:
        """What stays with the owner stays there whatever the broker answers. Raises `PlanError`."""
        granted = await self.pool.request(self.job, self.title, plan, self.steps)
        check_ends(granted.plan, self.problem)
        return granted


@dataclass(kw_only=True)
class Replanner(PoolReplanner):
    """A training job's: on the disk before anybody acts on it."""

    journal: CommitJournal
    directory: RunDirectory

    def adopt(self, deployment: Deployment) -> None:
        self.journal.adopt_plan(deployment.plan.version, msgspec.json.encode(deployment.plan))
        self.keep(deployment)

    def keep(self, deployment: Deployment) -> None:
        keep_deployment(self.directory, deployment)

    def distrust(self, peer: str, reason: str) -> None:
        """For later starts of the driver, too."""
        PoolReplanner.distrust(self, peer, reason)
        distrust(self.directory, peer, reason)


def is_present(member: Member) -> bool:
    return member.view.state in ("idle", "active", "draining")
