"""Looks at the circle of trust while a job runs: who is no longer in it loses its part within a second or so.

A revocation, an endorsement that expires and a trust file that can't be read any more all count. Decides only when to
look. Neighbours: `client.job_trust` says who may stay, drivers shut out, `client.replanning` finds somebody else.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from fusionai.client.job_trust import JobTrust, parts
from fusionai.execution.deployment import Deployment
from fusionai.primitives.ids import PeerId, short

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class Guarded(Protocol):
    """A training driver or a serving engine."""

    @property
    def deployment(self) -> Deployment: ...

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """It counts as lost."""
        ...


async def watch_circle(trust: JobTrust, driver: Guarded) -> None:
    """Until cancelled. Does nothing for a job that anybody may work for."""
    while trust.required:
        await asyncio.sleep(LOOK_S)
        for peer in sorted(parts(driver.deployment.plan)):
            if (reason := trust.reason_against(peer)) is not None:
                log.warning("peer %s is shut out: %s", short(peer), reason)
                driver.shut_out(peer, f"it is not trusted (any more): {reason}")
