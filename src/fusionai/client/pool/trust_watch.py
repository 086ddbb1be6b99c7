"""Checks the owner's trust list while a job runs, and excludes peers that are no longer trusted within about a second.

A peer loses its trust by revocation, by an expired endorsement, or if the trust file becomes unreadable.
`client.pool.job_trust` decides who is trusted, drivers exclude peers, `client.pool.replanning` replaces them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from fusionai.client.pool.job_trust import JobTrust, parts
from fusionai.execution.deployment import Deployment
from fusionai.primitives.ids import PeerId, short

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class Guarded(Protocol):
    """A training driver or a serving engine."""

    @property
    def deployment(self) -> Deployment: ...

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Treat `peer` as lost."""
        ...


async def watch_circle(trust: JobTrust, driver: Guarded) -> None:
    """Check until cancelled. Returns at once for a job that does not need trusted peers."""
    while trust.required:
        await asyncio.sleep(LOOK_S)
        for peer in sorted(parts(driver.deployment.plan)):
            if (reason := trust.reason_against(peer)) is not None:
                log.warning("peer %s is shut out: %s", short(peer), reason)
                driver.shut_out(peer, f"it is not trusted (any more): {reason}")
