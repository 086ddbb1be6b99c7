"""AdamW and SGD as torch computes them, one parameter at a time; state is complete at every time.

Before the first step, slots hold values from which that step gives the same result as from no state, as on torch, so
that state can move between the two. Factors that depend on the step are computed in double precision on the host and
rounded once, as torch does. Neighbours: `program` owns the parameters and calls `step` per commit; `backends.state`
names slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fusionai.backends.jax.dtypes import DTYPES
from fusionai.backends.state import OWN_FLOAT32, optimizer_slots
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec

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
