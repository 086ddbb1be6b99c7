"""Bytes of parameters that a graph declares instead of bringing them. Decides nothing: `ir.init` has every bit of them.

    weights = manifest(keys, declared(captured.graph, captured.state, seed), store, ...)

Neighbours: `weight_manifest` asks for what is in no file; a new model is served with what `fusion train` starts from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusionai.ir.init import initialise
from fusionai.ir.schema import Graph
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.weight_manifest import State


def declared(graph: Graph, state: State, seed: int) -> State:
    """A `State` that makes parameters with an initialisation program by it, and asks `state` for all other keys."""
    programs = {spec.key: spec for spec in graph.params.values() if spec.init is not None}

    def tensors(keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        others: list[str] = []
        for key in keys:
            spec = programs.get(key)
            if spec is None or spec.init is None:
                others.append(key)
            else:
                array = initialise(key, spec.shape, spec.dtype, spec.init, seed)
                yield key, host_tensor(spec.dtype, spec.shape, array.tobytes())
        if others:
            yield from state(others)

    return tensors
