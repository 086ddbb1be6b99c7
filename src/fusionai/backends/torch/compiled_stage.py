"""The compiled forms of a training stage's graph, and the memory that they need.

One interpreter per set of wanted outputs and mode, divided into segments where activations are recomputed or weights
are offloaded. Every new combination of input sizes runs without memory first. Neighbours: `program` runs the
interpreters, `sizes` measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from typing import Final

import torch

from fusionai.backends.binding import largest
from fusionai.backends.counters import DropoutKey
from fusionai.backends.stage_base import movable_weights
from fusionai.backends.torch.interpreter import Interpreter, compile_graph
from fusionai.backends.torch.offloaded_weights import cast_once
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.optimizers import PIECE
from fusionai.backends.torch.recomputation import RecomputedSegment, segments
from fusionai.backends.torch.sizes import META, Footprint, input_shapes, measure
from fusionai.backends.torch.stored import EMBEDDING, PackedReading
from fusionai.ir.graph import reads
from fusionai.ir.schema import Graph
from fusionai.primitives.tensors import tensor_bytes
from fusionai.wire.messages import StageOptions

PIECES_AT_ONCE: Final = 6
"""Tensors of `PIECE` elements alive at once during an update in pieces: two moments, torch's temporaries, and those of
coding."""


class CompiledStage:
    """Interpreters of one graph. `deferrable`: linear nodes whose weight gradient may be deferred in training."""

    def __init__(
        self, graph: Graph, options: StageOptions, grad_inputs: frozenset[str], deferrable: Collection[int]
    ) -> None:
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
        """Return the footprint of one microbatch; see `sizes.measure`."""
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

    def needed_bytes(self, held_bytes: int, microbatches: int, limit_bytes: int | None) -> int:
        """Return the bytes that the stage needs at the symbols' largest values, with `microbatches` in flight.
        `held_bytes`: parameters, gradients and optimizer slots."""
        training = self._options.optimizer is not None
        symbols = largest(self._graph)
        names = frozenset(self._graph.outputs)
        footprint = self.measured(
            names,
            TorchContext(training, DropoutKey(self._options.seed, 0, 0)),
            input_shapes(self._graph, symbols),
            symbols,
            None if limit_bytes is None else limit_bytes - held_bytes,
        )
        running_bytes = footprint.peak_bytes + footprint.again_bytes + self._opened_bytes() + self._cast_bytes(names)
        return held_bytes + max(running_bytes + footprint.saved_bytes * microbatches, self._update_bytes())

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

    def _cast_bytes(self, names: frozenset[str]) -> int:
        """Return the bytes of bfloat16 copies that autocast keeps of offloaded weights."""
        options = self._options
        if not options.offload_weights or options.optimizer is None or options.precision != "bf16":
            return 0
        parts, dropped = self.segments(self.interpreter(names, True, META))
        trained = {key for key, spec in self._specs.items() if spec.trainable}
        kept = [self.weight_bytes(part.weights & trained) // 2 for part in parts]
        return max(kept, default=0) if dropped else self.weight_bytes(trained) // 2

    def _update_bytes(self) -> int:
        """Return the extra bytes of an update in pieces. Activations are released by then."""
        optimizer = self._options.optimizer
        options = self._options
        if optimizer is None or (optimizer.state_bits == 32 and not (options.offload or options.offload_weights)):
            return 0
        largest_elements = max((prod(spec.shape) for spec in self._specs.values() if spec.trainable), default=0)
        return (PIECES_AT_ONCE + options.offload_weights) * 4 * min(PIECE, largest_elements)
