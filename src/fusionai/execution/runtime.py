"""One stage at work: its machine's commands become backend calls and messages.

Decides nothing: `coordination.stage` says what to do next, this module does it and reports back. It holds the tensors
that have arrived and not been used, and those retained for a neighbour's replay.

Neighbours: `execution.member` owns the runtimes of a job on this machine and moves their messages; `backends` compute.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np

from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.state import state_entries
from fusionai.coordination import stage as machine
from fusionai.coordination.stage import StageCommand, StageEvent, StageMachine, Work
from fusionai.execution.accumulate import total_gradient
from fusionai.execution.arrivals import Arrivals
from fusionai.execution.boundary import FEED, LOSS, Boundary, Port
from fusionai.execution.compute import ComputeThread, Timed
from fusionai.execution.state import chunks, headers
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import CommitRecord, Fence, Mode, Span, StageOptions

log = logging.getLogger(__name__)

ContextKey = tuple[Mode, int, int]
"""(mode, step, microbatch)."""


class Postman(Protocol):
    """How a runtime reaches others; `execution.member` implements it."""

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def to_driver(self, message: wire.Message) -> None: ...

    def failed(self, runtime: StageRuntime, code: wire.RefusalCode, reason: str) -> None: ...

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None: ...

    async def state(self, message: wire.StateChunk, tensors: Sequence[HostTensor]) -> None: ...

    async def linked(self, stages: Sequence[int]) -> None: ...


@dataclass(slots=True)
class Retained:
    """Boundary tensors sent in a step, kept by the sender until the line passes (recovery rule 10)."""

    activations: dict[tuple[int, int, int], dict[str, HostTensor]] = field(default_factory=dict)
    """(consumer, step, microbatch) -> values."""
    gradients: dict[tuple[int, int, int], dict[str, HostTensor]] = field(default_factory=dict)
    """(producer, step, microbatch) -> gradients."""

    def drop_below(self, line: int) -> None:
        for table in (self.activations, self.gradients):
            for key in [key for key in table if key[1] < line]:
                del table[key]


class StageRuntime:
    """See the module. All methods run on the event loop; only the backend's work runs in the compute thread."""

    def __init__(
        self,
        *,
        job: str,
        identity: tuple[str, bytes, StageOptions],
        graph: Graph,
        boundary: Boundary,
        options: StageOptions,
        program: StageProgram,
        compute: ComputeThread,
        postman: Postman,
        fingerprint: str,
        now_s: Callable[[], float],
        held_limit_bytes: int,
    ) -> None:
        self.job = job
        self.identity = identity
        """(graph hash, boundary as sent, options): what this runtime was loaded from."""
        self.boundary = boundary
        self.options = options
        self.program = program
        self.retained = Retained()
        self._compute = compute
        self._postman = postman
        self._fingerprint = fingerprint
        self._now_s = now_s
        self._check = Arrivals(graph, boundary)
        self._entries = frozenset(state_entries(graph, options.optimizer))
        self._held_limit_bytes = held_limit_bytes
        self._machine = StageMachine(
            boundary.shape(
                microbatches=options.microbatches, in_flight=options.in_flight, weight_lag=options.weight_lag
            )
        )
        self._held: defaultdict[ContextKey, dict[str, HostTensor]] = defaultdict(dict)
        self._gradients: defaultdict[tuple[int, int], dict[str, dict[int, HostTensor]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._shared: dict[tuple[int, Literal["partial", "total"]], list[tuple[str, HostTensor]]] = {}
        self._spans: list[Span] = []
        self._norms: dict[str, float] = {}
        self._imported: set[str] = set()
        self._import_progress = asyncio.Event()
        self._takes_state = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def stage(self) -> int:
        return self.boundary.stage

    @property
    def fence(self) -> Fence:
        if self._machine.fence is None:
            raise ExecutionError(f"stage {self.stage} of {self.job} is not attached to any plan.")
        return self._machine.fence

    # ---------------------------------------------------------------------------------------------- messages in

    def attach(self, fence: Fence) -> None:
        self._takes_state.clear()
        self._imported.clear()
        self._handle(machine.Attached(fence))

    def detach(self, reason: str) -> None:
        self._handle(machine.Detached(reason))

    async def close(self) -> None:
        """Wait for nothing any more. A piece of work in the compute thread ends there; its result is nobody's."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def dropped(self) -> int:
        """Tensors under the stage's own fence that belong to no work still to be done."""
        return self._machine.dropped

    def accepts(self, fence: Fence) -> bool:
        return self._machine.accepts(fence)

    def receive(self, message: wire.Message, tensors: Mapping[str, HostTensor]) -> None:
        """A message whose fence is this stage's own."""
        match message:
            case wire.Forward():
                self._check.forward(message, tensors)
                arrived = machine.ForwardArrived(message.mode, message.step, message.microbatch, message.producer)
                if self._machine.wants(arrived):
                    self._require_room(tensors)
                    self._held[message.mode, message.step, message.microbatch].update(tensors)
                self._handle(arrived)
            case wire.Backward():
                self._check.backward(message, tensors)
                returned = machine.BackwardArrived(message.step, message.microbatch, message.consumer)
                if self._machine.wants(returned):
                    table = self._gradients[message.step, message.microbatch]
                    for value, gradient in tensors.items():
                        table[value][message.consumer] = gradient
                self._handle(returned)
            case wire.SharedGradient():
                self._check.shared(message, tensors)
                part = machine.SharedArrived(message.step, message.sender, message.phase)
                if self._machine.wants(part):
                    self._shared[message.sender, message.phase] = list(tensors.items())
                self._handle(part)
            case wire.Commit():
                self._handle(machine.Committed(message.record, message.line, message.save))
            case wire.Resume():
                self._handle(machine.Resumed(message.committed, message.source, message.base, message.record))
                if message.source == "import" and self._machine.expects_state:
                    self._imported.clear()
                    self._takes_state.set()
            case wire.Export():
                self._handle(machine.ExportAsked(message.step))
            case _:
                raise ExecutionError(f"stage {self.stage} of {self.job} can't take a {type(message).__name__}.")

    async def receive_state(self, message: wire.StateChunk, tensors: Mapping[str, HostTensor]) -> None:
        """Part of a state to start from; the last chunk says of which step it is. The state may arrive before the
        resume that asks for it, on another connection: it waits, or it would be overwritten."""
        await self._takes_state.wait()
        entries = list(tensors.items())
        await self._compute.run(lambda: self.program.import_state(entries))
        self._imported.update(tensors)
        self._import_progress.set()
        if message.last and self._machine.expects_state:
            self._takes_state.clear()
            if missing := sorted(self._entries - self._imported):
                raise ExecutionError(
                    f"stage {self.stage} was given a state without {', '.join(missing[:3])} ({len(missing)} missing)."
                )
            self._handle(machine.StateArrived(message.step))

    def _require_room(self, tensors: Mapping[str, HostTensor]) -> None:
        """Credit bounds what well-behaved neighbours send; this bounds the others."""
        held_bytes = sum(tensor.nbytes for held in (tensors, *self._held.values()) for tensor in held.values())
        if held_bytes > self._held_limit_bytes:
            most = self._held_limit_bytes
            raise ExecutionError(f"stage {self.stage} would hold {held_bytes} bytes for later work, at most {most}.")

    # ------------------------------------------------------------------------------------------------ commands out

    def _handle(self, event: StageEvent) -> None:
        for command in self._machine.handle(event):
            self._perform(command)

    def _perform(self, command: StageCommand) -> None:
        post = self._postman.to_driver
        match command:
            case machine.Compute(work):
                self._start(partial(self._work, work))
            case machine.ReportStatus(applied, prepared):
                post(
                    wire.Status(
                        fence=self.fence,
                        stage=self.stage,
                        applied=applied,
                        prepared=prepared,
                        fingerprint=self._fingerprint,
                        clock_s=self._now_s(),
                    )
                )
            case machine.ReportReady(applied):
                self._start(partial(self._report_ready, applied))
            case machine.ReportPrepared(step):
                post(
                    wire.Prepared(
                        fence=self.fence,
                        stage=self.stage,
                        step=step,
                        norms=self._norms,
                        spans=tuple(self._spans),
                        peak_memory_bytes=self.program.resident_bytes,
                    )
                )
                self._spans = []
            case machine.ReportApplied(step):
                post(wire.Applied(fence=self.fence, stage=self.stage, step=step))
            case machine.DropSums():
                self.program.discard()
                self._gradients.clear()
                self._shared.clear()
            case machine.DropHeld(below):
                for key in [key for key in self._held if below is None or key[1] < below]:
                    del self._held[key]
            case machine.DropRetained(line):
                self.retained.drop_below(line)
            case machine.Refuse(reason):
                self._failed("bad_message", reason)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """The process boundary of a stage: whatever goes wrong must reach the driver as a report."""
        try:
            await work()
        except FusionError as error:
            self._failed("failed", str(error))
        except Exception as error:
            log.exception("stage %d of %s failed", self.stage, self.job)
            self._failed("failed", f"{type(error).__name__}: {error}")

    @property
    def linked_stages(self) -> tuple[int, ...]:
        """Stages this one exchanges tensors with."""
        return tuple(sorted(self.boundary.others))

    async def _report_ready(self, applied: int) -> None:
        await self._postman.linked(self.linked_stages)
        self._postman.to_driver(wire.Ready(fence=self.fence, stage=self.stage, applied=applied))

    # --------------------------------------------------------------------------------------------- pieces of work

    async def _work(self, work: Work) -> None:
        await self._do(work)
        self._handle(machine.WorkDone(work))

    async def _do(self, work: Work) -> None:
        call = Call(work.mode, work.step, work.microbatch)
        match work.kind:
            case "forward":
                await self._forward(call)
            case "backward":
                await self._backward(call)
            case "weights":
                _, timed = await self._compute.run(lambda: self.program.weight_gradients(call))
                self._span("weights", work.microbatch, timed)
            case "norms":
                await self._take_total()
                norms, timed = await self._compute.run(self.program.gradient_norms)
                foreign = {shared.key for shared in self.boundary.shared if shared.stages[0] != self.stage}
                self._norms = {key: norm for key, norm in norms.items() if key not in foreign}
                self._span("apply", 0, timed)
            case "apply":
                await self._apply(work.record)
            case "initialise":
                await self._initialise()
            case "export":
                await self._export(work.step)
            case "share":
                entries, _ = await self._compute.run(lambda: self.program.export_gradients(self._shared_keys))
                self._send_shared(self._home, work.step, "partial", entries)
            case "total":
                await self._sum_shared(work.step)

    async def _forward(self, call: Call) -> None:
        mode = call.mode
        inputs = self._held.pop((mode, call.step, call.microbatch))
        wanted = self.boundary.wanted(mode)
        values, timed = await self._compute.run(lambda: self.program.forward(call, inputs, wanted))
        self._span("forward", call.microbatch, timed)
        for port in self.boundary.sends:
            names = port.carried(mode)
            if not names:
                continue
            sent = {name: values[name] for name in names}
            self._postman.to_stage(port.other, self._forward_message(call, port, sent), tuple(sent.values()))
            if self.options.retain and mode == "train":
                self.retained.activations[port.other, call.step, call.microbatch] = sent
        outputs = {meaning: values[meaning] for meaning in self.boundary.job_outputs(mode)}
        if outputs:
            message = wire.Output(
                fence=self.fence,
                mode=mode,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                stage=self.stage,
                tensors=headers(outputs),
            )
            self._postman.output(message, tuple(outputs.values()))

    def _forward_message(self, call: Call, port: Port, sent: Mapping[str, HostTensor]) -> wire.Forward:
        return wire.Forward(
            fence=self.fence,
            mode=call.mode,
            step=call.step,
            replica=call.replica,
            microbatch=call.microbatch,
            producer=self.stage,
            consumer=port.other,
            tensors=headers(sent),
        )

    async def _backward(self, call: Call) -> None:
        arrived = self._gradients.pop((call.step, call.microbatch), {})
        microbatches = self.options.microbatches
        seeds_loss = LOSS in self.boundary.job_outputs("train")

        def work() -> dict[str, HostTensor]:
            gradients = {value: total_gradient(by_consumer) for value, by_consumer in arrived.items()}
            if seeds_loss:
                gradients[LOSS] = _loss_seed(microbatches)
            return self.program.backward(call, gradients)

        returned, timed = await self._compute.run(work)
        self._span("backward", call.microbatch, timed)
        for port in self.boundary.receives:
            if port.other == FEED or not port.needs_grad:
                continue
            # A value this microbatch's outputs did not depend on has no gradient; the message still has to arrive.
            sent = {value: returned[value] for value in port.needs_grad if value in returned}
            message = wire.Backward(
                fence=self.fence,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                consumer=self.stage,
                producer=port.other,
                tensors=headers(sent),
            )
            self._postman.to_stage(port.other, message, tuple(sent.values()))
            if self.options.retain:
                self.retained.gradients[port.other, call.step, call.microbatch] = sent

    async def _apply(self, record: CommitRecord | None) -> None:
        if record is None:
            raise ExecutionError(f"stage {self.stage} was told to apply a step without its commit record.")
        _, timed = await self._compute.run(
            lambda: self.program.apply(scale=record.scale, learning_rate=record.learning_rate)
        )
        self._span("apply", 0, timed)

    async def _initialise(self) -> None:
        missing, _ = await self._compute.run(self.program.initialise)
        if not missing:
            return
        self._takes_state.set()
        while not self._imported.issuperset(missing):
            self._import_progress.clear()
            await self._import_progress.wait()
        self._takes_state.clear()

    async def _export(self, step: int) -> None:
        entries = self.program.export_state(("model", "optimizer"))
        pending = chunks(entries)
        while True:
            chunk, _ = await self._compute.run(lambda: next(pending, None))
            named = dict(chunk or ())
            message = wire.StateChunk(
                fence=self.fence, stage=self.stage, step=step, last=chunk is None, tensors=headers(named)
            )
            await self._postman.state(message, tuple(named.values()))
            if chunk is None:
                return

    # --------------------------------------------------------------------------------------------- shared weights

    @property
    def _shared_keys(self) -> tuple[str, ...]:
        return tuple(sorted(shared.key for shared in self.boundary.shared))

    @property
    def _home(self) -> int:
        return self.boundary.shared[0].stages[0]

    def _send_shared(
        self, receiver: int, step: int, phase: Literal["partial", "total"], entries: Sequence[tuple[str, HostTensor]]
    ) -> None:
        named = dict(entries)
        message = wire.SharedGradient(
            fence=self.fence, step=step, sender=self.stage, receiver=receiver, phase=phase, tensors=headers(named)
        )
        self._postman.to_stage(receiver, message, tuple(named.values()))

    async def _sum_shared(self, step: int) -> None:
        """At home: own sums plus the others' in stage order, then the total to everybody."""
        others = sorted(sender for sender, phase in self._shared if phase == "partial")
        parts = [self._shared.pop((sender, "partial")) for sender in others]

        def work() -> list[tuple[str, HostTensor]]:
            for part in parts:
                self.program.import_gradients(part, add=True)
            return self.program.export_gradients(self._shared_keys)

        total, _ = await self._compute.run(work)
        for sender, part in zip(others, parts, strict=True):
            theirs = {key for key, _ in part}
            self._send_shared(sender, step, "total", [(key, tensor) for key, tensor in total if key in theirs])

    async def _take_total(self) -> None:
        """Away from home: the total replaces the own sums before norms are taken."""
        for key in [key for key in self._shared if key[1] == "total"]:
            entries = self._shared.pop(key)
            await self._compute.run(lambda entries=entries: self.program.import_gradients(entries, add=False))

    # ------------------------------------------------------------------------------------------------- reporting

    def _span(self, kind: Literal["forward", "backward", "weights", "apply"], microbatch: int, timed: Timed) -> None:
        self._spans.append(Span(kind, microbatch, timed.start_s, timed.end_s))

    def _failed(self, code: wire.RefusalCode, reason: str) -> None:
        self._postman.failed(self, code, reason)


def _loss_seed(microbatches: int) -> HostTensor:
    """d(mean over microbatches)/d(one microbatch's loss), rounded once to float32 as `(loss / M).backward()` does."""
    seed = np.float32(1) / np.float32(microbatches)
    return host_tensor("float32", (), seed.tobytes())
