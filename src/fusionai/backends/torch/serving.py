"""One serving stage on torch: weights packed for products, caches, passes.

The graph is compiled as for training and evaluation, with other kernels for products, lookups and attention. A pass is
checked as a whole before anything changes or is allocated. A prompt chunk fills caches at every position, but the
head's product, which is the largest of all, and the layer before it are needed at the last position only: after the
last attention only the wanted rows are computed. The memory needed is computed before anything is allocated: weights as
kept, caches, programs for single rows, and the values of the largest pass.

Neighbours: `held_weights` keeps the weights, `packed_siblings` merges nodes, `packed_graph` chooses kernels,
`page_table` keeps the sessions, `paged_attention` the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionai.backends.binding import shape_of, with_rows
from fusionai.backends.semantics import DropoutKey, Scores
from fusionai.backends.serving.base import CheckedPass, PlacedCache, ServingProgram, array_of, largest_pass
from fusionai.backends.serving.page_table import RowSpan, one_by_one
from fusionai.backends.state import ProgramSize
from fusionai.backends.torch import card_launch, carried_states, packed_graph
from fusionai.backends.torch.blocked_linear import kernels as row_kernels
from fusionai.backends.torch.blocked_linear import scratch_bytes
from fusionai.backends.torch.card_memory import with_memory
from fusionai.backends.torch.card_program import CardProgram, planned_for_card
from fusionai.backends.torch.card_program import needed_bytes as card_bytes
from fusionai.backends.torch.carried_states import NodeStates
from fusionai.backends.torch.compiled_stage import META, Footprint, input_shapes, measure
from fusionai.backends.torch.held_weights import ServingWeights, import_bytes, weight_bytes
from fusionai.backends.torch.host import DTYPES, to_host, to_torch
from fusionai.backends.torch.interpreter import Interpreter, compile_graph
from fusionai.backends.torch.known_sizes import KNOWN
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.packed_linear import by_parts
from fusionai.backends.torch.packed_siblings import Joined, join_siblings
from fusionai.backends.torch.paged_attention import (
    LayerCache,
    PassLayout,
    attention_scratch_bytes,
    cached_attention,
    lay_out,
)
from fusionai.backends.torch.row_program import RowPlace, RowProgram, needed_bytes, planned
from fusionai.ir.schema import Graph, Node, ParamSpec, content_hash
from fusionai.ir.serving import row_dimension, split_behind_attention
from fusionai.ir.serving_cost import STACKED_BYTES
from fusionai.ir.states import StateShape
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import ServeOptions

_CONTEXT = TorchContext(training=False, key=DropoutKey(0, 0, 0))


class TorchServingProgram(ServingProgram):
    """A serving stage that decodes by row programs and computes everything else by operators."""

    def __init__(
        self, graph: Graph, *, options: ServeOptions, device: torch.device, memory_limit_bytes: int | None
    ) -> None:
        super().__init__(graph, options)
        self._device = device
        in_blocks = device.type == "cpu" and row_kernels() is not None
        most_bytes = inf if by_parts(device) else STACKED_BYTES
        joined = join_siblings(graph, packed=in_blocks and options.weights == "packed", most_bytes=most_bytes)
        self._running = joined.graph
        self._plan = planned(self._running, tuple(graph.outputs), packed_graph.products(self._running), device)
        # One program for each output alone and one for all outputs together.
        programs = 1 if len(graph.outputs) == 1 else 1 + len(graph.outputs)
        rows_bytes = 0 if self._plan is None else programs * needed_bytes(self._plan, options)
        if in_blocks:
            rows_bytes += scratch_bytes()
        self._card_plan = planned_for_card(
            self._running, tuple(graph.outputs), packed_graph.products(self._running), device
        )
        if self._card_plan is not None:
            rows_bytes += programs * card_bytes(self._card_plan, options, self._layers)
        if device.type == "cpu":
            rows_bytes += attention_scratch_bytes(self._layers, options.pass_tokens)
        self._check_memory(joined, rows_bytes, memory_limit_bytes, in_blocks=in_blocks)
        self._weights = ServingWeights(graph, joined, options.weights, device, in_blocks=in_blocks)
        self._caches: dict[int, LayerCache] | None = None
        self._held: dict[int, NodeStates] = {}
        """The states of each node that carries one."""
        self._layout: PassLayout | None = None
        self._kernels: dict[int, Callable[..., Any]] = {
            **packed_graph.kernels(self._running, self._weights.uses, self._weights.tables),
            **{node.id: self._attention(node) for node in self._running.nodes if node.op == "fusion.attention"},
            **{shape.node: self._carrying(shape) for shape in self._states},
        }
        self._interpreters: dict[frozenset[str], Interpreter] = {}
        self._rows_behind: dict[frozenset[str], RowsBehind | None] = {}
        self._row_programs: dict[frozenset[str], RowProgram | None] = {}
        self._card_programs: dict[frozenset[str], CardProgram | None] = {}

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        with torch.inference_mode():
            super().import_weights(entries)

    def joined(self, keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(self._weights.joined(keys)))

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        with_memory(self._device, f"weight {spec.key}", lambda: self._weights.add(spec.key, tensor), again=False)

    def _forget_compiled(self) -> None:
        self._row_programs.clear()
        self._card_programs.clear()

    def _keep_packed(self, spec: ParamSpec, data: memoryview) -> bool:
        return self._weights.keep_packed(spec, data)

    def allocate(self) -> None:
        if self._caches is None:
            self._caches, self._held = with_memory(self._device, "the caches", self._allocated)
            if not self._waiting:
                self._card_program(frozenset(self._graph.outputs))

    def _allocated(self) -> tuple[dict[int, LayerCache], dict[int, NodeStates]]:
        options, device = self._options, self._device
        caches = {shape.node: LayerCache(shape, options, device) for shape in self._layers}
        return caches, {shape.node: NodeStates(shape, options, device) for shape in self._states}

    def _placed(self) -> Iterable[PlacedCache]:
        return (*(self._caches or {}).values(), *self._held.values())

    @property
    def resident_bytes(self) -> int:
        caches = () if self._caches is None else self._caches.values()
        kept = (*self._row_programs.values(), *self._card_programs.values())
        programs = (program for program in kept if program is not None)
        return self._weights.nbytes + sum(part.nbytes for part in (*caches, *self._held.values(), *programs))

    def _check_memory(self, joined: Joined, rows_bytes: int, limit_bytes: int | None, *, in_blocks: bool) -> None:
        """Raise `ExecutionError` if weights, caches, programs for single rows (`rows_bytes`) and the largest pass
        exceed the limit, or the import of weights does, or if a value's size differs from the graph's declaration."""
        form = self._options.weights
        weights_bytes = weight_bytes(self._graph, form, in_blocks=in_blocks)
        cache_bytes = self._planned_bytes
        self.size = ProgramSize(weights_bytes, cache_bytes)
        importing = import_bytes(self._graph, joined, form, in_blocks=in_blocks, in_parts=by_parts(self._device))
        held_bytes = weights_bytes + cache_bytes + rows_bytes
        if limit_bytes is not None and held_bytes + importing > limit_bytes:
            raise ExecutionError(
                f"the stage takes {weights_bytes} bytes of weights as {form}, {cache_bytes} of caches and {rows_bytes} "
                f"for decoding, {held_bytes + importing} during the import of weights; the limit is {limit_bytes}.",
                hint="Use fewer pages or sessions, a smaller weight format or fewer blocks here, or lend more memory.",
            )
        symbols = largest_pass(self._graph, self._options)
        left_bytes = None if limit_bytes is None else limit_bytes - held_bytes

        def run() -> Footprint:
            return measure(
                self._graph,
                compile_graph(self._graph, frozenset(self._graph.outputs), with_state_writes=False, device=META),
                input_shapes(self._graph, symbols),
                symbols,
                _CONTEXT,
                grad_inputs=frozenset(),
                limit_bytes=left_bytes,
            )

        KNOWN.of((content_hash(self._graph), "serving", tuple(sorted(symbols.items()))), left_bytes, run)

    # ------------------------------------------------------------------------------------------------------ computing

    def _computed(self, work: CheckedPass) -> dict[str, HostTensor]:
        """Compute decoding by row programs and everything else by operators. The choice for a session does not depend
        on other sessions."""
        card = self._card_program(work.wanted)
        if card is not None and not any(span.together for span in work.spans):
            made = self._by_card(card, work)
            if made is not None:
                return made
        program = self._row_program(work.wanted)
        if program is not None and not self._keeps:
            return self._by_rows(program, work.inputs, [RowPlace(0, (), -1)] * len(work.chosen), work.chosen)
        few = [span for span in work.spans if one_by_one(span)]
        if program is None or not few:
            return self._by_operators(work)
        single = [row for span in few for row in range(span.first, span.first + span.length)]
        places = [RowPlace(at, span.pages, span.ring) for span in few for at in range(span.start, span.end)]
        made = self._by_rows(program, work.inputs, places, single)
        if len(few) < len(work.spans):
            made = self._merged(work, made, single)
        return made if work.chosen == list(range(work.positions)) else _picked(made, work.chosen)

    def _merged(
        self, work: CheckedPass, made: Mapping[str, HostTensor], single: Sequence[int]
    ) -> dict[str, HostTensor]:
        """Return the rows `single`, which are in `made`, together with the other spans' rows, computed by operators."""
        others: list[RowSpan] = []
        kept: list[int] = []
        for span in work.spans:
            if not one_by_one(span):
                others.append(replace(span, first=len(kept)))
                kept += range(span.first, span.first + span.length)
        rest = self._by_operators(CheckedPass(tuple(others), _picked(work.inputs, kept), work.wanted, None, len(kept)))
        whole: dict[str, HostTensor] = {}
        for name, tensor in rest.items():
            array = np.empty((1, work.positions, *tensor.shape[2:]), dtype=np.float32)
            array[:, kept] = array_of(tensor)
            array[:, single] = array_of(made[name])
            whole[name] = host_tensor("float32", array.shape, array.data)
        return whole

    def _by_rows(
        self, program: RowProgram, fed: Mapping[str, HostTensor], places: Sequence[RowPlace], rows: Sequence[int]
    ) -> dict[str, HostTensor]:
        inputs = {name: array_of(tensor) for name, tensor in fed.items()}
        if any(list(rows) != list(range(array.shape[1])) for array in inputs.values()):
            inputs = {name: array[:, list(rows)] for name, array in inputs.items()}
        made = program.run(inputs, places)
        return {name: host_tensor("float32", array.shape, array.data) for name, array in made.items()}

    def _by_operators(self, work: CheckedPass) -> dict[str, HostTensor]:
        # Keys, values and states go to places that follow from the pass, so it may run again if memory runs out.
        return with_memory(self._device, f"a pass of {work.positions} positions", lambda: self._operated(work))

    def _operated(self, work: CheckedPass) -> dict[str, HostTensor]:
        rows, interpreter = work.rows, self._interpreter(work.wanted)
        with torch.inference_mode():
            if work.spans:
                self._layout = lay_out(
                    work.spans, self._options, paged=self._paged, windows=self._windows, device=self._device
                )
            values = {name: to_torch(work.inputs[name], self._device) for name in interpreter.inputs}
            behind = None if rows is None or len(rows) == work.positions else self._behind(work.wanted)
            if behind is not None:
                results = behind.run(_CONTEXT, values, self._weights.values, rows or (), self._device)
            else:
                outputs, _ = interpreter.run(_CONTEXT, values, self._weights.values(interpreter.params))
                results = {name: self._rows_of(name, value, rows) for name, value in outputs.items()}
        self._layout = None
        return {name: to_host(value, own=self._weights.shares(value)) for name, value in results.items()}

    def _by_card(self, program: CardProgram, work: CheckedPass) -> dict[str, HostTensor] | None:
        """Compute by kernels; None if the card's compiler fails, and then operators compute the same places anew."""
        try:
            return with_memory(self._device, f"a pass of {work.positions} positions", lambda: program.run(work))
        except FusionError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and operators serve instead
            card_launch.failed(error)
            self._card_plan = None
            self._card_programs.clear()
            return None

    def _card_program(self, wanted: frozenset[str]) -> CardProgram | None:
        if self._card_plan is None:
            return None
        if wanted not in self._card_programs:
            assert self._caches is not None
            plan, uses = self._card_plan, self._weights.uses
            if wanted != frozenset(self._graph.outputs):
                plan = planned_for_card(self._running, sorted(wanted), uses, self._device)
            self._card_programs[wanted] = plan and CardProgram(
                plan, uses, self._weights.values, self._caches, self._options, self._device
            )
        return self._card_programs[wanted]

    def _row_program(self, wanted: frozenset[str]) -> RowProgram | None:
        if self._plan is None:
            return None
        if wanted not in self._row_programs:
            assert self._caches is not None
            everything = wanted == frozenset(self._graph.outputs)
            uses = self._weights.uses
            plan = self._plan
            if not everything:
                plan = planned(self._running, sorted(wanted), uses, self._device)
            self._row_programs[wanted] = plan and RowProgram(
                plan, uses, self._weights.values, self._caches, self._options
            )
        return self._row_programs[wanted]

    def _interpreter(self, wanted: frozenset[str]) -> Interpreter:
        interpreter = self._interpreters.get(wanted)
        if interpreter is None:
            interpreter = self._interpreters[wanted] = compile_graph(
                self._running, wanted, with_state_writes=False, device=self._device, kernels=self._kernels
            )
        return interpreter

    def _behind(self, wanted: frozenset[str]) -> RowsBehind | None:
        if wanted not in self._rows_behind:
            self._rows_behind[wanted] = RowsBehind.of(self._running, wanted, self._device, self._kernels)
        return self._rows_behind[wanted]

    # ------------------------------------------------------------------------------------------------------- details

    def _attention(self, node: Node) -> Callable[..., Tensor]:
        number = node.id

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            scale: float,
            softcap: float | None = None,
            sinks: Tensor | None = None,
            **_: object,
        ) -> Tensor:
            # The operator's other arguments are fixed: causal, no padding mask, and the window is the cache's.
            assert self._layout is not None
            assert self._caches is not None
            return cached_attention(self._layout, self._caches[number], q, k, v, Scores(scale, softcap, sinks))

        return run

    def _carrying(self, shape: StateShape) -> Callable[..., Tensor]:
        return carried_states.kernel(shape, lambda: self._held[shape.node], self._spans)

    def _spans(self) -> tuple[RowSpan, ...]:
        assert self._layout is not None
        return self._layout.spans

    def _rows_of(self, name: str, value: Tensor | int, rows: Sequence[int] | None) -> Tensor | int:
        if rows is None or isinstance(value, int):
            return value
        along = row_dimension(self._graph, self._graph.outputs[name])
        if along is None or list(rows) == list(range(value.shape[along])):
            return value
        return value.index_select(along, torch.tensor(list(rows), dtype=torch.int64, device=value.device))


def _picked(tensors: Mapping[str, HostTensor], rows: Sequence[int]) -> dict[str, HostTensor]:
    """Return these rows of tensors [1, rows, ...]."""
    chosen: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(array_of(tensor)[:, list(rows)])
        chosen[name] = host_tensor(tensor.dtype, array.shape, array.data)
    return chosen


Params = Callable[[Collection[str]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RowsBehind:
    """The two halves of a graph. `before` fills the caches of all its attention nodes."""

    graph: Graph
    before: Interpreter
    after: Interpreter

    @classmethod
    def of(
        cls, graph: Graph, wanted: Collection[str], device: torch.device, kernels: Mapping[int, Callable[..., Any]]
    ) -> RowsBehind | None:
        """Return the halves; None if dividing the graph would save nothing."""
        halves = split_behind_attention(graph, wanted)
        if halves is None:
            return None
        first, second = (
            compile_graph(half, frozenset(half.outputs), with_state_writes=False, device=device, kernels=kernels)
            for half in halves
        )
        return cls(graph, first, second)

    def run(
        self,
        context: TorchContext,
        inputs: Mapping[str, Any],
        params: Params,
        rows: Sequence[int],
        device: torch.device,
    ) -> dict[str, Any]:
        """Return the outputs at `rows`, by meaning."""
        made, _ = self.before.run(context, inputs, params(self.before.params))
        if not rows:
            return {meaning: self._nothing(meaning, device) for meaning in self.after.outputs}
        index = torch.tensor(list(rows), dtype=torch.int64, device=device)
        values = {name: self._rows(name, made.get(name, inputs.get(name)), index) for name in self.after.inputs}
        outputs, _ = self.after.run(context, values, params(self.after.params))
        return outputs

    def _rows(self, name: str, value: Any, index: Tensor) -> Any:
        along = row_dimension(self.graph, name)
        return value if along is None else value.index_select(along, index)

    def _nothing(self, meaning: str, device: torch.device) -> Tensor:
        value = self.graph.outputs[meaning]
        sizes = shape_of(self.graph, value, with_rows(self.graph, 0))
        return torch.empty(sizes, dtype=DTYPES[self.graph.values[value].dtype], device=device)
