"""The vocabulary of the broker's decisions: requests, commands and refusals.

A request names its sender as authenticated by the transport, and its connection by the number that the shell gave it.
`decisions` decides, `broker.service` makes requests of messages and performs commands.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from fusionai.coordination.broker.events import MemberPlacement
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import Message, RefusalCode, Refused, WorkShare

REASON_LENGTH: Final = 2000


class Refusal(Exception):
    """Raised for a request that does not fit. The sender gets `message`."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.message = Refused(code=code, reason=reason[:REASON_LENGTH])


class Enrol(Struct, frozen=True):
    """A stranger shows an invitation. `digest`: SHA-256 of the token, hex. `peer` is computed from the key it names."""

    digest: str
    peer: PeerId
    purpose: Literal["provider", "owner"]


class Vouch(Struct, frozen=True):
    """A member asks for a certificate for a further key of its own machine."""

    sender: PeerId
    peer: PeerId
    purpose: Literal["provider", "owner"]


class RegisterMember(Struct, frozen=True):
    peer: PeerId
    connection: int
    boot: int
    profile: bytes
    addresses: tuple[str, ...]
    memory_bytes: int = 0
    flops_per_s: float = 0.0
    fastest_flops_per_s: float = 0.0


class Beat(Struct, frozen=True):
    """A heartbeat. `jobs`: jobs of which the process holds state."""

    peer: PeerId
    connection: int
    boot: int
    jobs: tuple[str, ...] = ()


class AskLeave(Struct, frozen=True):
    peer: PeerId
    connection: int
    drain: bool


class RequestJob(Struct, frozen=True):
    """`plan` is the plan at version 0; `plan_version` the version its owner believes it has, 0 for a new plan."""

    owner: PeerId
    connection: int
    job: JobId
    title: str
    steps: int
    plan: bytes
    plan_version: int
    members: tuple[MemberPlacement, ...]


class AskPlace(Struct, frozen=True):
    """A job's owner asks for a place in the queue or for its present one (`wire.broker.QueueRequest`)."""

    owner: PeerId
    connection: int
    job: JobId
    title: str
    steps: int
    machines: int
    memory_bytes: int
    excluded: tuple[str, ...] = ()
    priority: str = ""
    again: bool = False


class ReportJob(Struct, frozen=True):
    sender: PeerId
    connection: int
    job: JobId
    state: Literal["starting", "running", "stopping", "done", "failed"]
    step: int
    detail: str


class ReportWork(Struct, frozen=True):
    """A job's owner reports what its job has committed (`wire.broker.WorkReport`)."""

    sender: PeerId
    job: JobId
    run: str
    sequence: int
    steps: int
    tokens: int
    shares: tuple[WorkShare, ...]


class NoteRelayed(Struct, frozen=True):
    """The relay on the broker's machine has copied this much more."""

    relayed_bytes: int


class StopJob(Struct, frozen=True):
    sender: PeerId
    job: JobId
    connection: int = 0


class Invite(Struct, frozen=True):
    """`digest`: SHA-256 of a token that the shell has just drawn."""

    sender: PeerId
    digest: str
    uses: int
    lifetime_s: float


class EvictMember(Struct, frozen=True):
    """Send a member away for good, with all keys of its machine."""

    sender: PeerId
    peer: PeerId


class RevokeInvitation(Struct, frozen=True):
    """`invitation`: the beginning of its digest, as long as needed to tell it from others."""

    sender: PeerId
    invitation: str


class Disconnected(Struct, frozen=True):
    connection: int


class DeadlinePassed(Struct, frozen=True):
    """A deadline may have passed."""


class Stalled(Struct, frozen=True):
    """The broker itself was suspended for a while, so no member's silence counts."""


Request = (
    Enrol
    | Vouch
    | RegisterMember
    | Beat
    | AskLeave
    | RequestJob
    | AskPlace
    | ReportJob
    | ReportWork
    | NoteRelayed
    | StopJob
    | Invite
    | EvictMember
    | RevokeInvitation
    | Disconnected
    | DeadlinePassed
    | Stalled
)


class Answer(Struct, frozen=True):
    """Send this message to the sender of the request."""

    message: Message


class Notify(Struct, frozen=True):
    """Send this message on another connection."""

    connection: int
    message: Message


class Certify(Struct, frozen=True):
    """Answer with a certificate for this peer."""

    peer: PeerId


class IssueTickets(Struct, frozen=True):
    """Answer with the job's plan at its version and new tickets for all its members."""

    job: JobId
    version: int


class HandOut(Struct, frozen=True):
    """Answer with the invitation whose token has just been journalled as a digest."""


class SpreadRevocations(Struct, frozen=True):
    """Send the list of evicted members to all that are connected, and cut off those on it."""


Command = Answer | Notify | Certify | IssueTickets | HandOut | SpreadRevocations
