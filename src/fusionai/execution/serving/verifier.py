"""Rechecks one text at one stage: recomputes it from the rows the stage received, in large passes instead of token by
token.

A standby of the stage has its weights and empty caches; the job owner's machine loads the weights when it checks. The
results are reported as sketches, under the keys of all stages that saw them. The verdict is left to `serving.checking`.

`execution.serving.member` makes one verifier per check and passes on the rows. The driver makes one to settle an
objection of a standby. `execution.serving.sketches` makes the sketches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from fusionai.backends.serving.base import ServingProgram
from fusionai.backends.tolerance import numbers
from fusionai.coordination.serving.together import between
from fusionai.execution.host import ComputeThread
from fusionai.execution.serving.boundary import ServingBoundary
from fusionai.execution.serving.sketches import Projection, Sketches
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Segment, ServeOptions


@dataclass(frozen=True, slots=True)
class RecheckResult:
    """Result of a recheck, as sent in `ReadText`. `sketches`: by `got`, `gave`, `seen`. `moved`: norm of what the stage
    added to the rows, relative to the norm of what it sent (0 to 1)."""

    sketches: Mapping[str, HostTensor]
    moved: float


class TextVerifier:
    """Recomputes one text. Call `compute` with the rows in order; the last call returns the sketches. The program's
    caches are free afterwards, or after `end`."""

    def __init__(
        self,
        order: wire.ReadAgain,
        *,
        boundary: ServingBoundary,
        graph: Graph,
        program: ServingProgram,
        options: ServeOptions,
        compute: ComputeThread,
    ) -> None:
        """Raise `ExecutionError` for a text that does not fit in the caches, or a stage that sends no rows on."""
        pages = -(-order.length // options.page_tokens)
        if pages > options.pages:
            raise ExecutionError(
                f"a text of {order.length} positions needs {pages} pages, but the cache has {options.pages}."
            )
        if not boundary.sends:
            raise ExecutionError(f"stage {order.stage} sends no values to a next stage that could be compared.")
        self.order = order
        self._boundary = boundary
        self._program = program
        self._options = options
        self._compute = compute
        self._inputs = frozenset(graph.inputs) - FROM_SEGMENTS
        self._made = boundary.made(graph)
        self._pages = tuple(range(pages))
        self._taken = 0
        self._got = Projection(boundary.receives, order.keys[0])
        self._gave = Projection(boundary.sends, order.keys[0])
        self._seen = Projection(boundary.sends, order.keys[1])
        self._parts: list[tuple[Sketches, Sketches, Sketches]] = []
        self._stream = _stream(boundary, self._made)
        self._squares = [0.0, 0.0]
        """Sums of squares: of what the stage adds to rows, and of what it sends."""

    @property
    def nbytes(self) -> int:
        """Bytes of its projections and of the sketches made so far."""
        made_bytes = sum(part.nbytes for parts in self._parts for part in parts)
        return self._got.nbytes + self._gave.nbytes + self._seen.nbytes + made_bytes

    async def compute(self, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]) -> RecheckResult | None:
        """Compute the next rows and return the result after the last ones, None before. Raises `ExecutionError` for
        rows that don't belong to this text, and what the program raises."""
        length = self._checked(rows, tensors)
        start, self._taken = self._taken, self._taken + length
        ends = self._taken == self.order.length
        parts, _ = await self._compute.run(lambda: self._computed(start, length, tensors))
        self._parts.append(parts)
        if not ends:
            return None
        await self.end()
        whole = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        sketches = {
            name: host_tensor("float32", part.shape, part.tobytes())
            for name, part in zip(("got", "gave", "seen"), whole, strict=True)
        }
        added, given = self._squares
        moved = min(1.0, (added / given) ** 0.5) if 0 < given < inf and added < inf else 1.0
        return RecheckResult(sketches, moved)

    async def end(self) -> None:
        """Free the caches. No further rows can be computed."""
        await self._compute.run(lambda: self._program.forget((self.order.session,)))

    def _checked(self, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]) -> int:
        if rows.start != self._taken:
            raise ExecutionError(f"expected rows from position {self._taken}, got rows from position {rows.start}.")
        if {*tensors} != {spec.name for spec in self._boundary.receives}:
            raise ExecutionError(
                f"got rows of {sorted(tensors)[:5]}, which are not the inputs of stage {rows.stage + 1}."
            )
        shape = next(iter(tensors.values())).shape
        length = shape[1] if len(shape) > 1 else 0
        if not 0 < length <= min(self._options.pass_tokens, self.order.length - self._taken):
            raise ExecutionError(
                f"expected rows of a text of {self.order.length} positions, got {length} rows beyond its end or a pass."
            )
        for spec in self._boundary.receives:
            if (wrong := spec.check(tensors[spec.name], length)) is not None:
                raise ExecutionError(f"{wrong}.")
        return length

    def _computed(
        self, start: int, length: int, tensors: Mapping[str, HostTensor]
    ) -> tuple[Sketches, Sketches, Sketches]:
        """Compute one part, in the compute thread. Returns its sketches (got, gave, seen)."""
        order = self.order
        self._program.allocate()
        segment = Segment(
            order.session,
            start,
            length,
            len(self._pages) if start else 0,
            () if start else self._pages,
            order.adapter,
            together=between(order.together, start, start + length),
        )
        inputs = {name: tensors[name] for name in self._inputs}
        made = self._program.run((segment,), inputs, wanted=self._made) if self._made else {}
        gone = [spec.name for spec in self._boundary.sends]
        sent = {name: made[name] if name in made else tensors[name] for name in gone}
        if self._stream is not None:
            came, gave = (numbers(one).astype(np.float64) for one in (tensors[self._stream[0]], sent[self._stream[1]]))
            with np.errstate(invalid="ignore", over="ignore"):
                self._squares[0] += float(np.sum((gave - came) ** 2))
                self._squares[1] += float(np.sum(gave**2))
        return self._got.sketches(tensors), self._gave.sketches(sent), self._seen.sketches(sent)


def _stream(boundary: ServingBoundary, made: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the names (received, sent) of the residual stream, the value the stage receives and adds to; None without
    one. It is recognised by equal rows."""
    widest = sorted((spec for spec in boundary.sends if spec.name in made), key=lambda spec: -spec.row_bytes)
    for gives in widest:
        for gets in boundary.receives:
            if gets.row == gives.row and gives.row and {gets.dtype, gives.dtype} <= FLOAT_DTYPES:
                return gets.name, gives.name
    return None
