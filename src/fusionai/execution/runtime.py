"""One stage at work: its machine's commands become backend calls and messages.

Decides nothing: `coordination.stage` says what to do next, this module does it and reports back. A piece of work that
fails is told to the machine and to the driver; a link that fails is neither: the driver begins a new round for it.

Neighbours: `execution.member` owns the runtimes of a job on this machine and moves their messages; `execution.held` has
what arrived, `execution.retained` what was sent, `execution.copies` snapshots on their way; `backends` compute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from fusionai.execution.copies import Chunk, Copies
from fusionai.execution.held import Held
from fusionai.execution.retained import Retained, Sent
from fusionai.execution.state import chunks, headers
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import CommitRecord, Fence, Span, StageOptions

log = logging.getLogger(__name__)

Identity = tuple[str, bytes, StageOptions]
"""(graph hash, boundary as sent, options): what a runtime was loaded from."""


class Postman(Protocol):
    """How a runtime reaches others; `execution.member` implements it. None of these raises for a lost link."""

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def to_driver(self, message: wire.Message) -> None: ...

    def failed(self, runtime: StageRuntime, code: wire.RefusalCode, reason: str) -> None: ...

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None: ...

    async def state(self, message: wire.StateChunk, tensors: Sequence[HostTensor]) -> None:
        """Raises `TransportError`."""
        ...

    async def linked(self, stages: Sequence[int]) -> bool:
        """Whether the links to these stages and to the driver are up; if not, the driver has been told."""
        ...

    async def to_guard(
        self, guard: PeerId, addresses: Sequence[str], message: wire.Snapshot, tensors: Sequence[HostTensor]
    ) -> None:
        """Raises `TransportError`, `RefusedError`, `TrustError`."""
        ...

    def unguarded(self, guard: PeerId, reason: str) -> None:
        """Snapshots do not reach the guard, again and again."""
        ...

    async def snapshot(self, stage: int, step: int) -> Mapping[str, HostTensor]:
        """The entries of a snapshot, once it is whole here. The caller must not change them."""
        ...


class StageRuntime:
    """See the module. All methods run on the event loop; only the backend's work runs in the compute thread."""

    def __init__(
        self,
        *,
        job: str,
        identity: Identity,
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
        self.boundary = boundary
        self.options = options
        self.program = program
        self.retained = Retained()
        self.held = Held(boundary.stage, Arrivals(graph, boundary), held_limit_bytes)
        self.resident_bytes = program.resident_bytes
        """As of the last piece of work: the program itself must not be asked beside one."""
        self._compute = compute
        self._postman = postman
        self._fingerprint = fingerprint
        self._now_s = now_s
        self._entries = frozenset(state_entries(graph, options.optimizer))
        self._machine = StageMachine(
            boundary.shape(
                microbatches=options.microbatches, in_flight=options.in_flight, weight_lag=options.weight_lag
            )
        )
        self._copies = Copies(boundary.stage, program, compute, self._send_copy, self._guard_lost)
        self._guard: tuple[PeerId, tuple[str, ...]] | None = None
        self._spans: list[Span] = []
        self._norms: dict[str, float] = {}
        self._awaited: frozenset[str] = frozenset()
        """Entries the driver still has to send."""
        self._happened = asyncio.Event()
        """Set, and replaced, whenever the machine took an event."""
        self._superseded = asyncio.Event()
        """A later attach waits for the work under way; nobody reads what it exports."""
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def stage(self) -> int:
        return self.boundary.stage

    @property
    def fence(self) -> Fence:
        if self._machine.fence is None:
            raise ExecutionError(f"stage {self.stage} of {self.job} is not attached to any plan.")
        return self._machine.fence

    # ---------------------------------------------------------------------------------------------- messages in

    def attach(self, attach: wire.Attach) -> None:
        """Obey a later fence, as soon as the piece of work under way has ended."""
        if self._machine.fence is not None and attach.fence > self._machine.fence:
            self._superseded.set()
        self._guard = (PeerId(attach.guard), attach.guard_addresses) if attach.guard else None
        self._handle(machine.Attached(attach.fence, attach.retain, attach.snapshot_every))

    def detach(self, reason: str) -> None:
        self._handle(machine.Detached(reason))

    async def close(self) -> None:
        """Wait for nothing any more. A piece of work in the compute thread ends there; its result is nobody's."""
        self._closed = True
        self._happened.set()
        await self._copies.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def dropped(self) -> int:
        """Tensors under the stage's own fence that belong to no work still to be done."""
        return self._machine.dropped

    def accepts(self, fence: Fence) -> bool:
        return not self._closed and self._machine.accepts(fence)

    def receive(self, message: wire.Message, tensors: Mapping[str, HostTensor]) -> None:
        """A message whose fence is this stage's own."""
        match message:
            case wire.Forward():
                event = machine.ForwardArrived(message.mode, message.step, message.microbatch, message.producer)
                self._arrived(message, tensors, event)
            case wire.Backward():
                self._arrived(
                    message, tensors, machine.BackwardArrived(message.step, message.microbatch, message.consumer)
                )
            case wire.SharedGradient():
                self._arrived(message, tensors, machine.SharedArrived(message.step, message.sender, message.phase))
            case wire.Commit():
                self._handle(machine.Committed(message.record, message.line, message.save))
            case wire.Resume():
                # What an import has to bring; after `initialise` the program says what is missing.
                self._awaited = self._entries if message.source == "import" else frozenset()
                self._handle(
                    machine.Resumed(
                        message.committed,
                        message.source,
                        message.base,
                        message.records,
                        frozenset(message.replaying),
                        message.snapshot,
                    )
                )
            case wire.Export():
                self._handle(machine.ExportAsked(message.step))
            case _:
                raise ExecutionError(f"stage {self.stage} of {self.job} can't take a {type(message).__name__}.")

    def _arrived(
        self,
        message: Sent,
        tensors: Mapping[str, HostTensor],
        event: machine.ForwardArrived | machine.BackwardArrived | machine.SharedArrived,
    ) -> None:
        self.held.check(message, tensors)
        if self._machine.wants(event):
            self.held.keep(message, tensors)
        self._handle(event)

    async def receive_state(self, message: wire.StateChunk, tensors: Mapping[str, HostTensor]) -> None:
        """Part of a state to start from; the last chunk says of which step it is. It may arrive before the resume that
        asks for it, on another connection: then it waits (or it would be overwritten), but not beyond its fence."""
        while self.accepts(message.fence) and not self._machine.expects_state:
            await self._happened.wait()
        if not self.accepts(message.fence):
            return
        if foreign := (tensors.keys() & self._entries) - self._awaited:
            raise ExecutionError(f"stage {self.stage} was given {min(foreign)}, which it does not await.")
        entries = list(tensors.items())
        await self._import(entries)
        if not self.accepts(message.fence) or not self._machine.expects_state:
            return
        self._awaited -= tensors.keys()
        if message.last:
            if missing := sorted(self._awaited):
                raise ExecutionError(
                    f"stage {self.stage} was given a state without {', '.join(missing[:3])} ({len(missing)} missing)."
                )
            self._handle(machine.StateArrived(message.step))

    async def _import(self, entries: Chunk) -> None:
        def work() -> None:
            self.program.import_state(entries)
            self.resident_bytes = self.program.resident_bytes

        await self._compute.run(work)

    # ------------------------------------------------------------------------------------------------ commands out

    def _handle(self, event: StageEvent) -> None:
        before = self._machine.fence
        commands = self._machine.handle(event)
        if self._machine.fence != before:
            self._superseded.clear()
            self._copies.abandon()
            self._awaited = frozenset()
        for command in commands:
            self._perform(command)
        self._happened.set()
        self._happened = asyncio.Event()

    def _perform(self, command: StageCommand) -> None:
        post = self._postman.to_driver
        match command:
            case machine.Compute(work):
                self._start(partial(self._work, work))
            case machine.ReportStatus(applied, prepared, retained_from):
                post(
                    wire.Status(
                        fence=self.fence,
                        stage=self.stage,
                        applied=applied,
                        prepared=prepared,
                        retained_from=retained_from,
                        fingerprint=self._fingerprint,
                        clock_s=self._now_s(),
                    )
                )
            case machine.ReportReady(applied):
                self._start(partial(self._report_ready, self.fence, applied))
            case machine.ReportPrepared(step):
                post(
                    wire.Prepared(
                        fence=self.fence,
                        stage=self.stage,
                        step=step,
                        norms=self._norms,
                        spans=tuple(self._spans),
                        peak_memory_bytes=self.resident_bytes,
                    )
                )
                self._spans = []
            case machine.ReportApplied(step):
                post(wire.Applied(fence=self.fence, stage=self.stage, step=step))
            case machine.DropSums():
                dropped = self._compute.run(self.program.discard)
                self._start(partial(_finish, dropped))
            case machine.DropHeld(below):
                self.held.drop(below)
            case machine.DropRetained(line):
                self.retained.drop_below(line)
            case machine.SendRetained(to, first, below):
                self._start(partial(self._send_retained, self.fence, to, first, below))
            case machine.LoadSnapshot(step):
                self._start(partial(self._load_snapshot, self.fence, step))
            case machine.TakeSnapshot(step):
                self._copies.begin(step)
            case machine.Refuse(reason):
                self._failed("bad_message", reason)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it has it; of a message left alone nobody asks

    async def _reported(self, work: Callable[[], Awaitable[None]]) -> bool:
        """The process boundary of a stage: whatever goes wrong must reach the driver as a report."""
        try:
            await work()
        except FusionError as error:
            self._failed("failed", str(error))
        except Exception as error:
            log.exception("stage %d of %s failed", self.stage, self.job)
            self._failed("failed", f"{type(error).__name__}: {error}")
        else:
            return True
        return False

    @property
    def linked_stages(self) -> tuple[int, ...]:
        """Stages this one exchanges tensors with."""
        return tuple(sorted(self.boundary.others))

    async def _report_ready(self, fence: Fence, applied: int) -> None:
        if await self._postman.linked(self.linked_stages) and self.accepts(fence):
            self._postman.to_driver(wire.Ready(fence=fence, stage=self.stage, applied=applied))

    # ------------------------------------------------------------------------------------- recovery of others and self

    async def _send_retained(self, fence: Fence, to: frozenset[int], first: int, below: int) -> None:
        """All at once: these tensors are in memory anyway, and receivers order them by step."""
        if await self._postman.linked(sorted(to)) and self.accepts(fence):
            for receiver, message, tensors in self.retained.again(fence, to, first, below):
                self._postman.to_stage(receiver, message, tensors)

    async def _load_snapshot(self, fence: Fence, step: int) -> None:
        entries = await self._postman.snapshot(self.stage, step)
        if not self.accepts(fence):
            return
        if entries.keys() != self._entries:
            odd = sorted(entries.keys() ^ self._entries)
            raise ExecutionError(f"the snapshot of step {step} does not fit stage {self.stage}: {', '.join(odd[:3])}.")
        for chunk in chunks(entries.items()):
            await self._import(chunk)
            if not self.accepts(fence):
                return
        self._handle(machine.StateArrived(step))

    async def _send_copy(self, step: int, part: int, chunk: Chunk | None) -> None:
        if self._guard is None:
            raise ExecutionError(f"stage {self.stage} has no guard.")
        named = dict(chunk or ())
        message = wire.Snapshot(
            fence=self.fence,
            stage=self.stage,
            step=step,
            part=part,
            line=self._machine.line,
            last=chunk is None,
            tensors=headers(named),
        )
        await self._postman.to_guard(*self._guard, message, tuple(named.values()))

    def _guard_lost(self, reason: str) -> None:
        if self._guard is not None:
            self._postman.unguarded(self._guard[0], reason)

    # --------------------------------------------------------------------------------------------- pieces of work

    async def _work(self, work: Work) -> None:
        missing: list[bool] = []

        async def do() -> None:
            missing.append(await self._do(work))

        if await self._reported(do):
            self._handle(machine.WorkDone(work, missing=missing[0]))
        else:
            self._handle(machine.WorkFailed(work))

    async def _do(self, work: Work) -> bool:
        """True if entries are missing after `initialise`."""
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
                await self._norms_of(work.step)
            case "apply":
                await self._apply(work.record)
            case "initialise":
                return await self._initialise()
            case "export":
                await self._export(work.step)
            case "share":
                entries, _ = await self._compute.run(lambda: self.program.export_gradients(self._shared_keys))
                self._send_shared(self._home, work.step, "partial", entries)
            case "total":
                await self._sum_shared(work.step)
        return False

    def _send(self, receiver: int, message: Sent, tensors: Sequence[HostTensor]) -> None:
        """To a neighbour, if it goes there now; a replay may need it in any case."""
        if self._machine.retain and not (isinstance(message, wire.Forward) and message.mode != "train"):
            self.retained.keep(message, tensors)
        if self._machine.sends_to(receiver, message.step):
            self._postman.to_stage(receiver, message, tensors)

    async def _forward(self, call: Call) -> None:
        mode = call.mode
        inputs = self.held.take_inputs(mode, call.step, call.microbatch)
        wanted = self.boundary.wanted(mode)
        values, timed = await self._compute.run(lambda: self.program.forward(call, inputs, wanted))
        self._span("forward", call.microbatch, timed)
        for port in self.boundary.sends:
            if names := port.carried(mode):
                sent = {name: values[name] for name in names}
                self._send(port.other, self._forward_message(call, port, sent), tuple(sent.values()))
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
        arrived = self.held.take_gradients(call.step, call.microbatch)
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
            self._send(port.other, message, tuple(sent.values()))

    async def _norms_of(self, step: int) -> None:
        total = self.held.take_total(step)  # away from home: it replaces the own sums

        def work() -> dict[str, float]:
            if total:
                self.program.import_gradients(total, add=False)
            self.resident_bytes = self.program.resident_bytes
            return self.program.gradient_norms()

        norms, timed = await self._compute.run(work)
        foreign = {shared.key for shared in self.boundary.shared if shared.stages[0] != self.stage}
        self._norms = {key: norm for key, norm in norms.items() if key not in foreign}
        self._span("apply", 0, timed)

    async def _apply(self, record: CommitRecord | None) -> None:
        if record is None:
            raise ExecutionError(f"stage {self.stage} was told to apply a step without its commit record.")

        def work() -> None:
            self._copies.complete()
            self.program.apply(scale=record.scale, learning_rate=record.learning_rate)

        _, timed = await self._compute.run(work)
        self._span("apply", 0, timed)

    async def _initialise(self) -> bool:
        """True if the driver has to send what has no rule."""

        def work() -> tuple[str, ...]:
            missing = self.program.initialise()
            self.resident_bytes = self.program.resident_bytes
            return missing

        missing, _ = await self._compute.run(work)
        self._awaited = frozenset(missing)
        return bool(missing)

    async def _export(self, step: int) -> None:
        """Ends early when a later attach waits: nobody would read the rest, and a full connection blocks."""
        pending = chunks(self.program.export_state(("model", "optimizer")))
        superseded = asyncio.create_task(self._superseded.wait())
        try:
            while not self._superseded.is_set():
                chunk, _ = await self._compute.run(lambda: next(pending, None))
                named = dict(chunk or ())
                message = wire.StateChunk(
                    fence=self.fence, stage=self.stage, step=step, last=chunk is None, tensors=headers(named)
                )
                # Half a message must not be left on the connection: what was begun goes on alone.
                sending = asyncio.create_task(self._postman.state(message, tuple(named.values())))
                self._tasks.add(sending)
                sending.add_done_callback(self._ended)
                await asyncio.wait({sending, superseded}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                if chunk is None:
                    return
        finally:
            superseded.cancel()

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
        self._send(receiver, message, tuple(named.values()))

    async def _sum_shared(self, step: int) -> None:
        """At home: own sums plus the others' in stage order, then the total to everybody."""
        parts = self.held.take_partials(step)

        def work() -> list[tuple[str, HostTensor]]:
            for _, part in parts:
                self.program.import_gradients(part, add=True)
            return self.program.export_gradients(self._shared_keys)

        total, _ = await self._compute.run(work)
        for sender, part in parts:
            theirs = {key for key, _ in part}
            self._send_shared(sender, step, "total", [(key, tensor) for key, tensor in total if key in theirs])

    # ------------------------------------------------------------------------------------------------- reporting

    def _span(self, kind: Literal["forward", "backward", "weights", "apply"], microbatch: int, timed: Timed) -> None:
        self._spans.append(Span(kind, microbatch, timed.start_s, timed.end_s))

    def _failed(self, code: wire.RefusalCode, reason: str) -> None:
        self._postman.failed(self, code, reason)


async def _finish(work: Awaitable[object]) -> None:
    await work


def _loss_seed(microbatches: int) -> HostTensor:
    """d(mean over microbatches)/d(one microbatch's loss), rounded once to float32 as `(loss / M).backward()` does."""
    seed = np.float32(1) / np.float32(microbatches)
    return host_tensor("float32", (), seed.tobytes())
