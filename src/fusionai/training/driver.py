"""The driver of a training job: performs what `coordination.driver` commands, feeds it what happens.

The loop is `run`: take an event, let the machine decide, perform its commands. Decides nothing itself.

Neighbours: `training.connections` reaches the members, `training.checkpoints` collects state, `storage.commits` is the
journal; `execution` runs the stages, also those of the job owner in this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

import msgspec
import numpy as np

from fusionai.backends.state import state_entries
from fusionai.coordination import driver as machine
from fusionai.coordination.driver import DriverCommand, DriverEvent, DriverMachine
from fusionai.execution.boundary import FEED, LOSS, boundaries
from fusionai.execution.member import Host, JobMember
from fusionai.execution.state import headers
from fusionai.ir import schema
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.commits import CommitJournal
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints
from fusionai.training.connections import Connections
from fusionai.training.job import Batch, TrainingJob
from fusionai.training.outputs import Outputs
from fusionai.training.timeline import Timeline
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Mode

log = logging.getLogger(__name__)

Listener = Callable[[progress.Progress], None]


class Driver:
    """Use as: `await driver.run()`, then optionally `await driver.infer(...)`, then `await driver.close()`."""

    def __init__(
        self,
        job: TrainingJob,
        host: Host,
        *,
        journal: CommitJournal,
        checkpoints: Checkpoints,
        base: int,
        on_progress: Listener,
    ) -> None:
        self._job = job
        self._host = host
        self._journal = journal
        self._checkpoints = checkpoints
        self._on_progress = on_progress
        self._events: asyncio.Queue[DriverEvent] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._partition = job.partition()
        self._boundaries = boundaries(self._partition)
        self._entries = {
            stage.stage: state_entries(stage.graph, job.options.optimizer) for stage in self._partition.stages
        }
        self._outputs = Outputs()
        self._timeline = Timeline()
        self._ended: machine.EndJob | None = None
        self.fence = Fence(job.plan.version, journal.incarnation, 0)
        self._member = JobMember(
            host, job.job, job.owner, self.fence, on_output=self._on_output, on_link_lost=self._on_lost
        )
        self._connections = Connections(job, host, self._member, on_message=self._on_message, on_lost=self._on_lost)
        self._machine = DriverMachine(
            shape=job.shape(),
            fence=self.fence,
            learning_rate=job.learning_rate,
            journal=tuple(journal.records(base)),
            base=base,
            source="import" if base > 0 else "initialise",
        )

    # ------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> machine.EndJob:
        """Attach, resume, train, save. Raises nothing of the members' making: it is in the result."""
        await self._connections.open(self.fence)
        self._perform_all(self._machine.start())
        while self._ended is None:
            self._perform_all(self._machine.handle(await self._events.get()))
        return self._ended

    def stop(self, reason: str) -> None:
        """Finish the step under way, save, end."""
        self._events.put_nowait(machine.StopAsked(reason))

    async def close(self, reason: str = "done") -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connections.close(self.fence, reason)

    def _perform_all(self, commands: Sequence[DriverCommand]) -> None:
        for command in commands:
            try:
                self._perform(command)
            except FusionError as error:  # data that can't be read, a link that is gone
                self._events.put_nowait(machine.CommandFailed(str(error)))

    def _perform(self, command: DriverCommand) -> None:
        match command:
            case machine.SendAttach():
                self._attach_all()
            case machine.SendResume():
                self._resume(command)
            case machine.SendProbe(step):
                self._start(self._probe(step))
            case machine.AnnounceReady(base):
                self._on_progress(progress.JobReady(base))
            case machine.Feed(step, microbatch):
                self._feed("train", step, microbatch, self._job.data.microbatch(step, microbatch))
            case machine.DecideScale(step, norms):
                self._start(self._decide_scale(step, norms))
            case machine.JournalCommit(record):
                self._start(self._journal_commit(record))
            case machine.SendCommit(record, line, save):
                for placement in self._job.plan.stages:
                    self._tell(
                        placement.stage,
                        wire.Commit(fence=self.fence, stage=placement.stage, record=record, line=line, save=save),
                    )
            case machine.StepCommitted(record, losses, replayed):
                self._on_progress(self._timeline.step_done(record, losses, replayed, self._tokens_per_step))
            case machine.WriteCheckpoint(step, ask):
                self._start(self._write_checkpoint(step, ask=ask))
            case machine.Evaluate(step):
                self._start(self._evaluate(step))
            case machine.WarnTolerant(_, detail):
                self._on_progress(progress.Warned(f"not bit-exact, tolerated by the recipe: {detail}"))
            case machine.EndJob():
                self._ended = command

    # ------------------------------------------------------------------------------------------------ performing

    def _attach_all(self) -> None:
        neighbours = self._job.neighbours()
        for stage, boundary in zip(self._partition.stages, self._boundaries, strict=True):
            encoded = schema.encode(stage.graph)
            graph = host_tensor("uint8", (len(encoded),), encoded)
            peer = self._peer_of(stage.stage)
            message = wire.Attach(
                fence=self.fence,
                job=self._job.job,
                stage=stage.stage,
                stages=len(self._partition.stages),
                graph_hash=schema.content_hash(stage.graph),
                boundary=msgspec.Raw(msgspec.msgpack.encode(boundary)),
                options=self._job.stage_options(stage.stage),
                neighbours=neighbours,
                ticket=self._job.tickets.get(peer, b""),
                tensors=headers({"graph": graph}),
            )
            self._connections.tell(peer, message, (graph,))

    def _resume(self, command: machine.SendResume) -> None:
        self._tell(
            command.stage,
            wire.Resume(
                fence=self.fence,
                stage=command.stage,
                committed=command.committed,
                source=command.source,
                base=command.committed,
                record=command.record,
            ),
        )
        self._start(self._push_state(command))

    async def _push_state(self, command: machine.SendResume) -> None:
        """Send the stage what it can't make itself; nothing at all if it can make everything."""
        graph = self._partition.stages[command.stage].graph
        channel = self._connections.state_channel(self._peer_of(command.stage))
        pending = self._checkpoints.state_for(self._job, graph, base=command.committed, source=command.source)
        while (item := await asyncio.to_thread(next, pending, None)) is not None:
            chunk, last = item
            message = wire.StateChunk(
                fence=self.fence, stage=command.stage, step=command.committed, last=last, tensors=headers(chunk)
            )
            await channel.send(message, tuple(chunk.values()))

    def _feed(self, mode: Mode, step: int, microbatch: int, batch: Batch) -> None:
        """Each stage gets exactly the inputs it needs."""
        for boundary in self._boundaries:
            for port in boundary.receives:
                names = port.carried(mode)
                if port.other != FEED or not names:
                    continue
                missing = [name for name in names if name not in batch]
                if missing:
                    raise ExecutionError(
                        f"the model needs inputs {', '.join(missing)}, the data has {', '.join(batch)}."
                    )
                tensors = {name: batch[name] for name in names}
                message = wire.Forward(
                    fence=self.fence,
                    mode=mode,
                    step=step,
                    replica=0,
                    microbatch=microbatch,
                    producer=FEED,
                    consumer=boundary.stage,
                    tensors=headers(tensors),
                )
                self._member.to_stage(boundary.stage, message, tuple(tensors.values()))

    async def _decide_scale(self, step: int, norms: tuple[float, ...]) -> None:
        limit = float("inf") if self._job.clip_norm is None else self._job.clip_norm
        (total_norm, scale), _ = await self._host.compute.run(lambda: self._host.backend.clip_scale(norms, limit))
        self._events.put_nowait(machine.ScaleDecided(step, total_norm, scale))

    async def _journal_commit(self, record: wire.CommitRecord) -> None:
        await asyncio.to_thread(self._journal.append, record)
        self._events.put_nowait(machine.CommitJournalled(record))

    async def _write_checkpoint(self, step: int, *, ask: bool) -> None:
        started_s = time.monotonic()
        if ask:
            for placement in self._job.plan.stages:
                self._tell(placement.stage, wire.Export(fence=self.fence, stage=placement.stage, step=step))
        stages = {placement.stage: PeerId(placement.peer) for placement in self._job.plan.stages}
        path = await self._checkpoints.collect(step, self.fence, stages, self._entries, self._connections.state_channel)
        self._on_progress(progress.CheckpointSaved(step, str(path), time.monotonic() - started_s))
        self._events.put_nowait(machine.CheckpointWritten(step))

    async def _evaluate(self, step: int) -> None:
        """Mean loss over the evaluation part; at most two pipelines' worth of microbatches under way."""
        window = asyncio.Semaphore(2 * len(self._boundaries))

        async def one(index: int) -> float:
            async with window:
                waiting = self._outputs.expect("eval", step, index)
                self._feed("eval", step, index, self._job.data.evaluation(index))
                return _scalar((await waiting)[LOSS])

        losses = await asyncio.gather(*(one(index) for index in range(self._job.evaluation_batches)))
        self._on_progress(progress.Evaluated(step, sum(losses) / len(losses)))
        self._events.put_nowait(machine.EvaluationDone(step))

    async def _probe(self, step: int) -> None:
        """Invariant 7: nothing is called ready before a microbatch has crossed every stage and come back."""
        batch = self._job.data.microbatch(min(step, self._job.steps - 1), 0)
        losses: list[float] = []
        for index in range(2):
            waiting = self._outputs.expect("eval", step, index)
            self._feed("eval", step, index, batch)
            losses.append(_scalar((await waiting)[LOSS]))
        self._events.put_nowait(machine.ProbeAnswered((losses[0], losses[1])))

    async def infer(self, batch: Batch) -> dict[str, HostTensor]:
        """Job outputs other than the loss (`logits`) for one batch, computed across the pool's stages with the state
        of the last committed step."""
        step, index = self._machine.step, self._outputs.next_inference()
        waiting = self._outputs.expect("infer", step, index)
        self._feed("infer", step, index, batch)
        return await waiting

    # ---------------------------------------------------------------------------------------------- what arrives

    def _on_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> None:
        if message.fence != self.fence:
            return
        expected = self._boundaries[message.stage].job_outputs(message.mode)
        if set(tensors) != set(expected) or not expected:
            raise ExecutionError(f"expected outputs {list(expected)} of stage {message.stage}, got {list(tensors)}.")
        loss = _scalar(tensors[LOSS]) if LOSS in tensors else None
        if message.mode != "train":
            if not self._outputs.arrived(message.mode, message.step, message.microbatch, tensors):
                raise ExecutionError(
                    f"stage {message.stage} sent an output of {message.mode} microbatch {message.microbatch} of step "
                    f"{message.step}, which was not fed."
                )
        elif loss is not None:
            self._events.put_nowait(machine.LossArrived(message.step, message.microbatch, loss))

    def _on_message(self, peer: PeerId, message: wire.Message) -> None:
        stage = getattr(message, "stage", None)
        if stage is not None and (stage >= len(self._boundaries) or self._peer_of(stage) != peer):
            self._on_lost(peer, f"it sent a {type(message).__name__} of stage {stage}, which is not its own")
            return
        match message:
            case wire.Status(fence=self.fence):
                self._timeline.clock(message.stage, message.clock_s)
                self._events.put_nowait(machine.StageReported(message.stage, message.applied, message.prepared))
            case wire.Ready(fence=self.fence):
                self._events.put_nowait(machine.StageReady(message.stage, message.applied))
            case wire.Prepared(fence=self.fence):
                self._timeline.spans(message.stage, message.spans)
                self._events.put_nowait(machine.StagePrepared(message.stage, message.step, message.norms))
            case wire.StageFailed():
                self._lost(message.stage, f"peer {short(peer)}: {message.reason}")
            case _:
                return

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        for placement in self._job.plan.stages:
            if placement.peer == peer:
                self._lost(placement.stage, f"peer {short(peer)}: {reason}")

    def _lost(self, stage: int, reason: str) -> None:
        self._outputs.fail(reason)
        self._events.put_nowait(machine.StageLost(stage, reason))

    # ---------------------------------------------------------------------------------------------------- details

    def _start(self, work: Coroutine[object, object, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except FusionError as error:
                self._events.put_nowait(machine.CommandFailed(str(error)))
            except Exception as error:  # the job must end with a reason, never wait for a task that is gone
                log.exception("a command of %s failed", self._job.job)
                self._events.put_nowait(machine.CommandFailed(f"{type(error).__name__}: {error}"))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began

    def _tell(self, stage: int, message: wire.Message) -> None:
        self._connections.tell(self._peer_of(stage), message)

    def _peer_of(self, stage: int) -> PeerId:
        return PeerId(self._job.plan.stages[stage].peer)

    @property
    def _tokens_per_step(self) -> int:
        return self._job.tokens_per_microbatch * self._job.options.microbatches


def _scalar(tensor: HostTensor) -> float:
    """A float32 scalar as an exact Python float. Raises `ExecutionError` for anything else."""
    if tensor.dtype != "float32" or tensor.shape != ():
        raise ExecutionError(f"expected a loss as a float32 scalar, got {tensor.dtype}{list(tensor.shape)}.")
    return float(np.frombuffer(tensor.data, np.float32)[0])
