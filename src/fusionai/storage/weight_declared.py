"""Tensors of parameters that a graph declares by an initialisation program instead of bringing their values.

    weights = manifest(keys, declared(captured.graph, captured.state, seed), store, ...)

`ir.init` computes all values. `weight_manifest` asks for keys that are in no file, so that a new model is served with
the values from which `fusion train` starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusionai.ir.init import initialise
from fusionai.ir.schema import Graph
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.weight_manifest import State


def declared(graph: Graph, state: State, seed: int) -> State:
    """Return a `State` that computes parameters with an initialisation program, and asks `state` for all other keys."""
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
