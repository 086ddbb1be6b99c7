"""From an `Attach` to a loaded stage: nothing received is run before it is validated. Decides what is refused.

Neighbours: `execution.member` asks, `ir.validate` guards the door, `backends` load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fusionai.backends.interface import StageProgram
from fusionai.execution.boundary import Boundary
from fusionai.execution.host import Host
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.validate import parse
from fusionai.primitives.errors import ExecutionError, GraphError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire


@dataclass(frozen=True, slots=True)
class LoadedStage:
    graph: Graph
    boundary: Boundary
    program: StageProgram


async def load_stage(
    host: Host,
    attach: wire.Attach,
    tensors: Mapping[str, HostTensor],
    *,
    places: Mapping[int, PeerId],
    memory_limit_bytes: int | None,
) -> LoadedStage:
    """`places`: where the job's stages live, `memory_limit_bytes`: what is left for this one.

    Raises `GraphError` for a graph or boundary outside the grammar, `ExecutionError` for what can't run here."""
    graph_bytes = tensors.get("graph")
    if graph_bytes is None:
        raise GraphError(f"the attach of stage {attach.stage} carries no graph.")
    try:
        boundary = msgspec.msgpack.decode(attach.boundary, type=Boundary)
    except msgspec.MsgspecError as error:
        raise GraphError(f"the boundary of stage {attach.stage} does not fit its schema: {error}.") from None
    if boundary.stage != attach.stage:
        raise GraphError(f"the attach of stage {attach.stage} carries the boundary of stage {boundary.stage}.")
    if places.get(attach.stage) != host.peer:
        raise ExecutionError(f"the plan does not place stage {attach.stage} on this peer.")
    if unknown := boundary.others - places.keys():
        raise GraphError(f"stage {attach.stage} exchanges tensors with {sorted(unknown)}, not in its plan.")

    def load() -> LoadedStage:
        graph = parse(graph_bytes.data, host.graph_limits)
        if content_hash(graph) != attach.graph_hash:
            raise GraphError(f"stage {attach.stage}'s graph has another hash than announced.")
        boundary.check(graph)
        if unsupported := host.backend.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(
                f"backend {host.backend.name} can't run {', '.join(unsupported)} of stage {attach.stage}."
            )
        program = host.backend.load(
            graph,
            grad_inputs=boundary.grad_inputs,
            options=attach.options,
            memory_limit_bytes=memory_limit_bytes,
        )
        return LoadedStage(graph, boundary, program)

    loaded, _ = await host.compute.run(load)
    return loaded
