"""A session with the pool's broker: lists members and jobs, has plans adopted, stops jobs, creates invitations.

Also finds the membership with which this machine connects, and selects measured links within one local network.

Every method is one request and its answer. The broker is trusted no more than necessary: a job sees only members that
its owner's trust list allows, and a granted plan must equal the requested one. `broker` answers, `cli` and
`client.training.train` send requests, `client.pool.job_trust` says which members are allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import msgspec

from fusionai.client.pool.job_trust import JobTrust
from fusionai.execution.connections import Deployment
from fusionai.primitives.clock import PoolClock, SystemClock
from fusionai.primitives.errors import RefusedError, TransportError, TrustError, UsageError, WireError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.scheduling.problem.types import Excluded, Link, PeerProfile, Plan, hop
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import (
    MEMBERSHIP_FILE,
    Membership,
    enrol,
    further_membership,
    load_membership,
    renew_if_due,
)
from fusionai.transport.peer_transport import PeerTransport
from fusionai.wire import messages as wire

OWNER_DIRECTORY: Final = "owner"


async def owner_membership(home: Path, invitation: str | None) -> Membership:
    """Return this machine's membership as a job owner; enrol if it has none. Raises `UsageError` if that needs an
    invitation."""
    owner_home = home / OWNER_DIRECTORY
    if invitation is not None:
        return await enrol(invitation, owner_home, "owner")
    if (home / MEMBERSHIP_FILE).is_file():
        return await further_membership(load_membership(home), owner_home, "owner")
    if (kept := known_owner(home)) is not None:
        return kept
    raise UsageError(
        f"this machine has not joined a pool (there is no {home / MEMBERSHIP_FILE}).",
        hint="Pass --invite INVITE, or join a pool first: `fusion join --owner` finds those in the local network.",
    )


def any_membership(home: Path) -> Membership:
    """Return the machine's own membership, else its owner's. Either is enough to query the pool."""
    owner = None if (home / MEMBERSHIP_FILE).is_file() else known_owner(home)
    return load_membership(home) if owner is None else owner


def known_owner(home: Path) -> Membership | None:
    """Return the stored membership as a job owner, None if there is none. Contacts no other machine."""
    owner_home = home / OWNER_DIRECTORY
    return load_membership(owner_home) if (owner_home / MEMBERSHIP_FILE).is_file() else None


M = TypeVar("M", bound=wire.Message)

ANSWER_S: Final = 15.0
"""Timeout for an answer of the broker, including the time to connect, in seconds (chosen)."""


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A pool member with its profile decoded."""

    view: wire.MemberView
    profile: PeerProfile

    @property
    def named(self) -> str:
        """Its name, or its shortened id without one."""
        return self.profile.name or short(PeerId(self.view.peer))

    @property
    def is_present(self) -> bool:
        return self.view.state in ("idle", "active", "draining")


def held_up(members: Sequence[PoolMember], job: str = "") -> str:
    """Return which members may be free for `job` in a moment, and what holds them up; empty if there are none. A member
    without a connection usually has it again after a heartbeat, for example when its broker has just been restarted."""
    clearing = [one.profile.name for one in members if one.view.clears not in ("", job)]
    silent = [one.profile.name for one in members if one.view.state == "silent"]
    reasons = (
        *([f"{', '.join(clearing)}: still clearing the data of another job"] if clearing else ()),
        *([f"{', '.join(silent)}: not connected to the broker at the moment"] if silent else ()),
    )
    return "; ".join(reasons)


def members_of(view: wire.PoolView) -> tuple[PoolMember, ...]:
    """Return the members of a view with their profiles decoded. Which devices are of one machine is known from the
    broker alone, whatever their profiles say."""

    def profile(member: wire.MemberView) -> PeerProfile:
        shown = msgspec.msgpack.decode(member.profile, type=PeerProfile)
        return msgspec.structs.replace(shown, machine=member.machine)

    return tuple(PoolMember(member, profile(member)) for member in view.members)


def one_part_each(members: Sequence[PoolMember], working: Sequence[PoolMember] = ()) -> tuple[PoolMember, ...]:
    """Return the members without further parts of the same devices, and without other parts of devices that the
    `working` members are parts of: those parts are for other jobs."""
    kept = {one.view.peer for one in working}
    taken, found = {one.profile.divided_device for one in working}, list[PoolMember]()
    for member in members:
        device = member.profile.divided_device
        if member.view.peer in kept or device is None or device not in taken:
            found.append(member)
            taken.add(device)
    return tuple(found)


class PoolSession:
    """A session, used as `async with PoolSession(membership, trust=...) as pool:`.

    `on_stop` receives the notice that a job must stop, `on_members` the members at each listing. `trust`: the
    trust of the session's job; None for a session that only looks at the pool. Connects at the first request, and again
    after the broker was away. Every request raises `TransportError` if it is not answered within `ANSWER_S`."""

    def __init__(
        self,
        membership: Membership,
        *,
        trust: JobTrust | None,
        on_stop: Callable[[wire.StopNotice], None] | None = None,
        on_members: Callable[[tuple[PoolMember, ...]], None] | None = None,
    ) -> None:
        self.membership = membership
        self._trust = trust
        self.transport = PeerTransport(
            membership.credentials,
            membership.broker,
            admits=_nobody if trust is None else trust.check,
        )
        self._on_stop = on_stop
        self._on_members = on_members
        self._conversation: Conversation | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> PoolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._conversation is not None:
            await self._conversation.close()
        await self.transport.close()

    async def pool(self) -> tuple[PoolMember, ...]:
        view = await self._ask(wire.PoolQuery(), wire.PoolView)
        members = members_of(view)
        if self._trust is not None:
            members = self._trust.among(members)
        if self._on_members is not None:
            self._on_members(members)
        return members

    @property
    def barred(self) -> tuple[Excluded, ...]:
        """Members at the last listing that may not work for the job."""
        return () if self._trust is None else self._trust.barred

    async def jobs(self, job: str = "") -> tuple[wire.JobView, ...]:
        return (await self._ask(wire.JobQuery(job=job), wire.JobList)).jobs

    async def stop(self, job: str) -> None:
        await self._ask(wire.JobStop(job=job), wire.Done)

    async def leave(self, *, drain: bool) -> None:
        """Ask the broker to remove this machine's peer; with `drain`, after it has handed over its work."""
        await self._ask(wire.Leave(drain=drain), wire.Done)

    async def evict(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Send a member away with all keys of its machine; return these."""
        return tuple(map(PeerId, (await self._ask(wire.Evict(peer=peer), wire.Evicted)).peers))

    async def invitations(self) -> tuple[wire.InvitationView, ...]:
        return (await self._ask(wire.InvitationQuery(), wire.InvitationList)).invitations

    async def revoke_invitation(self, invitation: str) -> None:
        await self._ask(wire.InvitationRevoke(invitation=invitation), wire.Done)

    async def invite(self, *, uses: int, lifetime_s: float) -> str:
        return (await self._ask(wire.InviteRequest(uses=uses, lifetime_s=lifetime_s), wire.Invited)).invitation

    async def make_code(self) -> wire.CodeMade:
        """Have the broker make a six-digit code, with which one machine nearby can join."""
        return await self._ask(wire.CodeRequest(), wire.CodeMade)

    async def request(self, job: JobId, title: str, plan: Plan, steps: int) -> Deployment:
        """Have the broker adopt a plan of version 0, or get new tickets for the plan in force. Raises `RefusedError` if
        a peer of the plan is taken, gone or not trusted, or another plan is in force, and the caller should plan again;
        `TrustError` if the broker grants a different plan."""
        if self._trust is None:
            raise TrustError("this session only looks at the pool; it can't request plans.")
        try:
            self._trust.check_plan(plan)
        except TrustError as error:
            raise RefusedError(error.message, code="untrusted", hint=error.hint) from error
        question = wire.JobRequest(job=job, title=title, plan=msgspec.Raw(msgspec.msgpack.encode(plan)), steps=steps)
        granted = await self._ask(question, wire.JobGranted)
        clock = PoolClock(SystemClock())
        clock.set_by(granted.wall_s)
        made = msgspec.msgpack.decode(granted.plan, type=Plan)
        _check_same(plan, made, granted.job, job)
        return Deployment(
            plan=made,
            # An owner with stages has two tickets. The driver's comes last, and the owner dials with it.
            tickets={one.peer: one.ticket for one in granted.tickets},
            members={member.peer: member.addresses for member in granted.members},
            clock_ahead_s=clock.ahead_s,
        )

    async def place(self, question: wire.QueueRequest) -> wire.QueuePlace:
        """Ask for a place in the queue. Raises `RefusedError` (`unknown_job`: the job was taken out of it)."""
        return await self._ask(question, wire.QueuePlace)

    async def report(self, report: wire.JobReport) -> None:
        await self._ask(report, wire.Done)

    async def report_work(self, report: wire.WorkReport) -> None:
        await self._ask(report, wire.Done)

    async def ledger(self) -> bytes:
        """Return the pool's ledger, signed (`transport.security.ledger`)."""
        return (await self._ask(wire.LedgerQuery(), wire.LedgerView)).signed

    async def _ask(self, message: wire.Message, expected: type[M]) -> M:
        try:
            async with asyncio.timeout(ANSWER_S):
                conversation = await self._connected()
                answer = await conversation.ask(message)
        except TimeoutError:
            if self._conversation is not None:
                self._conversation.channel.abort()
            raise TransportError(f"the broker did not answer within {ANSWER_S:g} s.") from None
        except RefusedError as error:
            if error.code == "failed":
                self._pass_over()
                raise TransportError(f"the broker can't do that now: {error.hint or error.message}") from error
            raise
        if not isinstance(answer, expected):
            raise WireError(f"the broker answered {type(answer).__name__} to {type(message).__name__}.")
        return answer

    def _pass_over(self) -> None:
        """Look for another broker: the one that answered can't journal anything."""
        self.membership.broker.pass_over()
        if self._conversation is not None:
            self._conversation.channel.abort()

    async def _connected(self) -> Conversation:
        """Return the open connection; connect if there is none."""
        async with self._connecting:
            if self._conversation is None or self._conversation.channel.closed:
                channel = await self.membership.broker.dial(self.transport)
                self._conversation = Conversation(
                    channel, notices=(wire.StopNotice, wire.RevocationNotice), on_notice=self._notice
                )
                found = await self._conversation.ask(wire.RevocationQuery())
                if isinstance(found, wire.Revocations):
                    self._take_revocations(found.signed)
                    self.membership.broker.learn(found.brokers)
            # At every request, because a job may run for longer than a certificate is valid.
            await renew_if_due(self._conversation.ask, self.membership, now_wall_s=time.time())
            return self._conversation

    def _notice(self, message: wire.Message) -> None:
        if isinstance(message, wire.StopNotice) and self._on_stop is not None:
            self._on_stop(message)
        if isinstance(message, wire.RevocationNotice):
            self._take_revocations(message.signed)

    def _take_revocations(self, signed: bytes) -> None:
        if signed:
            self.membership.credentials.take_revocations(signed)


def _nobody(peer: PeerId) -> None:
    raise TrustError(f"this session only looks at the pool; it can't connect to peer {peer}.")


def _check_same(asked: Plan, made: Plan, granted_job: str, job: JobId) -> None:
    """Check that the broker changed nothing of the plan but its version. Raises `TrustError`."""
    fresh = asked.version == 0
    unversioned = msgspec.structs.replace(made, version=asked.version)
    if granted_job != job or msgspec.msgpack.encode(unversioned) != msgspec.msgpack.encode(asked):
        raise TrustError(
            f"the broker granted a different plan than job {job} requested.",
            hint="A broker may refuse a plan but not change it: don't use this broker.",
        )
    if made.version < 1 if fresh else made.version != asked.version:
        raise TrustError(f"the broker gave job {job}'s plan version {made.version}, which can't be its next version.")


BETTER: Final = 2.0
"""Least factor by which a local link must exceed the access links' bandwidth (chosen). Every exception slows down the
planner's search."""
MOST_MEMBERS: Final = 64
"""Largest pool for which local links are used (chosen). In larger ones, the planner's bounds, which rely on equal
machines, are worth more."""


def near_links(members: Sequence[PoolMember]) -> dict[str, Link]:
    """Return links by `"<from>><to>"`, in both directions, with the slower figures if both ends measured."""
    if len(members) > MOST_MEMBERS:
        return {}
    profiles = {member.view.peer: member.profile for member in members}
    found: dict[str, Link] = {}
    for member in members:
        for link in member.view.links:
            other = profiles.get(link.peer)
            if link.route != "lan" or not link.probed_bytes_per_s or other is None or other is member.profile:
                continue
            line = hop(member.profile, other, {})
            if link.probed_bytes_per_s < BETTER * line.bandwidth_bytes_per_s:
                continue
            known = Link(bandwidth_bytes_per_s=link.probed_bytes_per_s, latency_s=link.round_trip_s / 2)
            for key in (f"{member.view.peer}>{link.peer}", f"{link.peer}>{member.view.peer}"):
                before = found.get(key)
                if before is None or known.bandwidth_bytes_per_s < before.bandwidth_bytes_per_s:
                    found[key] = known
    return dict(sorted(found.items()))
