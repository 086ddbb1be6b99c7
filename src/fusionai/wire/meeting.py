"""Messages by which two members come together who can't dial each other. Decides fields and bounds.

The dialling side asks the broker to introduce it; the broker answers with a pairing token and tells the other side,
with a token of its own. Both then go where the introduction says. Nothing of a job is in these messages.

Neighbours: `wire.messages` has them in its union; `transport.introductions` asks, `broker.introductions` answers.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import Addresses, Blob, Count, Name, Peer, Seconds, WireMessage

Way = Literal["lan", "direct", "quic", "relay"]
"""Which way a link goes: within one network, straight over the internet, straight through routers by UDP, or over a
relay that sees ciphertext."""

MAX_LINKS: Final = 256
"""Of one peer, in a report: more are left out."""
MAX_NEAR: Final = 16
"""More peers are not named."""


class Meet(WireMessage, frozen=True, kw_only=True, tag="meet"):
    """A member asks the broker to be introduced to another that it can't dial."""

    peer: Peer
    """Whom it wants to reach."""
    addresses: Addresses = ()
    """Where the asking side can be dialled just now, for the other to try at the same time."""


class Introduced(WireMessage, frozen=True, kw_only=True, tag="introduced"):
    """Answer to `Meet`: the other side has been told."""

    token: Blob
    """The asking side's pairing token (`transport.pairing`), to show to the relay; empty: there is no relay."""
    addresses: Addresses = ()
    """Where the other side listens now."""


class MeetNotice(WireMessage, frozen=True, kw_only=True, tag="meet_notice"):
    """The broker tells a peer that another wants to reach it and can't dial it: come to the relay."""

    peer: Peer
    """Who wants to reach it."""
    token: Blob
    """The receiving side's pairing token (`transport.pairing`), to show to the relay; empty: there is no relay."""
    addresses: Addresses = ()
    """Where the other side can be dialled just now."""


class Observe(WireMessage, frozen=True, kw_only=True, tag="observe"):
    """A member asks the broker how it is seen from there, and whether a port of it can be dialled."""

    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """A TCP port to dial at the address that is seen; 0: none."""


class Observed(WireMessage, frozen=True, kw_only=True, tag="observed"):
    """Answer to `Observe`."""

    host: Name
    """The address the connection comes from, as the broker sees it; empty where the transport has none."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """The port it comes from: another than the own where a router translates."""
    reachable: bool = False
    """Whether the asking peer itself answered at that address and the port it named."""
    udp_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Where the broker's machine can be asked the same by QUIC, to learn how a UDP port is seen; 0: nowhere."""


class LinkView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A link that a peer has now or has probed: to whom and which way."""

    peer: Peer
    way: Way
    """Which way it goes: within one network, straight, through routers by UDP, or over a relay."""
    channels: Count
    """Connections of which it consists; 0: it was only probed."""
    round_trip_s: Seconds
    """Of the network, as measured between the two ends; 0: not measured."""
    bandwidth_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """The most that was delivered so far, which is the least the link can; 0: not measured."""
    loss: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of the packets that had to be sent again."""
    probed_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """What a probe of the idle link found, within one network; 0: not probed."""


class Near(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Another peer that the broker sees at the same address: perhaps in the same home."""

    peer: Peer
    addresses: Addresses
