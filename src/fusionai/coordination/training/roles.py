"""Places, neighbours and limits of one plan version, as the machine of a training job's driver sees them.

`training` makes it from a plan and its partition; `coordination.training.driver` and `restoring` use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusionai.coordination.round.roles import PlanRoles


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles(PlanRoles):
    snapshot_every: int = 0
    """Steps between the snapshots that standbys get."""
    feed_window: int
    """Microbatches that may be fed beyond those whose loss is known."""
    neighbours: Mapping[int, frozenset[int]]
    """Stage -> stages it exchanges tensors with."""
    fed: frozenset[int]
    """Stages that take inputs from the data feed."""
    stateless: frozenset[int] = frozenset()
    """Stages without parameters and buffers (the loss): their state is known at every step."""
