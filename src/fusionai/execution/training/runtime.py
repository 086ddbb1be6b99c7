"""Runs one stage: passes events to its stage machine and performs the machine's commands.

`coordination.training.stage` decides what to do next. A failed piece of work is reported to the machine and to the
driver. A lost link is not a failure of the stage; the driver begins a new round for it.

`execution.training.member` owns the runtimes of a job on this machine and moves their messages
(`Postman`). `execution.training.work` does the pieces of work, `arrivals` holds what arrived, `retained` what was sent,
`copies` sends snapshots."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fusionai.backends.interface import StageProgram
from fusionai.backends.state import saved_entries, state_entries
from fusionai.coordination.training import stage_interface as machine
from fusionai.coordination.training.exchanges import NO_EXCHANGES, exchanges_of
from fusionai.coordination.training.stage import StageMachine
from fusionai.coordination.training.stage_interface import StageCommand, StageEvent, StageWork
from fusionai.execution.host import Host
from fusionai.execution.member import refusal_of
from fusionai.execution.tensors import chunks
from fusionai.execution.training.arrivals import Arrivals, WaitingTensors
from fusionai.execution.training.boundary import Boundary, RetainedMessages, Sent
from fusionai.execution.training.codecs import joined
from fusionai.execution.training.snapshots import Chunk, Entries, SnapshotCopier, StateCopy
from fusionai.execution.training.twins import Twins
from fusionai.execution.training.work import StageExecutor
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, StageOptions

if TYPE_CHECKING:
    from fusionai.execution.training.member import JobMember

log = logging.getLogger(__name__)

Identity = tuple[str, bytes, StageOptions]
"""(graph hash, boundary as sent, options): identifies what a runtime was loaded from."""


class StageRuntime:
    """Runs one stage. All methods run on the event loop; only the backend's work runs in the compute thread."""

    def __init__(
        self,
        *,
        job: str,
        identity: Identity,
        graph: Graph,
        boundary: Boundary,
        options: StageOptions,
        program: StageProgram,
        host: Host,
        member: JobMember,
    ) -> None:
        self.job = job
        self.identity = identity
        self.boundary = boundary
        self.options = options
        self.program = program
        self.retained = RetainedMessages(host.memory)
        self.held = WaitingTensors(boundary.stage, Arrivals(graph, boundary, options.codecs), host.memory)
        self._host = host
        self.member = member
        self._entries = frozenset(state_entries(graph, options.optimizer))
        self._trainable = {spec.key: spec.shape for spec in graph.params.values() if spec.trainable}
        """Key -> shape of trainable parameters."""
        self._machine = StageMachine(
            boundary.shape(
                microbatches=options.microbatches,
                in_flight=options.in_flight,
                weight_lag=options.weight_lag,
                exchanges=exchanges_of(options) if self._trainable else NO_EXCHANGES,
            )
        )
        self._copies = SnapshotCopier(
            boundary.stage, program, _entries(graph, options), host.compute, self._send_copy, self._standby_lost
        )
        self._standby: tuple[PeerId, bytes] | None = None
        """The standby and the broker's ticket for it."""
        self._bench = StageExecutor(
            self,
            compute=host.compute,
            copies=self._copies,
            trainable=sorted(self._trainable),
            saved=tuple(saved_entries(graph, options)),
        )
        self.twins = Twins(self, host, self._trainable)
        self._awaited: frozenset[str] = frozenset()
        """Entries that the driver still has to send."""
        self._happened = asyncio.Event()
        """Set and replaced whenever the machine has handled an event."""
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
        """Adopt a later fence as soon as the current piece of work has ended."""
        if self._machine.fence is not None and attach.fence > self._machine.fence:
            self._bench.superseded.set()
        self._standby = (PeerId(attach.standby), attach.standby_ticket) if attach.standby else None
        self._bench.secret = attach.secret
        self._handle(machine.Attached(attach.fence, attach.retain, attach.snapshot_every))

    def set_aside(self) -> None:
        """Stop taking part, because the stage now runs elsewhere. It stays loaded until it is attached again."""
        self._standby = None
        self._copies.abandon()

    def detach(self, reason: str) -> None:
        self._handle(machine.Detached(reason))

    async def close(self) -> None:
        """End all tasks. Work in the compute thread still finishes; its result is discarded."""
        self._closed = True
        self._happened.set()
        await self._copies.close()
        await self._bench.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Both refer to this runtime: the reference cycle would keep the stage's whole state until garbage collection.
        del self._bench, self._copies

    def accepts(self, fence: Fence) -> bool:
        return not self._closed and self._machine.accepts(fence)

    def receive(self, message: wire.Message, tensors: Mapping[str, HostTensor]) -> None:
        """Handle a message whose fence is this stage's own."""
        match message:
            case wire.Forward() | wire.Backward() | wire.SharedGradient():
                event = _event_of(message)
                packed = () if isinstance(message, wire.SharedGradient) else message.packed
                carried = joined(tensors, packed) if packed else tensors
                self.held.arrivals.check(message, carried)
                if self._machine.wants(event) and not self.held.keep(message, carried):
                    return  # more parts follow
                self._handle(event)
            case wire.Commit():
                self._handle(machine.Committed(message.record, message.watermark, message.save))
            case wire.Resume():
                # Entries that an import must bring. `_work` says which are missing after `initialise`.
                self._awaited = self._entries if message.source == "import" else frozenset()
                self._handle(
                    machine.Resumed(
                        message.committed,
                        message.source,
                        message.base,
                        message.records,
                        frozenset(message.replaying),
                        message.snapshot,
                        message.watermark,
                    )
                )
            case wire.Export():
                self._handle(machine.ExportAsked(message.step))
            case wire.ExchangeRound():
                self.twins.order(message)
            case wire.ExchangeAdopt():
                self.twins.commit(message)
            case wire.ExchangePart():
                self.twins.take(message, tensors)
            case _:
                raise ExecutionError(f"stage {self.stage} of {self.job} can't take a {type(message).__name__}.")

    async def receive_state(self, message: wire.StateChunk, tensors: Mapping[str, HostTensor]) -> None:
        """Take part of a state to start from; the last chunk names its step. It may arrive on another connection before
        the resume that asks for it. Then it waits, because initialisation would overwrite it, but not longer than its
        fence is valid."""
        while self.accepts(message.fence) and not self._machine.expects_state:
            await self._happened.wait()
        if not self.accepts(message.fence):
            return
        if foreign := (tensors.keys() & self._entries) - self._awaited:
            raise ExecutionError(f"stage {self.stage} received state entry {min(foreign)}, which it does not need.")
        entries = list(tensors.items())
        await self._bench.take_in(entries)
        if not self.accepts(message.fence) or not self._machine.expects_state:
            return
        self._awaited -= tensors.keys()
        if message.last:
            if missing := sorted(self._awaited - self.twins.newcomers.entries):
                raise ExecutionError(
                    f"stage {self.stage} received a state without {', '.join(missing[:3])} ({len(missing)} missing)."
                )
            self._begin_when_whole(message.step)

    def begins(self) -> None:
        """The state that other replicas agreed on is in place."""
        self._awaited -= self.twins.newcomers.entries
        self._begin_when_whole(0)

    def _begin_when_whole(self, step: int) -> None:
        if not self._awaited:
            self._handle(machine.StateArrived(step))

    # ------------------------------------------------------------------------------------------------ commands out

    def _handle(self, event: StageEvent) -> None:
        before = self._machine.fence
        commands = self._machine.handle(event)
        if self._machine.fence != before:
            self._bench.superseded.clear()
            self._copies.abandon()
            self.twins.begin_fence()
            self._awaited = frozenset()
        for command in commands:
            self._perform(command)
        self._happened.set()
        self._happened = asyncio.Event()

    def _perform(self, command: StageCommand) -> None:
        post = self.member.to_driver
        match command:
            case machine.Compute(work):
                self.start(partial(self._work, work))
            case machine.ReportStatus(applied, prepared, retained_from):
                post(
                    wire.Status(
                        fence=self.fence,
                        stage=self.stage,
                        applied=applied,
                        prepared=prepared,
                        retained_from=retained_from,
                        fingerprint=self._host.fingerprint if self.program.repeats else "",
                        clock_s=self._host.clock.now_s(),
                    )
                )
            case machine.ReportReady(applied):
                self.start(partial(self._report_ready, self.fence, applied))
            case machine.ReportPrepared(step):
                post(
                    wire.Prepared(
                        fence=self.fence,
                        stage=self.stage,
                        step=step,
                        norms=self._bench.norms,
                        spans=tuple(self._bench.spans),
                        sketches=self._bench.take_sketches(step),
                        nonfinite=self._bench.nonfinite,
                    )
                )
                self._bench.spans.clear()
            case machine.ReportApplied(step):
                post(wire.Applied(fence=self.fence, stage=self.stage, step=step))
                self.twins.newcomers.serve()
            case machine.DropSums():
                dropped = self._host.compute.run(self._bench.discard)
                self.start(partial(_finish, dropped))
            case machine.DropHeld(below):
                self.held.drop(below)
            case machine.DropRetained(watermark):
                self.retained.drop_below(watermark)
            case machine.SendRetained(to, first, below):
                self.start(partial(self._send_retained, self.fence, to, first, below))
            case machine.LoadSnapshot(step):
                self.start(partial(self._load_snapshot, self.fence, step))
            case machine.TakeSnapshot(step):
                self._copies.begin(step)
            case machine.Refuse(reason):
                self._failed("bad_message", reason)

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run `work` and report every exception to the driver: nothing above this would do so."""
        try:
            await work()
        except Exception as error:
            if not isinstance(error, FusionError):
                log.exception("stage %d of %s failed", self.stage, self.job)
            self._failed(*refusal_of(error))
        else:
            return True
        return False

    @property
    def adopted(self) -> int:
        """Step whose outer update is the last one that the state includes; below 0 if it includes none."""
        return self._machine.shape.exchanges.adopted(self._machine.applied)

    def agreed(self, step: int) -> None:
        """The outer update of a step, summed with other replicas' stages, can be adopted."""
        self._handle(machine.OuterUpdateArrived(step))

    @property
    def linked_stages(self) -> tuple[int, ...]:
        """Stages that this stage exchanges tensors with."""
        return tuple(sorted(self.boundary.others))

    def retains_whole(self, to: int, first: int, below: int) -> bool:
        """Return whether everything that stage `to` received from this one in these steps can be resent."""
        microbatches = self._machine.shape.microbatches
        return self.retained.is_whole(self.boundary, microbatches, to, first, below)

    async def _report_ready(self, fence: Fence, applied: int) -> None:
        if await self.member.linked(self.linked_stages) and self.accepts(fence):
            self.member.to_driver(wire.Ready(fence=fence, stage=self.stage, applied=applied))

    # ------------------------------------------------------------------------------------- recovery of others and self

    async def _send_retained(self, fence: Fence, to: frozenset[int], first: int, below: int) -> None:
        """Resend all at once: these tensors are in memory anyway, and receivers order them by step."""
        if await self.member.linked(sorted(to)) and self.accepts(fence):
            for receiver, message, tensors in self.retained.again(fence, to, first, below):
                self.member.to_stage(receiver, message, tensors)

    async def _load_snapshot(self, fence: Fence, step: int) -> None:
        entries = await self.member.kept.whole(self.stage, step)
        if not self.accepts(fence):
            return
        if entries.keys() != self._entries:
            odd = sorted(entries.keys() ^ self._entries)
            raise ExecutionError(f"the snapshot of step {step} does not fit stage {self.stage}: {', '.join(odd[:3])}.")
        for chunk in chunks(entries.items()):
            await self._bench.take_in(chunk)
            if not self.accepts(fence):
                return
        self._handle(machine.StateArrived(step))

    async def _send_copy(self, copy: StateCopy, part: int, chunk: Chunk | None) -> None:
        if self._standby is None:
            raise ExecutionError(f"stage {self.stage} has no standby.")
        named = dict(chunk or ())
        message = wire.Snapshot(
            fence=self.fence,
            stage=self.stage,
            step=copy.step,
            part=part,
            watermark=self._machine.retained.watermark,
            last=chunk is None,
            rest_of=copy.rest_of,
            tensors=headers(named),
        )
        peer, ticket = self._standby
        addresses = self._host.addresses_of(peer, self.job, ticket)
        await self.member.kept.send(peer, addresses, message, tuple(named.values()))

    def _standby_lost(self, reason: str) -> None:
        if self._standby is not None:
            self.member.without_standby(self._standby[0], reason)

    # --------------------------------------------------------------------------------------------- pieces of work

    async def _work(self, work: StageWork) -> None:
        if await self._reported(partial(self._bench.do, work)):
            if initialised := work.kind == "initialise":
                self._awaited = self._bench.missing | self.twins.newcomers.entries
                self.twins.newcomers.ask()
            self._handle(machine.WorkDone(work, missing=initialised and bool(self._awaited)))
        else:
            self._handle(machine.WorkFailed(work))

    def send(self, receiver: int, message: Sent, tensors: Sequence[HostTensor]) -> None:
        """Send to a neighbour that now takes part in this step. It is retained in any case, because a replay may need
        it."""
        if self._machine.retained.is_wanted and not (isinstance(message, wire.Forward) and message.mode != "train"):
            self.retained.keep(message, tensors)
        if self._machine.sends_to(receiver, message.step):
            self.member.to_stage(receiver, message, tensors)

    def _failed(self, code: wire.RefusalCode, reason: str) -> None:
        self.member.failed(self.stage, self.fence, code, reason)


def _event_of(message: Sent) -> machine.ForwardArrived | machine.BackwardArrived | machine.SharedArrived:
    match message:
        case wire.Forward():
            return machine.ForwardArrived(message.mode, message.step, message.microbatch, message.producer)
        case wire.Backward():
            return machine.BackwardArrived(message.step, message.microbatch, message.consumer)
        case wire.SharedGradient():
            return machine.SharedArrived(message.step, message.sender, message.phase)


def _entries(graph: Graph, options: StageOptions) -> Entries:
    """Split a state's entries: fixed ones are frozen weights, constants, and buffers that the graph does not write."""
    written = set(graph.state_writes.values())
    fixed = {spec.key for spec in graph.params.values() if not spec.trainable and spec.key not in written}
    entries = state_entries(graph, options.optimizer)
    return Entries(
        fixed=[name for name, entry in entries.items() if entry.key in fixed],
        moving=[name for name, entry in entries.items() if entry.key not in fixed],
    )


async def _finish(work: Awaitable[object]) -> None:
    await work
