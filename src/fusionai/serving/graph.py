"""Which weights are needed to serve a captured graph. Neighbours: `ir.serving`, `client.serving.model`."""

from __future__ import annotations

from fusionai.ir.schema import Graph
from fusionai.ir.serving import serving_graph


def weight_keys(graph: Graph) -> tuple[str, ...]:
    """Keys of all parameters that `graph` without its loss reads, sorted."""
    return tuple(sorted({spec.key for spec in serving_graph(graph).params.values()}))
