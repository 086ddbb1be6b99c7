"""Decides who may use the broker's page: which hosts and origins a request may name, and who has a session.

The page changes the pool, so a foreign web page in its owner's browser must reach nothing. Every request must name a
host of the page (a rebound DNS name is another host). A request that changes something must come from the page's own
origin and carry JSON, which no form and no simple request of another origin does. `app` applies this.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fusionai.gateway.admission import host_name
from fusionai.primitives.errors import FusionError

TRIES: Final = 5
"""Wrong secrets in a row after which further tries wait (chosen)."""
WAIT_S: Final = 60.0
"""Wait after that, in seconds; each further wrong secret doubles it up to `LONGEST_WAIT_S` (both chosen)."""
LONGEST_WAIT_S: Final = 3600.0
SESSION_S: Final = 12 * 3600.0
"""Time after its last use at which a session ends (chosen)."""
MOST_SESSIONS: Final = 64
"""Limit on sessions; a further one ends the one that was used longest ago (chosen)."""
SHORTEST_PASSWORD: Final = 12
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class PageRefusal(FusionError):
    """A request to the page that is refused. `status`: of the HTTP answer."""

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """What is decided about of a request. Headers that are missing are None."""

    method: str
    host: str | None
    origin: str | None
    fetch_site: str | None
    content_type: str | None


def check_source(head: RequestHead, *, scheme: str, hosts: frozenset[str]) -> None:
    """Raise `PageRefusal` for a request that does not come from the page itself. `hosts`: names of the page's
    machine."""
    host = head.host or ""
    if host_name(host) not in hosts:
        raise PageRefusal(403, f"This page has another address than {host[:80]!r}.")
    if head.origin is not None and head.origin.lower() != f"{scheme}://{host.lower()}":
        raise PageRefusal(403, f"This page takes requests from itself only, not from {head.origin[:80]!r}.")
    if head.method in ("GET", "HEAD"):
        return
    if head.origin is None or head.fetch_site not in (None, "same-origin"):
        raise PageRefusal(403, "A request that changes something must come from this page.")
    if (head.content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise PageRefusal(415, "Expected the content type application/json.")


@dataclass
class SessionGate:
    """Sessions of the page, opened with its secret. Times are on any monotonic clock. Wrong tries are counted for all
    clients together, because an attacker may have many addresses; open sessions go on meanwhile."""

    digest: bytes
    """SHA-256 of the secret."""
    draw: Callable[[], str] = lambda: secrets.token_urlsafe(32)
    _wrong: int = 0
    _closed_until_s: float = 0.0
    _sessions: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Digest of each session's token -> last use."""

    def open(self, secret: str, now_s: float) -> str:
        """Return the token of a new session. Raises `PageRefusal` for a wrong secret, and for any during a wait."""
        if now_s < self._closed_until_s:
            wait_s = self._closed_until_s - now_s
            raise PageRefusal(429, f"Too many wrong tries; the next one is possible in {wait_s:.0f} s.")
        if not hmac.compare_digest(self.digest, _digest(secret)):
            self._wrong += 1
            if self._wrong >= TRIES:
                self._closed_until_s = now_s + min(WAIT_S * 2.0 ** (self._wrong - TRIES), LONGEST_WAIT_S)
            raise PageRefusal(401, "That is not right.")
        self._wrong = 0
        token = self.draw()
        self._sessions[_digest(token)] = now_s
        while len(self._sessions) > MOST_SESSIONS:
            del self._sessions[min(self._sessions, key=self._sessions.__getitem__)]
        return token

    def check(self, token: str | None, now_s: float) -> None:
        """Raise `PageRefusal` unless the token is that of an open session, which is prolonged."""
        shown = _digest(token or "")
        used_s = self._sessions.get(shown)
        if used_s is None or now_s - used_s > SESSION_S:
            self._sessions.pop(shown, None)
            raise PageRefusal(401, "Sign in first.")
        self._sessions[shown] = now_s

    def close(self, token: str | None) -> None:
        """End the session."""
        self._sessions.pop(_digest(token or ""), None)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def gate_of(secret: str) -> SessionGate:
    """Return the gate that this secret opens."""
    return SessionGate(_digest(secret))
