"""A text at one stage computed again: from what the stage got of it, in one go instead of token by token.

Whoever stands by for the stage has its weights, and nothing in its caches; the job owner's machine loads them for the
occasion. What comes out is told as marks, under the keys of all who saw it. Judges nothing.

Neighbours: `execution.serving_member` has one per check and brings the rows; the driver has one where it settles what
a guard took exception to; `execution.serving_marks` makes marks; `serving.checking` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from fusionai.backends.serving import ServingProgram
from fusionai.backends.tolerance import numbers
from fusionai.execution.compute import ComputeThread
from fusionai.execution.serving_boundary import ServingBoundary
from fusionai.execution.serving_marks import Marks, Projection
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Segment, ServeOptions


@dataclass(frozen=True, slots=True)
class Reading:
    """What a `ReadText` tells."""

    marks: Mapping[str, HostTensor]
    moved: float


class TextReferee:
    """`compute` the rows as they come, in order; it gives the marks with the last. The program's caches are free
    afterwards, or after `end`."""

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
        """Raises `ExecutionError` for a text that has no room here, or a stage whose rows nobody else gets."""
        pages = -(-order.length // options.page_tokens)
        if pages > options.pages:
            raise ExecutionError(f"a text of {order.length} positions takes {pages} pages, there are {options.pages}.")
        if not boundary.sends:
            raise ExecutionError(f"stage {order.stage} sends nothing on that could be compared.")
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
        self._parts: list[tuple[Marks, Marks, Marks]] = []
        self._stream = _stream(boundary, self._made)
        self._squares = [0.0, 0.0]
        """Of what the stage adds to rows, and of what it gives."""

    async def compute(self, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]) -> Reading | None:
        """The next rows; the marks of all of them once the last are there. Raises `ExecutionError` for rows that are
        none of this text's, and what the program raises."""
        length = self._checked(rows, tensors)
        start, self._taken = self._taken, self._taken + length
        ends = self._taken == self.order.length
        parts, _ = await self._compute.run(lambda: self._computed(start, length, tensors))
        self._parts.append(parts)
        if not ends:
            return None
        await self.end()
        whole = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        marks = {
            name: host_tensor("float32", part.shape, part.tobytes())
            for name, part in zip(("got", "gave", "seen"), whole, strict=True)
        }
        added, given = self._squares
        moved = min(1.0, (added / given) ** 0.5) if 0 < given < inf and added < inf else 1.0
        return Reading(marks, moved)

    async def end(self) -> None:
        """Nothing more is computed of it."""
        await self._compute.run(lambda: self._program.forget((self.order.session,)))

    def _checked(self, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]) -> int:
        if rows.start != self._taken:
            raise ExecutionError(f"expected rows from position {self._taken} on, got those from {rows.start}.")
        if {*tensors} != {spec.name for spec in self._boundary.receives}:
            raise ExecutionError(f"rows of {sorted(tensors)[:5]} came, which is not what stage {rows.stage + 1} gets.")
        shape = next(iter(tensors.values())).shape
        length = shape[1] if len(shape) > 1 else 0
        if not 0 < length <= min(self._options.pass_tokens, self.order.length - self._taken):
            raise ExecutionError(f"expected rows of a text of {self.order.length} positions, {length} more came.")
        for spec in self._boundary.receives:
            if (wrong := spec.check(tensors[spec.name], length)) is not None:
                raise ExecutionError(f"{wrong}.")
        return length

    def _computed(self, start: int, length: int, tensors: Mapping[str, HostTensor]) -> tuple[Marks, Marks, Marks]:
        """In the compute thread."""
        order = self.order
        self._program.allocate()
        segment = Segment(
            order.session, start, length, len(self._pages) if start else 0, () if start else self._pages, order.adapter
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
        return self._got.marks(tensors), self._gave.marks(sent), self._seen.marks(sent)


def _stream(boundary: ServingBoundary, made: tuple[str, ...]) -> tuple[str, str] | None:
    """The value that the stage gets and the one that it makes of it by adding to it, by their rows; None without."""
    widest = sorted((spec for spec in boundary.sends if spec.name in made), key=lambda spec: -spec.row_bytes)
    for gives in widest:
        for gets in boundary.receives:
            if gets.row == gives.row and gives.row and {gets.dtype, gives.dtype} <= FLOAT_DTYPES:
                return gets.name, gives.name
    return None
