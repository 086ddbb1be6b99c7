"""The gateway's settings: names, limits, keys, with their defaults.

Neighbours: all modules of this package read them; the command line sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusionai.gateway.keys import KeyRing


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may use. Exceeding a limit gives an error answer, never a dropped connection, with one exception:
    beyond twice `connections`, a connection is closed at once."""

    body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    """Time to send a whole body; the head of a request has `head_timeout_s`."""
    head_timeout_s: float = 15.0
    connections: int = 1024
    """Open connections; a request on any further one is answered with 503."""
    requests: int = 512
    """Requests being answered at the same time; any further one is answered with 429."""
    choices: int = 32
    """Generations in one request: number of prompts times `n`."""
    inputs: int = 256
    """Texts in one request for embeddings."""
    unread_bytes: int = 64 * 2**10
    """Bytes of events that may wait for a client that does not read; beyond it the generation ends. The operating
    systems' buffers are additional: `socket_bytes` here, and the receive buffer of the client's system, usually 64
    KB."""
    socket_bytes: int = 16 * 2**10
    """Size of a connection's send buffer in the operating system. Small, because the buffer hides that a client does
    not read: with 256 KB each, 16 such clients kept all sessions of a slow model for about ten minutes."""
    stalled_s: float = 20.0
    """A client that accepts no data for this time while data waits for it is disconnected."""
    keep_alive_s: float = 10.0
    """Time between comments on a stream with no other events."""
    deadline_s: float | None = None
    """Deadline of a generation, unless the request sets an earlier one; None: no deadline."""
    drain_s: float = 5.0
    """Time for which streams may continue after the gateway was asked to stop."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`model`: the name that clients use; `aliases`: other names for it; `adapters`: names of its adapters, used like
    model names. `keys` None: no API key is required, and only programs on this machine may send requests."""

    model: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    keys: KeyRing | None = None
    limits: Limits = field(default_factory=Limits)
    created_s: int = 0
    """Creation time of the model in seconds since 1970, as reported by `/v1/models`."""
