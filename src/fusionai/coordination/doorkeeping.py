"""Which connection a listener drops when too many have proven too little: random early drop within the largest crowd.

A crowd is a set of connections that cost this machine something and have not yet shown what would entitle them to it:
half-open handshakes, or members without a ticket. A newcomer always gets in. From three quarters of a cap on, another
connection is dropped with a probability that rises to one at the cap, so that a crowd never exceeds its caps.

- A dropped connection belongs to the crowd that is too large: the newcomer's key, the newcomer's address prefix, or, at
  the total cap, the prefix with the most connections. A flood from one prefix therefore displaces itself.
- The dropped connection is drawn at random. Dropping the oldest one would favour an attacker: at a rate of (cap /
  round trip) every honest handshake is the oldest before it is over. The idea is that of Random Early Detection (Floyd
  and Jacobson, 1993), as applied to half-open connections by OpenSSH's `MaxStartups start:rate:full` and by the random
  drop of SYN floods (RFC 4987, section 3.1; Ricciulli, Lincoln and Kakkar, 1999).

`transport.channels.framed` holds the connections and drops them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

EARLY: Final = 0.75
"""Fraction of a cap from which connections are dropped at random (chosen)."""
_PREFIX_BITS: Final = {4: 24, 6: 48}
"""Bits of an address that count as one site. An IPv4 /24 is the smallest network that is routed on its own; an IPv6 /48
is the largest that a provider assigns to one site (RFC 6177), so one customer can't pose as many."""

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdCaps:
    """Most connections in all, of one address prefix, and of one key."""

    total: int
    prefix: int
    key: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a connection comes from. `key` is empty until the other side has proven one."""

    prefix: str
    key: str = ""


def prefix_of(host: str) -> str:
    """Return the network that `host` counts for: an IPv4 /24 or an IPv6 /48; `host` itself if it is no address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(ipaddress.ip_network((address, _PREFIX_BITS[address.version]), strict=False))


class Crowd(Generic[T]):
    """Connections of one kind at one listener. `draw` returns a random number from 0 to 1, without 1."""

    def __init__(self, caps: CrowdCaps, draw: Callable[[], float]) -> None:
        self._caps = caps
        self._draw = draw
        self._callers: dict[T, Caller] = {}
        self._prefixes: Counter[str] = Counter()
        self._keys: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._callers)

    def enter(self, connection: T, caller: Caller) -> T | None:
        """Add a connection. Return another one that must be dropped for it; it no longer belongs to the crowd. Linear
        in the size of the crowd if one is dropped, else constant."""
        self._callers[connection] = caller
        self._prefixes[caller.prefix] += 1
        if caller.key:
            self._keys[caller.key] += 1
        dropped = self._to_drop(connection, caller)
        if dropped is not None:
            self.leave(dropped)
        return dropped

    def leave(self, connection: T) -> None:
        """Remove a connection. Does nothing if it does not belong to the crowd."""
        caller = self._callers.pop(connection, None)
        if caller is None:
            return
        for counted, name in ((self._prefixes, caller.prefix), (self._keys, caller.key)):
            if name in counted:
                counted[name] -= 1
                if not counted[name]:
                    del counted[name]

    def _to_drop(self, newcomer: T, caller: Caller) -> T | None:
        if caller.key and self._keys[caller.key] > self._caps.key:
            return self._one_of(newcomer, lambda other: other.key == caller.key)
        if self._is_drawn(self._prefixes[caller.prefix], self._caps.prefix):
            return self._one_of(newcomer, lambda other: other.prefix == caller.prefix)
        if self._is_drawn(len(self._callers), self._caps.total):
            largest = max(self._prefixes.values())
            return self._one_of(newcomer, lambda other: self._prefixes[other.prefix] == largest)
        return None

    def _is_drawn(self, count: int, cap: int) -> bool:
        """Return whether a crowd of `count` has to give up a connection."""
        early = EARLY * cap
        return count > early and (count > cap or self._draw() < (count - early) / (cap - early))

    def _one_of(self, newcomer: T, belongs: Callable[[Caller], bool]) -> T | None:
        """Draw a connection other than the newcomer; None if there is none."""
        others = [one for one, caller in self._callers.items() if one != newcomer and belongs(caller)]
        return others[int(self._draw() * len(others))] if others else None
