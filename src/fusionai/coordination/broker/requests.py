"""The vocabulary of the broker's decisions: requests, commands and refusals.

A request names its sender as authenticated by the transport, and its connection by the number that the shell gave it.
`decisions` decides, `broker.service` makes requests of messages and performs commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fusionai.coordination.broker.events import MemberPlacement
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import Message, RefusalCode, Refused

REASON_LENGTH: Final = 2000


class Refusal(Exception):
    """Raised for a request that does not fit. The sender gets `message`."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.message = Refused(code=code, reason=reason[:REASON_LENGTH])


@dataclass(frozen=True, slots=True)
class Enrol:
    """A stranger shows an invitation. `digest`: SHA-256 of the token, hex. `peer` is computed from the key it names."""

    digest: str
    peer: PeerId
    purpose: Literal["provider", "owner"]


@dataclass(frozen=True, slots=True)
class Vouch:
    """A member asks for a certificate for a further key of its own machine."""

    sender: PeerId
    peer: PeerId
    purpose: Literal["provider", "owner"]


@dataclass(frozen=True, slots=True)
class RegisterMember:
    peer: PeerId
    connection: int
    boot: int
    profile: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat. `jobs`: jobs of which the process holds state."""

    peer: PeerId
    connection: int
    boot: int
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskLeave:
    peer: PeerId
    connection: int
    drain: bool


@dataclass(frozen=True, slots=True)
class RequestJob:
    """`plan` is the plan at version 0; `plan_version` the version its owner believes it has, 0 for a new plan."""

    owner: PeerId
    connection: int
    job: JobId
    title: str
    steps: int
    plan: bytes
    plan_version: int
    members: tuple[MemberPlacement, ...]


@dataclass(frozen=True, slots=True)
class ReportJob:
    sender: PeerId
    connection: int
    job: JobId
    state: Literal["starting", "running", "stopping", "done", "failed"]
    step: int
    detail: str


@dataclass(frozen=True, slots=True)
class StopJob:
    sender: PeerId
    job: JobId


@dataclass(frozen=True, slots=True)
class Invite:
    """`digest`: SHA-256 of a token that the shell has just drawn."""

    sender: PeerId
    digest: str
    uses: int
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    connection: int


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A deadline may have passed."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """The broker itself was suspended for a while, so no member's silence counts."""


Request = (
    Enrol
    | Vouch
    | RegisterMember
    | Beat
    | AskLeave
    | RequestJob
    | ReportJob
    | StopJob
    | Invite
    | Disconnected
    | DeadlinePassed
    | Stalled
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Send this message to the sender of the request."""

    message: Message


@dataclass(frozen=True, slots=True)
class Notify:
    """Send this message on another connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Certify:
    """Answer with a certificate for this peer."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class IssueTickets:
    """Answer with the job's plan at its version and new tickets for all its members."""

    job: JobId
    version: int


@dataclass(frozen=True, slots=True)
class HandOut:
    """Answer with the invitation whose token has just been journalled as a digest."""


Command = Answer | Notify | Certify | IssueTickets | HandOut
