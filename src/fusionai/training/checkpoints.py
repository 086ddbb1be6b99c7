"""State between stages and disk: what a stage is given to start from, and what it streams back to be kept.

Decides which entries a stage needs from outside: everything after a checkpoint, otherwise only what has no
initialisation rule (a pretrained model's weights have none). The layout on disk is `storage.checkpoint`'s.

Neighbours: `training.driver` calls it, `storage` keeps the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from fusionai.backends.state import StateEntry, check_entry
from fusionai.execution.state import chunks
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter
from fusionai.storage.manifest import step_directory
from fusionai.storage.reader import CheckpointReader, prune
from fusionai.training.job import TrainingJob
from fusionai.transport.interface import Channel, Envelope
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

    def state_for(
        self, job: TrainingJob, graph: Graph, *, base: int, source: Literal["keep", "initialise", "import"]
    ) -> Iterator[Chunk]:
        """Chunks of the state a stage starts from, the last one marked; none at all if it makes or keeps everything."""
        match source:
            case "keep":
                return
            case "initialise":
                owed = [spec.key for spec in graph.params.values() if spec.init is None]
                entries = _model_entries(job.state(owed)) if owed else iter(())
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
            yield {}, True  # a stage without parameters, such as the loss, waits for its state like any other
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
        # Constants are part of the graph's definition, not of its state: checkpoints don't repeat them.
        yield from _model_entries(job.state(sorted(keys - kept)))

    async def collect(
        self,
        step: int,
        fence: wire.Fence,
        stages: Mapping[int, PeerId],
        entries: Mapping[int, Mapping[str, StateEntry]],
        state_channel: Callable[[PeerId], Channel],
    ) -> Path:
        """Read every stage's state of `step` from its member's state connection into one atomic checkpoint.

        `entries`: what each stage's state consists of; nothing else is written, and nothing of it may be missing.
        Raises `ExecutionError` for a state that is not as expected, `StorageError`, `TransportError`."""
        by_peer: dict[PeerId, dict[int, dict[str, StateEntry]]] = {}
        for stage, peer in stages.items():
            by_peer.setdefault(peer, {})[stage] = dict(entries[stage])
        with await asyncio.to_thread(CheckpointWriter, self.root, step, self._header, files=self._files) as writer:
            turn = asyncio.Lock()

            async def drain(peer: PeerId, owed: dict[int, dict[str, StateEntry]]) -> None:
                channel = state_channel(peer)
                while owed:
                    envelope = await channel.receive()
                    finished = _take_off(owed, envelope, step, fence, peer)
                    async with turn:
                        await asyncio.to_thread(_add_all, writer, envelope.tensors)
                    if finished is not None:
                        del owed[finished]

            drains = [asyncio.create_task(drain(peer, owed)) for peer, owed in by_peer.items()]
            try:
                await asyncio.gather(*drains)
            finally:
                for task in drains:
                    task.cancel()
                await asyncio.gather(*drains, return_exceptions=True)
            path = await asyncio.to_thread(writer.finish)
        if step > 0:
            await asyncio.to_thread(prune, self.root, self._keep)
        return path


def _take_off(
    owed: Mapping[int, dict[str, StateEntry]], envelope: Envelope, step: int, fence: wire.Fence, peer: PeerId
) -> int | None:
    """Strike what has come off the list of what is owed; the stage, if this was its last chunk."""
    message = envelope.message
    if not isinstance(message, wire.StateChunk):
        raise ExecutionError(
            f"expected the state of step {step} from peer {short(peer)}, got {type(message).__name__}."
        )
    if message.fence != fence or message.step != step or message.stage not in owed:
        raise ExecutionError(
            f"expected the state of step {step} of stages {sorted(owed)} from peer {short(peer)}, "
            f"got that of step {message.step} of stage {message.stage}."
        )
    entries = owed[message.stage]
    for name, tensor in envelope.tensors.items():
        check_entry(entries, name, tensor)
        del entries[name]
    if not message.last:
        return None
    if entries:
        raise ExecutionError(f"the state of stage {message.stage} came without {', '.join(sorted(entries)[:3])}.")
    return message.stage


def _add_all(writer: CheckpointWriter, tensors: Mapping[str, HostTensor]) -> None:
    for entry, tensor in tensors.items():
        writer.add(entry, tensor)


def _model_entries(entries: Iterable[tuple[str, HostTensor]]) -> Iterator[tuple[str, HostTensor]]:
    return ((f"model/{key}", tensor) for key, tensor in entries)
