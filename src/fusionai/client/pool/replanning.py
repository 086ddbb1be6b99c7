"""Gets a new plan for a running job: to replace lost peers, or because a better plan is available.

Decides which machines may be used: free ones, those of the job itself, and a lost machine only if no other fits and the
broker has heard from it since. The recipe says whether a machine with other numerics may take over, or the model may be
cut anew over the remaining machines; both happen only after a grace period, which is counted down. A plan, its tickets,
and the step from which bits may differ are stored before any machine acts on the plan (recovery rule 16). The stored
deployment lets a driver restart while the broker is away; faulty peers are stored too, and never used again.

`training.driver` and `serving.engine` request replacements, `client.pool.watch` looks for better plans,
`scheduling.standby.continuation` and `takeover` make plans, `client.pool.session` sends them to the broker.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Final

import msgspec

from fusionai.client.pool.session import PoolMember, PoolSession, held_up, near_links, one_part_each
from fusionai.execution.connections import Deployment
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import ExecutionError, RefusedError, StorageError, TransportError, TrustError
from fusionai.primitives.ids import JobId
from fusionai.primitives.process import in_background
from fusionai.scheduling.problem.embedding_and_head import check_embedding_and_head
from fusionai.scheduling.problem.types import Excluded, PeerProfile, Plan, Problem
from fusionai.scheduling.standby import takeover as settling
from fusionai.scheduling.standby.continuation import (
    GRACE_S,
    Nothing,
    Otherwise,
    Takeover,
    otherwise,
    recorded,
    stand_in,
)
from fusionai.scheduling.standby.straggling import slowed
from fusionai.scheduling.standby.takeover import WaitingForMachines
from fusionai.scheduling.standby.takeover import with_profiles as rounded_problem
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory
from fusionai.transport.security.identity import read_private, write_private

LOOK_S: Final = 0.5
"""Pause before the pool is listed again if no machine fits, or the broker is tried again, in seconds (chosen)."""
FORGOTTEN_S: Final = 600.0
"""Time for which a machine counts as slow as it was found, in seconds (chosen). Then its profile counts again."""
COUNTED: Final = (30, 20, 10, 5, 4, 3, 2, 1)
"""Remaining seconds of the grace period that are reported; all seconds would fill the log."""
LARGEST_DEPLOYMENT_BYTES: Final = 2**28
RETRIED: Final = ("busy", "unknown_peer", "untrusted", "leaving", "stale_fence", "bad_message")
"""Codes of refusals after which listing the pool and planning again may succeed."""


@dataclass(frozen=True, slots=True)
class _Slowness:
    """`factor`: how many times slower a machine is than its profile says, measured at `at_s`."""

    at_s: float
    factor: float


@dataclass
class MachineHistory:
    """What one job has found about machines: which were lost, which are back, which are slower than their profiles.
    `say` shows a sentence to the user."""

    clock: Clock
    say: Callable[[str], None] = lambda _: None
    missing: set[str] = field(default_factory=set[str])
    """Lost peers that are in no plan adopted since. If one of them is named as lost again, it is not a new loss."""
    _losses: dict[str, settling.Loss] = field(default_factory=dict[str, settling.Loss])
    _seen: dict[str, PoolMember] = field(default_factory=dict[str, PoolMember])
    """Each member as the last look at the pool showed it."""
    _lost_boots: dict[str, int] = field(default_factory=dict[str, int])
    """Boot number of the process that was lost last, by peer."""
    _slow: dict[str, _Slowness] = field(default_factory=dict[str, _Slowness])

    def see(self, members: Iterable[PoolMember]) -> None:
        self._seen.update((member.view.peer, member) for member in members)

    def note_lost(self, peer: str) -> None:
        """Record that the job has just lost a peer. It counts as available when the broker has heard from it since."""
        self.missing.add(peer)
        loss = self._losses[peer] = settling.lost(self._losses.get(peer), self.clock.now_s())
        member = self._seen.get(peer)
        self._lost_boots.pop(peer, None)
        if member is None:
            return
        self._lost_boots[peer] = member.view.boot
        if loss.is_given_up:
            self.say(
                f"{member.named} was lost or failed {loss.times} times in a row: it is asked again after pauses that "
                f"double up to {settling.LONGEST_RETRY_S / 60:.0f} minutes, or when it has joined anew"
            )

    def note_sound(self, peers: Iterable[str]) -> None:
        """These run a stage, or could take one over now."""
        now_s = self.clock.now_s()
        for peer in peers:
            if (loss := self._losses.get(peer)) is not None and peer not in self.missing:
                self._losses[peer] = settling.sound(loss, now_s)

    def is_back(self, member: PoolMember) -> bool:
        """Return whether a member was never lost, or has been heard for long enough since."""
        peer = member.view.peer
        loss = self._losses.get(peer)
        rejoined = self._lost_boots.get(peer) != member.view.boot
        return loss is None or loss.is_over(self.clock.now_s() - member.view.last_heard_s, rejoined=rejoined)

    def is_there(self, member: PoolMember) -> bool:
        """Return whether a lost member may be used if there is no other."""
        loss = self._losses.get(member.view.peer)
        return loss is None or loss.is_there(self.clock.now_s() - member.view.last_heard_s)

    def learn(self, slow: Mapping[str, float]) -> None:
        """Remember how many times slower peers were found than `slowness` said. Otherwise a stage would return to a
        slow machine as soon as another one is slow too."""
        now_s = self.clock.now_s()
        for peer, factor in slow.items():
            self._slow[peer] = _Slowness(now_s, self.slowness(peer) * factor)

    def keep_in_mind(self, peers: Iterable[str]) -> None:
        """Keep the found slowness of peers that run stages: it counts for as long as they do. A slowness that has
        already expired stays expired."""
        self.learn({peer: 1.0 for peer in peers if self.slowness(peer) != 1.0})

    def slowness(self, peer: str) -> float:
        found = self._slow.get(peer)
        return 1.0 if found is None or self.clock.now_s() - found.at_s > FORGOTTEN_S else found.factor


@dataclass(frozen=True, slots=True)
class _Alternative:
    """The alternative if no machine can take over with the same bits and the same cut, found for the inputs `key`.
    `unlike`: the alternative if the recipe allowed other numerics."""

    key: object
    found: Otherwise | Nothing
    unlike: Otherwise | Nothing


@dataclass(kw_only=True)
class PoolReplanner:
    """Gets plans for one job. `problem`: the planning problem, which may be replaced when speeds are measured again.
    `excluded` returns the members that the recipe excludes, `barred` those that are not trusted, as of the last
    listing. Stores nothing on disk: for jobs that start from scratch after a restart, such as serving."""

    pool: PoolSession
    job: JobId
    title: str
    steps: int
    problem: Problem
    policy: Takeover
    excluded: Callable[[tuple[PoolMember, ...]], frozenset[str]]
    machines: MachineHistory
    barred: Callable[[], tuple[Excluded, ...]] = tuple
    faulty_peers: set[str] = field(default_factory=set[str])
    """Peers whose results were wrong."""
    grace_s: float = GRACE_S
    """Time to wait for a machine with the same numerics before the job uses an alternative, in seconds."""
    is_shrunk: bool = False
    """Whether the model was cut anew because machines were missing."""
    _newest_version: int = 0
    _short_since_s: float | None = None
    """Time since which no machine can take over with the same bits and the same cut."""
    _shown_s: int | None = None
    """Remaining seconds reported last."""
    _alternative: _Alternative | None = None
    _transaction: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the request for a plan until it is stored."""

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        """Return a deployment without the peers `lost`, waiting until there is one (`execution.connections`). `waiting`
        receives the reasons for waiting. Raises `ExecutionError` if the recipe refuses the available machines."""
        for peer in lost - self.machines.missing:
            self.machines.note_lost(peer)
        while True:
            try:
                members = await self.pool.pool()
                found = self._replaced(present.plan, lost, members)
                if isinstance(found, WaitingForMachines):
                    found = await self._otherwise_than(found, present.plan, lost, members)
                if isinstance(found, Plan):
                    return await self.make_real(found)
                waiting(found)
            except RefusedError as error:
                if error.code not in RETRIED:
                    raise
                by = "the job's trust" if error.code == "untrusted" else "the broker"
                waiting(f"{by} refused a plan: {error.message}")
            except (TransportError, TimeoutError) as error:
                why = error.message if isinstance(error, TransportError) else "it does not answer"
                waiting(f"the broker is needed for a new plan and can't be reached: {why}")
            await asyncio.sleep(LOOK_S)

    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[PoolMember, ...]) -> Plan | WaitingForMachines:
        unversioned = msgspec.structs.replace(plan, version=0)
        gone = self._gone(plan, lost, members)
        others = [one.profile for one in self.usable(members) if one.view.peer not in gone]
        found = stand_in(unversioned, self.problem, gone, others, self.policy)
        if isinstance(found, WaitingForMachines) and (returned := self._returned(lost, members)):
            found = stand_in(unversioned, self.problem, gone, [*others, *returned], self.policy)
        return found

    def _gone(self, plan: Plan, lost: frozenset[str], members: tuple[PoolMember, ...]) -> frozenset[str]:
        """Return `lost` with the other peers of the plan that the broker has lost meanwhile."""
        present = frozenset(member.view.peer for member in members if member.is_present)
        gone = lost | ({stage.peer for stage in plan.stages} - present - {plan.feed})
        return gone | ({standby.peer for standby in plan.standbys} - present)

    def _returned(self, lost: frozenset[str], members: tuple[PoolMember, ...]) -> list[PeerProfile]:
        return [one.profile for one in self.usable(members) if one.view.peer in lost and self.machines.is_there(one)]

    async def _otherwise_than(
        self, waiting: WaitingForMachines, plan: Plan, lost: frozenset[str], members: tuple[PoolMember, ...]
    ) -> Plan | str:
        """Handle the case that no machine can take over with the same bits and the same cut. Returns an alternative
        plan after the grace period; before that, or without an alternative, a sentence about what is waited for. Raises
        `ExecutionError` if the recipe refuses the available machines."""
        now_s = self.machines.clock.now_s()
        if self._short_since_s is None:
            self._short_since_s = now_s
        gone, back = self._gone(plan, lost, members), self._returned(lost, members)
        returned = {one.peer for one in back}
        there = [*(one.profile for one in self.usable(members) if one.view.peer not in gone), *back]
        posed = msgspec.structs.replace(self.problem, links=near_links(members))
        alternative = await self._find_alternative(plan, posed, gone - returned, there)
        found, problem = alternative.found, rounded_problem(posed, there)
        if isinstance(found, Nothing):
            return self._unhelped(waiting, found, alternative.unlike, problem)
        left_s = self._short_since_s + self.grace_s - now_s
        if left_s <= 0:
            self.is_shrunk = self.is_shrunk or found.recut
            return found.plan
        if self._shown_s is None or ceil(left_s) in COUNTED:
            self._shown_s = ceil(left_s)
        return f"{waiting.sentence}; {found.words(problem)} in {self._shown_s} s"

    async def _find_alternative(
        self, plan: Plan, problem: Problem, gone: frozenset[str], there: Sequence[PeerProfile]
    ) -> _Alternative:
        """Return the alternative. It is planned once for the same machines, because planning takes a while."""
        key = (plan, gone, tuple(there), problem)
        if self._alternative is None or self._alternative.key != key:
            unversioned = msgspec.structs.replace(plan, version=0)
            search = partial(otherwise, unversioned, problem, gone, there)
            found = unlike = await in_background(partial(search, self.policy))
            if isinstance(found, Nothing) and self.policy in ("exact", "refuse"):
                unlike = await in_background(partial(search, "any"))
            self._alternative = _Alternative(key, found, unlike)
        return self._alternative

    def _unhelped(
        self, waiting: WaitingForMachines, nothing: Nothing, unlike: Otherwise | Nothing, problem: Problem
    ) -> str:
        """Return a sentence about what is waited for and what would help. Raises `ExecutionError` if only other
        numerics prevent an alternative and the recipe refuses to wait."""
        if isinstance(unlike, Nothing):
            return f"{waiting.sentence}; {nothing.reason}"
        if self.policy == "refuse":
            raise ExecutionError(
                f"{waiting.sentence}; the available machines compute other bits, and the recipe refuses them.",
                hint='Set takeover = "any" in [faults], or run the command again when such a machine has joined.',
            )
        return (
            f'{waiting.sentence}; takeover = "exact" demands the same bits. What would help: a machine with the '
            f'processor, device and settings of the lost one, or takeover = "any" in [faults], which would '
            f"mean {unlike.words(problem)}"
        )

    def usable(self, members: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
        """Return the members that are free for this job or already have a part in it, with the speeds that this job has
        found."""
        self.machines.see(members)
        return tuple(
            dataclasses.replace(member, profile=slowed(member.profile, self.machines.slowness(member.view.peer)))
            for member in self._allowed(members)
            if (
                member.view.state == "idle"
                and member.view.rests_s == 0
                # The broker assigns a member to no job while it holds data of another.
                and member.view.clears in ("", self.job)
            )
            or (member.view.state == "active" and member.view.job == self.job)
        )

    def spare(self, members: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
        """Return the usable members that are not kept for a job in the queue: what this job may begin with or grow by.
        It grows by no further part of a device that it has a part of."""
        free = tuple(one for one in self.usable(members) if one.view.kept_for in ("", self.job))
        working = [one for one in free if one.view.job == self.job]
        return one_part_each(free, working) if working else free

    def held_up(self, members: tuple[PoolMember, ...]) -> str:
        """Return which members this job may use in a moment, and what holds them up; empty if there are none."""
        return held_up(self._allowed(members), self.job)

    def _allowed(self, members: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
        kept_out = self.excluded(members) | self.faulty_peers
        return tuple(one for one in members if one.view.peer not in kept_out)

    async def make_real(self, plan: Plan) -> Deployment:
        """Have the broker adopt `plan` (version 0), store it, and return it with its version and tickets. Raises
        `RefusedError`, `TransportError`, `StorageError`, and `TrustError` if the version is not new."""
        async with self._transaction:
            granted = await self._granted(self.with_record(plan))
            # Members admit the peers of the placement with the newest version, so an old placement must not get it.
            if granted.plan.version <= self._newest_version:
                raise TrustError(
                    f"the broker gave a new plan of job {self.job} version {granted.plan.version}, which is not above "
                    f"version {self._newest_version}."
                )
            self._newest_version = granted.plan.version
            await asyncio.to_thread(self.adopt, granted)
            self.machines.missing -= {one.peer for one in (*granted.plan.stages, *granted.plan.standbys)}
            self._short_since_s = self._shown_s = None
            return granted

    @property
    def unforced(self) -> Problem:
        """The problem for voluntary plans, which keep the same bits as long as the job's bits are still exact."""
        return self.problem if self.is_tolerant else msgspec.structs.replace(self.problem, takeover="exact")

    def with_record(self, plan: Plan) -> Plan:
        """Return `plan` with the records that it must keep of earlier plans."""
        return plan

    @property
    def is_tolerant(self) -> bool:
        """Whether a voluntary plan may change bits."""
        return self.policy == "tolerant"

    def adopt(self, deployment: Deployment) -> None:
        """Store a plan that is in force from now on. Blocking."""

    def keep(self, deployment: Deployment) -> None:
        """Store new tickets for the plan in force. Blocking."""

    def distrust(self, peer: str, reason: str) -> None:  # noqa: ARG002
        """Exclude a peer that gave wrong results from all further plans."""
        self.faulty_peers.add(peer)

    async def renewed(self, deployment: Deployment) -> Deployment:
        """Return the plan in force with new tickets and current addresses. Raises `RefusedError` (`unknown_job` or
        `stale_fence`: it is no longer in force), `TransportError`."""
        async with self._transaction:
            granted = await self._granted(deployment.plan)
            await asyncio.to_thread(self.keep, granted)
            return granted

    async def _granted(self, plan: Plan) -> Deployment:
        """Request a plan, and check that blocks of the owner stay with the owner in the answer. Raises `PlanError`."""
        granted = await self.pool.request(self.job, self.title, plan, self.steps)
        check_embedding_and_head(granted.plan, self.problem)
        return granted


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: Plan
    members: dict[str, tuple[str, ...]]
    tickets: dict[str, bytes]


def keep_deployment(directory: RunDirectory, deployment: Deployment) -> None:
    """Store the deployment, durably on return. Raises `StorageError`."""
    kept = _Kept(deployment.plan, dict(deployment.members), dict(deployment.tickets))
    write_private(directory.deployment, msgspec.msgpack.encode(kept))


def kept_deployment(directory: RunDirectory) -> Deployment | None:
    """Return the stored deployment, None if there is no intact one. Raises `StorageError`."""
    try:
        content = read_private(directory.deployment, limit_bytes=LARGEST_DEPLOYMENT_BYTES)
        kept = None if content is None else msgspec.msgpack.decode(content, type=_Kept)
    except (TrustError, msgspec.DecodeError):
        return None
    return None if kept is None else Deployment(plan=kept.plan, members=kept.members, tickets=kept.tickets)


class Distrusted(msgspec.Struct, frozen=True):
    """A peer whose results were wrong. `reason`: which results, and how they were found wrong."""

    peer: str
    reason: str


def distrusted(directory: RunDirectory) -> tuple[Distrusted, ...]:
    """Return the stored peers. Raises `StorageError` for a file that can't be read or parsed."""
    path = directory.distrusted
    if not path.is_file():
        return ()
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=tuple[Distrusted, ...])
    except msgspec.DecodeError as problem:
        raise StorageError(
            f"{path} can't be parsed ({problem}).",
            hint="Remove it; the job may then use the peers listed in it again.",
        ) from None


def distrust(directory: RunDirectory, peer: str, reason: str) -> None:
    """Add a peer to the file, durably on return. Raises `StorageError`."""
    known = tuple(one for one in distrusted(directory) if one.peer != peer)
    write_atomic(directory.distrusted, msgspec.json.encode((*known, Distrusted(peer, reason))))


@dataclass(kw_only=True)
class TrainingReplanner(PoolReplanner):
    """Gets plans for a training job. A plan is on disk before any machine acts on it."""

    journal: CommitJournal
    directory: RunDirectory
    tolerance: float = 0.0
    """Largest relative difference of losses after machines with other numerics have taken over."""

    def with_record(self, plan: Plan) -> Plan:
        before = self.adopted
        return plan if before is None else recorded(before, plan, self.problem, self.journal.committed, self.tolerance)

    @property
    def adopted(self) -> Plan | None:
        """The latest plan on disk (see `adopted_plan`)."""
        return adopted_plan(self.journal)

    @property
    def is_tolerant(self) -> bool:
        """Whether a voluntary plan may change bits: also after a tolerant takeover, when they differ already."""
        adopted = self.adopted if self.policy == "any" else None
        return self.policy == "tolerant" or (adopted is not None and bool(adopted.tolerant_takeovers))

    def adopt(self, deployment: Deployment) -> None:
        self.journal.adopt_plan(deployment.plan.version, msgspec.json.encode(deployment.plan))
        self.keep(deployment)

    def keep(self, deployment: Deployment) -> None:
        keep_deployment(self.directory, deployment)

    def distrust(self, peer: str, reason: str) -> None:
        """Exclude a peer, also from plans of later starts of the driver."""
        PoolReplanner.distrust(self, peer, reason)
        distrust(self.directory, peer, reason)


def adopted_plan(journal: CommitJournal) -> Plan | None:
    """Return the latest plan on disk; None if there is none or another version of this program wrote it."""
    kept = journal.plan
    if kept is None:
        return None
    try:
        return msgspec.json.decode(kept.plan, type=Plan)
    except msgspec.DecodeError:
        return None
