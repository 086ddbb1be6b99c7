"""Decides what each request does to the pool, which sender may make it, and what is answered.

`handle(desk, request, now_s, wall_s)` is pure. It returns facts and commands. The shell journals the facts first; only
then does it adopt the new desk and perform the commands. If the journal refuses, nothing has happened.

This module decides admission itself: invitations, certificates for newcomers, further keys of members, eviction.
`presence`, `assignment`, `turns` and `accounting` decide the rest, `requests` defines the vocabulary, `broker.service`
is the shell and signs certificates and the list of evicted members."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Final

from fusionai.coordination.broker import accounting, assignment, events, presence, requests, turns
from fusionai.coordination.broker.membership import Invitation
from fusionai.coordination.broker.pool import EVICTED_KEPT_S
from fusionai.coordination.broker.requests import REASON_LENGTH, Answer, Refusal
from fusionai.coordination.broker.state import BrokerRules, BrokerState, Decision
from fusionai.coordination.broker.transaction import Transaction
from fusionai.coordination.machine import ForbiddenTransition
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.wire.messages import Done, Evicted, Refused

MAX_EVICTED: Final = 1_000
"""Limit on evicted keys that are remembered: their list fits into one message."""
MAX_VOUCHED: Final = 16
"""Limit on further keys that one member may have certified, because it vouches for them."""


def check_welcome(desk: BrokerState, peer: PeerId) -> None:
    """Raise `Refusal` for an evicted key."""
    if peer in desk.pool.evicted:
        raise Refusal("evicted", f"{short(peer)} was evicted from this pool.")


def enrol(turn: Transaction, request: requests.Enrol) -> None:
    check_welcome(turn.desk, request.peer)
    invitation = _invitation(turn, request.digest)
    if invitation is None or invitation.expires_at_s <= turn.wall_s:
        raise Refusal("bad_invitation", "This invitation is unknown or expired.")
    # A machine that was away for long may be forgotten: it enrols again, which is another use.
    if request.peer not in invitation.peers or request.peer not in turn.pool.members:
        if invitation.uses_left < 1:
            raise Refusal("bad_invitation", "This invitation is used up.")
        _check_room(turn)
        turn.record(
            events.PeerEnrolled(
                at_s=turn.wall_s, peer=request.peer, purpose=request.purpose, invitation=invitation.digest
            )
        )
    turn.commands.append(requests.Certify(request.peer))


def vouch(turn: Transaction, request: requests.Vouch) -> None:
    if not turn.desk.knows(request.sender):
        raise Refusal("unknown_peer", f"{short(request.sender)} has not joined this pool.")
    if request.peer == request.sender:  # it renews its own certificate
        turn.commands.append(requests.Certify(request.peer))
        return
    check_welcome(turn.desk, request.peer)
    sender = turn.pool.members.get(request.sender)
    if sender is not None and sender.sponsor is not None:
        # Otherwise one member could fill the pool, key by key.
        raise Refusal("not_authorised", f"{sender.entity} was itself certified for another member.")
    if request.peer not in turn.pool.members:
        vouched = sum(member.sponsor == request.sender for member in turn.pool.members.values())
        if vouched >= MAX_VOUCHED:
            raise Refusal("not_authorised", f"{short(request.sender)} has had {MAX_VOUCHED} further keys certified.")
        _check_room(turn)
        turn.record(
            events.KeyVouched(at_s=turn.wall_s, peer=request.peer, purpose=request.purpose, sponsor=request.sender)
        )
    turn.commands.append(requests.Certify(request.peer))


def check_inviter(rules: BrokerRules, peer: PeerId) -> None:
    """Raise `Refusal` for a member that may not let others in."""
    if peer != rules.broker and peer not in rules.inviters:
        raise Refusal("not_authorised", "Only the broker's owner and members it named may invite.")


def invite(turn: Transaction, request: requests.Invite) -> None:
    check_inviter(turn.rules, request.sender)
    in_date = sum(one.expires_at_s > turn.wall_s for one in turn.pool.invitations.values())
    if in_date >= turn.rules.max_invitations:
        raise Refusal("busy", f"{in_date} invitations are out already; wait until some expire.")
    turn.record(
        events.InvitationIssued(
            at_s=turn.wall_s,
            invitation=request.digest,
            uses=request.uses,
            expires_at_s=turn.wall_s + request.lifetime_s,
        )
    )
    turn.commands.append(requests.HandOut())


def evict(turn: Transaction, request: requests.EvictMember) -> None:
    """Evict a member with all keys of its machine: a key that stayed could have further ones certified. Jobs of these
    keys end."""
    _check_owner(turn, request.sender, "evict members")
    keys = _keys_of(turn, request.peer)
    evicted = [peer for peer in keys if peer not in turn.pool.evicted]
    counted = sum(at_s > turn.wall_s - EVICTED_KEPT_S for at_s in turn.pool.evicted.values())
    if counted + len(evicted) > MAX_EVICTED:
        raise Refusal("busy", f"{counted} members have been evicted already, which is the limit.")
    for peer in evicted:
        turn.record(events.MemberEvicted(at_s=turn.wall_s, peer=peer))
    for peer in evicted:
        if (member := turn.pool.members.get(peer)) is not None:
            presence.send_away(turn, member)
    for job in (*turn.pool.live_jobs(), *turn.pool.queued_jobs()):
        if job.owner in keys:
            turn.fail(job, "its owner was evicted")
    turn.commands.append(requests.SpreadRevocations())
    turn.commands.append(Answer(Evicted(peers=tuple(keys))))


def _keys_of(turn: Transaction, peer: PeerId) -> list[PeerId]:
    """Return all known keys of this key's machine; the key alone if it has been forgotten: its certificate may still be
    valid. Raise `Refusal` for a key of the broker's own machine."""
    member = turn.pool.members.get(peer)
    machine = peer if member is None else member.sponsor or peer
    if turn.rules.broker in (peer, machine):
        raise Refusal("not_authorised", f"{short(peer)} is a key of the broker's own machine, which stays.")
    keys = [one.peer for one in turn.pool.members.values() if machine in (one.peer, one.sponsor)]
    if keys or len(peer) == PEER_ID_LENGTH:
        return keys or [peer]
    raise Refusal("unknown_peer", f"{short(peer)} is no member of this pool.")


def revoke_invitation(turn: Transaction, request: requests.RevokeInvitation) -> None:
    _check_owner(turn, request.sender, "revoke invitations")
    found = [digest for digest in turn.pool.invitations if digest.startswith(request.invitation)]
    if len(found) != 1:
        reason = "unknown or over" if not found else f"ambiguous: {len(found)} invitations begin with it"
        raise Refusal("bad_invitation", f"Invitation {request.invitation[:16]!r} is {reason}.")
    turn.record(events.InvitationRevoked(at_s=turn.wall_s, invitation=found[0]))
    turn.commands.append(Answer(Done()))


def _check_owner(turn: Transaction, sender: PeerId, what: str) -> None:
    if sender != turn.rules.broker:
        raise Refusal("not_authorised", f"Only the broker's owner may {what}.")


def _check_room(turn: Transaction) -> None:
    if turn.pool.expected() >= turn.rules.max_members:
        raise Refusal("busy", f"The pool is full ({turn.rules.max_members} members); try again when one has left.")


def _invitation(turn: Transaction, digest: str) -> Invitation | None:
    """Return the invitation, compared with all in constant time, so that the answer's delay reveals nothing."""
    found = None
    for known, invitation in turn.pool.invitations.items():
        if hmac.compare_digest(known.encode(), digest.encode()):
            found = invitation
    return found


_DECIDES: Final[dict[type[requests.Request], Callable[[Transaction, Any], None]]] = {
    requests.Enrol: enrol,
    requests.Vouch: vouch,
    requests.Invite: invite,
    requests.EvictMember: evict,
    requests.RevokeInvitation: revoke_invitation,
    requests.RegisterMember: presence.register,
    requests.Beat: presence.beat,
    requests.AskLeave: presence.leave,
    requests.Disconnected: presence.disconnect,
    requests.DeadlinePassed: presence.tick,
    requests.Stalled: presence.restart_leases,
    requests.RequestJob: assignment.request_job,
    requests.AskPlace: turns.ask_place,
    requests.ReportJob: assignment.report_job,
    requests.StopJob: assignment.stop_job,
    requests.ReportWork: accounting.report_work,
    requests.NoteRelayed: accounting.note_relayed,
}


def handle(desk: BrokerState, request: requests.Request, *, now_s: float, wall_s: float) -> Decision:
    """Return the decision on one request. `now_s` is monotonic, `wall_s` is seconds since 1970. A request that does not
    fit is answered by `Refused` and changes nothing."""
    turn = Transaction(desk, now_s, wall_s)
    try:
        _DECIDES[type(request)](turn, request)
        turns.rearrange(turn, timely=isinstance(request, requests.DeadlinePassed))
    except Refusal as refusal:
        return Decision(desk, (), (Answer(refusal.message),))
    except ForbiddenTransition as forbidden:
        return Decision(desk, (), (Answer(Refused(code="bad_message", reason=str(forbidden)[:REASON_LENGTH])),))
    renewed_only = (
        not turn.facts
        and turn.desk.waits is desk.waits
        and turn.desk.turns is desk.turns
        and not isinstance(request, requests.DeadlinePassed | requests.Stalled)
    )
    return Decision(turn.desk if renewed_only else turn.desk.with_deadline(), tuple(turn.facts), tuple(turn.commands))
