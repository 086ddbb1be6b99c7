"""Runs one stage of a serving job: computes passes, sends rows on, and keeps what it sent for the next stage's
recovery.

It validates passes and limits how many may wait; passes are computed in order of arrival. The driver assigns pages to
sessions and handles failures.

`execution.serving.member` delivers messages and sends, `backends.interface` computes, `execution.serving.boundary`
keeps rows, `execution.serving.sketches` sketches what passes through if it may be checked."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fusionai.backends.serving.base import ServingProgram
from fusionai.execution.host import ComputeThread, Outcome, Timed
from fusionai.execution.member import refusal_of
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.serving.boundary import PAGE_NUMBER_BYTES, RetainedRows, RowSpec, ServingBoundary, packed
from fusionai.execution.serving.sketches import SketchBook, drawing_bytes
from fusionai.execution.serving.verifier import TextVerifier
from fusionai.ir.graph import needed_nodes
from fusionai.ir.schema import Graph
from fusionai.ir.serving import ATTENTION, FROM_SEGMENTS, HIDDEN, works_by_rows
from fusionai.ir.states import carries, may_carry
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Segment, ServeOptions, StageDelay

if TYPE_CHECKING:
    from fusionai.execution.serving.member import ServingMember

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1024
"""Passes that may wait at a stage (chosen)."""
MAX_WAITING_BYTES: Final = 2**29
"""Bytes of tensors that waiting passes may hold at a stage (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageIdentity:
    """Identifies a loaded stage: two loads of equal identity describe the same stage."""

    graph_hash: str
    boundary: bytes
    options: ServeOptions
    select: bool
    last: bool
    weights: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Order:
    """A checked pass. `needed`: the rows of the segments of which the driver wants something. `rows`: the rows to
    compute outputs for, None for all. `computes`: the graph outputs to compute. `parts`: each output to compute by
    itself, with its rows of the tensors that came; instead of `rows` and `computes`."""

    message: wire.Pass
    tensors: Mapping[str, HostTensor]
    segments: tuple[Segment, ...]
    needed: tuple[int, ...]
    rows: Sequence[int] | None
    computes: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    arrived_s: float
    nbytes: int


class ServingStage:
    """One loaded stage. `identity` says what was loaded; `allocated` whether it has caches (a standby has none)."""

    def __init__(
        self,
        *,
        identity: StageIdentity,
        boundary: ServingBoundary,
        graph: Graph,
        program: ServingProgram,
        compute: ComputeThread,
        memory: MemoryBudget,
        member: ServingMember,
    ) -> None:
        self.stage = boundary.stage
        self.identity = identity
        self.allocated = False
        self._boundary = boundary
        self._graph = graph
        self._options = identity.options
        self._program = program
        self._compute = compute
        self._memory = memory
        self._member = member
        self._caches = keeps_positions(graph, identity.options)
        self._inputs = frozenset(graph.inputs) - FROM_SEGMENTS
        self._placed = needs_segments(graph, identity.options)
        """Whether the rows must be exactly the segments' positions."""
        self._made = boundary.made(graph)
        self._least = _filling(graph)
        """Output whose computation fills every cache, the hidden states if they do."""
        keeps = identity.options.retain and not identity.select and not identity.last
        self._retained = RetainedRows(boundary.sends, identity.options) if keeps else None
        self._book: SketchBook | None = None
        self._orders: deque[_Order] = deque()
        """Passes that wait or are being computed, in order."""
        self._computing: tuple[int, float] | None = None
        """Number of the pass being computed, and its start time."""
        self._computed_any = False
        """Whether a pass ended since `working` was last called."""
        memory.join(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of passes that wait or are being computed, and of the page tables."""
        tables_bytes = 0 if self._retained is None else self._retained.tables_bytes
        return sum(order.nbytes for order in self._orders) + tables_bytes

    @property
    def resident_bytes(self) -> int:
        return self._program.resident_bytes + (0 if self._retained is None else self._retained.held_bytes)

    @property
    def program(self) -> ServingProgram:
        return self._program

    def changed_weights(self, identity: StageIdentity, specs: Sequence[wire.WeightSpec]) -> tuple[str, ...] | None:
        """Return the keys of `specs` whose values are not those loaded; None if more than values differs."""
        if replace(identity, weights=()) != replace(self.identity, weights=()):
            return None
        pairs = zip(specs, self.identity.weights, strict=True)
        return tuple(spec.key for spec, digest in pairs if spec.digest != digest)

    def working(self, now_s: float) -> tuple[int, float] | None:
        """Return what `wire.Working` reports, (pass number or -1, seconds); None if there is nothing to report. `now_s`
        is a time on this machine's monotonic clock."""
        computed, self._computed_any = self._computed_any, False
        computing = self._computing  # set in the compute thread
        if computing is not None:
            return computing[0], max(0.0, now_s - computing[1])
        if self._orders:
            return -1, max(0.0, now_s - self._orders[0].arrived_s)
        return (-1, 0.0) if computed else None

    async def begin(self, *, fresh: bool) -> tuple[tuple[int, int], ...]:
        """Take part in passes from now on, and return (session, positions) of what is cached, after all work in
        progress. `fresh`: everything computed and kept so far is useless. A standby has no caches and retains nothing
        until now: plans give it room for those of one stage, whichever it takes over, and for the weights of all.
        Raises `ExecutionError` if they do not fit."""
        self._memory.use(self._program, retained_bytes(self._boundary, self.identity))
        if fresh and self._retained is not None:
            self._retained.clear()
        if self._book is not None:
            self._book.clear()  # texts that span two rounds are not checked

        def ready() -> dict[int, int]:
            # One piece of work: each piece would wait for its turn, and the driver waits for all of them.
            if fresh:
                self._program.forget_all()
            self._program.allocate()
            return dict(self._program.cached)

        found, _ = await self._compute.run(ready, rests=False)
        self.allocated = True
        return tuple(sorted(found.items()))

    def mark(self, secret: bytes, *, gives: bool) -> None:
        """Sketch received rows (and sent ones, if `gives`) from now on, under keys derived from `secret`; with an empty
        secret, sketch nothing. Sketches made under the same secret stay."""
        if self._book is not None and self._book.secret == secret:
            return
        # All live texts, all that wait to be checked, and as many newer ones.
        capacity = 3 * self._options.pages * self._options.page_tokens
        sends = self._boundary.sends if gives else ()
        self._book = None
        if secret:
            receives, memory = self._boundary.receives, self._memory
            self._book = SketchBook(
                secret, receives, sends, capacity, room_bytes=lambda: memory.room_for_sketches_bytes
            )
            memory.join_sketches(self._book)

    # ---------------------------------------------------------------------------------------------------- passes

    def take(self, message: wire.Pass, tensors: Mapping[str, HostTensor]) -> None:
        """Compute a pass when its turn comes. Raises `ExecutionError` for one that breaks the protocol."""
        order = self._checked(message, tensors)
        if len(self._orders) >= MAX_WAITING or self.nbytes + order.nbytes > MAX_WAITING_BYTES:
            raise ExecutionError(f"stage {self.stage} received more passes than it can hold.")
        self._memory.require(order.nbytes, f"stage {self.stage}")
        self._orders.append(order)
        self._compute.submit(lambda: self._run(order), lambda outcome: self._done(order, outcome))

    def _run(self, order: _Order) -> dict[str, HostTensor] | None:
        """Compute the pass, in the compute thread. Returns None for a pass of a round that is over."""
        if order.message.fence != self._member.present:
            return None
        self._computing = order.message.number, time.monotonic()
        try:
            return self._values(order)
        finally:
            self._computing = None

    def _values(self, order: _Order) -> dict[str, HostTensor]:
        inputs = {name: order.tensors[name] for name in self._inputs}
        if order.message.forget:
            self._program.forget(order.message.forget)
        made: dict[str, HostTensor] = {}
        for output, rows in order.parts:
            some = {spec.name: _rows_of(inputs[spec.name], spec, rows) for spec in self._boundary.receives}
            made |= self._program.run((), some, wanted=(output,))
        if order.computes:
            made |= self._program.run(order.segments, inputs, wanted=order.computes, rows=order.rows)
        return made

    def _done(self, order: _Order, outcome: Outcome[dict[str, HostTensor] | None]) -> None:
        self._orders.popleft()  # passes finish in order
        self._computed_any = True
        message = order.message
        match outcome:
            case FusionError():
                reason = str(outcome)[:4000]
                self._member.to_driver(
                    wire.PassFailed(fence=message.fence, stage=self.stage, number=message.number, reason=reason)
                )
            case Exception():
                log.error("stage %d failed", self.stage, exc_info=outcome)
                self._member.failed(self.stage, message.fence, *refusal_of(outcome))
            case made, timed:
                if made is not None and message.fence == self._member.present:
                    self._send_on(order, made, timed)

    def _send_on(self, order: _Order, made: dict[str, HostTensor], timed: Timed) -> None:
        message = order.message
        hop = StageDelay(self.stage, max(0.0, timed.start_s - order.arrived_s), timed.busy_s)
        hops = (*message.hops, hop)
        sent: dict[str, HostTensor] = {}
        ends = message.rebuild == self.stage
        answers = self.identity.last or (self.identity.select and not order.needed and message.rebuild < 0)
        if self._retained is not None or not (ends or answers):
            for spec in self._boundary.sends:
                sent[spec.name] = made[spec.name] if spec.name in made else _picked(order, spec)
        if ends:
            for done in message.segments:
                rebuilt = wire.Rebuilt(
                    fence=message.fence,
                    stage=self.stage,
                    number=message.number,
                    session=done.session,
                    length=done.start + done.length,
                )
                self._member.to_driver(rebuilt)
        elif answers:
            # After row selection, a pass without wanted rows has nothing left to compute.
            result = _results(order, made)
            answer = wire.PassResult(
                fence=message.fence, number=message.number, stage=self.stage, hops=hops, tensors=headers(result)
            )
            self._member.result(answer, tuple(result.values()))
        else:
            following = msgspec.structs.replace(
                message, producer=self.stage, consumer=self.stage + 1, hops=hops, tensors=headers(sent)
            )
            self._member.to_stage(self.stage + 1, following, tuple(sent.values()))
        if self._retained is not None or self._book is not None:
            # In a later turn of the event loop, so that the messages leave first.
            asyncio.get_running_loop().call_soon(self._keep, order, sent)

    def _keep(self, order: _Order, sent: dict[str, HostTensor]) -> None:
        message = order.message
        if self._retained is not None:
            try:
                self._retained.forget(message.forget)
                self._retained.keep(message.segments, sent)
            except ExecutionError as error:
                reason = f"what was sent on can't be kept: {error}"
                self._member.failed(self.stage, message.fence, "bad_message", reason)
        if self._book is not None and message.rebuild < 0:
            self._book.add(message.segments, order.needed, order.tensors, sent)

    def _checked(self, message: wire.Pass, tensors: Mapping[str, HostTensor]) -> _Order:
        place = f"pass {message.number} at stage {self.stage}"
        if not self.allocated:
            raise ExecutionError(f"{place}: this member is only a standby of the stage and computes no passes.")
        total = sum(segment.length for segment in message.segments)
        if not 0 < total <= self._options.pass_tokens:
            raise ExecutionError(f"{place}: expected 1 to {self._options.pass_tokens} positions, got {total}.")
        if len({segment.session for segment in message.segments}) != len(message.segments):
            raise ExecutionError(f"{place}: it contains a session twice.")
        for rows in (message.wanted, message.state_rows):
            if any(later <= row for row, later in itertools.pairwise(rows)) or (rows and rows[-1] >= total):
                raise ExecutionError(f"{place}: expected wanted rows in ascending order and below {total}.")
        needed = tuple(sorted({*message.wanted, *message.state_rows}))
        if message.rebuild >= 0 and (message.rebuild < self.stage or needed):
            raise ExecutionError(f"{place}: a rebuild must end at stage {self.stage} or later and want no rows.")
        if {*tensors} != {spec.name for spec in self._boundary.receives}:
            raise ExecutionError(f"{place}: got {sorted(tensors)[:5]}, not this stage's inputs.")
        came = next(iter(tensors.values())).shape[1:2] if tensors else (total,)
        rows_in = came[0] if came else 0
        selected = rows_in != total
        if selected and (rows_in != len(needed) or self._placed):
            raise ExecutionError(f"{place}: expected {total} rows, got {rows_in}.")
        for spec in self._boundary.receives:
            if (wrong := spec.check(tensors[spec.name], rows_in)) is not None:
                raise ExecutionError(f"{place}: {wrong}.")
        outputs = self._wanted_outputs(message, place) if self.identity.last else {}
        rebuilding = message.rebuild >= 0
        ends = self._retained is None and (message.rebuild == self.stage or not (needed or rebuilding))
        selects = (self.identity.select or self.identity.last) and not selected and not rebuilding
        parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if ends and (self.identity.select or self.identity.last or rebuilding):
            # Nothing is sent on from here, but the caches must still be filled.
            computes, rows = self._least if self._caches else (), ()
        elif len(outputs) > 1 and not self._placed:
            # The head's product, which is the largest, is computed for its own rows only.
            here = {row: place for place, row in enumerate(needed)} if selected else range(total)
            parts = tuple((output, tuple(here[row] for row in wanted)) for output, wanted in outputs.items())
            computes, rows = (), None
        else:
            # States alone may not need every node with a cache.
            least = self._least if self._caches and not message.wanted else ()
            computes = tuple(dict.fromkeys((*outputs, *least))) if self.identity.last else self._made
            rows = needed if selects and len(needed) != total else None
        return _Order(
            message=message,
            tensors=tensors,
            segments=() if selected else message.segments,
            needed=needed,
            rows=rows,
            computes=computes,
            parts=parts,
            arrived_s=time.monotonic(),
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        )

    def _wanted_outputs(self, message: wire.Pass, place: str) -> dict[str, tuple[int, ...]]:
        """Return the outputs that a pass wants, with their rows. Raises `ExecutionError` for one that is not made."""
        wanted = {message.states: message.state_rows, message.output: message.wanted}
        if message.output == message.states and message.state_rows:
            raise ExecutionError(f"{place}: it wants {message.output} twice.")
        found = {output: rows for output, rows in wanted.items() if rows}
        for output in found:
            if output not in self._boundary.outputs:
                raise ExecutionError(f"{place}: this stage has no output {output!r}.")
        return found

    # --------------------------------------------------------------------------------------------------- rebuilding

    def rebuild(self, order: wire.Rebuild) -> None:
        """Resend what these segments sent before. Raises `ExecutionError` for an order that breaks the protocol. Rows
        that are no longer here fail the order, not the stage."""
        if self.identity.last or order.through <= self.stage:
            raise ExecutionError(
                f"stage {self.stage} can't rebuild caches through stage {order.through}, which is not a later stage."
            )
        try:
            self._send_again(order)
        except ExecutionError as error:
            self._member.to_driver(
                wire.PassFailed(fence=order.fence, stage=self.stage, number=order.number, reason=str(error)[:4000])
            )

    def _send_again(self, order: wire.Rebuild) -> None:
        if self._retained is None:
            raise ExecutionError(f"stage {self.stage} retains nothing.")
        for segment in order.segments:
            self._memory.require(PAGE_NUMBER_BYTES * len(segment.pages), f"stage {self.stage}'s page tables")
            self._retained.place(segment)
        for segments in packed(order.segments, self._options.pass_tokens):
            self._require_rows(self._retained, segments)
            tensors = self._retained.rows(segments)
            again = wire.Pass(
                fence=order.fence,
                number=order.number,
                producer=self.stage,
                consumer=self.stage + 1,
                segments=segments,
                rebuild=order.through,
                tensors=headers(tensors),
            )
            self._member.to_stage(self.stage + 1, again, tuple(tensors.values()))

    def _require_rows(self, retained: RetainedRows, segments: Sequence[Segment]) -> None:
        """Raise `ExecutionError` if a copy of these rows does not fit into the memory that is lent."""
        rows = sum(segment.length for segment in segments)
        self._memory.require(rows * retained.row_bytes, f"{rows} rows that stage {self.stage} sends again")

    # ------------------------------------------------------------------------------------------------- spot checks

    def sketches_of(self, order: wire.RequestSketches) -> dict[str, HostTensor]:
        """Return the sketches made at these positions. Raises `ExecutionError` if nothing is sketched."""
        if self._book is None:
            raise ExecutionError(f"stage {self.stage} was not asked to make sketches.")
        if order.length > self._options.pages * self._options.page_tokens:
            raise ExecutionError(f"sketches of {order.length} positions were asked for; no text can be that long here.")
        sketches_of = self._book.of_positions(order.session, order.start, order.length)
        return {
            name: host_tensor("float32", sketches.shape, sketches.tobytes())
            for name, sketches in zip(("got", "gave"), sketches_of, strict=True)
        }

    def shown(self, order: wire.ShowRows) -> Iterator[tuple[int, dict[str, HostTensor]]]:
        """Yield (first position, rows as sent) of a finished text, in parts of at most one pass. Raises
        `ExecutionError` for rows that are not retained (any more)."""
        if self._retained is None:
            raise ExecutionError(f"stage {self.stage} retains nothing.")
        for segments in packed([order.segment], self._options.pass_tokens):
            self._require_rows(self._retained, segments)
            # A pass of the text may still be in progress, so the session's own page table stays unchanged.
            yield segments[0].start, self._retained.rows(segments, order.segment.pages)

    def verifier(self, order: wire.ReadAgain) -> TextVerifier:
        """Return a verifier for the peer that runs this stage, if this member is only its standby and has the memory.
        Raises `ExecutionError`."""
        if self.allocated:
            raise ExecutionError(f"stage {self.stage} runs here, so its caches are in use; only a standby can recheck.")
        self._memory.use(self._program)
        boundary, what = self._boundary, f"a check of a text at stage {self.stage}"
        self._memory.require_for_sketches(drawing_bytes(boundary.receives) + 2 * drawing_bytes(boundary.sends), what)
        verifier = TextVerifier(
            order,
            boundary=boundary,
            graph=self._graph,
            program=self._program,
            options=self._options,
            compute=self._compute,
        )
        self._memory.join_sketches(verifier)
        return verifier


def _filling(graph: Graph) -> tuple[str, ...]:
    """Return an output that needs every node with a cache; all outputs if none does."""
    kept = {node.id for node in graph.nodes if node.op == ATTENTION or may_carry(node)}
    for output in sorted(graph.outputs, key=lambda meaning: meaning != HIDDEN):
        if kept <= {node.id for node in needed_nodes(graph, [graph.outputs[output]])}:
            return (output,)
    return tuple(graph.outputs)


def keeps_positions(graph: Graph, options: ServeOptions) -> bool:
    """Return whether a stage with this graph keeps something of earlier positions of a text."""
    if options.at_once:
        return False
    return options.whole or carries(graph) or any(node.op == ATTENTION for node in graph.nodes)


def needs_segments(graph: Graph, options: ServeOptions) -> bool:
    """Return whether a stage with this graph must know which rows belong to which text."""
    if options.at_once and not works_by_rows(graph):
        return True
    return keeps_positions(graph, options) or not FROM_SEGMENTS.isdisjoint(graph.inputs)


def retained_bytes(boundary: ServingBoundary, identity: StageIdentity) -> int:
    """Return the largest number of bytes that a stage will retain."""
    options = identity.options
    if not options.retain or identity.select or identity.last:
        return 0
    return RetainedRows.capacity_bytes(boundary.sends, options.pages, options.page_tokens)


def _picked(order: _Order, spec: RowSpec) -> HostTensor:
    """Return a value that is passed on, without the rows that no output needs."""
    tensor = order.tensors[spec.name]
    return tensor if order.rows is None else _rows_of(tensor, spec, order.rows)


def _rows_of(tensor: HostTensor, spec: RowSpec, rows: Sequence[int]) -> HostTensor:
    if len(rows) == tensor.shape[1]:
        return tensor
    picked = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1], spec.row_bytes)[list(rows)]
    return HostTensor(spec.dtype, (1, len(rows), *spec.row), picked.reshape(-1).data)


def _results(order: _Order, made: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Return what the last stage sends to the driver: each output at the rows of which it is wanted."""
    message = order.message
    wanted = {message.states: message.state_rows, message.output: message.wanted}
    if order.parts or not (message.wanted and message.state_rows):
        return {name: made[name] for name, rows in wanted.items() if rows}
    place = {row: number for number, row in enumerate(order.needed)}
    found: dict[str, HostTensor] = {}
    for name, rows in wanted.items():
        tensor = made[name]
        spec = RowSpec(name, tensor.dtype, tensor.shape[2:])
        found[name] = _rows_of(tensor, spec, [place[row] for row in rows])
    return found
