"""From an `Attach`, `Prepare` or `Recheck` message to a loaded stage, with everything validated before it runs.

`execution.training.stages` calls it, `ir.validate` checks graphs, `backends` load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fusionai.backends.interface import StageProgram
from fusionai.execution.allocator import keep_freed_memory, spare_memory
from fusionai.execution.host import Host
from fusionai.execution.training.boundary import Boundary
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.validate import parse
from fusionai.primitives.errors import ExecutionError, GraphError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A validated stage and its program."""

    graph: Graph
    boundary: Boundary
    program: StageProgram


async def load_stage(
    host: Host,
    told: wire.Attach | wire.Prepare | wire.Recheck,
    tensors: Mapping[str, HostTensor],
    *,
    places: Mapping[int, PeerId],
    memory_limit_bytes: int | None,
) -> LoadedStage:
    """Validate and load one stage in the compute thread.

    `places`: the peer of each of the job's stages. `memory_limit_bytes`: memory left for this stage. Raises
    `GraphError` for a graph or boundary that is not valid, `ExecutionError` for a stage that this machine can't run.
    """
    told_as = type(told).__name__.lower()
    graph_bytes = tensors.get("graph")
    if graph_bytes is None:
        raise GraphError(f"the {told_as} of stage {told.stage} carries no graph.")
    try:
        boundary = msgspec.msgpack.decode(told.boundary, type=Boundary)
    except msgspec.MsgspecError as error:
        raise GraphError(f"the boundary of stage {told.stage} does not fit its schema: {error}.") from None
    if boundary.stage != told.stage:
        raise GraphError(f"the {told_as} of stage {told.stage} carries the boundary of stage {boundary.stage}.")
    if unknown := boundary.others - places.keys():
        raise GraphError(f"stage {told.stage} exchanges tensors with {sorted(unknown)}, which are not in its plan.")
    if len(told.options.codecs) not in (0, len(places) - 1):
        raise GraphError(
            f"the {told_as} of stage {told.stage} has {len(told.options.codecs)} codecs for {len(places)} stages."
        )

    def load() -> LoadedStage:
        graph = parse(graph_bytes.data, host.graph_limits)
        if content_hash(graph) != told.graph_hash:
            raise GraphError(f"stage {told.stage}'s graph does not have the announced hash.")
        boundary.check(graph)
        if unsupported := host.backend.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(
                f"backend {host.backend.name} can't run {', '.join(unsupported)} of stage {told.stage}."
            )
        # The allocator's settings are process-wide, so the stage loaded last decides.
        if told.options.recompute or told.options.offload:
            spare_memory()
        else:
            keep_freed_memory()
        program = host.backend.load(
            graph,
            grad_inputs=boundary.grad_inputs,
            options=told.options,
            memory_limit_bytes=memory_limit_bytes,
        )
        return LoadedStage(graph, boundary, program)

    loaded, _ = await host.compute.run(load)
    return loaded
