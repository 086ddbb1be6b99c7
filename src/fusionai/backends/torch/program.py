"""One stage on torch: parameters, contexts of microbatches in flight, gradient sums, the optimizer.

Autograd sums gradients into the parameters' `.grad`, microbatch by microbatch, exactly as `loss.backward()` in a single
process would. Buffers that a training microbatch rewrites are rebound, and the values of the last applied step are kept
until the next, so that a discarded step leaves no trace. Neighbours: `compiled_stage` compiles the graph and
measures it, `optimizers` updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fusionai.backends.binding import bind_symbols
from fusionai.backends.interface import (
    NOTHING_BEGUN,
    Call,
    ContextKey,
    Entries,
    StageProgram,
    Tensors,
    check_gradient,
    key_of,
)
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.state import StateEntry, check_entry
from fusionai.backends.torch.card_memory import with_memory
from fusionai.backends.torch.compiled_stage import CompiledStage
from fusionai.backends.torch.determinism import repeating, repeats_itself
from fusionai.backends.torch.host import DTYPES, to_host, to_torch
from fusionai.backends.torch.interpreter import Interpreter, StoredWeight
from fusionai.backends.torch.operators import Left, TorchContext, add_to, deferrable, finish, repeats_keys
from fusionai.backends.torch.optimizers import TorchStageOptimizer, parameter_norms, scale_gradients, slot_shapes
from fusionai.backends.torch.recomputation import RecomputedSegment, free, run_in_segments
from fusionai.backends.torch.slots import DiskSlots, OffloadedWeights, OptimizerSlots
from fusionai.ir.graph import reads
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import OptimizerSpec, StageOptions

_HOST: Final = torch.device("cpu")
MAX_CHECKED_SHAPES: Final = 64
"""Combinations of input shapes remembered as checked; chosen."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A microbatch between forward and backward: outputs that carry gradients, and inputs that receive them."""

    outputs: dict[str, Tensor]
    entered: dict[str, Tensor]
    """Inputs as the graph reads them."""
    gradients: dict[str, Tensor]
    """Gradients of the inputs, filled by backward."""
    left: Left | None


class _Entry(torch.autograd.Function):
    """The point where an input enters the graph; it captures the input's gradient as autograd summed it. A leaf tensor
    would give the gradient other strides, and autocast would cast a leaf only once for all its readers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, gradients: dict[str, Tensor]) -> Tensor:
        ctx.name, ctx.gradients = name, gradients
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ctx.gradients[ctx.name],) = gradients
        return None, None, None


class TorchStageProgram(StageProgram):
    """A stage that trains or evaluates."""

    def __init__(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        device: torch.device,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__(graph, grad_inputs=grad_inputs, options=options)
        if options.offload_weights and not options.recompute:
            raise ExecutionError(
                "offload_weights needs recompute: activations kept for backward would hold the offloaded weights.",
                hint="Set `recompute` too.",
            )
        self._device = device
        self.repeats = repeats_itself(graph, device)
        self._memory_limit_bytes = memory_limit_bytes
        self._segments: dict[
            tuple[frozenset[str], bool], tuple[tuple[RecomputedSegment, ...], Callable[[RecomputedSegment], None]]
        ] = {}
        """(wanted outputs, training) -> segments, and the function that loads a segment's weights."""
        self._checked: set[object] = set()
        self._passed_on = {value: self._trained_values[value] for value in grad_inputs if value in self._trained_values}
        """Parameters whose gradient of each microbatch goes to another stage: value name -> key."""
        self._deferrable = deferrable(graph, self._passed_on) if self._defers else frozenset[int]()
        self._repeats_keys = repeats_keys(device, half_floats=options.precision == "bf16")
        self._compiled = CompiledStage(graph, options, self._grad_inputs, self._deferrable, self._repeats_keys)
        self._check_memory()
        self._offloaded: OffloadedWeights | None = None
        if options.offload_weights:
            keys = sorted(self._compiled.movable)
            self._offloaded = OffloadedWeights({key: self._entries[f"model/{key}"] for key in keys}, device)
        self._tensors = {key: self._empty(key, spec) for key, spec in self._specs.items()}
        self._trainable = {key: self._tensors[key] for key, spec in self._specs.items() if spec.trainable}
        self._parameter_storages = {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()} - {0}
        self._lagging: dict[ContextKey, Left] = {}
        """Deferred weight gradients of microbatches whose backward has run."""
        self._optimizer: TorchStageOptimizer | None = None
        if options.optimizer is not None and self._trainable:
            try:
                self._optimizer = TorchStageOptimizer(
                    options.optimizer,
                    self._trainable,
                    self._slots(options.optimizer),
                    None if self._offloaded is None else self._offloaded.shelf,
                )
            except ValueError as error:
                raise ExecutionError(f"invalid optimizer settings: {error}.") from error

    def _empty(self, key: str, spec: ParamSpec) -> Tensor:
        if self._offloaded is not None and key in self._offloaded.keys:
            return self._offloaded.tensor(key, trainable=spec.trainable)
        entry = self._entries[f"model/{key}"]
        return torch.zeros(entry.shape, dtype=DTYPES[entry.dtype], device=self._device, requires_grad=spec.trainable)

    def _slots(self, optimizer: OptimizerSpec) -> OptimizerSlots | None:
        if not self._options.offload:
            return None
        shapes = slot_shapes(optimizer, self._trainable)
        layout = {
            (key, slot): shape for key, slots in shapes.items() for slot, shape in slots.items() if slot != "step"
        }
        return DiskSlots(layout, self._device)

    # ------------------------------------------------------------------------------------------------------ running

    def forward(self, call: Call, inputs: Tensors, wanted: Sequence[str] | None = None) -> dict[str, HostTensor]:
        """The bytes of `inputs` must not change until `backward`."""
        names = self._begin(call, wanted)
        with repeating(self._device, strict=self.repeats):
            return with_memory(self._device, self._place(call), lambda: self._forward(call, inputs, names))

    def _forward(self, call: Call, inputs: Tensors, names: frozenset[str]) -> dict[str, HostTensor]:
        """Run forward. Nothing is kept before all results are made, so that it may run again if memory runs out."""
        training = call.mode == "train"
        interpreter = self._compiled.interpreter(names, training, self._device)
        half_floats = self._options.precision == "bf16"
        symbols = bind_symbols(self._graph, inputs, interpreter.inputs, half_floats=half_floats)
        left: Left | None = [] if training and self._defers else None
        key = DropoutKey(self._options.seed, call.step, call.microbatch)
        context = TorchContext(training, key, left, self._repeats_keys)
        self._check_sizes(names, context, inputs, symbols)
        entered: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        values: dict[str, Tensor | int] = {}
        for name in interpreter.inputs:
            if self._graph.values[name].dtype == "symint":
                values[name] = int(to_torch(inputs[name], _HOST))
                continue
            value = to_torch(inputs[name], self._device)
            if training and name in self._grad_inputs:
                enter: Callable[..., Any] = _Entry.apply
                value = entered[name] = enter(value.requires_grad_(), name, gradients)
            values[name] = value
        params = {value: self._given(self._graph.params[value]) for value in interpreter.params}
        precision = partial(_precision, half_floats, self._device.type)
        with torch.set_grad_enabled(training), precision():
            if (training and self._options.recompute) or self._offloaded is not None:
                parts, enter = self._parts(names, interpreter, training)
                outputs, writes = run_in_segments(interpreter, parts, context, values, params, precision, enter)
            else:
                outputs, writes = interpreter.run(context, values, params)
        made = {
            name: to_host(value, own=self._is_parameter(value), laid_out=training) for name, value in outputs.items()
        }
        if training:
            self._contexts[key_of(call)] = _InFlight(
                {name: value for name, value in outputs.items() if _carries_gradient(value)}, entered, gradients, left
            )
        self._rewrite({buffer: value.detach() for buffer, value in writes.items()})
        return made

    def backward(self, call: Call, gradients: Tensors, begun: Tensors = NOTHING_BEGUN) -> dict[str, HostTensor]:
        """An input that the named outputs do not depend on is absent from the result."""
        # Not a second time: part of the gradients would be added twice.
        with repeating(self._device, strict=self.repeats):
            return with_memory(
                self._device, self._place(call), lambda: self._backward(call, gradients, begun), again=False
            )

    def _backward(self, call: Call, gradients: Tensors, begun: Tensors) -> dict[str, HostTensor]:
        held = self._take(call, gradients, begun)
        roots: list[Tensor] = []
        root_gradients: list[Tensor] = []
        for name, gradient in gradients.items():
            output = held.outputs.get(name)
            if output is None:
                continue
            check_gradient(name, gradient, tuple(output.shape), str(output.dtype).removeprefix("torch."))
            roots.append(output)
            root_gradients.append(to_torch(gradient, self._device))
        # Autograd adds root gradients before it runs anything, so sums continue from the contributions in `begun`.
        passed: dict[str, HostTensor] = {}
        later: list[tuple[Tensor, Tensor]] = []
        for name, gradient in begun.items():
            key = self._trained_values.get(name)
            root = held.entered.get(name) if key is None else self._parameter(key)
            if root is None:
                passed[name] = gradient  # no wanted output reads it
                continue
            check_gradient(name, gradient, tuple(root.shape), str(root.dtype).removeprefix("torch."))
            value = to_torch(gradient, self._device)
            if name in self._deferred_weights:
                later.append((root, value))
            else:
                roots.append(root)
                root_gradients.append(value)
        if roots:
            try:
                torch.autograd.backward(roots, root_gradients)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ExecutionError(f"backward of step {call.step}, microbatch {call.microbatch}: {error}") from error
        for weight, value in later:
            lagging = next((one for one in held.left or () if one.weight is weight), None)
            if lagging is None:
                add_to(weight, value)
            else:
                lagging.begun = value
        if held.left is not None:
            self._lagging[key_of(call)] = held.left
        passed |= {name: to_host(gradient, laid_out=True) for name, gradient in held.gradients.items()}
        for value, key in self._passed_on.items():
            parameter = self._parameter(key)
            if parameter.grad is not None:
                passed[value] = to_host(parameter.grad)
                parameter.grad = None
        return passed

    def weight_gradients(self, call: Call) -> None:
        left = self._lagging.pop(key_of(call), None)
        if left is not None:
            with repeating(self._device, strict=self.repeats):
                with_memory(self._device, self._place(call), lambda: finish(left), again=False)

    @property
    def _deferred_weights(self) -> frozenset[str]:
        """Values of weights whose gradients are deferred."""
        return frozenset(
            name for node in self._graph.nodes if node.id in self._deferrable for name in [*reads(node)][1:2]
        )

    @property
    def _defers(self) -> bool:
        """Whether weight gradients are deferred. Not under autocast, whose products differ,
        and not with offloaded weights."""
        options = self._options
        return options.weight_lag > 0 and options.precision == "fp32" and not options.offload_weights

    def _parts(
        self, names: frozenset[str], interpreter: Interpreter, training: bool
    ) -> tuple[tuple[RecomputedSegment, ...], Callable[[RecomputedSegment], None]]:
        if (names, training) not in self._segments:
            parts, dropped = self._compiled.segments(interpreter)
            # Must not hold the program: see `_precision`.
            enter = free if self._offloaded is None else partial(self._offloaded.enter, cast_once=dropped)
            self._segments[names, training] = parts, enter
        return self._segments[names, training]

    # -------------------------------------------------------------------------------------------------- the update

    def gradient_norms(self) -> dict[str, float]:
        """Compute the norms of each gradient by the same call as `clip_grad_norm_`."""
        self._require_summed("take norms")
        summed = [(key, parameter.grad) for key, parameter in self._trainable.items() if parameter.grad is not None]
        norms = parameter_norms([gradient for _, gradient in summed])
        return {key: norm for (key, _), norm in zip(summed, norms, strict=True)}

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        """Return the sums of these parameters, in this order; those without a gradient are absent."""
        self._require_summed("export gradients")
        exported: list[tuple[str, HostTensor]] = []
        for key in keys:
            gradient = self._parameter(key).grad
            if gradient is not None:
                exported.append((key, to_host(gradient, own=True)))
        return exported

    def import_gradients(self, entries: Entries, *, add: bool) -> None:
        for key, tensor in entries:
            parameter = self._parameter(key)
            check_entry(self._entries, f"model/{key}", tensor)
            value = to_torch(tensor, self._device, own=True)
            if add and parameter.grad is not None:
                parameter.grad.add_(value)
            else:
                parameter.grad = value

    def apply(self, *, scale: float, learning_rate: float) -> None:
        self._require_idle("apply")
        self._require_optimizer()
        gradients = [parameter.grad for parameter in self._trainable.values() if parameter.grad is not None]
        if gradients and scale != 1.0:
            scale_gradients(gradients, scale)
        if self._offloaded is not None:
            self._offloaded.leave()
        optimizer = self._optimizer
        if optimizer is not None:
            with_memory(self._device, "the update", lambda: optimizer.step(learning_rate), again=False)
        self._clear_gradients()
        self._committed.clear()

    def discard(self) -> None:
        self._lagging.clear()
        super().discard()

    # ------------------------------------------------------------------------------------------------------- state

    def _copy(self, entry: StateEntry) -> HostTensor:
        if entry.slot:
            assert self._optimizer is not None  # otherwise there would be no such entry
            return to_host(self._optimizer.read(entry.key, entry.slot), own=True)
        if self._offloaded is not None and entry.key in self._offloaded.keys:
            return to_host(self._offloaded.read(entry.key))
        return to_host(self._committed.get(entry.key, self._tensors[entry.key]), own=True)

    @property
    def resident_bytes(self) -> int:
        gradients = [parameter.grad for parameter in self._trainable.values() if parameter.grad is not None]
        tensors = [*self._tensors.values(), *self._committed.values(), *gradients]
        total_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return total_bytes + (self._optimizer.resident_bytes if self._optimizer is not None else 0)

    # ------------------------------------------------------------------------------------------------------ checks

    def _check_memory(self) -> None:
        """Check the limit at the symbols' largest values."""
        held_bytes, limit_bytes = self._state_bytes(), self._memory_limit_bytes
        self._require_room(held_bytes, limit_bytes)
        microbatches = max(1, self._options.in_flight) + self._options.weight_lag
        needed_bytes = self._compiled.needed_bytes(held_bytes, microbatches, limit_bytes)
        self._require_room_in_flight(needed_bytes, microbatches, limit_bytes)

    def _check_sizes(
        self, names: frozenset[str], context: TorchContext, inputs: Tensors, symbols: Mapping[str, int]
    ) -> None:
        """Run sizes not seen before without memory first: a value may grow where a symbol shrinks."""
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        seen = (names, context.training, tuple(sorted(shapes.items())))
        if seen in self._checked:
            return
        limit_bytes = None if self._memory_limit_bytes is None else self._memory_limit_bytes - self.resident_bytes
        if limit_bytes is not None and self._offloaded is not None:
            interpreter = self._compiled.interpreter(names, context.training, self._device)
            parts, _ = self._parts(names, interpreter, context.training)
            most_bytes = max((self._weight_bytes(part.weights) for part in parts), default=0)
            limit_bytes -= most_bytes - self._offloaded.present_bytes
        self._compiled.measured(names, context, shapes, symbols, limit_bytes)
        if len(self._checked) >= MAX_CHECKED_SHAPES:
            self._checked.clear()
        self._checked.add(seen)

    def _require_idle(self, action: str) -> None:
        super()._require_idle(action)
        self._require_summed(action)

    def _require_summed(self, action: str) -> None:
        if self._lagging:
            raise ExecutionError(
                f"can't {action}: weight gradients of {len(self._lagging)} microbatches are still to be computed.",
                hint="Call weight_gradients for each of them first.",
            )

    # ----------------------------------------------------------------------------------------------------- details

    @staticmethod
    def _place(call: Call) -> str:
        return f"microbatch {call.microbatch} of step {call.step}"

    def _given(self, spec: ParamSpec) -> Tensor | StoredWeight:
        tensor = self._tensors[spec.key]
        return StoredWeight(tensor, spec) if spec.stored else tensor

    def _parameter(self, key: str) -> Tensor:
        self._require_trainable(key)
        return self._trainable[key]

    def _put(self, entry: StateEntry, value: HostTensor) -> None:
        key = entry.key
        given = to_torch(value, self._device, own=bool(entry.slot))
        if entry.slot:
            assert self._optimizer is not None  # otherwise there would be no such entry
            self._optimizer.write(key, entry.slot, given)
        elif self._offloaded is not None and key in self._offloaded.keys:
            self._offloaded.write(key, given)
        elif self._specs[key].trainable:
            with torch.no_grad():
                self._tensors[key].copy_(given)
        else:
            # Rebound, never overwritten: a context may still hold the old tensor.
            self._tensors[key] = given.to(self._device, copy=True)
            self._committed.pop(key, None)

    def _clear_gradients(self) -> None:
        for parameter in self._trainable.values():
            parameter.grad = None

    def _is_parameter(self, value: Tensor | int) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._parameter_storages


def _precision(half_floats: bool, device_type: str) -> AbstractContextManager[object]:
    """Return the precision context. A function, not a method: autograd's saved state may hold it and must not hold the
    program, which holds autograd's results. Python's collector does not see cycles through autograd's graph."""
    return torch.autocast(device_type, torch.bfloat16) if half_floats else nullcontext()


def _carries_gradient(value: Tensor | int) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
