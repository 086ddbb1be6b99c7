"""One stage on JAX: parameters, what forward keeps for backward, gradient sums, the optimizer.

Forward and backward are compiled once for each set of sizes. Backward needs what `jax.vjp` keeps, which the compiled
forward returns. Gradients are summed microbatch by microbatch. Buffers that a training microbatch rewrites are rebound,
and the values of the last applied step are kept until the next, so that a discarded step leaves no trace.

Optimizers compute as torch does, one parameter at a time. Before the first step, slots hold values from which that step
gives the same result as from no state, as on torch, so that state can move between the two. Factors that depend on the
step are computed in double precision on the host and rounded once, as torch does. Neighbours: `tracing` turns the graph
into a function and checks its memory beforehand, `backends.state` names slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fusionai.backends.binding import OPERATOR_FAILURES, bind_symbols, check_indices, first_line, largest
from fusionai.backends.interface import NOTHING_BEGUN, Call, Entries, StageProgram, Tensors, check_gradient, key_of
from fusionai.backends.jax.dtypes import DTYPES, Device, is_floating, to_host, to_jax
from fusionai.backends.jax.tracing import JaxContext, Program, Value, footprint_bytes, program_of
from fusionai.backends.semantics import DropoutKey, folds
from fusionai.backends.state import OWN_FLOAT32, StateEntry, check_entry, optimizer_slots
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import OptimizerSpec, StageOptions

State = dict[str, Array]


class JaxStageOptimizer:
    """Optimizer of a stage. `shapes`: key -> (dtype, shape) of the parameters. Raises `ExecutionError` for settings
    that it lacks."""

    def __init__(self, spec: OptimizerSpec, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        if spec.state_bits != 32:
            raise ExecutionError(
                f"this backend keeps optimizer state in 32 bits, not in {spec.state_bits}.",
                hint="Let machines with backend torch run the job, or set state_bits = 32 in the recipe.",
            )
        self._spec = spec
        self._slots = {key: optimizer_slots(spec, *shape) for key, shape in shapes.items()}
        self._decays = {key for key, (_, shape) in shapes.items() if spec.decay_vectors or len(shape) >= 2}
        self._state: dict[str, State] = {}
        self._steps: dict[str, float] = {}

    def step(self, key: str, parameter: Array, gradient: Array, learning_rate: float) -> Array:
        """Return the parameter after one update; also updates the state of `key`."""
        decay = self._spec.weight_decay if key in self._decays else 0.0
        state = self._state.setdefault(key, {})
        for slot in self._slots[key]:
            if slot != "step" and slot not in state:
                state[slot] = self._empty(key, slot)
        match self._spec.kind:
            case "adamw":
                count = self._steps[key] = self._steps.get(key, 0.0) + 1.0
                first, second = self._spec.betas
                factors = (
                    1.0 - learning_rate * decay,
                    1.0 - first,
                    second,
                    1.0 - second,
                    (1.0 - second**count) ** 0.5,
                    self._spec.eps,
                    -(learning_rate / (1.0 - first**count)),
                )
                moved, state["exp_avg"], state["exp_avg_sq"] = _adamw(
                    parameter, gradient, state["exp_avg"], state["exp_avg_sq"], np.asarray(factors, np.float32)
                )
            case "sgd":
                factors = (decay, self._spec.momentum, -learning_rate)
                moved, buffer = _sgd(
                    parameter,
                    gradient,
                    state.get("momentum_buffer"),
                    np.asarray(factors, np.float32),
                    nesterov=self._spec.nesterov,
                )
                if buffer is not None:
                    state["momentum_buffer"] = buffer
        return moved

    def reset(self) -> None:
        """Forget all state, as before the first step."""
        self._state.clear()
        self._steps.clear()

    def read(self, key: str, slot: str) -> Array:
        """Return a slot, or its value before the first step if it is empty."""
        if slot == "step":
            return jnp.asarray(self._steps.get(key, 0.0), jnp.float32)
        held = self._state.get(key, {}).get(slot)
        return self._empty(key, slot) if held is None else held

    def write(self, key: str, slot: str, value: Array) -> None:
        if slot == "step":
            self._steps[key] = float(value)
        else:
            self._state.setdefault(key, {})[slot] = value

    @property
    def resident_bytes(self) -> int:
        return sum(value.nbytes for state in self._state.values() for value in state.values())

    def _empty(self, key: str, slot: str) -> Array:
        dtype, shape = self._slots[key][slot]
        # The first momentum buffer is the gradient itself; only adding it to -0.0 changes no bit (0.0 + -0.0 is 0.0).
        initial = -0.0 if slot == "momentum_buffer" else 0.0
        return jnp.full(shape, initial, DTYPES["float32" if slot in OWN_FLOAT32 else dtype])


@partial(jax.jit, donate_argnums=(2, 3))
def _adamw(
    parameter: Array, gradient: Array, average: Array, squares: Array, factors: Array
) -> tuple[Array, Array, Array]:
    """Compute in the order of `torch.optim.adamw._single_tensor_adamw`."""
    decayed, towards, kept, fresh, root, eps, step = (factors[place] for place in range(7))
    gradient = gradient.astype(parameter.dtype)
    parameter = parameter * decayed
    average = average + towards * (gradient - average)
    squares = squares * kept + fresh * gradient * gradient
    return parameter + step * (average / (jnp.sqrt(squares) / root + eps)), average, squares


@partial(jax.jit, static_argnames=("nesterov",))
def _sgd(
    parameter: Array, gradient: Array, buffer: Array | None, factors: Array, *, nesterov: bool
) -> tuple[Array, Array | None]:
    """Compute in the order of `torch.optim.sgd._single_tensor_sgd`."""
    decay, momentum, step = (factors[place] for place in range(3))
    gradient = gradient.astype(parameter.dtype) + decay * parameter
    if buffer is None:
        return parameter + step * gradient, None
    buffer = buffer * momentum + gradient
    moving = gradient + momentum * buffer if nesterov else buffer
    return parameter + step * moving, buffer


Arrays = dict[str, jax.Array]
MOST_COMPILED: Final = 64
"""Compiled programs for different sizes that are kept at a time; chosen."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A microbatch between forward and backward. `pull`: output gradients -> gradients of parameters and inputs."""

    pull: Any
    outputs: dict[str, tuple[tuple[int, ...], Any]]
    """Outputs that carry a gradient: name -> (shape, dtype)."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """`forward(trained, leaves, others, params, keys)`, compiled for fixed sizes."""

    program: Program
    forward: Callable[..., Any]
    drops: tuple[int, ...]
    """Nodes that draw dropout masks or random numbers."""


class JaxStageProgram(StageProgram):
    """A stage that trains or evaluates."""

    def __init__(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        device: Device,
        memory_limit_bytes: int | None,
    ) -> None:
        if options.offload:
            raise ExecutionError(
                "this backend keeps optimizer state in memory, not in a file.",
                hint='Set offload = "never" in the recipe, or let machines with backend torch run the job.',
            )
        if options.offload_weights:
            raise ExecutionError(
                "this backend keeps weights in its device's memory.",
                hint='Set offload_weights = "never" in the recipe, or let machines with backend torch run the job.',
            )
        super().__init__(graph, grad_inputs=grad_inputs, options=options)
        self._device = device
        self._trainable = tuple(sorted(key for key, spec in self._specs.items() if spec.trainable))
        if options.optimizer is not None:
            shapes = {key: (self._specs[key].dtype, tuple(self._specs[key].shape)) for key in self._trainable}
            self._optimizer = JaxStageOptimizer(options.optimizer, shapes)
        self._programs: dict[tuple[frozenset[str], bool], Program] = {}
        self._compiled: dict[object, _Compiled] = {}
        self._check_memory(memory_limit_bytes)
        self._tensors = {
            key: jax.device_put(jnp.zeros((held := self._entries[f"model/{key}"]).shape, DTYPES[held.dtype]), device)
            for key in self._specs
        }
        self._sums: Arrays = {}

    # ------------------------------------------------------------------------------------------------------ running

    def forward(self, call: Call, inputs: Tensors, wanted: Sequence[str] | None = None) -> dict[str, HostTensor]:
        training = call.mode == "train"
        names = self._begin(call, wanted)
        program = self._program(names, training)
        bind_symbols(self._graph, inputs, program.inputs, half_floats=self._options.precision == "bf16")
        check_indices(self._graph, program.nodes, inputs)
        compiled = self._of_sizes(program, names, training, inputs)
        given = {name: to_jax(inputs[name], self._device) for name in program.inputs if not self._is_size(name)}
        leaves = {name: value for name, value in given.items() if training and name in self._grad_inputs}
        others = {name: value for name, value in given.items() if name not in leaves}
        dropout = DropoutKey(self._options.seed, call.step, call.microbatch)
        keys = {node: np.array(folds(dropout, node), np.uint32) for node in compiled.drops}
        trained, fixed = self._parameters()
        with _compiling():
            if training:
                (floats, pull), (rest, writes) = compiled.forward(trained, leaves, others, fixed, keys)
                carrying = {name: (value.shape, value.dtype) for name, value in floats.items()}
                self._contexts[key_of(call)] = _InFlight(pull, carrying)
            else:
                (floats, rest), writes = compiled.forward(trained, leaves, others, fixed, keys)
        self._rewrite(writes)
        return {name: to_host(value) for name, value in {**floats, **rest}.items()}

    def backward(self, call: Call, gradients: Tensors, begun: Tensors = NOTHING_BEGUN) -> dict[str, HostTensor]:
        """An input that the named outputs do not depend on is absent from the result. The
        compiled backward sums this stage's own uses; the contributions in `begun` are added to that sum."""
        held = self._take(call, gradients, begun)
        roots: Arrays = {}
        for name, gradient in gradients.items():
            if name not in held.outputs:
                continue
            shape, dtype = held.outputs[name]
            check_gradient(name, gradient, shape, str(dtype))
            roots[name] = to_jax(gradient, self._device)
        known = {name: to_jax(gradient, self._device) for name, gradient in begun.items()}
        own = self._own_gradients(held, roots) if roots else {}
        for name, gradient in begun.items():
            if name in own:
                check_gradient(name, gradient, own[name].shape, str(own[name].dtype))
        totals = {
            name: _added(known[name], own[name]) if name in known and name in own else (own | known)[name]
            for name in (*own, *(name for name in known if name not in own))
        }
        returned: dict[str, HostTensor] = {}
        for name, gradient in totals.items():
            key = self._trained_values.get(name)
            if name in self._grad_inputs or key is None:
                returned[name] = to_host(gradient)
            else:
                self._sums[key] = _added(self._sums[key], gradient) if key in self._sums else gradient
        return returned

    def _own_gradients(self, held: _InFlight, roots: Arrays) -> Arrays:
        """Return value name -> gradient, for the inputs and parameters that these outputs depend on."""
        all_roots = {
            name: roots[name] if name in roots else jnp.zeros(shape, dtype)
            for name, (shape, dtype) in held.outputs.items()
        }
        with _compiling():
            trained, leaves = _pulled(held.pull, all_roots)
        values = reached(self._graph, frozenset(self._graph.outputs[name] for name in roots))
        found = {name: leaf for name, leaf in leaves.items() if name in values}
        return found | {value: trained[key] for value, key in self._trained_values.items() if value in values}

    def weight_gradients(self, call: Call) -> None:
        """Do nothing: backward defers nothing."""

    # -------------------------------------------------------------------------------------------------- the update

    def gradient_norms(self) -> dict[str, float]:
        return {key: float(_norm(self._sums[key])) for key in self._trainable if key in self._sums}

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        return [(key, to_host(self._sums[key])) for key in keys if self._known(key) in self._sums]

    def import_gradients(self, entries: Entries, *, add: bool) -> None:
        for key, tensor in entries:
            check_entry(self._entries, f"model/{self._known(key)}", tensor)
            value = to_jax(tensor, self._device)
            self._sums[key] = _added(self._sums[key], value) if add and key in self._sums else value

    def apply(self, *, scale: float, learning_rate: float) -> None:
        self._require_idle("apply")
        self._require_optimizer()
        assert self._optimizer is not None, "the options name an optimizer"
        factor = np.float32(scale)
        for key in self._trainable:
            gradient = self._sums.pop(key, None)
            if gradient is None:
                continue
            gradient = gradient if scale == 1.0 else _scaled(gradient, factor)
            self._tensors[key] = self._optimizer.step(key, self._tensors[key], gradient, learning_rate)
        self._committed.clear()

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def resident_bytes(self) -> int:
        held = [*self._tensors.values(), *self._committed.values(), *self._sums.values()]
        return sum(value.nbytes for value in held) + (self._optimizer.resident_bytes if self._optimizer else 0)

    # ----------------------------------------------------------------------------------------------------- details

    def _copy(self, entry: StateEntry) -> HostTensor:
        if entry.slot:
            assert self._optimizer is not None, "otherwise there would be no such entry"
            return to_host(self._optimizer.read(entry.key, entry.slot))
        return to_host(self._committed.get(entry.key, self._tensors[entry.key]))

    def _put(self, entry: StateEntry, value: HostTensor) -> None:
        if not entry.slot:
            self._tensors[entry.key] = to_jax(value, self._device)
        elif self._optimizer is not None:
            self._optimizer.write(entry.key, entry.slot, to_jax(value, self._device))

    def _clear_gradients(self) -> None:
        self._sums.clear()

    def _known(self, key: str) -> str:
        self._require_trainable(key)
        return key

    def _is_size(self, name: str) -> bool:
        return self._graph.values[name].dtype == "symint"

    def _parameters(self) -> tuple[Arrays, Arrays]:
        """Return (trained parameters, all other parameters), by key."""
        trained = {key: self._tensors[key] for key in self._trainable}
        return trained, {key: value for key, value in self._tensors.items() if key not in trained}

    def _program(self, names: frozenset[str], training: bool) -> Program:
        program = self._programs.get((names, training))
        if program is None:
            program = self._programs[names, training] = program_of(
                self._graph,
                names,
                with_state_writes=training,
                mixed=self._options.precision == "bf16",
                recompute=self._options.recompute,
            )
        return program

    def _of_sizes(self, program: Program, names: frozenset[str], training: bool, inputs: Tensors) -> _Compiled:
        """Return the program compiled for these sizes. Checks of sizes run while it is traced."""
        sizes = {name: int(to_jax(inputs[name], self._device)) for name in program.inputs if self._is_size(name)}
        shapes = tuple((name, inputs[name].shape, inputs[name].dtype) for name in program.inputs)
        at = (names, training, shapes, tuple(sorted(sizes.items())))
        compiled = self._compiled.get(at)
        if compiled is None:
            if len(self._compiled) >= MOST_COMPILED:
                self._compiled.clear()
            traced = traced_forward(self._graph, program, sizes, training)
            drops = tuple(node.id for node in program.nodes if _draws(node.op, node.kwargs, training=training))
            compiled = self._compiled[at] = _Compiled(program, jax.jit(traced), drops)
        return compiled

    def _check_memory(self, limit_bytes: int | None) -> None:
        """Check the limit at the symbols' largest values: parameters, gradients, optimizer slots and what microbatches
        keep."""
        training = self._options.optimizer is not None
        held_bytes = self._state_bytes()
        self._require_room(held_bytes, limit_bytes)
        program = self._program(frozenset(self._graph.outputs), training)
        symbols = largest(self._graph)
        flight_bytes = footprint_bytes(self._graph, program, symbols, self._grad_inputs, training=training)
        microbatches = max(1, self._options.in_flight) if training else 1
        self._require_room_in_flight(held_bytes + flight_bytes * microbatches, microbatches, limit_bytes)


@contextmanager
def _compiling() -> Iterator[None]:
    """Name what JAX can't compile, such as the gradient of a pooling with dilation, which it finds when it first runs
    what was traced."""
    try:
        yield
    except OPERATOR_FAILURES as error:
        raise ExecutionError(f"JAX can't run this stage: {first_line(error)}.") from error


def traced_forward(graph: Graph, program: Program, sizes: Mapping[str, int], training: bool) -> Callable[..., Any]:
    """Return a function (trained, leaves, others, fixed, keys) that JAX can trace. In training it returns ((float
    outputs, pull), (other outputs, writes)), otherwise ((float outputs, other outputs), writes). Parameters are keyed
    by key, inputs by name."""
    key_of = {value: graph.params[value].key for value in program.params}

    def run(
        trained: Arrays, leaves: Arrays, others: Arrays, fixed: Arrays, keys: Mapping[int, jax.Array]
    ) -> tuple[Arrays, tuple[dict[str, Value], Arrays]]:
        params = {value: trained[key] if key in trained else fixed[key] for value, key in key_of.items()}
        outputs, writes = program.run(JaxContext(training, keys), {**others, **leaves, **sizes}, params)
        floats: Arrays = {}
        rest: dict[str, Value] = {}
        for name, value in outputs.items():
            if not isinstance(value, int) and is_floating(value.dtype):
                floats[name] = value
            else:
                rest[name] = value
        return floats, (rest, {key: jax.lax.stop_gradient(value) for key, value in writes.items()})

    def train(trained: Arrays, leaves: Arrays, others: Arrays, fixed: Arrays, keys: Any) -> Any:
        floats, pull, aside = jax.vjp(
            lambda own, given: run(own, given, others, fixed, keys), trained, leaves, has_aux=True
        )
        return (floats, pull), aside

    def evaluate(trained: Arrays, leaves: Arrays, others: Arrays, fixed: Arrays, keys: Any) -> Any:
        floats, (rest, writes) = run(trained, leaves, others, fixed, keys)
        return (floats, rest), writes

    return train if training else evaluate


def _draws(op: str, options: Mapping[str, Any], *, training: bool) -> bool:
    if op == "fusion.uniform":
        return True
    return training and (op == "fusion.dropout" or (op == "fusion.attention" and options.get("dropout", 0.0) != 0.0))


@jax.jit
def _pulled(pull: Any, roots: Arrays) -> tuple[Arrays, Arrays]:
    return pull(roots)


@jax.jit
def _added(one: jax.Array, other: jax.Array) -> jax.Array:
    return one + other


@jax.jit
def _scaled(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    return gradient * factor.astype(gradient.dtype)


@jax.jit
def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))


def reached(graph: Graph, roots: Collection[str]) -> frozenset[str]:
    """Return the values that these values (`roots`) depend on through differentiable operators."""
    found = set(roots)
    for node in reversed(graph.nodes):
        if OPERATORS[node.op].differentiable and not found.isdisjoint(node.outputs):
            found.update(reads(node))
    return frozenset(found)
