"""Selects links within one local network, as measured by peers, that a plan should use instead of the access links.

Between two machines of one home, a plan would otherwise count the home's access link in both directions. Peers' reports
about links are trusted like their profiles: a peer that reports wrongly gets stages that are slower than planned.

`peer.profile` measures the links; `scheduling.problem.links` defines how links between two peers override access links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fusionai.client.pool.session import Member
from fusionai.scheduling.problem.links import hop
from fusionai.scheduling.problem.types import Link

BETTER: Final = 2.0
"""Least factor by which a local link must exceed the access links' bandwidth (chosen). Every exception slows down the
planner's search."""
MOST_MEMBERS: Final = 64
"""Largest pool for which local links are used (chosen). In larger ones, the planner's bounds, which rely on equal
machines, are worth more."""


def near_links(members: Sequence[Member]) -> dict[str, Link]:
    """Return links by `"<from>><to>"`, in both directions, with the slower figures if both ends measured."""
    if len(members) > MOST_MEMBERS:
        return {}
    profiles = {member.view.peer: member.profile for member in members}
    found: dict[str, Link] = {}
    for member in members:
        for link in member.view.links:
            other = profiles.get(link.peer)
            if link.way != "lan" or not link.probed_bytes_per_s or other is None or other is member.profile:
                continue
            line = hop(member.profile, other, {})
            if link.probed_bytes_per_s < BETTER * line.bandwidth_bytes_per_s:
                continue
            known = Link(bandwidth_bytes_per_s=link.probed_bytes_per_s, latency_s=link.round_trip_s / 2)
            for key in (f"{member.view.peer}>{link.peer}", f"{link.peer}>{member.view.peer}"):
                before = found.get(key)
                if before is None or known.bandwidth_bytes_per_s < before.bandwidth_bytes_per_s:
                    found[key] = known
    return dict(sorted(found.items()))
