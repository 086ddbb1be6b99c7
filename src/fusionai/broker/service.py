"""The broker without its sockets: messages in, messages out, every fact journalled before it is acknowledged.

A message of an authenticated sender becomes a request. `coordination.broker.decisions` decides it, the facts are
appended to the journal, and only then the decision is adopted and its commands are performed: certificates, tickets,
answers, notices. If the journal fails, the state is unchanged and the sender gets an error.

A stranger may only ask to join, with an invitation or with a code (`code_door`). `reading` checks profiles and plans
against their schemas and size limits. Tensors never pass through. `server` owns the connections and the timer,
`transport` signs.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Final

import msgspec

from fusionai.broker.admission import LenderAdmission
from fusionai.broker.code_door import CodeDoor
from fusionai.broker.comings import coming_or_going
from fusionai.broker.engines.interface import JournalAway, JournalInDoubt, JournalTaken, PoolJournal
from fusionai.broker.lent import RelayMeter, ledger_view
from fusionai.broker.reachability import Introducer
from fusionai.broker.reading import fastest_flops_per_s, job_request, place_request, read_profile, work_report
from fusionai.coordination.broker import pool, requests, state
from fusionai.coordination.broker.decisions import check_inviter, check_welcome, handle
from fusionai.coordination.broker.job_queue import QueuePolicy
from fusionai.coordination.broker.join_code import CODE_LIFETIME_S
from fusionai.coordination.broker.requests import Refusal, Request
from fusionai.coordination.broker.state import BrokerRules, BrokerState, Decision, recovered
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError, RefusedError, StorageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.scheduling.problem.types import Plan
from fusionai.transport.enrolment import InvitationContent, format_invitation
from fusionai.transport.interface import Remote
from fusionai.transport.routes.addresses import is_loopback, is_near, vouched
from fusionai.transport.security.certificates import Authority
from fusionai.transport.security.identity import peer_of, public_key_of
from fusionai.transport.security.revocation import RevocationList, sign_revocations
from fusionai.transport.security.signed import DRIVER_STAGE, Role, Ticket, sign_ticket
from fusionai.wire import messages as wire

TOKEN_BYTES: Final = 32
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message for a connection that did not request it."""

    connection: int
    message: wire.Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Messages to send after a request. `answer` is None if there is no sender (a timer, a broken connection)."""

    answer: wire.Message | None
    notices: tuple[Notice, ...] = ()
    evicted: frozenset[PeerId] = frozenset()
    """Peers whose connections must end."""


@dataclass(frozen=True, slots=True)
class _Doubtful:
    """A decision of which it is not known yet whether it was journalled."""

    sequence: int
    decision: Decision
    finish: Callable[[Replies], Replies]
    invitation: str


@dataclass(kw_only=True)
class BrokerService:
    """One pool's state and its journal. Calls are made from one thread; none of them waits for the network. Writing the
    journal blocks for one disk synchronisation. `draw_token` is the source of invitation tokens. Making the service
    rebuilds the pool from the journal, and raises `StorageError` where that is damaged."""

    rules: InitVar[BrokerRules]
    journal: PoolJournal
    authority: Authority
    clock: Clock
    ticket_lifetime_s: float = 600.0
    draw_token: Callable[[], bytes] = lambda: secrets.token_bytes(TOKEN_BYTES)
    introducer: Introducer | None = None
    admission: LenderAdmission = field(default_factory=LenderAdmission)
    addresses: tuple[str, ...] = ()
    """Addresses of this broker, for invitations."""
    notice: Callable[[str], None] = _LOG.info
    """Gets a sentence when a machine comes or goes."""
    appended: Callable[[float], object] = lambda _: None
    """Gets the time in seconds that each append to the journal took."""
    announces: bool = False
    """Whether machines nearby can find this broker, so that codes are of use."""
    _links: dict[PeerId, tuple[wire.LinkView, ...]] = field(default_factory=dict)
    """Links that each peer reported last. They are not journalled."""
    _seen_at: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Source host of the connection by which each peer registered last."""
    relayed: RelayMeter = field(default_factory=RelayMeter)
    _doubtful: _Doubtful | None = None

    def __post_init__(self, rules: BrokerRules) -> None:
        self._sequence, known = remembered(self.journal)
        self.state: BrokerState = recovered(rules, known, self.clock.now_s())
        self.codes = CodeDoor(
            self.authority.public_key,
            rules.broker,
            self.clock,
            lambda: self.invite(uses=1, lifetime_s=CODE_LIFETIME_S),
        )

    @property
    def sequence(self) -> int:
        """Return the number of the journal's last row."""
        return self._sequence

    @property
    def next_deadline_s(self) -> float | None:
        return self.state.next_deadline_s

    def receive(self, remote: Remote, connection: int, message: wire.Message) -> Replies:
        """Return exactly one answer to a message. Raises only `JournalTaken`: another broker has taken over; and
        `JournalInDoubt`: `settle` returns the answer later."""
        try:
            self._check_settled()
            if remote.peer is None:
                return self._admit(remote, connection, message)
            check_welcome(self.state, remote.peer)
            # Each broker of the pool has its key, so that its owner may do what this one's owner may.
            peer = self.state.rules.broker if remote.role == "broker" else remote.peer
            if not self.state.knows(peer):
                raise Refusal("unknown_peer", "This certificate is of a pool that no longer knows it; join again.")
            return self._serve(remote, peer, connection, message)
        except Refusal as refusal:
            return Replies(answer=refusal.message)
        except (JournalTaken, JournalInDoubt):
            raise
        except StorageError as error:
            if not isinstance(error, JournalAway):  # the beginning of an outage was reported
                _LOG.error("nothing could be journalled: %s", error)
            return Replies(answer=wire.Refused(code="failed", reason=str(error)))

    def _admit(self, remote: Remote, connection: int, message: wire.Message) -> Replies:
        """Answer a stranger."""
        match message:
            case wire.JoinRequest():
                return self._enrol(message)
            case wire.CodeOffer() | wire.CodeProof():
                if not (is_near(remote.host) or is_loopback(remote.host)):
                    # A code has few values, so that its tries are not for all of the internet.
                    raise Refusal("bad_code", "Codes are for machines in the broker's network; use an invitation.")
                try:
                    return Replies(answer=self.codes.answer(connection, message))
                except RefusedError as error:
                    raise Refusal("failed", f"{error.message} {error.hint or ''}") from error
            case _:
                reason = "Without a certificate one may only ask to join, with an invitation or a code."
                raise Refusal("not_authorised", reason)

    def disconnected(self, connection: int) -> Replies:
        self.codes.ended(connection)
        return self._decide(requests.Disconnected(connection))

    def tick(self) -> Replies:
        """Handle a deadline that has passed. Raises `StorageError` if the loss of a member could not be journalled."""
        return self._decide(requests.DeadlinePassed())

    def note_relayed(self) -> Replies:
        """Journal what the relay has copied. Raises `StorageError`."""
        count = self.relayed.unnoted_bytes
        return self._decide(requests.NoteRelayed(count), finish=partial(self.relayed.noted, count))

    def adopt_policy(self, policy: QueuePolicy) -> Replies:
        """Follow another policy of the queue from now on. Raises `StorageError`; the policy then holds as well, unless
        the journal is away."""
        self._check_settled()
        rules = replace(self.state.rules, queue=policy)
        self.state = replace(self.state, rules=rules, arranged_of=())
        return self.tick()

    def stalled(self) -> Replies:
        """Give all members a new lease, because this process itself was suspended for a while."""
        return self._decide(requests.Stalled())

    def invite(self, *, uses: int, lifetime_s: float) -> str:
        """Return an invitation made by the broker itself. Raises `StorageError` or `RefusedError`."""
        request = wire.InviteRequest(uses=uses, lifetime_s=lifetime_s)
        answer = self._hand_out(self.state.rules.broker, request).answer
        if isinstance(answer, wire.Refused):
            raise RefusedError("the broker could not invite.", code=answer.code, hint=answer.reason)
        if not isinstance(answer, wire.Invited):
            raise FusionError(f"expected an invitation, got {answer}.")
        return answer.invitation

    def _enrol(self, message: wire.JoinRequest) -> Replies:
        return self._decide(requests.Enrol(_digest(message.token), peer_of(message.public_key), message.purpose))

    def _serve(self, remote: Remote, peer: PeerId, connection: int, message: wire.Message) -> Replies:
        match message:
            case wire.Heartbeat():
                return self._beat(peer, connection, message)
            case wire.Register():
                register = self._registration(remote, peer, connection, message)
                return self._decide(
                    register, finish=lambda found: self._with_brokers(self._with_neighbours(found, peer, remote.host))
                )
            case wire.Leave():
                return self._decide(requests.AskLeave(peer, connection, message.drain))
            case wire.PoolQuery():
                return Replies(answer=self._pool_view())
            case wire.Meet():
                return self._introduce(remote, message)
            case wire.JobQuery():
                return Replies(answer=state.job_list(self.state, JobId(message.job) if message.job else None))
            case wire.JobRequest():
                request = job_request(peer, connection, message)
                for placement in request.members:
                    self.admission.check_member(
                        PeerId(placement.peer), self.state.pool.members.get(PeerId(placement.peer))
                    )
                return self._decide(request)
            case wire.QueueRequest():
                return self._decide(place_request(peer, connection, message))
            case wire.JobReport():
                job, phase, step = JobId(message.job), message.state, message.step
                return self._decide(requests.ReportJob(peer, connection, job, phase, step, message.detail))
            case wire.WorkReport():
                return self._decide(work_report(peer, message))
            case wire.LedgerQuery():
                return Replies(answer=ledger_view(self.state, self.authority, self.clock.wall_s(), self.relayed))
            case wire.JobStop():
                return self._decide(requests.StopJob(peer, JobId(message.job), connection))
            case wire.InviteRequest():
                return self._hand_out(peer, message)
            case wire.CodeRequest():
                check_inviter(self.state.rules, peer)
                return Replies(
                    answer=wire.CodeMade(code=self.codes.make(), lifetime_s=CODE_LIFETIME_S, announced=self.announces)
                )
            case wire.InvitationQuery():
                return Replies(answer=state.invitation_list(self.state, peer, self.clock.wall_s()))
            case wire.InvitationRevoke():
                return self._decide(requests.RevokeInvitation(peer, message.invitation))
            case wire.Evict():
                return self._decide(requests.EvictMember(peer, PeerId(message.peer)))
            case wire.RevocationQuery():
                return Replies(answer=self.revocations())
            case wire.JoinRequest():
                # A token renews the certificate of this key. Without one, the member asks for a further key of its
                # machine.
                if message.token:
                    return self._enrol(message)
                return self._decide(requests.Vouch(peer, peer_of(message.public_key), message.purpose))
            case _:
                tag = message.__struct_config__.tag
                raise Refusal("bad_message", f"A broker has no answer to {tag}; jobs go between their members.")

    def _beat(self, peer: PeerId, connection: int, message: wire.Heartbeat) -> Replies:
        self.admission.check_member(peer, self.state.pool.members.get(peer))
        self._links[peer] = message.links
        beat = requests.Beat(peer, connection, message.boot, message.jobs)
        is_first = self.state.links.get(peer) != connection
        return self._decide(beat, finish=self._with_brokers if is_first else lambda found: found)

    def _registration(
        self, remote: Remote, peer: PeerId, connection: int, message: wire.Register
    ) -> requests.RegisterMember:
        profile = read_profile(message.profile, peer)
        self.admission.check_registering(peer, profile, self.notice)
        return requests.RegisterMember(
            peer,
            connection,
            message.boot,
            bytes(message.profile),
            vouched(message.addresses, remote.host),
            profile.memory_bytes,
            profile.effective_flops_per_s,
            fastest_flops_per_s(profile),
        )

    def revocations(self) -> wire.Revocations:
        """Return the present list of evicted members, signed, and where the pool's brokers are."""
        pool = self.state.pool
        found = RevocationList(pool.revocations, tuple(pool.evicted))
        signed = sign_revocations(found, self.authority.key) if pool.evicted else b""
        return wire.Revocations(signed=signed, brokers=self.addresses)

    def _spread(self) -> tuple[Notice, ...]:
        """Return a notice with the list for each member and driver that is connected."""
        desk, notice = self.state, wire.RevocationNotice(signed=self.revocations().signed)
        members = {link for peer, link in desk.links.items() if peer not in desk.pool.evicted}
        connections = sorted(members | set(desk.drivers.values()))
        return tuple(Notice(connection=connection, message=notice) for connection in connections)

    def plan_of(self, job: JobId) -> Plan | None:
        """Return the plan in force for a job, None if it has ended or is unknown."""
        known = self.state.pool.jobs.get(job)
        minted = None if known is None or not known.live else self.state.pool.plans.get(known.plan_version)
        return None if minted is None else msgspec.msgpack.decode(minted.plan, type=Plan)

    def _pool_view(self) -> wire.PoolView:
        def with_links(member: wire.MemberView) -> wire.MemberView:
            links = () if member.state == "lost" else self._links.get(PeerId(member.peer), ())
            return msgspec.structs.replace(member, links=links) if links else member

        view = state.pool_view(self.state, self.clock.now_s(), self.clock.wall_s())
        return msgspec.structs.replace(view, members=tuple(with_links(member) for member in view.members))

    def _with_neighbours(self, outcome: Replies, peer: PeerId, host: str) -> Replies:
        """Add the peers seen at the same address, which may share a network with this one. Loopback connections come
        from this machine and are left out."""
        if not isinstance(outcome.answer, wire.Registered) or not host or is_loopback(host):
            return outcome
        self._seen_at[peer] = host
        members = self.state.pool.members
        near = [
            wire.Near(other, members[other].addresses)
            for other, seen_at in self._seen_at.items()
            if seen_at == host and other != peer and other in members and members[other].phase in state.PRESENT
        ]
        answer = msgspec.structs.replace(outcome.answer, near=tuple(near[-wire.MAX_NEAR :]))
        return Replies(answer=answer, notices=outcome.notices)

    def _with_brokers(self, outcome: Replies) -> Replies:
        """Say where the pool's brokers are: a member may have joined before there were several."""
        if not isinstance(outcome.answer, wire.Registered | wire.HeartbeatAck):
            return outcome
        return replace(outcome, answer=msgspec.structs.replace(outcome.answer, brokers=self.addresses))

    def _introduce(self, remote: Remote, message: wire.Meet) -> Replies:
        introducer = self.introducer or Introducer(self.authority)
        answer, connection, notice = introducer.introduce(self.state, remote, message, now_wall_s=self.clock.wall_s())
        return Replies(answer=answer, notices=(Notice(connection=connection, message=notice),))

    def _hand_out(self, sender: PeerId, message: wire.InviteRequest) -> Replies:
        token = self.draw_token()
        content = InvitationContent(self.authority.pool, self.addresses, self.authority.public_key, token)
        request = requests.Invite(sender, _digest(token), message.uses, message.lifetime_s)
        return self._decide(request, invitation=format_invitation(content))

    def _decide(
        self, request: Request, *, invitation: str = "", finish: Callable[[Replies], Replies] = lambda found: found
    ) -> Replies:
        """Decide, journal, adopt, perform: in this order. `finish` adds to the replies."""
        self._check_settled()
        decision = handle(self.state, request, now_s=self.clock.now_s(), wall_s=self.clock.wall_s())
        sequence = self._sequence
        if decision.facts:
            began_s = self.clock.now_s()
            try:
                sequence = self.journal.append(self._sequence, decision.facts)
            except JournalInDoubt:
                self._doubtful = _Doubtful(sequence + len(decision.facts), decision, finish, invitation)
                raise
            self.appended(self.clock.now_s() - began_s)
        return self._adopt(_Doubtful(sequence, decision, finish, invitation))

    def _adopt(self, decided: _Doubtful) -> Replies:
        decision, self._sequence = decided.decision, decided.sequence
        for fact in decision.facts:
            _LOG.info("%s", type(fact).__name__)
        before, self.state = self.state.pool, decision.desk
        for fact in decision.facts:
            if (sentence := coming_or_going(fact, before, self.state.pool)) is not None:
                self.notice(sentence)
        if self.journal.compaction_due:
            self._compact()
        return decided.finish(self._perform(decision, decided.invitation))

    def settle(self, written: bool) -> Replies:
        """Complete the decision in doubt, once it is known whether its facts were written."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is None or not written:
            reason = "The pool's journal was out of reach, and this has not been done; ask again."
            return Replies(answer=wire.Refused(code="failed", reason=reason))
        return self._adopt(doubtful)

    def _check_settled(self) -> None:
        """Raise `JournalAway` while a decision is in doubt, because the next one depends on it; and while another
        broker may keep the pool, so that members look for that one."""
        if self._doubtful is not None or self.journal.lapsed:
            raise JournalAway(
                "the pool's journal is out of reach; what was asked has not been done.",
                hint="The broker tries again by itself.",
            )

    def _compact(self) -> None:
        """Start the journal anew with the present pool. Decisions stand whether or not this succeeds."""
        try:
            frozen = pool.freeze(self.state.pool)
            if pool.thaw(frozen) != self.state.pool:
                # A defect of freezing or thawing: keep the facts.
                raise StorageError("the pool read back from its frozen form is another one.")
            self.journal.compact(frozen)
        except JournalTaken:
            raise
        except StorageError as error:
            _LOG.warning("the journal stays as long as it is: %s", error)
            self.journal.postpone_compaction()

    def _perform(self, decision: Decision, invitation: str) -> Replies:
        answer: wire.Message | None = None
        notices: list[Notice] = []
        evicted = frozenset[PeerId]()
        for command in decision.commands:
            match command:
                case requests.Answer():
                    answer = command.message
                case requests.Notify():
                    notices.append(Notice(connection=command.connection, message=command.message))
                case requests.Certify():
                    answer = self._certify(command.peer)
                case requests.IssueTickets():
                    answer = self._issue_tickets(command.job, command.version)
                case requests.HandOut():
                    answer = wire.Invited(invitation=invitation)
                case requests.SpreadRevocations():
                    notices += self._spread()
                    evicted = frozenset(self.state.pool.evicted)
        return Replies(answer=answer, notices=tuple(notices), evicted=evicted)

    def _certify(self, peer: PeerId) -> wire.JoinGranted:
        return wire.JoinGranted(
            peer=peer,
            certificate=self.authority.issue(public_key_of(peer), "member", now_wall_s=self.clock.wall_s()),
            authority=self.authority.certificate,
        )

    def _issue_tickets(self, job: JobId, version: int) -> wire.JobGranted:
        """Return a ticket for each stage in the plan's order, for each spare that is only a standby, and for the
        driver."""
        minted = self.state.pool.plans[version]
        plan = msgspec.structs.replace(msgspec.msgpack.decode(minted.plan, type=Plan), version=version)
        owner = self.state.pool.jobs[job].owner
        expires_at_s = self.clock.wall_s() + self.ticket_lifetime_s
        holders: list[tuple[str, int, Role]] = [
            *((placement.peer, placement.stage, "stage") for placement in plan.stages),
            *((member.peer, member.standbys[0], "standby") for member in minted.members if not member.stages),
            (owner, DRIVER_STAGE, "driver"),
        ]
        members = self.state.pool.members

        def listens_at(peer: str) -> tuple[str, ...]:
            # An owner that keeps stages to itself lends nothing, and no member dials it.
            return () if peer == owner or PeerId(peer) not in members else members[PeerId(peer)].addresses

        tickets = [
            Ticket(job, peer, stage, version, role, expires_at_s, listens_at(peer)) for peer, stage, role in holders
        ]
        peers = tuple(PeerId(placement.peer) for placement in minted.members)
        return wire.JobGranted(
            job=job,
            plan=msgspec.Raw(msgspec.msgpack.encode(plan)),
            tickets=tuple(wire.TicketFor(one.peer, sign_ticket(one, self.authority.key)) for one in tickets),
            members=state.members_view(self.state, peers, self.clock.now_s(), self.clock.wall_s()),
            wall_s=self.clock.wall_s(),
        )


def remembered(journal: PoolJournal) -> tuple[int, pool.Pool]:
    """Return the last row's number and the pool at that row. Raises `StorageError`."""
    kept = journal.load()
    try:
        known = pool.thaw(kept.state) if kept.state else pool.Pool()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{journal.name}: the pool it begins with is none this version knows ({error}).",
            hint="Was it written by a newer version? Update this one.",
        ) from error
    return kept.sequence, pool.replay(kept.facts, known)


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
