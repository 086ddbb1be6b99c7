"""From a `Load` message to a stage without weights, with everything validated before it runs.

`execution.serving.member` calls it, `ir.validate` checks graphs, `backends.interface` prepares programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from fusionai.backends.interface import ServingBackend, ServingProgram
from fusionai.backends.serving.cacheless import WholeServing
from fusionai.execution.host import Host
from fusionai.execution.serving.boundary import ServingBoundary
from fusionai.execution.serving.stage import Identity, ServingPostman, ServingStage, retained_bytes
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.validate import parse
from fusionai.primitives.errors import ExecutionError, GraphError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire


def identity_of(load: wire.Load) -> Identity:
    return Identity(
        graph_hash=load.graph_hash,
        boundary=bytes(load.boundary),
        options=load.options,
        select=load.select,
        last=load.stage == load.stages - 1,
        weights=tuple(spec.digest for spec in load.weights),
    )


async def prepare_stage(
    host: Host,
    load: wire.Load,
    tensors: Mapping[str, HostTensor],
    *,
    postman: ServingPostman,
    memory_limit_bytes: int | None,
) -> tuple[ServingStage, ServingProgram]:
    """Validate and prepare one stage in the compute thread. `memory_limit_bytes`: memory left for this stage.

    Raises `GraphError` for a graph or boundary that is not valid, `ExecutionError` for a stage this machine can't run.
    """
    place, identity = f"stage {load.stage}", identity_of(load)
    graph_bytes = tensors.get("graph")
    if graph_bytes is None:
        raise GraphError(f"the load of {place} carries no graph.")
    try:
        boundary = msgspec.msgpack.decode(load.boundary, type=ServingBoundary)
    except msgspec.MsgspecError as error:
        raise GraphError(f"the boundary of {place} does not fit its schema: {error}.") from None
    if boundary.stage != load.stage or load.stage >= load.stages:
        raise GraphError(f"the load of {place} of {load.stages} carries the boundary of stage {boundary.stage}.")
    if not hasattr(host.backend, "serve"):
        raise ExecutionError(f"backend {host.backend.name} can't serve models.")
    backend = cast("ServingBackend", host.backend)

    def read() -> Graph:
        graph = parse(graph_bytes.data, host.graph_limits)
        if content_hash(graph) != load.graph_hash:
            raise GraphError(f"the graph of {place} does not have the announced hash.")
        boundary.check(graph)
        if unsupported := host.backend.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(f"backend {host.backend.name} can't run {', '.join(unsupported)} of {place}.")
        needed, given = {spec.key for spec in graph.params.values()}, {spec.key for spec in load.weights}
        if needed != given:
            some = ", ".join(sorted(needed ^ given)[:5])
            raise GraphError(
                f"the load of {place} does not list exactly the weights that the graph reads; differing: {some}."
            )
        return graph

    # Two pieces of work, so that passes of other stages get their turns in between.
    graph, _ = await host.compute.run(read)
    limit_bytes = memory_limit_bytes
    if limit_bytes is not None:
        limit_bytes -= retained_bytes(boundary, identity)
    program, _ = await host.compute.run(
        lambda: (
            WholeServing(graph, options=load.options, backend=host.backend, memory_limit_bytes=limit_bytes)
            if load.options.whole
            else backend.serve(graph, options=load.options, memory_limit_bytes=limit_bytes)
        )
    )
    stage = ServingStage(
        identity=identity, boundary=boundary, graph=graph, program=program, compute=host.compute, postman=postman
    )
    return stage, program
