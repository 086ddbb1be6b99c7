"""What a machine brings to every job it takes part in: backend, compute thread, transport and limits.

Built by `peer.daemon` and `client`, used by `execution.training.member`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusionai.backends.interface import Backend
from fusionai.execution.compute import ComputeThread
from fusionai.ir.validate import GraphLimits
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Transport
from fusionai.transport.security.signed import Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Resources of one machine. `memory_limit_bytes` covers stages and snapshots together; None if the provider set no
    limit. `weights`: cache of served models' weights; None on a machine that does not serve other owners' models.
    `seal`: signs the placements of this machine's own jobs; None if it has no jobs."""

    peer: PeerId
    backend: Backend
    compute: ComputeThread
    transport: Transport
    fingerprint: str
    clock: Clock
    memory_limit_bytes: int | None = None
    weights: WeightStore | None = None
    seal: Seal | None = None
    graph_limits: GraphLimits = field(default_factory=GraphLimits)
