"""State between stages and disk: what a stage receives to start from, and what it sends back to be saved.

This module decides which entries a stage needs from outside: everything after a checkpoint, otherwise only entries
without an initialisation rule (weights of a pretrained model have none). The layout on disk is defined by
`storage.checkpoint`. `training.driver` calls this module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from fusionai.backends.state import StateEntry, as_stored, check_entry
from fusionai.backends.tolerance import TOLERANCES, difference, numbers
from fusionai.coordination.training import interface
from fusionai.coordination.training.evaluations import Evaluation
from fusionai.coordination.training.stage_interface import Source
from fusionai.execution.tensors import chunks, is_finite
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.weights import initialise
from fusionai.primitives.errors import ExecutionError, StorageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import TolerantTakeover
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import CheckpointReader, best_checkpoint, forget_after, name_best, prune, step_directory
from fusionai.training.deployment import TrainingJob
from fusionai.training.progress import BestKept, CheckpointSaved, Progress
from fusionai.training.rounds import JobRound
from fusionai.transport.interface import Envelope
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers

Chunk = tuple[dict[str, HostTensor], bool]
"""Entries, and whether they are the last."""


class Checkpoints:
    """The checkpoints of one job. `files`: files saved beside the weights (config.json, tokenizer). `keep`: number of
    complete checkpoints to keep. `unread`: yields the model's tensors that no stage holds, because no output
    depends on them (key -> initial value), so that the weights have the names that plain PyTorch expects."""

    def __init__(
        self,
        root: Path,
        header: CheckpointHeader,
        *,
        files: Mapping[str, bytes],
        keep: int,
        unread: Callable[[], Iterable[tuple[str, HostTensor]]] = tuple,
    ) -> None:
        self.root = root
        self._header = header
        self._files = files
        self.keep = keep
        self._unread = unread

    def state_for(self, job: TrainingJob, graph: Graph, *, base: int, source: Source) -> Iterator[Chunk]:
        """Yield the state a stage starts from in chunks, the last one marked; nothing if the stage needs none."""
        match source:
            case "keep" | "snapshot":
                return
            case "initialise":
                twins_send = job.options.sync_begun > 0
                owed = [
                    spec.key
                    for spec in graph.params.values()
                    if spec.init is None and not (spec.trainable and twins_send)
                ]
                entries = _model_entries(graph, job.state(owed)) if owed else iter(())
            case "import":
                entries = self._saved(job, graph, base)
        previous: dict[str, HostTensor] | None = None
        for chunk in chunks(entries):
            if previous is not None:
                yield previous, False
            previous = dict(chunk)
        if previous is not None:
            yield previous, True
        elif source == "import":
            yield {}, True  # a stage without any state waits for the last chunk too

    def _saved(self, job: TrainingJob, graph: Graph, step: int) -> Iterator[tuple[str, HostTensor]]:
        reader = CheckpointReader(step_directory(self.root, step))
        keys = {spec.key for spec in graph.params.values()}
        kept: set[str] = set()
        for entry in reader.names:
            kind, _, rest = entry.partition("/")
            key = rest if kind == "model" else rest.rpartition("/")[0]
            if key in keys:
                kept.add(key)
                yield entry, reader.read(entry)
        # Constants are part of the graph's definition, and an adapter's base belongs to the owner, so checkpoints do
        # not repeat them. Entries with an initialisation rule are initialised here, as the stage did at the beginning.
        specs = {spec.key: spec for spec in graph.params.values()}
        rest = sorted(keys - kept)
        yield from _model_entries(graph, job.state([key for key in rest if specs[key].init is None]))
        yield from _model_entries(
            graph, ((key, _initial(specs[key], job.options.seed)) for key in rest if specs[key].init is not None)
        )

    def writer(self, step: int, takeovers: tuple[TolerantTakeover, ...]) -> CheckpointWriter:
        """Begin to write a checkpoint, with what no stage holds. Blocking. Raises `StorageError`, `ModelError`."""
        header = msgspec.structs.replace(self._header, tolerant_takeovers=takeovers)
        writer = CheckpointWriter(self.root, step, header, files=self._files)
        try:
            for key, tensor in self._unread():
                writer.add(f"model/{key}", tensor)
        except BaseException:
            writer.abandon()
            raise
        return writer


class Collection:
    """One checkpoint being written: `take` stores what members send, `run` waits for all of it and completes the
    checkpoint. `cancel` before the last chunk leaves nothing behind; after it, the checkpoint is still completed.

    `entries`: the entries of each stage's state; all must arrive, and no others are accepted. `tolerant`: machines
    round differently, so copies of a tied parameter may differ within `backends.tolerance`, and the first stage's
    copy is saved. `takeovers`: tolerant takeovers to record in the checkpoint's header."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        step: int,
        fence: wire.Fence,
        stages: Mapping[int, PeerId],
        entries: Mapping[int, Mapping[str, StateEntry]],
        *,
        tolerant: bool,
        takeovers: tuple[TolerantTakeover, ...] = (),
    ) -> None:
        self.step = step
        self._checkpoints = checkpoints
        self._takeovers = takeovers
        self._fence = fence
        self._stages = dict(stages)
        self._owed = {stage: dict(entries[stage]) for stage in stages}
        firsts: dict[str, int] = {}
        for stage in sorted(stages):
            for entry in entries[stage]:
                firsts.setdefault(entry, stage)
        self._firsts = firsts if tolerant else None
        """Entry -> the stage whose value is saved; None if all copies are equal."""
        self._copies: list[tuple[int, str, HostTensor]] = []
        """(stage, entry, value) of copies that are only compared, because another stage's is saved."""
        self._writer: asyncio.Future[CheckpointWriter] = asyncio.get_running_loop().create_future()
        self._settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True when everything has arrived, False after `cancel`; an exception if writing failed."""
        self._turn = asyncio.Lock()

    async def run(self) -> Path | None:
        """Return the complete checkpoint, or None if it was cancelled. Raises `StorageError`."""
        try:
            writer = await asyncio.to_thread(self._checkpoints.writer, self.step, self._takeovers)
        except BaseException:
            self.cancel()
            raise
        try:
            self._writer.set_result(writer)
            if not await self._settled:
                return None
            await asyncio.to_thread(self._compare, writer)
            return await asyncio.to_thread(writer.finish)
        finally:
            async with self._turn:  # a thread may still be writing a chunk
                await asyncio.to_thread(writer.abandon)

    async def take(self, peer: PeerId, envelope: Envelope) -> None:
        """Take a message from a member's state connection. Raises `ExecutionError` for state other than expected."""
        message = envelope.message
        if not isinstance(message, wire.StateChunk):
            raise ExecutionError(f"expected the state of step {self.step}, got {type(message).__name__}.")
        if message.fence > self._fence:
            raise ExecutionError(f"expected the state of step {self.step}, got one with the fence of a later round.")
        if message.fence < self._fence or self._settled.done():
            return
        finished = self._take_off(message, envelope.tensors, peer)
        await asyncio.wait({self._writer, self._settled}, return_when=asyncio.FIRST_COMPLETED)
        async with self._turn:
            if self._settled.done():
                return
            try:
                await asyncio.to_thread(self._add_all, self._writer.result(), message.stage, envelope.tensors)
            except StorageError as error:
                self._settled.set_exception(error)
                return
        if finished:
            del self._owed[message.stage]
            if not self._owed and not self._settled.done():
                self._settled.set_result(True)

    def _take_off(self, message: wire.StateChunk, tensors: Mapping[str, HostTensor], peer: PeerId) -> bool:
        """Remove the arrived entries from those expected. Return whether it was the stage's last chunk."""
        mine = sorted(stage for stage in self._owed if self._stages[stage] == peer)
        if message.step != self.step or message.stage not in mine:
            raise ExecutionError(
                f"expected the state of step {self.step} of stages {mine} from peer {short(peer)}, "
                f"got the state of step {message.step} of stage {message.stage}."
            )
        entries = self._owed[message.stage]
        for name, tensor in tensors.items():
            check_entry(entries, name, tensor)
            del entries[name]
        if message.last and entries:
            raise ExecutionError(f"the state of stage {message.stage} lacks {', '.join(sorted(entries)[:3])}.")
        return message.last

    def _add_all(self, writer: CheckpointWriter, stage: int, tensors: Mapping[str, HostTensor]) -> None:
        for entry, tensor in tensors.items():
            if not is_finite(tensor, masks=True):
                raise ExecutionError(
                    f"the state of step {self.step} of stage {stage} has values of {entry} that are not finite; it is "
                    "not saved."
                )
            if self._firsts is None or self._firsts[entry] == stage:
                writer.add(entry, tensor)
            else:
                self._copies.append((stage, entry, host_tensor(tensor.dtype, tensor.shape, bytes(tensor.data))))

    def _compare(self, writer: CheckpointWriter) -> None:
        """Raise `StorageError` if copies of one parameter differ by more than rounding explains."""
        for stage, entry, tensor in self._copies:
            kept = writer.value(entry)
            apart = difference(numbers(tensor), numbers(kept))
            most = TOLERANCES["bfloat16" if tensor.dtype == "bfloat16" else "float32"].stage
            if apart > most:
                raise StorageError(
                    f"checkpoint of step {self.step}: stage {stage} holds a value of {entry} that is {apart:.2g} of "
                    f"its size away from the saved copy; rounding explains at most {most:.2g}.",
                    hint="Tied parameters have diverged; the job must go back to its last checkpoint.",
                )

    def cancel(self) -> None:
        """Stop waiting for state that has not arrived."""
        if not self._settled.done():
            self._settled.set_result(False)


class Saving:
    """Checkpoints of a job's driver: collects, writes and restores state in the present round."""

    def __init__(self, present: JobRound, checkpoints: Checkpoints, on_progress: Callable[[Progress], None]) -> None:
        self._round = present
        self._checkpoints = checkpoints
        self._on_progress = on_progress
        self._collection: Collection | None = None
        self._collected: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self._collection is not None:
            self._collection.cancel()

    async def push_state(self, command: interface.SendResume) -> None:
        """Send the stage the state it can't make itself, if any."""
        present = self._round
        graph = present.cut.stages[command.stage].graph
        pending = self._checkpoints.state_for(
            present.job, graph, base=command.resume.base, source=command.resume.source
        )
        while (item := await asyncio.to_thread(next, pending, None)) is not None:
            chunk, last = item
            message = wire.StateChunk(
                fence=present.fence, stage=command.stage, step=command.resume.base, last=last, tensors=headers(chunk)
            )
            await present.send_state(command.stage, message, tuple(chunk.values()))

    def _rounds_differently(self) -> bool:
        """Return whether machines with different numerics have, or may have had, a part in this job."""
        present = self._round
        prints = {one.fingerprint for one in present.deployment.plan.stages if present.cut.saves(one.stage)}
        return present.job.options.takeover != "exact" or len(prints) > 1

    def write(self, step: int, *, ask: bool) -> None:
        """Collect and write a checkpoint. `ask`: ask the stages to export their state."""
        present, former, started_s = self._round, self._collected, time.monotonic()
        stages = {
            stage: PeerId(peer) for stage, peer in present.machine.roles.places.items() if present.cut.saves(stage)
        }
        entries = {stage: present.cut.stages[stage].saved for stage in stages}
        takeovers = present.deployment.plan.tolerant_takeovers
        collection = self._collection = Collection(
            self._checkpoints,
            step,
            present.fence,
            stages,
            entries,
            tolerant=self._rounds_differently(),
            takeovers=takeovers,
        )

        async def collect() -> None:
            if former is not None:
                await asyncio.wait({former})  # two collections must not write to the same directory
            path = await collection.run()
            if path is not None:
                self._on_progress(CheckpointSaved(step, str(path), time.monotonic() - started_s))
                present.post(interface.CheckpointWritten(step))

        self._collected = present.start_lasting(collect())
        if ask:
            for stage in stages:
                present.to(stage, wire.Export(fence=present.fence, stage=stage, step=step))

    async def take(self, peer: PeerId, envelope: Envelope) -> None:
        """Take a message from a member's state connection; ignored if no checkpoint was ever collected."""
        if self._collection is not None:
            await self._collection.take(peer, envelope)

    def prune(self, best: Evaluation | None, since: int | None) -> None:
        """Remove old checkpoints, but never that of `best`, nor the newest of at most `since` steps. Call it only while
        no stage may still load one (recovery rule 15)."""
        checkpoints = self._checkpoints
        self._round.start_lasting(
            asyncio.to_thread(prune, checkpoints.root, checkpoints.keep, None if best is None else best.step, since)
        )

    async def name_best(self, best: Evaluation) -> None:
        path = await asyncio.to_thread(name_best, self._checkpoints.root, best)
        self._on_progress(BestKept(best.step, best.loss, str(path)))

    async def rewind(self, step: int, journal: CommitJournal) -> None:
        """Cut back the journal first, then checkpoints: at a start, checkpoints later than the journal are dropped."""
        self.cancel()
        if self._collected is not None:
            await asyncio.wait({self._collected})
        await asyncio.to_thread(journal.take_back, step)
        await asyncio.to_thread(forget_after, self._checkpoints.root, step)
        await asyncio.to_thread(best_checkpoint, self._checkpoints.root, self._round.machine.standing.best)


def _initial(spec: ParamSpec, seed: int) -> HostTensor:
    assert spec.init is not None
    made = np.ascontiguousarray(initialise(spec.key, spec.shape, spec.dtype, spec.init, seed))
    return host_tensor(spec.dtype, spec.shape, made.tobytes())


def _model_entries(graph: Graph, entries: Iterable[tuple[str, HostTensor]]) -> Iterator[tuple[str, HostTensor]]:
    """Yield state entries. Frozen weights are packed once, here, so standbys and later stages get the same bytes."""
    specs = {spec.key: spec for spec in graph.params.values()}
    return ((f"model/{key}", as_stored(specs[key], tensor)) for key, tensor in entries)
