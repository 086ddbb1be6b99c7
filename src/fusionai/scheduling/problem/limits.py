"""Constraints on pipelines: the number of stages they may have, and the machines they must use.

`planner` sets the limits; every search and every bound obeys them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusionai.scheduling.problem.pins import must_use
from fusionai.scheduling.problem.types import PeerProfile, Problem


@dataclass(frozen=True, slots=True)
class Limits:
    """Pipelines with pool stages from `fewest` to `most` that use every peer in the mask `required`."""

    fewest: int
    most: int
    required: int = 0


def limits_among(problem: Problem, peers: Sequence[PeerProfile], limits: Limits) -> Limits:
    """`limits` for these peers, with the mask of the peers that must be used."""
    index = {peer.peer: i for i, peer in enumerate(peers)}
    required = sum(1 << index[name] for name in must_use(problem))
    return Limits(fewest=limits.fewest, most=min(limits.most, len(peers)), required=required)
