"""One stage of a serving job at work: passes in, rows out, what was sent on kept for the stage after.

Decides what a pass may say and how many may wait; passes are computed in the order they came. Never decides which
session has which page, nor what happens after a failure: the driver does.

Neighbours: `execution.serving_member` brings messages and reaches others, `backends.serving` computes,
`execution.serving_retained` keeps, `execution.serving_marks` marks what passes by where that may be checked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from fusionai.backends.serving import ServingProgram
from fusionai.execution.compute import ComputeThread, Outcome, Timed
from fusionai.execution.serving_boundary import RowSpec, ServingBoundary
from fusionai.execution.serving_marks import MarkBook
from fusionai.execution.serving_packing import packed
from fusionai.execution.serving_referee import TextReferee
from fusionai.execution.serving_retained import Retained
from fusionai.execution.state import headers
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS, HIDDEN
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Hop, Segment, ServeOptions

log = logging.getLogger(__name__)

ATTENTION: Final = "fusion.attention"
MAX_WAITING: Final = 1024
MAX_WAITING_BYTES: Final = 2**29


class ServingPostman(Protocol):
    """How a stage reaches others; `execution.serving_member` implements it. Neither raises for a lost link."""

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def to_driver(self, message: wire.Message) -> None:
        """On the control connection."""
        ...

    def result(self, message: wire.PassResult, tensors: Sequence[HostTensor]) -> None:
        """To the driver, on the link for tensors."""
        ...

    def failed(self, stage: int, fence: Fence, code: wire.RefusalCode, reason: str) -> None: ...

    @property
    def present(self) -> Fence:
        """The fence of the round."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Two loads of equal identity describe the same stage."""

    graph_hash: str
    boundary: bytes
    options: ServeOptions
    select: bool
    last: bool
    weights: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Order:
    """A pass, checked. `rows`: as they came; `selected`: only those that are wanted came or go on."""

    message: wire.Pass
    tensors: Mapping[str, HostTensor]
    segments: tuple[Segment, ...]
    rows: Sequence[int] | None
    computes: tuple[str, ...]
    arrived_s: float
    nbytes: int


class ServingStage:
    """`identity` says what was loaded; `allocated` whether the caches are there (a guard does without)."""

    def __init__(
        self,
        *,
        identity: Identity,
        boundary: ServingBoundary,
        graph: Graph,
        program: ServingProgram,
        compute: ComputeThread,
        postman: ServingPostman,
    ) -> None:
        self.stage = boundary.stage
        self.identity = identity
        self.allocated = False
        self._boundary = boundary
        self._graph = graph
        self._options = identity.options
        self._program = program
        self._compute = compute
        self._postman = postman
        self._caches = keeps_positions(graph, identity.options)
        self._inputs = frozenset(graph.inputs) - FROM_SEGMENTS
        self._placed = self._caches or not FROM_SEGMENTS.isdisjoint(graph.inputs)
        """Whether the rows must be exactly the segments' positions."""
        self._made = boundary.made(graph)
        self._least = ((HIDDEN,) if HIDDEN in graph.outputs else tuple(graph.outputs))[:1]
        """What takes least to compute of all that needs every attention."""
        keeps = identity.options.retain and not identity.select and not identity.last
        self._retained = Retained(boundary.sends, identity.options.page_tokens) if keeps else None
        self._book: MarkBook | None = None
        self._orders: deque[_Order] = deque()
        """Here and not done, in the order they are computed."""
        self._computing: tuple[int, float] | None = None
        """Number of the pass that is computed and since when."""
        self._computed_any = False
        """Since `working` was asked last."""
        self._waiting_bytes = 0

    @property
    def resident_bytes(self) -> int:
        return self._program.resident_bytes + (0 if self._retained is None else self._retained.held_bytes)

    @property
    def reserved_bytes(self) -> int:
        """With what will be retained once all pages are in use. A guard retains nothing: plans give it room for the
        caches and retained rows of one stage, whichever it takes over, and for the weights of all."""
        retained = retained_bytes(self._boundary, self.identity) if self.allocated else 0
        return self._program.resident_bytes + retained

    def working(self, now_s: float) -> tuple[int, float] | None:
        """What `wire.Working` says, at a time on this machine's monotonic clock; None where nothing is to be said."""
        computed, self._computed_any = self._computed_any, False
        computing = self._computing  # set in the compute thread
        if computing is not None:
            return computing[0], max(0.0, now_s - computing[1])
        if self._orders:
            return -1, max(0.0, now_s - self._orders[0].arrived_s)
        return (-1, 0.0) if computed else None

    async def begin(self, *, fresh: bool) -> tuple[tuple[int, int], ...]:
        """Take part in passes from now on. `fresh`: nothing of what was computed and kept is of use any more. Gives
        (session, positions) of what is cached, after everything that was under way."""
        if fresh and self._retained is not None:
            self._retained.clear()
        if self._book is not None:
            self._book.clear()  # no text of two rounds is checked

        def ready() -> dict[int, int]:
            # One piece of work: each waits for its turn, and somebody waits for all of them.
            if fresh:
                self._program.forget_all()
            self._program.allocate()
            return dict(self._program.cached)

        found, _ = await self._compute.run(ready)
        self.allocated = True
        return tuple(sorted(found.items()))

    def mark(self, secret: bytes, *, gives: bool) -> None:
        """Mark from now on what comes (and, if it `gives`, what goes) under keys that follow from `secret`; empty:
        nothing. What was marked under the same secret stays."""
        if self._book is not None and self._book.secret == secret:
            return
        # All that live, all that wait to be checked, and as much that came after these.
        capacity = 3 * self._options.pages * self._options.page_tokens
        sends = self._boundary.sends if gives else ()
        self._book = MarkBook(secret, self._boundary.receives, sends, capacity) if secret else None

    # ---------------------------------------------------------------------------------------------------- passes

    def take(self, message: wire.Pass, tensors: Mapping[str, HostTensor]) -> None:
        """Compute a pass when its turn comes. Raises `ExecutionError` for one that breaks the protocol."""
        order = self._checked(message, tensors)
        if len(self._orders) >= MAX_WAITING or self._waiting_bytes + order.nbytes > MAX_WAITING_BYTES:
            raise ExecutionError(f"stage {self.stage} is sent more passes than it can hold.")
        self._orders.append(order)
        self._waiting_bytes += order.nbytes
        self._compute.submit(lambda: self._run(order), lambda outcome: self._done(order, outcome))

    def _run(self, order: _Order) -> dict[str, HostTensor] | None:
        """In the compute thread. None for a pass of a round that is over."""
        if order.message.fence != self._postman.present:
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
        if not order.computes:
            return {}
        return self._program.run(order.segments, inputs, wanted=order.computes, rows=order.rows)

    def _done(self, order: _Order, outcome: Outcome[dict[str, HostTensor] | None]) -> None:
        self._orders.popleft()  # passes are done in their order
        self._waiting_bytes -= order.nbytes
        self._computed_any = True
        message = order.message
        match outcome:
            case FusionError():
                reason = str(outcome)[:4000]
                self._postman.to_driver(
                    wire.PassFailed(fence=message.fence, stage=self.stage, number=message.number, reason=reason)
                )
            case Exception():
                log.error("stage %d failed", self.stage, exc_info=outcome)
                code: wire.RefusalCode = "out_of_memory" if isinstance(outcome, MemoryError) else "failed"
                self._postman.failed(self.stage, message.fence, code, f"{type(outcome).__name__}: {outcome}")
            case made, timed:
                if made is not None and message.fence == self._postman.present:
                    self._send_on(order, made, timed)

    def _send_on(self, order: _Order, made: dict[str, HostTensor], timed: Timed) -> None:
        message = order.message
        hop = Hop(self.stage, max(0.0, timed.start_s - order.arrived_s), timed.busy_s)
        hops = (*message.hops, hop)
        sent: dict[str, HostTensor] = {}
        ends = message.rebuild == self.stage
        answers = self.identity.last or (self.identity.select and not message.wanted and message.rebuild < 0)
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
                self._postman.to_driver(rebuilt)
        elif answers:
            # After a selection nothing is left to compute for a pass that nobody wants to see.
            result = {} if not message.wanted else {message.output: made[message.output]}
            answer = wire.PassResult(
                fence=message.fence, number=message.number, stage=self.stage, hops=hops, tensors=headers(result)
            )
            self._postman.result(answer, tuple(result.values()))
        else:
            following = msgspec.structs.replace(
                message, producer=self.stage, consumer=self.stage + 1, hops=hops, tensors=headers(sent)
            )
            self._postman.to_stage(self.stage + 1, following, tuple(sent.values()))
        if self._retained is not None or self._book is not None:
            # A turn of the loop later: what is to be sent leaves first.
            asyncio.get_running_loop().call_soon(self._keep, order, sent)

    def _keep(self, order: _Order, sent: dict[str, HostTensor]) -> None:
        message = order.message
        if self._retained is not None:
            try:
                self._retained.forget(message.forget)
                self._retained.keep(message.segments, sent)
            except ExecutionError as error:
                reason = f"what was sent on can't be kept: {error}"
                self._postman.failed(self.stage, message.fence, "bad_message", reason)
        if self._book is not None and message.rebuild < 0:
            self._book.add(message.segments, message.wanted, order.tensors, sent)

    def _checked(self, message: wire.Pass, tensors: Mapping[str, HostTensor]) -> _Order:
        place = f"pass {message.number} at stage {self.stage}"
        if not self.allocated:
            raise ExecutionError(f"{place}: the stage stands by, it computes nothing.")
        total = sum(segment.length for segment in message.segments)
        if not 0 < total <= self._options.pass_tokens:
            raise ExecutionError(f"{place}: expected 1 to {self._options.pass_tokens} positions, got {total}.")
        if len({segment.session for segment in message.segments}) != len(message.segments):
            raise ExecutionError(f"{place}: a session is in it twice.")
        wanted = message.wanted
        if any(later <= row for row, later in itertools.pairwise(wanted)) or (wanted and wanted[-1] >= total):
            raise ExecutionError(f"{place}: expected ascending rows below {total}, got others.")
        if message.rebuild >= 0 and (message.rebuild < self.stage or wanted):
            raise ExecutionError(f"{place}: expected stage {self.stage} or later to be rebuilt, no rows wanted.")
        if {*tensors} != {spec.name for spec in self._boundary.receives}:
            raise ExecutionError(f"{place}: it carries {sorted(tensors)[:5]}, not what this stage receives.")
        came = next(iter(tensors.values())).shape[1:2] if tensors else (total,)
        rows_in = came[0] if came else 0
        selected = rows_in != total
        if selected and (rows_in != len(wanted) or self._placed):
            raise ExecutionError(f"{place}: expected {total} rows, got {rows_in}.")
        for spec in self._boundary.receives:
            if (wrong := spec.check(tensors[spec.name], rows_in)) is not None:
                raise ExecutionError(f"{place}: {wrong}.")
        if self.identity.last and wanted and message.output not in self._boundary.outputs:
            raise ExecutionError(f"{place}: this stage has no output {message.output!r}.")
        rebuilding = message.rebuild >= 0
        ends = self._retained is None and (message.rebuild == self.stage or not (wanted or rebuilding))
        selects = (self.identity.select or self.identity.last) and not selected and not rebuilding
        if ends and (self.identity.select or self.identity.last or rebuilding):
            # Nothing goes on from here; what fills the caches is computed all the same.
            computes, rows = self._least if self._caches else (), ()
        else:
            computes = (message.output,) if self.identity.last else self._made
            rows = wanted if selects and len(wanted) != total else None
        return _Order(
            message=message,
            tensors=tensors,
            segments=() if selected else message.segments,
            rows=rows,
            computes=computes,
            arrived_s=time.monotonic(),
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        )

    # --------------------------------------------------------------------------------------------------- rebuilding

    def rebuild(self, order: wire.Rebuild) -> None:
        """Send on once more what the segments sent before. Raises `ExecutionError` for an order that breaks the
        protocol; what is not here any more fails the order, not the stage."""
        if self.identity.last or order.through <= self.stage:
            raise ExecutionError(f"stage {self.stage} has nothing to rebuild through stage {order.through}.")
        try:
            self._send_again(order)
        except ExecutionError as error:
            self._postman.to_driver(
                wire.PassFailed(fence=order.fence, stage=self.stage, number=order.number, reason=str(error)[:4000])
            )

    def _send_again(self, order: wire.Rebuild) -> None:
        if self._retained is None:
            raise ExecutionError(f"stage {self.stage} retains nothing.")
        for segment in order.segments:
            self._retained.place(segment)
        for segments in packed(order.segments, self._options.pass_tokens):
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
            self._postman.to_stage(self.stage + 1, again, tuple(tensors.values()))

    # ------------------------------------------------------------------------------------------------- spot checks

    def told(self, order: wire.TellMarks) -> dict[str, HostTensor]:
        """What was marked of these positions. Raises `ExecutionError` where nothing is."""
        if self._book is None:
            raise ExecutionError(f"stage {self.stage} marks nothing.")
        if order.length > self._options.pages * self._options.page_tokens:
            raise ExecutionError(f"there is no text of {order.length} positions.")
        told = self._book.told(order.session, order.start, order.length)
        return {
            name: host_tensor("float32", marks.shape, marks.tobytes())
            for name, marks in zip(("got", "gave"), told, strict=True)
        }

    def shown(self, order: wire.ShowRows) -> Iterator[tuple[int, dict[str, HostTensor]]]:
        """(first position, rows as sent) of a text that is over, in parts of at most a pass. Raises `ExecutionError`
        for what is not retained (any more)."""
        if self._retained is None:
            raise ExecutionError(f"stage {self.stage} retains nothing.")
        for segments in packed([order.segment], self._options.pass_tokens):
            # A pass of the text may still be under way: its own table stays as it is.
            yield segments[0].start, self._retained.rows(segments, order.segment.pages)

    def referee(self, order: wire.ReadAgain) -> TextReferee:
        """For work of whoever runs the stage, where this one stands by. Raises `ExecutionError`."""
        if self.allocated:
            raise ExecutionError(f"stage {self.stage} runs here: it has no caches to spare.")
        return TextReferee(
            order,
            boundary=self._boundary,
            graph=self._graph,
            program=self._program,
            options=self._options,
            compute=self._compute,
        )


def keeps_positions(graph: Graph, options: ServeOptions) -> bool:
    """Whether a stage with this graph needs what came before in a text."""
    return options.whole or any(node.op == ATTENTION for node in graph.nodes)


def retained_bytes(boundary: ServingBoundary, identity: Identity) -> int:
    """The most that a stage will retain."""
    options = identity.options
    if not options.retain or identity.select or identity.last:
        return 0
    return Retained.capacity_bytes(boundary.sends, options.pages, options.page_tokens)


def _picked(order: _Order, spec: RowSpec) -> HostTensor:
    """A value that is passed along, less the rows that nobody wants."""
    tensor = order.tensors[spec.name]
    if order.rows is None:
        return tensor
    rows = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1], spec.row_bytes)[list(order.rows)]
    return HostTensor(spec.dtype, (1, len(order.rows), *spec.row), rows.reshape(-1).data)
