"""Messages by which two members meet that can't dial each other: fields and bounds.

The dialling side asks the broker to introduce it. The broker answers with a pairing token and sends the other side a
token of its own. Both sides then connect as the introduction says. These messages carry no content of a job.

Neighbours: `wire.messages` has them in its union; `transport.introductions` asks, `broker.introductions` answers.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import Addresses, Blob, Count, Name, Peer, Seconds, WireMessage

Way = Literal["lan", "direct", "quic", "relay"]
"""Route of a link: within one network, direct over the internet, direct through routers by UDP, or over a relay that
sees only ciphertext."""

MAX_LINKS: Final = 256
"""Most links of one peer in a report. Further ones are left out."""
MAX_NEAR: Final = 16
"""Most nearby peers that the broker names to a new member."""


class Meet(WireMessage, frozen=True, kw_only=True, tag="meet"):
    """A member asks the broker to introduce it to another member that it can't dial."""

    peer: Peer
    """Peer that the asking side wants to reach."""
    addresses: Addresses = ()
    """Addresses where the asking side can be dialled now, so that the other side can try at the same time."""


class Introduced(WireMessage, frozen=True, kw_only=True, tag="introduced"):
    """Answer to `Meet`: the other side has been notified."""

    token: Blob
    """Pairing token of the asking side (`transport.pairing`), to show to the relay; empty: there is no relay."""
    addresses: Addresses = ()
    """Addresses where the other side listens now."""


class MeetNotice(WireMessage, frozen=True, kw_only=True, tag="meet_notice"):
    """The broker tells a peer that another member wants to reach it and can't dial it: connect to the relay."""

    peer: Peer
    """Peer that wants to reach the receiver."""
    token: Blob
    """Pairing token of the receiving side (`transport.pairing`), to show to the relay; empty: there is no relay."""
    addresses: Addresses = ()
    """Addresses where the other side can be dialled now."""


class Observe(WireMessage, frozen=True, kw_only=True, tag="observe"):
    """A member asks the broker from which address its connection comes, and whether one of its ports can be dialled."""

    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """TCP port for the broker to dial at that address; 0: none."""


class Observed(WireMessage, frozen=True, kw_only=True, tag="observed"):
    """Answer to `Observe`."""

    host: Name
    """Source address of the connection, as the broker sees it; empty if the transport has none."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Source port of the connection. It differs from the member's own port if a router translates addresses."""
    reachable: bool = False
    """Whether the asking peer itself answered at that address and the port it named."""
    udp_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """QUIC port of the broker's machine that answers the same question for UDP; 0: none."""


class LinkView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An open or probed link of a peer: to which peer, and by which route."""

    peer: Peer
    way: Way
    """Route: within one network, direct, through routers by UDP, or over a relay."""
    channels: Count
    """Number of connections of the link; 0: it was only probed."""
    round_trip_s: Seconds
    """Round-trip time of the network, measured between the two ends; 0: not measured."""
    bandwidth_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Highest rate delivered so far, a lower bound of the link's bandwidth; 0: not measured."""
    loss: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of the packets that had to be sent again."""
    probed_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Bandwidth that a probe of the idle link measured, within one network; 0: not probed."""


class Near(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Another peer that the broker sees at the same address, perhaps in the same home network."""

    peer: Peer
    addresses: Addresses
