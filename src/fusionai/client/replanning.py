"""Another plan for a running job: in place of peers that are lost, or because the pool offers something better.

Decides who may be asked: machines that stand by, those of the job itself, and a lost machine only when nobody else will
do and the broker has heard it since. Whether a machine of other numerics may stand in, or the model be cut anew over
those that remain, the recipe says; that is done after a grace period only, which is counted down. A plan is journalled,
and kept with its tickets, before anybody acts on it (recovery rule 16); so is from which step on bits may differ.

Neighbours: `training.driver` asks, `client.pool_watch` looks out for better plans, `scheduling.going_on` and `takeover`
make them, `client.pool_session` asks the broker.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Final, Protocol

import msgspec

from fusionai.client.background import in_background
from fusionai.client.deployments import keep_deployment
from fusionai.client.distrusted import distrust
from fusionai.client.near_links import near_links
from fusionai.client.pool_session import Member
from fusionai.execution.deployment import Deployment
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import ExecutionError, RefusedError, TransportError, TrustError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.scheduling import settling
from fusionai.scheduling.ends import check_ends
from fusionai.scheduling.going_on import GRACE_S, Nothing, Otherwise, Takeover, otherwise, recorded, stand_in
from fusionai.scheduling.straggling import slowed
from fusionai.scheduling.takeover import Waiting
from fusionai.scheduling.takeover import told as told_problem
from fusionai.scheduling.types import Excluded, PeerProfile, Plan, Problem
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory

LOOK_S: Final = 0.5
"""Between two looks at a pool where nobody fits, or for a broker that is away."""
FORGOTTEN_S: Final = 600.0
"""How long a machine counts as as slow as it was found; then it may show itself again."""
COUNTED: Final = (30, 20, 10, 5, 4, 3, 2, 1)
"""Seconds left that are said; those in between would only fill the log."""
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


@dataclass(frozen=True, slots=True)
class _Besides:
    """What there is where nobody can stand in as it was, found for `key`; `unlike`: what there would be if the recipe
    took any numerics."""

    key: object
    found: Otherwise | Nothing
    unlike: Otherwise | Nothing


@dataclass(kw_only=True)
class PoolReplanner:
    """One job's. `problem`: what its plans are made from; may be replaced when speeds are measured anew. Keeps nothing:
    for jobs that begin anew after a restart, such as serving."""

    pool: Pool
    job: JobId
    title: str
    steps: int
    problem: Problem
    policy: Takeover
    excluded: Callable[[tuple[Member, ...]], frozenset[str]]
    """Those that the recipe keeps out."""
    clock: Clock
    barred: Callable[[], tuple[Excluded, ...]] = tuple
    """Those that the job's trust kept out at the last look."""
    liars: set[str] = field(default_factory=set[str])
    """Whose results were wrong."""
    grace_s: float = GRACE_S
    """How long a machine of the same numerics is waited for before the job goes on otherwise."""
    say: Callable[[str], None] = lambda _: None
    """Takes a sentence for people."""
    _newest_version: int = 0
    _short_since_s: float | None = None
    """Since when nobody can stand in as it was."""
    _shown_s: int | None = None
    """Seconds left that were said last."""
    _besides: _Besides | None = None
    is_shrunk: bool = False
    """Whether the model was cut anew for want of machines."""
    _losses: dict[str, settling.Loss] = field(default_factory=dict[str, settling.Loss])
    _seen: dict[str, Member] = field(default_factory=dict[str, Member])
    """Each member as the last look at the pool showed it."""
    _lost_boots: dict[str, int] = field(default_factory=dict[str, int])
    """Boot number of the process that was lost last, by peer."""
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
                found = self._replaced(present.plan, lost, members)
                if isinstance(found, Waiting):
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
                waiting(f"the broker is needed for another plan and can't be reached: {why}")
            await asyncio.sleep(LOOK_S)

    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[Member, ...]) -> Plan | Waiting:
        unversioned = msgspec.structs.replace(plan, version=0)
        gone = self._gone(plan, lost, members)
        others = [one.profile for one in self.usable(members) if one.view.peer not in gone]
        found = stand_in(unversioned, self.problem, gone, others, self.policy)
        if isinstance(found, Waiting) and (returned := self._returned(lost, members)):
            found = stand_in(unversioned, self.problem, gone, [*others, *returned], self.policy)
        return found

    def _gone(self, plan: Plan, lost: frozenset[str], members: tuple[Member, ...]) -> frozenset[str]:
        """Whoever else the broker has lost meanwhile would only be lost again."""
        present = frozenset(member.view.peer for member in members if is_present(member))
        gone = lost | ({stage.peer for stage in plan.stages} - present - {plan.feed})
        return gone | ({guard.peer for guard in plan.guards} - present)

    def _returned(self, lost: frozenset[str], members: tuple[Member, ...]) -> list[PeerProfile]:
        return [one.profile for one in self.usable(members) if one.view.peer in lost and self.is_there(one)]

    async def _otherwise_than(
        self, waiting: Waiting, plan: Plan, lost: frozenset[str], members: tuple[Member, ...]
    ) -> Plan | str:
        """Where nobody can stand in as it was: after the grace period another plan; until then, and where there is
        none, what is waited for. Ends the job where the recipe refuses what there is."""
        now_s = self.clock.now_s()
        if self._short_since_s is None:
            self._short_since_s = now_s
        gone, back = self._gone(plan, lost, members), self._returned(lost, members)
        returned = {one.peer for one in back}
        there = [*(one.profile for one in self.usable(members) if one.view.peer not in gone), *back]
        posed = msgspec.structs.replace(self.problem, links=near_links(members))
        besides = await self._look_besides(plan, posed, gone - returned, there)
        found, told = besides.found, told_problem(posed, there)
        if isinstance(found, Nothing):
            return self._unhelped(waiting, found, besides.unlike, told)
        left_s = self._short_since_s + self.grace_s - now_s
        if left_s <= 0:
            self.is_shrunk = self.is_shrunk or found.recut
            return found.plan
        if self._shown_s is None or ceil(left_s) in COUNTED:
            self._shown_s = ceil(left_s)
        return f"{waiting.sentence}; {found.words(told)} in {self._shown_s} s"

    async def _look_besides(
        self, plan: Plan, problem: Problem, gone: frozenset[str], there: Sequence[PeerProfile]
    ) -> _Besides:
        """Planning takes a while: once for the same machines."""
        key = (plan, gone, tuple(there), problem)
        if self._besides is None or self._besides.key != key:
            unversioned = msgspec.structs.replace(plan, version=0)
            search = partial(otherwise, unversioned, problem, gone, there)
            found = unlike = await in_background(partial(search, self.policy))
            if isinstance(found, Nothing) and self.policy in ("exact", "refuse"):
                unlike = await in_background(partial(search, "any"))
            self._besides = _Besides(key, found, unlike)
        return self._besides

    def _unhelped(self, waiting: Waiting, nothing: Nothing, unlike: Otherwise | Nothing, told: Problem) -> str:
        """What is waited for, and what would help. Raises `ExecutionError` where it is other numerics alone that keep
        everybody from going on, and the recipe refuses to wait."""
        if isinstance(unlike, Nothing):
            return f"{waiting.sentence}; {nothing.reason}"
        if self.policy == "refuse":
            raise ExecutionError(
                f"{waiting.sentence}; those that are there compute other bits, and the recipe refuses them.",
                hint='Set takeover = "any" in [faults], or run it again when such a machine has joined.',
            )
        return (
            f'{waiting.sentence}; takeover = "exact" demands the same bits. What would help: a machine with the '
            f'processor, device and settings of the one that is lost, or takeover = "any" in [faults], which would '
            f"mean {unlike.words(told)}"
        )

    def note_lost(self, peer: str) -> None:
        """The job has lost it just now: it counts as there when the broker has heard it since."""
        self._missing.add(peer)
        loss = self._losses[peer] = settling.lost(self._losses.get(peer), self.clock.now_s())
        member = self._seen.get(peer)
        self._lost_boots.pop(peer, None)
        if member is None:
            return
        self._lost_boots[peer] = member.view.boot
        if loss.is_given_up:
            name = member.profile.name or short(PeerId(peer))
            self.say(
                f"{name} was lost or failed {loss.times} times in a row: it is asked again after pauses that double "
                f"up to {settling.LONGEST_RETRY_S / 60:.0f} minutes, or when it has joined anew"
            )

    def note_sound(self, peers: Iterable[str]) -> None:
        """These run a stage, or could take one over now."""
        now_s = self.clock.now_s()
        for peer in peers:
            if (loss := self._losses.get(peer)) is not None and peer not in self._missing:
                self._losses[peer] = settling.sound(loss, now_s)

    def is_back(self, member: Member) -> bool:
        """Whether it was never lost, or has been heard long enough since."""
        peer = member.view.peer
        loss = self._losses.get(peer)
        rejoined = self._lost_boots.get(peer) != member.view.boot
        return loss is None or loss.is_over(self.clock.now_s() - member.view.last_heard_s, rejoined=rejoined)

    def is_there(self, member: Member) -> bool:
        """Whether it may be asked where nobody else can be."""
        loss = self._losses.get(member.view.peer)
        return loss is None or loss.is_there(self.clock.now_s() - member.view.last_heard_s)

    def usable(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Who stands by for this job, or has a part in it already; as fast as this job has found them."""
        self._seen.update((member.view.peer, member) for member in members)
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
            granted = await self._granted(self.with_record(plan))
            # Members let in whom the newest placement names: an old one must never be the newest again.
            if granted.plan.version <= self._newest_version:
                raise TrustError(
                    f"the broker gave a new plan of job {self.job} version {granted.plan.version}, after version "
                    f"{self._newest_version}."
                )
            self._newest_version = granted.plan.version
            await asyncio.to_thread(self.adopt, granted)
            self._missing -= {one.peer for one in (*granted.plan.stages, *granted.plan.guards)}
            self._short_since_s = self._shown_s = None
            return granted

    @property
    def unforced(self) -> Problem:
        """What plans are made from that nobody is forced to: those keep bits while they are what they were."""
        return self.problem if self.is_tolerant else msgspec.structs.replace(self.problem, takeover="exact")

    def with_record(self, plan: Plan) -> Plan:
        """`plan` with what is to be kept of those before it."""
        return plan

    @property
    def is_tolerant(self) -> bool:
        """Whether a plan that nobody is forced to may change bits."""
        return self.policy == "tolerant"

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
    tolerance: float = 0.0
    """How far losses may be apart after machines of other numerics have taken over."""

    def with_record(self, plan: Plan) -> Plan:
        before = self.adopted
        return plan if before is None else recorded(before, plan, self.problem, self.journal.committed, self.tolerance)

    @property
    def adopted(self) -> Plan | None:
        """See `adopted_plan`."""
        return adopted_plan(self.journal)

    @property
    def is_tolerant(self) -> bool:
        """Bits that are others already lose nothing by another plan."""
        adopted = self.adopted if self.policy == "any" else None
        return self.policy == "tolerant" or (adopted is not None and bool(adopted.tolerant_takeovers))

    def adopt(self, deployment: Deployment) -> None:
        self.journal.adopt_plan(deployment.plan.version, msgspec.json.encode(deployment.plan))
        self.keep(deployment)

    def keep(self, deployment: Deployment) -> None:
        keep_deployment(self.directory, deployment)

    def distrust(self, peer: str, reason: str) -> None:
        """For later starts of the driver, too."""
        PoolReplanner.distrust(self, peer, reason)
        distrust(self.directory, peer, reason)


def adopted_plan(journal: CommitJournal) -> Plan | None:
    """The newest on the disk; None where there is none, or one of another version of this program."""
    kept = journal.plan
    if kept is None:
        return None
    try:
        return msgspec.json.decode(kept.plan, type=Plan)
    except msgspec.DecodeError:
        return None


def is_present(member: Member) -> bool:
    return member.view.state in ("idle", "active", "draining")
