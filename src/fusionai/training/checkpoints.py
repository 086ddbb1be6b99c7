"""State between stages and disk: what a stage is given to start from, and what it streams back to be kept.

Decides which entries a stage needs from outside: everything after a checkpoint, otherwise only what has no
initialisation rule (a pretrained model's weights have none). The layout on disk is `storage.checkpoint`'s.

Neighbours: `training.driver` calls it, `storage` keeps the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from fusionai.backends.state import StateEntry, as_stored, check_entry
from fusionai.backends.tolerance import TOLERANCES, difference, numbers
from fusionai.coordination.evaluations import Evaluation
from fusionai.coordination.stage import Source
from fusionai.execution.state import chunks
from fusionai.ir.init import initialise
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.primitives.errors import ExecutionError, StorageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.types import TolerantTakeover
from fusionai.storage.best import best_checkpoint, name_best
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter
from fusionai.storage.manifest import step_directory, step_of
from fusionai.storage.reader import CheckpointReader, complete_checkpoints, forget_after, prune
from fusionai.training.job import TrainingJob
from fusionai.transport.interface import Envelope
from fusionai.wire import messages as wire

Chunk = tuple[dict[str, HostTensor], bool]
"""Entries and whether they are the last."""


class Checkpoints:
    """`files` stand beside the weights (config.json, tokenizer). `keep`: how many complete checkpoints stay."""

    def __init__(self, root: Path, header: CheckpointHeader, *, files: Mapping[str, bytes], keep: int) -> None:
        self.root = root
        self._header = header
        self._files = files
        self._keep = keep

    def state_for(self, job: TrainingJob, graph: Graph, *, base: int, source: Source) -> Iterator[Chunk]:
        """Chunks of the state a stage starts from, the last one marked; none at all if it makes or has everything."""
        match source:
            case "keep" | "snapshot":
                return
            case "initialise":
                owed = [spec.key for spec in graph.params.values() if spec.init is None]
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
            yield {}, True  # a stage without any state waits for the word all the same

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
        # Constants are part of the graph's definition, not of its state, and an adapter's base is the owner's:
        # checkpoints don't repeat them. What has a rule is made by it here, as at the beginning it was by the stage.
        specs = {spec.key: spec for spec in graph.params.values()}
        rest = sorted(keys - kept)
        yield from _model_entries(graph, job.state([key for key in rest if specs[key].init is None]))
        yield from _model_entries(
            graph, ((key, _initial(specs[key], job.options.seed)) for key in rest if specs[key].init is not None)
        )

    def collection(
        self,
        step: int,
        fence: wire.Fence,
        stages: Mapping[int, PeerId],
        entries: Mapping[int, Mapping[str, StateEntry]],
        *,
        tolerant: bool,
        takeovers: tuple[TolerantTakeover, ...] = (),
    ) -> Collection:
        """Of every stage's state of `step`. `entries`: what each stage's state consists of; nothing else is written,
        and nothing of it may be missing. `tolerant`: machines round differently, so the copies of a tied parameter may
        be apart as far as `backends.tolerance` lets them; what the first stage that has it holds is kept.
        `takeovers`: what is said of the bits of this state."""
        owed = {stage: dict(entries[stage]) for stage in stages}
        header = msgspec.structs.replace(self._header, tolerant_takeovers=takeovers)
        return Collection(self.root, header, self._files, step, fence, dict(stages), owed, tolerant=tolerant)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the complete ones."""
        found = (step_of(path) for path in complete_checkpoints(self.root))
        return tuple(step for step in found if step is not None)

    def forget_after(self, step: int, best: Evaluation | None = None) -> None:
        """Remove those of states after more than `step` steps; `best` is what is the best now. Blocking."""
        forget_after(self.root, step)
        best_checkpoint(self.root, best)

    def name_best(self, best: Evaluation) -> Path:
        """Write down which complete checkpoint holds the best state. Blocking."""
        return name_best(self.root, best)

    def prune(self, best: int | None) -> None:
        """Remove old checkpoints, but never that of step `best`. Blocking; only while no stage may still load one
        (recovery rule 15)."""
        prune(self.root, self._keep, best)


class Collection:
    """One checkpoint on its way to the disk: `take` what members send, while `run` waits and then completes it.

    `cancel` before the last chunk leaves nothing behind; afterwards the checkpoint is completed all the same.
    """

    def __init__(
        self,
        root: Path,
        header: CheckpointHeader,
        files: Mapping[str, bytes],
        step: int,
        fence: wire.Fence,
        stages: Mapping[int, PeerId],
        owed: dict[int, dict[str, StateEntry]],
        *,
        tolerant: bool,
    ) -> None:
        self.step = step
        self._root = root
        self._header = header
        self._files = files
        self._fence = fence
        self._stages = stages
        self._owed = owed
        firsts: dict[str, int] = {}
        for stage in sorted(owed):
            for entry in owed[stage]:
                firsts.setdefault(entry, stage)
        self._firsts = firsts if tolerant else None
        """Entry -> the stage whose value is kept; None: all have the same."""
        self._copies: list[tuple[int, str, HostTensor]] = []
        """Stage, entry and what it holds, where another stage's is kept."""
        self._writer: asyncio.Future[CheckpointWriter] = asyncio.get_running_loop().create_future()
        self._settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True when everything has come, False when nothing more will; or why it can't be written."""
        self._turn = asyncio.Lock()

    async def run(self) -> Path | None:
        """The complete checkpoint, or None if it was cancelled. Raises `StorageError`."""
        try:
            writer = await asyncio.to_thread(CheckpointWriter, self._root, self.step, self._header, files=self._files)
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
        """A message on a member's state connection. Raises `ExecutionError` for a state that is not as expected."""
        message = envelope.message
        if not isinstance(message, wire.StateChunk):
            raise ExecutionError(f"expected the state of step {self.step}, got {type(message).__name__}.")
        if message.fence > self._fence:
            raise ExecutionError(f"expected the state of step {self.step}, got one of a round that is still to come.")
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
        """Strike what has come off the list of what is owed; whether it was the stage's last chunk."""
        mine = sorted(stage for stage in self._owed if self._stages[stage] == peer)
        if message.step != self.step or message.stage not in mine:
            raise ExecutionError(
                f"expected the state of step {self.step} of stages {mine} from peer {short(peer)}, "
                f"got that of step {message.step} of stage {message.stage}."
            )
        entries = self._owed[message.stage]
        for name, tensor in tensors.items():
            check_entry(entries, name, tensor)
            del entries[name]
        if message.last and entries:
            raise ExecutionError(f"the state of stage {message.stage} came without {', '.join(sorted(entries)[:3])}.")
        return message.last

    def _add_all(self, writer: CheckpointWriter, stage: int, tensors: Mapping[str, HostTensor]) -> None:
        for entry, tensor in tensors.items():
            if self._firsts is None or self._firsts[entry] == stage:
                writer.add(entry, tensor)
            else:
                self._copies.append((stage, entry, host_tensor(tensor.dtype, tensor.shape, bytes(tensor.data))))

    def _compare(self, writer: CheckpointWriter) -> None:
        """Raises `StorageError` where copies of one parameter are further apart than rounding explains."""
        for stage, entry, tensor in self._copies:
            kept = writer.value(entry)
            apart = difference(numbers(tensor), numbers(kept))
            most = TOLERANCES["bfloat16" if tensor.dtype == "bfloat16" else "float32"].stage
            if apart > most:
                raise StorageError(
                    f"checkpoint of step {self.step}: stage {stage} holds a value of {entry} that is {apart:.2g} of "
                    f"its size away from what is kept; rounding explains {most:.2g}.",
                    hint="Tied parameters have diverged; the job must go back to its last checkpoint.",
                )

    def cancel(self) -> None:
        """What has not come will not come any more."""
        if not self._settled.done():
            self._settled.set_result(False)


def _initial(spec: ParamSpec, seed: int) -> HostTensor:
    assert spec.init is not None
    made = np.ascontiguousarray(initialise(spec.key, spec.shape, spec.dtype, spec.init, seed))
    return host_tensor(spec.dtype, spec.shape, made.tobytes())


def _model_entries(graph: Graph, entries: Iterable[tuple[str, HostTensor]]) -> Iterator[tuple[str, HostTensor]]:
    """Frozen weights are packed here, once: whoever gets them afterwards, a guard or an heir, gets these bytes."""
    specs = {spec.key: spec for spec in graph.params.values()}
    return ((f"model/{key}", as_stored(specs[key], tensor)) for key, tensor in entries)
