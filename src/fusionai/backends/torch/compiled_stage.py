"""The compiled forms of a stage's graph, and the memory that they need, computed without allocating it.

One interpreter per set of wanted outputs and mode, divided into segments where activations are recomputed or weights
are offloaded. For sizes, a graph runs on torch's `meta` device, where tensors have shapes but no memory. Every value is
compared with the graph's declaration, and the memory that is alive at once with the limit. The declaration is never
trusted, because the graph comes from another machine. Neighbours: `program` runs the interpreters and asks for every
new combination of sizes, `serving` measures its largest pass.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

import torch
from torch import Tensor

from fusionai.backends.binding import OPERATOR_FAILURES, first_line, largest, shape_of
from fusionai.backends.interface import movable_weights
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.interpreter import EMBEDDING, Interpreter, PackedReading, Step, compile_graph, describe
from fusionai.backends.torch.known_sizes import KNOWN
from fusionai.backends.torch.live_memory import WatchedStorages
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.optimizers import PIECE
from fusionai.backends.torch.recomputation import RecomputedSegment, segments
from fusionai.backends.torch.rehearsal import META, NO_GRADIENT, HalfProducts, Rehearsed, rehearsed
from fusionai.ir.graph import copied_weights, copy_bytes, reads
from fusionai.ir.operators import IN_BFLOAT16, OPERATORS
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.shapes import symbols_of
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.wire.messages import StageOptions

log = logging.getLogger(__name__)


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
        WatchedStorages("meta", meter.make),
        # No backward runs here, so nothing need be kept; a result that is saved as itself would never be freed.
        torch.autograd.graph.saved_tensors_hooks(meter.save, _never),
        torch.set_grad_enabled(context.training),
    ):
        for position, step in enumerate(interpreter.steps):
            part = beginnings.get(position)
            if part is not None:
                meter.enter(part, registers)
            meter.begin()
            try:
                step.run(registers)
            except FusionError as error:
                raise ExecutionError(f"{describe(step.node)}: {error.message}", hint=error.hint) from error
            except OPERATOR_FAILURES as error:
                raise ExecutionError(f"{describe(step.node)} can't run at these sizes: {first_line(error)}") from error
            meter.after(step, registers)
    return meter.footprint()


class _Meter:
    """Counts the distinct storages of live registers (views share theirs), and those that are made inside operators."""

    def __init__(
        self, graph: Graph, interpreter: Interpreter, symbols: Mapping[str, int], limit_bytes: int | None
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
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that were made in the run and still live."""
        self.made_bytes = self.begun_bytes = 0
        """Their bytes now, and when the present operator began."""

    def begin(self) -> None:
        """An operator begins."""
        self.begun_bytes = self.made_bytes

    def make(self, storage: torch.UntypedStorage, by: object) -> None:
        """Count a storage that the present operator made, until it is freed. Raises `ExecutionError` beyond the
        limit."""
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self.made or address in self.users or address in self.parameters:
            return

        def free(_: object) -> None:
            if self.made.pop(address, None) is not None:
                self.made_bytes -= nbytes

        self.made[address] = weakref.ref(storage, free)
        self.made_bytes += nbytes
        self._reach(self.live_bytes + self.made_bytes - self.begun_bytes, nbytes, f"{by} within it")

    def _reach(self, live_bytes: int, nbytes: int, what: str) -> None:
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if self.limit_bytes is not None and live_bytes > self.limit_bytes:
            raise ExecutionError(
                f"{what} needs {nbytes} bytes, {live_bytes} together with other live values; the limit is "
                f"{self.limit_bytes}.",
                hint="Use smaller microbatches, give this peer fewer blocks or lend more memory.",
            )

    def hold_inputs(self, registers: list[object]) -> None:
        for name, register in self.registers.items():
            value = registers[register]
            if not isinstance(value, Tensor):
                continue
            if register in self.parameter_registers:
                storage = value.untyped_storage()
                self.parameters.add(storage._cdata)
            else:
                self._hold(value, name)

    def after(self, step: Step, registers: list[object]) -> None:
        for name in step.node.outputs:
            value = registers[self.registers[name]]
            if isinstance(value, Tensor):
                self._compare(step, name, value)
                self._hold(value, describe(step.node))
        for register in step.dead:
            value = registers[register]
            if isinstance(value, Tensor) and register not in self.parameter_registers:
                self._release(value)
            registers[register] = None

    def enter(self, part: RecomputedSegment, registers: list[object]) -> None:
        """Count saved storages for `part` from here on. The values it reads are kept in any case."""
        self.entered = self.entered or {}
        self._leave()
        for register in part.entering:
            value = registers[register]
            if isinstance(value, Tensor):
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

    def save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.parameters or storage._cdata in self.saved:
            return
        self.saved[storage._cdata] = storage
        self.saved_bytes += storage.nbytes()

    def _hold(self, value: Tensor, what: str) -> None:
        storage = value.untyped_storage()
        address = storage._cdata
        if address in self.parameters:
            return
        if address not in self.users:
            # Kept in `held` so that no later storage gets the same address.
            self.held[address] = storage
            self.users[address] = 0
            self.live_bytes += storage.nbytes()
            self._reach(self.live_bytes, storage.nbytes(), what)
        self.users[address] += 1

    def _release(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        address = storage._cdata
        if address not in self.users:
            return
        self.users[address] -= 1
        if self.users[address] == 0:
            del self.users[address]
            self.live_bytes -= storage.nbytes()
            del self.held[address]

    def _compare(self, step: Step, name: str, value: Tensor) -> None:
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
) -> Tensor | int:
    dtype = graph.values[name].dtype
    if dtype == "symint":
        return 1
    differentiable = context.training and name in grad_inputs
    return torch.empty(shape, dtype=DTYPES[dtype], device=META, requires_grad=differentiable)


def _param(graph: Graph, name: str, context: TorchContext) -> Tensor:
    spec = graph.params[name]
    return torch.empty(
        spec.shape, dtype=DTYPES[spec.dtype], device=META, requires_grad=context.training and spec.trainable
    )


def _never(_saved: None) -> Tensor:
    raise AssertionError("nothing runs backward without memory")


UPDATED_AT_ONCE: Final = 3
"""Tensors of a parameter's size alive at once during an update of a whole parameter: torch's temporaries."""
PIECES_AT_ONCE: Final = 6
"""Tensors of `PIECE` elements alive at once during an update in pieces: two moments, torch's temporaries, and those of
coding."""


class CompiledStage:
    """Interpreters of one graph. `deferrable`: linear nodes whose weight gradient may be deferred in training.
    `repeats_keys`: see `operators.TorchContext`."""

    def __init__(
        self,
        graph: Graph,
        options: StageOptions,
        grad_inputs: frozenset[str],
        deferrable: Collection[int],
        repeats_keys: bool = False,
    ) -> None:
        self._repeats_keys = repeats_keys
        self._graph = graph
        self._options = options
        self._grad_inputs = grad_inputs
        self._deferrable = deferrable
        self._stored = PackedReading(
            frozenset(value for value, spec in graph.params.items() if spec.stored), again=options.recompute
        )
        self._movable = movable_weights(graph) if options.offload_weights else {}
        self._interpreters: dict[tuple[frozenset[str], bool, str], Interpreter] = {}
        self._specs = {spec.key: spec for spec in graph.params.values()}

    @property
    def movable(self) -> frozenset[str]:
        """Keys of the parameters that are offloaded."""
        return frozenset[str]().union(*self._movable.values())

    def interpreter(self, names: frozenset[str], training: bool, device: torch.device) -> Interpreter:
        key = (names, training, device.type)
        interpreter = self._interpreters.get(key)
        if interpreter is None:
            interpreter = compile_graph(
                self._graph,
                names,
                with_state_writes=training,
                device=device,
                mixed=self._options.precision == "bf16" and device != META,
                deferred=self._deferrable if training else (),
                stored=self._stored,
            )
            self._interpreters[key] = interpreter
        return interpreter

    def segments(self, interpreter: Interpreter) -> tuple[tuple[RecomputedSegment, ...], bool]:
        """Return the segments, and whether autocast's copies of their weights may be dropped with them."""
        parts = segments(interpreter, self._movable)
        cast = self._options.offload_weights and self._options.precision == "bf16"
        return parts, cast and cast_once(self._graph, interpreter, parts)

    def measured(
        self,
        names: frozenset[str],
        context: TorchContext,
        shapes: Mapping[str, tuple[int, ...]],
        symbols: Mapping[str, int],
        limit_bytes: int | None,
    ) -> Footprint:
        """Return the footprint of one microbatch; see `compiled_stage.measure`."""

        def run() -> Footprint:
            return measure(
                self._graph,
                self.interpreter(names, context.training, META),
                shapes,
                symbols,
                context,
                grad_inputs=self._grad_inputs,
                limit_bytes=limit_bytes,
                recompute=context.training and self._options.recompute,
            )

        sizes = tuple(sorted(symbols.items())), tuple(sorted(shapes.items()))
        return KNOWN.of((self._known_by, names, context.training, sizes), limit_bytes, run)

    @cached_property
    def _known_by(self) -> tuple[object, ...]:
        """All that the sizes follow from, besides the mode and the sizes of the inputs."""
        options = self._options
        kinds = (options.recompute, options.precision, options.offload_weights, self._repeats_keys)
        return content_hash(self._graph), self._grad_inputs, frozenset(self._deferrable), kinds

    def needed_bytes(self, held_bytes: int, microbatches: int, limit_bytes: int | None) -> int:
        """Return the bytes that the stage needs at the symbols' largest values, with `microbatches` in flight.
        `held_bytes`: parameters, gradients and optimizer slots."""
        training = self._options.optimizer is not None
        symbols = largest(self._graph)
        names = frozenset(self._graph.outputs)
        footprint = self.measured(
            names,
            TorchContext(training, DropoutKey(self._options.seed, 0, 0), repeats_keys=self._repeats_keys),
            input_shapes(self._graph, symbols),
            symbols,
            None if limit_bytes is None else limit_bytes - held_bytes,
        )
        known = all(node.op not in NO_GRADIENT for node in self._graph.nodes)
        # Autocast's copies of offloaded weights are dropped with them, which no rehearsal does.
        if training and known and not (self._options.offload_weights and self._options.precision == "bf16"):
            try:
                one = KNOWN.of((self._known_by, names, "rehearsed"), None, lambda: self._rehearsed(names))
            except (FusionError, *OPERATOR_FAILURES) as error:
                log.debug("no gradient without memory, its size is estimated: %s", first_line(error))
            else:
                running_bytes = one.peak_bytes + one.kept_bytes * (microbatches - 1)
                return held_bytes + max(running_bytes, self._update_bytes())
        copied_bytes = self._copied_bytes(names, microbatches)
        running_bytes = footprint.peak_bytes + footprint.again_bytes + self._opened_bytes() + copied_bytes
        return held_bytes + max(running_bytes + footprint.saved_bytes * microbatches, self._update_bytes())

    def _rehearsed(self, names: frozenset[str]) -> Rehearsed:
        halves = HalfProducts() if self._options.precision == "bf16" else None
        interpreter = compile_graph(
            self._graph,
            names,
            with_state_writes=True,
            device=META,
            mixed=halves is not None,
            stored=self._stored,
            halve=None if halves is None else halves.of,
        )
        return rehearsed(
            self._graph,
            interpreter,
            input_shapes(self._graph, largest(self._graph)),
            TorchContext(True, DropoutKey(self._options.seed, 0, 0), repeats_keys=self._repeats_keys),
            grad_inputs=self._grad_inputs,
            recompute=self._options.recompute,
            halves=halves,
        )

    def weight_bytes(self, keys: Collection[str]) -> int:
        return sum(tensor_bytes(self._specs[key].dtype, self._specs[key].shape) for key in keys)

    def _opened_bytes(self) -> int:
        """Return the float32 bytes of packed weights that are unpacked at once: those of one weight, or of a block when
        recomputing."""
        opened = [
            (node.block, 4 * prod(self._graph.params[name].shape))
            for node in self._graph.nodes
            for name in reads(node)
            if name in self._stored.values and node.op != EMBEDDING
        ]
        if not self._stored.again:
            return max((nbytes for _, nbytes in opened), default=0)
        blocks = Counter[int]()
        for block, nbytes in opened:
            blocks[block] += nbytes
        return max(blocks.values(), default=0)

    def _copied_bytes(self, names: frozenset[str], microbatches: int) -> int:
        """Return the bytes of bfloat16 copies of weights that autocast makes: of all weights in each microbatch in
        flight, because backward reads them; if activations are recomputed, of all weights while one runs forward."""
        options = self._options
        if options.optimizer is None or options.precision != "bf16":
            return 0
        if not options.offload_weights:
            whole = sum(
                copy_bytes(self._graph.params[value]) for value in {one for _, one in copied_weights(self._graph)}
            )
            return whole if options.recompute else whole * microbatches
        parts, dropped = self.segments(self.interpreter(names, True, META))
        trained = {key for key, spec in self._specs.items() if spec.trainable}
        kept = [self.weight_bytes(part.weights & trained) // 2 for part in parts]
        return max(kept, default=0) if dropped else self.weight_bytes(trained) // 2

    def _update_bytes(self) -> int:
        """Return the extra bytes of an update in pieces. Activations are released by then."""
        optimizer = self._options.optimizer
        options = self._options
        if optimizer is None:
            return 0
        largest_elements = max((prod(spec.shape) for spec in self._specs.values() if spec.trainable), default=0)
        if optimizer.state_bits == 32 and not (options.offload or options.offload_weights):
            return UPDATED_AT_ONCE * 4 * largest_elements
        return (PIECES_AT_ONCE + options.offload_weights) * 4 * min(PIECE, largest_elements)


def cast_once(graph: Graph, interpreter: Interpreter, parts: Collection[RecomputedSegment]) -> bool:
    """Return whether autocast casts no trained weight in two of `parts`. A weight used twice normally has one cast for
    both uses, whose gradients are summed in bfloat16. With a second cast they would be summed in float32."""
    seen: set[str] = set()
    for part in parts:
        nodes = [step.node for step in interpreter.steps[part.start : part.stop]]
        cast = {
            graph.params[name].key
            for node in nodes
            if OPERATORS[node.op].category in IN_BFLOAT16
            for name in reads(node)
            if name in graph.params and graph.params[name].trainable
        }
        if seen & cast:
            return False
        seen |= cast
    return True
