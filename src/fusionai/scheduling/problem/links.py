"""Derives the bandwidth and latency of a hop between two peers from access links and pairwise exceptions.

Every peer has one access link; a transfer runs at the slower of the sender's uplink and the receiver's downlink and
occupies both. An exception (two machines in one home, a bad route) replaces that for one direction of one pair and
occupies neither access link. `pipeline` turns bytes into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.types import Link, PeerProfile


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """Link in one direction between two peers. `shared`: a transfer occupies the access links of both."""

    bandwidth_bytes_per_s: float
    latency_s: float
    shared: bool


_SAME_MACHINE = DirectedLink(bandwidth_bytes_per_s=inf, latency_s=0.0, shared=False)


def hop(sender: PeerProfile, receiver: PeerProfile, exceptions: Mapping[str, Link]) -> DirectedLink:
    """The hop from `sender` to `receiver`; free if they are the same peer. `exceptions`: `from>to` -> link."""
    if sender.peer == receiver.peer:
        return _SAME_MACHINE
    own = exceptions.get(f"{sender.peer}>{receiver.peer}")
    if own is not None:
        return DirectedLink(own.bandwidth_bytes_per_s, own.latency_s, shared=False)
    return DirectedLink(
        bandwidth_bytes_per_s=min(sender.uplink.bandwidth_bytes_per_s, receiver.downlink.bandwidth_bytes_per_s),
        latency_s=sender.uplink.latency_s + receiver.downlink.latency_s,
        shared=True,
    )


def check_links(exceptions: Mapping[str, Link], machines: Sequence[PeerProfile]) -> None:
    """Raise `PlanError` if a key is not `from>to` of two of the machines, or if the bandwidth or latency of a link or
    an access link is invalid."""
    names = sorted({machine.peer for machine in machines})
    for key, link in exceptions.items():
        ends = key.split(">")
        if len(ends) != 2:
            raise PlanError(f"expected a link's key as 'from>to', got {key!r}.")
        for end in ends:
            if end not in names:
                raise PlanError(f"link {key!r} names peer {end!r}, which is not in the pool.", hint=nearest(end, names))
        _check(link, f"link {key!r}")
    for machine in machines:
        _check(machine.uplink, f"the uplink of peer {machine.peer!r}")
        _check(machine.downlink, f"the downlink of peer {machine.peer!r}")


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint that names the nearest known peer."""
    close = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"The nearest known name is {close[0]!r}." if close else "The pool has no peers."


def _check(link: Link, what: str) -> None:
    if not link.bandwidth_bytes_per_s > 0 or not 0 <= link.latency_s < inf:
        raise PlanError(
            f"expected {what} to have a positive bandwidth and a latency of at least 0 s, "
            f"got {link.bandwidth_bytes_per_s} bytes/s and {link.latency_s} s."
        )
