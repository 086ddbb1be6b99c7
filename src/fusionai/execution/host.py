"""What a machine brings to every job it takes part in. Decides nothing.

Neighbours: `peer.daemon` and `client` make it, `execution.member` works with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusionai.backends.interface import Backend
from fusionai.execution.compute import ComputeThread
from fusionai.ir.validate import Limits
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Transport
from fusionai.transport.placements import Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`memory_limit_bytes` covers stages and snapshots together; None where the provider set no limit. `weights`: where
    those of served models are kept; None on a machine that serves nobody else's. `seal`: what signs the placements of
    its own jobs; None on one that has none."""

    peer: PeerId
    backend: Backend
    compute: ComputeThread
    transport: Transport
    fingerprint: str
    clock: Clock
    memory_limit_bytes: int | None = None
    weights: WeightStore | None = None
    seal: Seal | None = None
    graph_limits: Limits = field(default_factory=Limits)
