"""Rechecks a range of another peer's steps: reruns them from a snapshot with the inputs that peer received.

The stage itself computes microbatches concurrently. Here they run one by one, in the order in which their gradients are
summed, which gives the same bits. The results are reported as sketches under the keys of all stages that saw them, with
the gradient norms and the distance of the resulting state from the next snapshot. The verdict is left to
`training.inspection`.

`execution.training.member` makes one verifier per check and passes on what arrives; `execution.training.work` does
the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TypeVar

import numpy as np

from fusionai.backends.interface import Call
from fusionai.backends.state import StateEntry, state_entries
from fusionai.backends.tolerance import numbers
from fusionai.execution.host import ComputeThread
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.tensors import chunks
from fusionai.execution.training.arrivals import Arrivals, WaitingTensors
from fusionai.execution.training.boundary import Sent
from fusionai.execution.training.codecs import joined, unpack_all
from fusionai.execution.training.stages import LoadedStage
from fusionai.execution.training.work import StagePass, sketch_at
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire

T = TypeVar("T")
Entries = Mapping[str, HostTensor]
Arrived = tuple[str, int, int, int]
"""(kind of message, step, microbatch, other stage)."""


class StepVerifier:
    """Reruns one stage's steps. Call `take` for what arrives and `run` once. The program's state is unusable
    afterwards."""

    def __init__(
        self, request: wire.Recheck, loaded: LoadedStage, compute: ComputeThread, memory: MemoryBudget
    ) -> None:
        """Raise `ExecutionError` for steps that can't be rerun."""
        boundary, options = loaded.boundary, request.options
        if not request.first < request.below or len(request.records) != request.below - request.first:
            raise ExecutionError(
                f"expected the records of steps {request.first} to {request.below - 1}, "
                f"got {len(request.records)} of them."
            )
        if options.sync_every:
            raise ExecutionError("steps that end in an exchange with other jobs can't be run again alone.")
        self._request = request
        self._program = loaded.program
        self._boundary = boundary
        self._compute = compute
        self._pass = StagePass(loaded.program, boundary, options)
        self._held = WaitingTensors(boundary.stage, Arrivals(loaded.graph, boundary, options.codecs), memory)
        self._entries: Mapping[str, StateEntry] = state_entries(loaded.graph, options.optimizer)
        self._shape = boundary.shape(microbatches=options.microbatches, in_flight=1)
        self._keys = {(one.stage, one.step): one.key for one in request.keys}
        self._arrived: set[Arrived] = set()
        self._happened = asyncio.Event()
        self._sketches: dict[tuple[int, int], list[wire.Sketch]] = {}
        """(stage, step) -> the sketches that this stage should have made."""
        self._norms: list[wire.StepNorms] = []
        self._failure = ""

    def take(self, message: Sent, tensors: Entries) -> None:
        """Take a message that a neighbour sent to the stage. Raises `ExecutionError` if it does not belong to the
        check."""
        if not self._request.first <= message.step < self._request.below:
            raise ExecutionError(f"expected nothing of step {message.step} in a check of stage {self._request.stage}.")
        carried = joined(tensors, () if isinstance(message, wire.SharedGradient) else message.packed)
        self._held.arrivals.check(message, carried)
        key = _arrival(message)
        if key in self._arrived or not self._held.keep(message, carried):
            return
        self._arrived.add(key)
        self._happened.set()

    def fail(self, reason: str) -> None:
        """End the check without an opinion, because something that arrived can't be used."""
        self._failure = reason
        self._happened.set()

    async def run(self, begin: Entries, end: Entries) -> wire.Rechecked:
        """Rerun from snapshot `begin` to the state expected in snapshot `end`. Raises what the backend raises."""
        request = self._request
        if begin.keys() != self._entries.keys():
            raise ExecutionError(f"the snapshot of step {request.first} does not fit stage {request.stage}.")
        begin_distance = 0.0
        if request.first == 0:
            begin_distance = await self._computed(lambda: self._from_rules(begin))
        for chunk in chunks(begin.items()):
            await self._computed(lambda chunk=chunk: self._program.import_state(chunk))
        for record in request.records:
            await self._step(record)
        state_distance = await self._computed(lambda: _apart(self._program.export_state(("model", "optimizer")), end))
        return wire.Rechecked(
            fence=request.fence,
            stage=request.stage,
            first=request.first,
            below=request.below,
            sketches=tuple(
                wire.SketchesOf(by, step, tuple(sketches)) for (by, step), sketches in sorted(self._sketches.items())
            ),
            norms=tuple(self._norms),
            state_distance=state_distance,
            begin_distance=begin_distance,
        )

    def _from_rules(self, begin: Entries) -> float:
        """Return how far the first snapshot's parameters are from the ones that follow from (seed, name)."""
        self._program.discard()
        missing = {*self._program.initialise()}
        made = [name for name, entry in self._entries.items() if not entry.slot and name not in missing]
        return _apart(self._program.export_entries(made), begin)

    async def _step(self, record: wire.CommitRecord) -> None:
        step = record.step
        for index in range(self._shape.microbatches):
            microbatch = self._shape.microbatch(index)
            await self._all_of(step, microbatch)
            await self._microbatch(Call("train", step, microbatch, self._boundary.replica))
        await self._until(self._shared_of(step))
        norms = await self._computed(lambda: self._summed(step))
        self._norms.append(wire.StepNorms(step, norms))
        await self._computed(lambda: self._program.apply(scale=record.scale, learning_rate=record.learning_rate))

    async def _microbatch(self, call: Call) -> None:
        inputs = self._held.take_inputs("train", call.step, call.microbatch)
        gradients = self._held.take_gradients(call.step, call.microbatch)
        own, key, passed = self._boundary.stage, self._keys.get((self._boundary.stage, call.step)), self._pass

        def work() -> None:
            unpacked = unpack_all(inputs)
            _, gave = passed.forward(call, unpacked)
            back = passed.backward(call, gradients)
            if self._request.options.weight_lag:
                self._program.weight_gradients(call)
            if key:
                self._sketches.setdefault((own, call.step), []).extend(
                    one
                    for by_stage, sent, forward in (
                        (passed.received(unpacked), False, True),
                        (passed.returned(gradients), False, False),
                        (gave, True, True),
                        (back, True, False),
                    )
                    for one in passed.sketches(call.microbatch, by_stage, key, sent=sent, forward=forward)
                )
            for forward, by_stage in ((True, gave), (False, back)):
                for other, carried in by_stage.items():
                    if their := self._keys.get((other, call.step)):
                        seen = sketch_at(other, own, call.microbatch, carried, their, sent=False, forward=forward)
                        self._sketches.setdefault((other, call.step), []).append(seen)

        await self._computed(work)

    def _summed(self, step: int) -> dict[str, float]:
        """Return the norms of the step's gradients, the shared ones as their home summed them."""
        for _, part in self._held.take_partials(step):
            self._program.import_gradients(part, add=True)
        for _, total in self._held.take_totals(step):
            self._program.import_gradients(total, add=False)
        foreign = {one.key for one in self._boundary.shared if one.stages[0] != self._boundary.stage}
        return {key: norm for key, norm in self._program.gradient_norms().items() if key not in foreign}

    # ------------------------------------------------------------------------------------------------------ waiting

    async def _all_of(self, step: int, microbatch: int) -> None:
        wanted: set[Arrived] = {
            ("forward", step, microbatch, port.other) for port in self._boundary.receives if port.values
        }
        wanted |= {("backward", step, microbatch, port.other) for port in self._boundary.returned}
        await self._until(wanted)

    def _shared_of(self, step: int) -> set[Arrived]:
        partials: set[Arrived] = {("partial", step, 0, other) for other in self._boundary.sums_of}
        return partials | {("total", step, 0, home) for home in self._boundary.summed_by}

    async def _until(self, wanted: Iterable[Arrived]) -> None:
        owed = {*wanted}
        while not owed <= self._arrived:
            if self._failure:
                raise ExecutionError(self._failure)
            self._happened.clear()
            await self._happened.wait()
        self._arrived -= owed

    async def _computed(self, work: Callable[[], T]) -> T:
        result, _ = await self._compute.run(work)
        return result


def _arrival(message: Sent) -> Arrived:
    match message:
        case wire.Forward():
            return ("forward", message.step, message.microbatch, message.producer)
        case wire.Backward():
            return ("backward", message.step, message.microbatch, message.consumer)
        case wire.SharedGradient():
            return (message.phase, message.step, 0, message.sender)


def _apart(found: Iterable[tuple[str, HostTensor]], expected: Entries) -> float:
    """Return the norm of the difference divided by the norm of `expected`, the largest of these ratios: over all
    parameters together, and over all optimizer slots of each kind.

    Single tensors are not compared, because a gradient may consist of rounding errors only. An optimizer that divides
    by the gradient's size turns those into arbitrary values.
    """
    squares: dict[str, list[float]] = {}
    for name, tensor in found:
        other = expected.get(name)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            return inf
        kind = "model" if name.startswith("model/") else name.rpartition("/")[2]
        apart, length = squares.setdefault(kind, [0.0, 0.0])
        one, two = numbers(tensor).astype(np.float64), numbers(other).astype(np.float64)
        squares[kind] = [apart + float(np.sum((one - two) ** 2)), length + float(np.sum(two**2))]
    worst = 0.0
    for apart, length in squares.values():
        if not np.isfinite(apart) or (apart and not length):
            return inf
        worst = max(worst, (apart / length) ** 0.5 if length else 0.0)
    return worst
