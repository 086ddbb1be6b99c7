"""Computes the memory that a stage needs before anything is allocated, by tracing shapes.

Every output's size at given sizes of the symbols is compared with the graph's declaration. What a microbatch keeps for
its backward is what `jax.vjp` keeps, without the parameters, which are counted elsewhere. Neighbours: `program` calls
this, `tracing` runs the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionai.backends.jax.operators import Context
from fusionai.backends.jax.promotion import DTYPES, is_floating
from fusionai.backends.jax.tracing import Program, Value
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.shapes import evaluate
from fusionai.ir.stored import stored_bytes
from fusionai.primitives.errors import ExecutionError


def footprint_bytes(
    graph: Graph, program: Program, symbols: Mapping[str, int], grad_inputs: Collection[str], *, training: bool
) -> int:
    """Return the bytes of one microbatch in flight. Raises `ExecutionError` if an output differs from its
    declaration."""
    sizes = {name: evaluate(name, symbols) for name in program.inputs if graph.values[name].dtype == "symint"}
    given = {
        name: jax.ShapeDtypeStruct(_shape(graph, name, symbols), DTYPES[graph.values[name].dtype])
        for name in program.inputs
        if name not in sizes
    }
    params = {name: _held(graph.params[name]) for name in program.params}
    keys = {node.id: jax.ShapeDtypeStruct((2,), jnp.uint32) for node in program.nodes}

    def run(
        floats: dict[str, Any], others: dict[str, Any], keys: dict[int, Any]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        own = {**floats, **others}
        inputs = {name: own[name] for name in given}
        outputs, writes = program.run(
            Context(training, keys), {**inputs, **sizes}, {name: own[name] for name in params}
        )
        _compare(graph, program, outputs, symbols)
        carrying = {name: value for name, value in outputs.items() if not isinstance(value, int)}
        floating = {name: value for name, value in carrying.items() if is_floating(value.dtype)}
        return floating, {**{name: value for name, value in carrying.items() if name not in floating}, **writes}

    everything = {**given, **params}
    trained = {name for name, spec in graph.params.items() if spec.trainable} | set(grad_inputs)
    floats = {name: value for name, value in everything.items() if name in trained and is_floating(value.dtype)}
    others = {name: value for name, value in everything.items() if name not in floats}
    if not training:
        made, aside = jax.eval_shape(run, floats, others, keys)
        return _bytes([*given.values(), *made.values(), *aside.values()])
    made, pull, aside = jax.eval_shape(
        lambda floats, others, keys: jax.vjp(lambda own: run(own, others, keys), floats, has_aux=True),
        floats,
        others,
        keys,
    )
    kept = _bytes(jax.tree_util.tree_leaves(pull)) - _bytes(params.values())
    return max(0, kept) + _bytes([*given.values(), *made.values(), *aside.values()])


def _held(spec: ParamSpec) -> jax.ShapeDtypeStruct:
    if spec.stored:
        return jax.ShapeDtypeStruct((stored_bytes(spec.shape, spec.stored),), jnp.uint8)
    return jax.ShapeDtypeStruct(tuple(spec.shape), DTYPES[spec.dtype])


def _compare(graph: Graph, program: Program, outputs: Mapping[str, Value], symbols: Mapping[str, int]) -> None:
    for meaning, value in outputs.items():
        name = program.outputs[meaning]
        if isinstance(value, int):
            continue
        declared = _shape(graph, name, symbols)
        if tuple(value.shape) != declared:
            raise ExecutionError(
                f"output {meaning!r} has shape {list(value.shape)}, but the graph declares {list(declared)}."
            )


def _shape(graph: Graph, name: str, symbols: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(dim, symbols) for dim in graph.values[name].shape)


def _bytes(values: Any) -> int:
    return sum(int(np.prod(value.shape)) * jnp.dtype(value.dtype).itemsize for value in values)
