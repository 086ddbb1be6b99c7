"""Turns a graph into a function that JAX can trace, and lists the operators that it may contain.

Every operator's name is in `ir.operators.OPERATORS`; a graph can only pick entries of the finished table. Functions
take the arguments of torch's operators, with sizes as plain integers: a compiled program has fixed sizes. Operators
that depend on the mode or on counters get the run's `JaxContext` and the node's id first. Under `bf16`, products take
bfloat16 and reductions float32, as with torch's autocast. With `recompute`, the nodes of each block form a unit that
keeps only its inputs and is recomputed in backward.

The memory that a stage needs is computed by tracing shapes: every output's size is compared with the graph's
declaration, and what a microbatch keeps for its backward is what `jax.vjp` keeps, without the parameters, which are
counted elsewhere. Weights in fewer bits (`ir.weights`) are unpacked inside functions that backward recomputes, so
that only the packed bytes are kept. Neighbours: `program` and `backend` compile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fusionai.backends.binding import IN_FLOAT32, OPERATOR_FAILURES, SIZES, describe, first_line, shape_of
from fusionai.backends.jax.arithmetic import ELEMENTWISE, REDUCTIONS
from fusionai.backends.jax.dtypes import DTYPES, is_floating
from fusionai.backends.jax.norms import LOSSES, NORMS, batch_norm, batch_norm_functional
from fusionai.backends.jax.products import PRODUCTS, SCANS, attention, dropout, uniform
from fusionai.backends.jax.shaping import LOOKUPS, SHAPING
from fusionai.backends.operands import RULES
from fusionai.backends.semantics import argument
from fusionai.ir.graph import needed_nodes, reads
from fusionai.ir.operators import IN_BFLOAT16, OPERATORS
from fusionai.ir.schema import Graph, Node, ParamSpec
from fusionai.ir.shapes import evaluate
from fusionai.ir.weights import group_of, stored_bytes
from fusionai.primitives.errors import ExecutionError, FusionError


@dataclass(frozen=True, slots=True)
class JaxContext:
    """Properties of a run. `keys`: node that draws random numbers -> its two folds, uint32 [2]."""

    training: bool
    keys: Mapping[int, Array]


def _attention(
    context: JaxContext, node: int, q: Array, k: Array, v: Array, *, scale: float, dropout: float = 0.0, **options: Any
) -> Array:
    drops = context.training and dropout > 0.0
    return attention(
        q, k, v, scale=scale, dropout=dropout if drops else 0.0, key=context.keys[node] if drops else None, **options
    )


def _dropout(context: JaxContext, node: int, x: Array, *, p: float) -> Array:
    return dropout(x, p, context.keys[node]) if context.training and p > 0.0 else x


CONTEXTUAL: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "fusion.attention": _attention,
        "fusion.dropout": _dropout,
        "fusion.in_training": lambda context, _node, trained, otherwise: trained if context.training else otherwise,
        "fusion.uniform": lambda context, node, x: uniform(x, context.keys[node]),
        "aten._native_batch_norm_legit_functional.default": (
            lambda context, _node, *args: batch_norm_functional(context.training, *args)
        ),
        "aten.batch_norm.default": lambda context, _node, *args: batch_norm(context.training, *args),
    }
)
"""Operators called as `f(context, node id, *args, **kwargs)`."""
PLAIN: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {**SIZES, **ELEMENTWISE, **SHAPING, **REDUCTIONS, **PRODUCTS, **NORMS, **LOSSES, **LOOKUPS, **SCANS}
)
"""Operators called as `f(*args, **kwargs)`."""


Value = jax.Array | int


@dataclass(frozen=True, slots=True)
class Program:
    """The part of a graph that `wanted` outputs need. `inputs`, `params`: value names. `outputs`: meaning -> value;
    `writes`: buffer key -> value."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: Mapping[str, str]
    writes: Mapping[str, str]
    mixed: bool
    recompute: bool
    stored: Mapping[str, ParamSpec]
    """Parameters given in packed form."""

    def run(
        self, context: JaxContext, values: Mapping[str, Value], params: Mapping[str, jax.Array]
    ) -> tuple[dict[str, Value], dict[str, jax.Array]]:
        """Return (outputs by meaning, new buffers by key). Raises `ExecutionError` naming the node that failed."""
        known: dict[str, Value] = {**values, **params}
        if self.recompute and context.training:
            for _, group in groupby(self.nodes, key=lambda node: node.block):
                self._again(context, list(group), known)
        else:
            self.advance(context, self.nodes, known)
        outputs = {meaning: known[value] for meaning, value in self.outputs.items()}
        return outputs, {key: jnp.asarray(known[value]) for key, value in self.writes.items()}

    def _again(self, context: JaxContext, nodes: Sequence[Node], known: dict[str, Value]) -> None:
        """Run `nodes` so that backward recomputes them instead of keeping their results."""
        entering = {name for node in nodes for name in reads(node)}
        arrays = {name: value for name in sorted(entering & known.keys()) if not isinstance(value := known[name], int)}
        sizes = {name: value for name, value in known.items() if isinstance(value, int)}
        found: dict[str, int] = {}

        def unit(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            own: dict[str, Value] = {**sizes, **given}
            self.advance(context, nodes, own)
            made = {name: own[name] for node in nodes for name in node.outputs}
            found.update({name: value for name, value in made.items() if isinstance(value, int)})
            return {name: value for name, value in made.items() if not isinstance(value, int)}

        known.update(jax.checkpoint(unit)(arrays))
        known.update(found)

    def advance(self, context: JaxContext, nodes: Sequence[Node], known: dict[str, Value]) -> None:
        for node in nodes:
            try:
                if any(name in self.stored for name in reads(node)):
                    results = self._of_stored(context, node, known)
                else:
                    results = self._computed(context, node, known)
            except FusionError as error:
                raise ExecutionError(f"{describe(node)}: {error.message}", hint=error.hint) from error
            except OPERATOR_FAILURES as error:
                raise ExecutionError(f"{describe(node)} failed: {first_line(error)}") from error
            known.update(zip(node.outputs, results, strict=True))

    def _of_stored(self, context: JaxContext, node: Node, known: Mapping[str, Value]) -> Sequence[Value]:
        """Run a node with unpacked weights; backward unpacks them again for the node's gradient."""
        named = {name: known[name] for name in reads(node)}
        arrays = {name: value for name, value in named.items() if not isinstance(value, int)}
        sizes = {name: value for name, value in known.items() if isinstance(value, int)}

        def unit(given: dict[str, jax.Array]) -> list[jax.Array]:
            weights = {name: opened(given[name], self.stored[name]) for name in given if name in self.stored}
            return [jnp.asarray(value) for value in self._computed(context, node, {**sizes, **given, **weights})]

        return (jax.checkpoint(unit) if context.training else unit)(arrays)

    def _computed(self, context: JaxContext, node: Node, known: Mapping[str, Value]) -> Sequence[Value]:
        args = [argument(arg, known.__getitem__, DTYPES.__getitem__) for arg in node.args]
        options = {name: argument(arg, known.__getitem__, DTYPES.__getitem__) for name, arg in node.kwargs.items()}
        if (rule := RULES.get(node.op)) is not None:
            rule(*args, **options)
        if self.mixed:
            category = OPERATORS[node.op].category
            if category in IN_BFLOAT16:
                args, options = _with(args, options, jnp.float32, jnp.bfloat16)
            elif category in IN_FLOAT32:
                args, options = _with(args, options, jnp.bfloat16, jnp.float32)
        compute = PLAIN.get(node.op)
        if compute is not None:
            result = compute(*args, **options)
        else:
            result = CONTEXTUAL[node.op](context, node.id, *args, **options)
        if len(node.outputs) == 1:
            return [result[0] if isinstance(result, list | tuple) else result]
        return list(result)


def program_of(
    graph: Graph, wanted: Collection[str], *, with_state_writes: bool, mixed: bool, recompute: bool
) -> Program:
    """Return the program for the outputs `wanted`."""
    outputs = {meaning: value for meaning, value in graph.outputs.items() if meaning in wanted}
    writes = dict(graph.state_writes) if with_state_writes else {}
    nodes = tuple(needed_nodes(graph, {*outputs.values(), *writes}))
    used = {name for node in nodes for name in reads(node)} | set(outputs.values())
    return Program(
        nodes=nodes,
        inputs=tuple(name for name in graph.inputs if name in used),
        params=tuple(name for name in graph.params if name in used),
        outputs=outputs,
        writes={key: value for value, key in writes.items()},
        mixed=mixed,
        recompute=recompute,
        stored={name: graph.params[name] for name in graph.params if name in used and graph.params[name].stored},
    )


def _with(args: list[Any], options: dict[str, Any], one: Any, other: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with tensors of dtype `one` converted to `other`."""

    def cast(value: Any) -> Any:
        return value.astype(other) if isinstance(value, jax.Array) and value.dtype == one else value

    return [cast(value) for value in args], {name: cast(value) for name, value in options.items()}


def opened(data: jax.Array, spec: ParamSpec) -> jax.Array:
    """Return flat uint8 unpacked as float32 in the parameter's shape."""
    shape, count = tuple(spec.shape), prod(spec.shape)
    columns = shape[-1]
    match spec.stored:
        case "int8":
            codes = jax.lax.bitcast_convert_type(data[:count], jnp.int8).reshape(-1, columns)
            found = codes.astype(jnp.float32) * _halves(data[count:]).reshape(-1, 1)
        case "int4":
            group = group_of(shape)
            assert group is not None, "a graph is checked before it is loaded"
            codes = data[: count // 2]
            levels = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, group).astype(jnp.float32)
            pairs = _halves(data[count // 2 :]).reshape(-1, 2)
            found = (levels - 8) * pairs[:, :1] + pairs[:, 1:]
        case _:
            found = _halves(data)
    return found.reshape(shape)


def _halves(data: jax.Array) -> jax.Array:
    """Return bfloat16 given as bytes as float32."""
    return jax.lax.bitcast_convert_type(data.reshape(-1, 2), jnp.bfloat16).astype(jnp.float32)


def footprint_bytes(
    graph: Graph, program: Program, symbols: Mapping[str, int], grad_inputs: Collection[str], *, training: bool
) -> int:
    """Return the bytes of one microbatch in flight. Raises `ExecutionError` if an output differs from its
    declaration."""
    sizes = {name: evaluate(name, symbols) for name in program.inputs if graph.values[name].dtype == "symint"}
    given = abstract(graph, [name for name in program.inputs if name not in sizes], symbols)
    params = {name: _held(graph.params[name]) for name in program.params}
    keys = {node.id: jax.ShapeDtypeStruct((2,), jnp.uint32) for node in program.nodes}

    def run(
        floats: dict[str, Any], others: dict[str, Any], keys: dict[int, Any]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        own = {**floats, **others}
        inputs = {name: own[name] for name in given}
        outputs, writes = program.run(
            JaxContext(training, keys), {**inputs, **sizes}, {name: own[name] for name in params}
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
        declared = shape_of(graph, name, symbols)
        if tuple(value.shape) != declared:
            raise ExecutionError(
                f"output {meaning!r} has shape {list(value.shape)}, but the graph declares {list(declared)}."
            )


def abstract(graph: Graph, names: Iterable[str], symbols: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return values without memory, with their declared shapes and dtypes."""
    return {
        name: jax.ShapeDtypeStruct(shape_of(graph, name, symbols), DTYPES[graph.values[name].dtype]) for name in names
    }


def _bytes(values: Any) -> int:
    return sum(int(np.prod(value.shape)) * jnp.dtype(value.dtype).itemsize for value in values)
