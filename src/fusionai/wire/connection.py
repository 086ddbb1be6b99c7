"""Messages of every connection: handshake, refusal, acknowledgement, and measurement of the link."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from fusionai.wire.base import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Count,
    Name,
    RefusalCode,
    Seconds,
    Stream,
    TensorHeader,
    Text,
    WireMessage,
)

MAX_BACK_BYTES: Final = 4 * 2**20
"""Most bytes that a member may ask to be sent back for a bandwidth measurement."""


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
    back_bytes: Annotated[int, Meta(ge=0, le=MAX_BACK_BYTES)] = 0
    """Bytes that the answer carries, to measure the other direction."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()
