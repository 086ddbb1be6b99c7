"""Links within one network, as peers found them, for plans. Decides which are enough better than the lines to count.

Between two machines of one home a plan would otherwise count the home's line, there and back. What peers say of each
other is believed as their profiles are: whoever lies gets stages that are slower than planned, and loses them.

Neighbours: `peer.near` measures, `scheduling.links` says what an exception means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fusionai.client.pool_session import Member
from fusionai.scheduling.links import hop
from fusionai.scheduling.types import Link

BETTER: Final = 2.0
"""So many times the bandwidth of the two lines: every exception costs the planner's search."""
MOST_MEMBERS: Final = 64
"""Of more, bounds that count on equal machines are worth more than short ways."""


def near_links(members: Sequence[Member]) -> dict[str, Link]:
    """`"<from>><to>"` -> link, both ways, the slower of the two where both were probed."""
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
