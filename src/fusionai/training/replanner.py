"""Who gets the driver another plan when a stage has nobody. The interface only.

Neighbours: `training.driver` asks, `client.replanning` asks the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fusionai.training.deployment import Deployment


class Replanner(Protocol):
    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        """`present` with others in the place of `lost`, journalled as the plan in force. Takes as long as it takes;
        `waiting` hears what is waited for. Raises `FusionError` where the job can't go on at all."""
        ...
