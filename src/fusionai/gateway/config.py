"""What the gateway is told: names, limits, keys. Decides the defaults alone.

Neighbours: everything in this package reads it; the command line fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusionai.gateway.keys import KeyRing


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take. All of them answer with a clear error, none with a dropped connection, save
    `connections` doubled: beyond that connections are closed at once."""

    body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    """To send a whole body; a request's head has `head_timeout_s`."""
    head_timeout_s: float = 15.0
    connections: int = 1024
    """Open at once. A request on one more is answered with 503."""
    requests: int = 512
    """Being answered at once. One more is answered with 429."""
    choices: int = 32
    """Generations of one request: prompts times `n`."""
    inputs: int = 256
    """Texts of one request for embeddings."""
    unread_bytes: int = 64 * 2**10
    """Events that may wait for a client that does not read; then its generation ends. The system's buffers come on top:
    `socket_bytes` here, and what the client's own system accepts for it, 64 KB as a rule."""
    socket_bytes: int = 16 * 2**10
    """Unsent bytes the system keeps for a connection. Small, because they hide a client that does not read: with 256 KB
    of each, 16 such clients held all sessions of a slow model for some ten minutes."""
    stalled_s: float = 20.0
    """A client that takes nothing for this time while something waits for it is cut off."""
    keep_alive_s: float = 10.0
    """Between comments on a stream on which nothing else comes."""
    deadline_s: float | None = None
    """For a whole generation, unless the request says less."""
    drain_s: float = 5.0
    """Streams may go on for so long once the gateway stops."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`model`: the name clients use; `aliases`: others that mean the same; `adapters`: other names, each an adapter's
    beside it. `keys`: None means that nobody has to show one, and then only this machine may ask."""

    model: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    keys: KeyRing | None = None
    limits: Limits = field(default_factory=Limits)
    created_s: int = 0
    """When the model came, in seconds since 1970: `/v1/models` tells it."""
