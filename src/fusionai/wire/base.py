"""Parts of all messages (bounded field types, fence, tensor headers, refusal codes); messages of any connection.

The other modules of `wire` build the messages of their pair of sides from these parts.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

PROTOCOL_VERSION: Final = 11
OLDEST_PROTOCOL_VERSION: Final = 11

Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Blob = Annotated[bytes, Meta(max_length=65_536)]
MAX_PLACEMENT_BYTES: Final = 2**19
Placement = Annotated[bytes, Meta(max_length=MAX_PLACEMENT_BYTES)]
"""Placement of one round, signed by the job's owner: which keys hold which stages (`transport.security.signed`)."""
Secret = Annotated[bytes, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Index = Annotated[int, Meta(ge=0, le=2**40)]
StepIndex = Annotated[int, Meta(ge=-1, le=2**40)]
"""A step; -1 means "before the first"."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Address = Annotated[str, Meta(max_length=256)]
"""`tcp://host:port`. Other schemes select other transports."""
Addresses = Annotated[tuple[Address, ...], Meta(max_length=32)]
Peer = Annotated[str, Meta(max_length=64)]
Job = Annotated[str, Meta(max_length=128, pattern=r"^[a-z0-9][a-z0-9-]*$")]
Stream = Literal["control", "tensors", "state"]
"""Streams are separate connections, so that a control message can overtake a tensor that is held back."""
Mode = Literal["train", "eval", "infer"]
RefusalCode = Literal[
    "protocol_version",
    "not_authorised",
    "bad_invitation",
    "bad_code",
    "evicted",
    "bad_ticket",
    "expired_ticket",
    "bad_placement",
    "untrusted",
    "stale_fence",
    "unknown_job",
    "unknown_peer",
    "unsupported_operator",
    "bad_graph",
    "out_of_memory",
    "bad_message",
    "busy",
    "queued",
    "quota",
    "leaving",
    "failed",
]
REFUSAL_SENTENCES: Final[dict[str, str]] = {
    "protocol_version": "The two sides speak different protocol versions; update the older one.",
    "not_authorised": "This identity may not do that in this pool.",
    "bad_invitation": "The invitation is unknown, used up or expired; ask the broker's owner for a new one.",
    "bad_code": "The code is wrong or no longer valid; `fusion invite --code` on the broker's machine makes a new one.",
    "evicted": "The pool's owner has sent this machine away.",
    "bad_ticket": "The ticket does not name this peer, job or plan, or its signature does not hold.",
    "expired_ticket": "The ticket has expired or its job is over; the job owner must ask the broker for a new one.",
    "bad_placement": "The placement signed by the job's owner is missing, does not hold or does not name this peer.",
    "untrusted": "Its key is not endorsed by any that is trusted here.",
    "stale_fence": "The message belongs to an older plan version or attempt.",
    "unknown_job": "No such job in this pool.",
    "unknown_peer": "No such peer in this pool.",
    "unsupported_operator": "This peer's backend can't run an operator of its stage.",
    "bad_graph": "The graph breaks the grammar, the allow-list or a cap.",
    "out_of_memory": "The stage needs more memory than this peer lends.",
    "bad_message": "The message does not fit the schema or comes at the wrong moment.",
    "busy": "This peer already runs a stage of another job.",
    "queued": "Jobs wait in the pool's queue; with --wait this job takes a place in it.",
    "quota": "The owner's jobs would hold more than the pool's policy lets one owner have.",
    "leaving": "This peer is leaving the pool.",
    "failed": "The stage failed; the message says how.",
}


class WireMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="m"):
    """Base of all messages. The tag identifies the message type."""


class Fence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True, array_like=True):
    """(plan version, driver incarnation, attempt), compared in that order. A peer acts only on messages with its own
    current fence."""

    plan_version: Count
    incarnation: Count
    attempt: Count


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Name, dtype and shape of one tensor. Tensor bytes follow in the body in the same order, unpadded. `layout`: see
    `primitives.tensors.HostTensor`."""

    name: Name
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    layout: Annotated[tuple[Count, ...], Meta(max_length=17)] = ()


class Neighbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The peer that hosts a stage of the job. Stage numbers are the plan's; the job owner's own stages have the owner's
    peer id."""

    stage: Count
    peer: Peer
    ticket: Blob = b""
    """The broker's ticket for that peer, which says where it listens; empty for the owner, which no member dials."""


MAX_PROBE_BYTES: Final = 4 * 2**20
"""Most bytes that one bandwidth measurement may carry in either direction."""


class Hello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    """First message of the dialling side. `stream` says what this connection is for."""

    oldest_version: Count = OLDEST_PROTOCOL_VERSION
    newest_version: Count = PROTOCOL_VERSION
    stream: Stream = "control"
    software: Name = ""


class Welcome(WireMessage, frozen=True, kw_only=True, tag="welcome"):
    """The listening side accepts and names the version both speak."""

    version: Count
    software: Name = ""


class Refused(WireMessage, frozen=True, kw_only=True, tag="refused"):
    """Refusal, with its reason. May answer any message. After a handshake it ends the connection."""

    code: RefusalCode
    reason: Text = ""


class Done(WireMessage, frozen=True, kw_only=True, tag="done"):
    """Acknowledgement without further content."""


class Ping(WireMessage, frozen=True, kw_only=True, tag="ping"):
    """Measures liveness and round-trip time between members, on any stream."""

    sequence: Count
    sent_at_s: Seconds


class Pong(WireMessage, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping` and `Probe`: repeats their numbers and carries as many bytes as the probe asked for."""

    sequence: Count
    sent_at_s: Seconds
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()


class Probe(WireMessage, frozen=True, kw_only=True, tag="probe"):
    """Bulk bytes to measure a link's bandwidth. Answered by `Pong` when the last byte has arrived."""

    sequence: Count
    sent_at_s: Seconds
    back_bytes: Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)] = 0
    """Bytes that the answer carries, to measure the other direction."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()
