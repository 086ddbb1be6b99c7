"""Computes the memory that a graph needs without allocating it, and checks the graph's declared sizes.

Runs the compiled graph on torch's `meta` device, where tensors have shapes but no memory. Every value is compared with
the graph's declaration, and the memory that is alive at once with the limit. The declaration is never trusted, because
the graph comes from another machine. Neighbours: `program` calls this at load and for every new combination of sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusionai.backends.binding import OPERATOR_FAILURES, first_line, shape_of
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.interpreter import Interpreter, Step, describe
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.recomputation import RecomputedSegment, segments
from fusionai.ir.schema import Graph
from fusionai.ir.shapes import symbols_of
from fusionai.primitives.errors import ExecutionError, FusionError

META = torch.device("meta")
"""Torch's device for tensors without memory."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one microbatch: the peak of live values during forward, the bytes kept for backward, and the most bytes
    that a segment keeps while backward recomputes it (0 without recomputation)."""

    peak_bytes: int
    saved_bytes: int
    again_bytes: int = 0


def input_shapes(graph: Graph, symbols: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the graph's inputs at these symbol values."""
    return {name: shape_of(graph, name, symbols) for name in graph.inputs}


def measure(
    graph: Graph,
    interpreter: Interpreter,
    shapes: Mapping[str, tuple[int, ...]],
    symbols: Mapping[str, int],
    context: TorchContext,
    *,
    grad_inputs: frozenset[str],
    limit_bytes: int | None,
    recompute: bool = False,
) -> Footprint:
    """Run without memory and return the footprint. `interpreter` must be compiled for `META`. `recompute`: count as
    `run_in_segments` runs. Raises `ExecutionError` if a value differs from the graph's declaration, or if a single
    value or all live values together exceed `limit_bytes`."""
    registers = interpreter.start(
        context,
        {name: _input(graph, name, shape, context, grad_inputs) for name, shape in shapes.items()},
        {name: _param(graph, name, context) for name in interpreter.params},
    )
    meter = _Meter(graph, interpreter, symbols, limit_bytes)
    meter.hold_inputs(registers)
    beginnings = {part.start: part for part in segments(interpreter)} if recompute else {}

    with (
        # No backward runs here, so nothing need be kept; a result that is saved as itself would never be freed.
        torch.autograd.graph.saved_tensors_hooks(meter.save, _never),
        torch.set_grad_enabled(context.training),
    ):
        for position, step in enumerate(interpreter.steps):
            part = beginnings.get(position)
            if part is not None:
                meter.enter(part, registers)
            try:
                step.run(registers)
            except FusionError as error:
                raise ExecutionError(f"{describe(step.node)}: {error.message}", hint=error.hint) from error
            except OPERATOR_FAILURES as error:
                raise ExecutionError(f"{describe(step.node)} can't run at these sizes: {first_line(error)}") from error
            meter.after(step, registers)
    return meter.footprint()


class _Meter:
    """Counts the distinct storages of live registers: views share theirs."""

    def __init__(
        self,
        graph: Graph,
        interpreter: Interpreter,
        symbols: Mapping[str, int],
        limit_bytes: int | None,
    ) -> None:
        self.graph = graph
        self.registers = interpreter.values
        self.symbols = symbols
        self.limit_bytes = limit_bytes
        self.parameter_registers = set(interpreter.params.values())
        self.users: dict[int, int] = {}
        """Address of a storage -> number of live registers that refer to it."""
        self.held: dict[int, torch.UntypedStorage] = {}
        self.saved: dict[int, torch.UntypedStorage] = {}
        """Storages saved in the run, or in the current segment when recomputing."""
        self.entered: dict[int, torch.UntypedStorage] | None = None
        """Storages that enter segments, if segments are recomputed; else None."""
        self.parameters: set[int] = set()
        self.live_bytes = self.peak_bytes = self.saved_bytes = self.again_bytes = 0

    def hold_inputs(self, registers: list[object]) -> None:
        for name, register in self.registers.items():
            value = registers[register]
            if not isinstance(value, torch.Tensor):
                continue
            if register in self.parameter_registers:
                storage = value.untyped_storage()
                self.parameters.add(storage._cdata)
            else:
                self._hold(value, name)

    def after(self, step: Step, registers: list[object]) -> None:
        for name in step.node.outputs:
            value = registers[self.registers[name]]
            if isinstance(value, torch.Tensor):
                self._compare(step, name, value)
                self._hold(value, describe(step.node))
        for register in step.dead:
            value = registers[register]
            if isinstance(value, torch.Tensor) and register not in self.parameter_registers:
                self._release(value)
            registers[register] = None

    def enter(self, part: RecomputedSegment, registers: list[object]) -> None:
        """Count saved storages for `part` from here on. The values it reads are kept in any case."""
        self.entered = self.entered or {}
        self._leave()
        for register in part.entering:
            value = registers[register]
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.parameters:
                    self.entered[storage._cdata] = storage

    def footprint(self) -> Footprint:
        if self.entered is None:
            return Footprint(self.peak_bytes, self.saved_bytes)
        self._leave()
        kept_bytes = sum(storage.nbytes() for storage in self.entered.values())
        return Footprint(self.peak_bytes, kept_bytes, self.again_bytes)

    def _leave(self) -> None:
        self.again_bytes = max(self.again_bytes, self.saved_bytes)
        self.saved.clear()
        self.saved_bytes = 0

    def save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.parameters or storage._cdata in self.saved:
            return
        self.saved[storage._cdata] = storage
        self.saved_bytes += storage.nbytes()

    def _hold(self, value: torch.Tensor, what: str) -> None:
        storage = value.untyped_storage()
        address = storage._cdata
        if address in self.parameters:
            return
        if address not in self.users:
            # Kept in `held` so that no later storage gets the same address.
            self.held[address] = storage
            self.users[address] = 0
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
                raise ExecutionError(
                    f"{what} needs {storage.nbytes()} bytes, {self.live_bytes} together with other live values; "
                    f"the limit is {self.limit_bytes}.",
                    hint="Use smaller microbatches, give this peer fewer blocks or lend more memory.",
                )
        self.users[address] += 1

    def _release(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        address = storage._cdata
        if address not in self.users:
            return
        self.users[address] -= 1
        if self.users[address] == 0:
            del self.users[address]
            self.live_bytes -= storage.nbytes()
            del self.held[address]

    def _compare(self, step: Step, name: str, value: torch.Tensor) -> None:
        spec = self.graph.values.get(name)
        if spec is None:
            raise ExecutionError(f"{describe(step.node)}: its result {name!r} is not declared in the graph.")
        if all(symbols_of(dim) <= self.symbols.keys() for dim in spec.shape):
            declared = shape_of(self.graph, name, self.symbols)
            if declared != tuple(value.shape):
                raise ExecutionError(
                    f"{describe(step.node)}: {name!r} is declared as {list(declared)} "
                    f"but comes out as {list(value.shape)}."
                )
        if DTYPES.get(spec.dtype) != value.dtype:
            raise ExecutionError(
                f"{describe(step.node)}: {name!r} is declared as {spec.dtype} but comes out as {value.dtype}."
            )


def _input(
    graph: Graph, name: str, shape: tuple[int, ...], context: TorchContext, grad_inputs: frozenset[str]
) -> torch.Tensor | int:
    dtype = graph.values[name].dtype
    if dtype == "symint":
        return 1
    differentiable = context.training and name in grad_inputs
    return torch.empty(shape, dtype=DTYPES[dtype], device=META, requires_grad=differentiable)


def _param(graph: Graph, name: str, context: TorchContext) -> torch.Tensor:
    spec = graph.params[name]
    return torch.empty(
        spec.shape, dtype=DTYPES[spec.dtype], device=META, requires_grad=context.training and spec.trainable
    )


def _never(_saved: None) -> torch.Tensor:
    raise AssertionError("nothing runs backward without memory")
