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

from fusionai.execution.state import chunks
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter
from fusionai.storage.manifest import step_directory
from fusionai.storage.reader import CheckpointReader, prune
from fusionai.training.job import TrainingJob
from fusionai.transport.interface import Channel
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
        """Chunks of the state a stage starts from, the last one marked; none at all if it can make everything."""
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
        self, job: TrainingJob, step: int, stages: Mapping[int, PeerId], state_channel: Callable[[PeerId], Channel]
    ) -> Path:
        """Read every stage's state of `step` from its member's state connection into one atomic checkpoint."""
        by_peer: dict[PeerId, set[int]] = {}
        for stage, peer in stages.items():
            by_peer.setdefault(peer, set()).add(stage)
        buffers = {spec.key for spec in job.graph.params.values() if spec.kind != "constant"}
        with await asyncio.to_thread(CheckpointWriter, self.root, step, self._header, files=self._files) as writer:
            turn = asyncio.Lock()
            await asyncio.gather(
                *(
                    self._drain(peer, wanted, step, state_channel(peer), writer, turn)
                    for peer, wanted in by_peer.items()
                )
            )
            path = await asyncio.to_thread(writer.finish, [f"model/{key}" for key in sorted(buffers)])
        if step > 0:
            await asyncio.to_thread(prune, self.root, self._keep)
        return path

    async def _drain(
        self, peer: PeerId, wanted: set[int], step: int, channel: Channel, writer: CheckpointWriter, turn: asyncio.Lock
    ) -> None:
        missing = set(wanted)
        while missing:
            envelope = await channel.receive()
            message = envelope.message
            if not isinstance(message, wire.StateChunk) or message.step != step or message.stage not in missing:
                raise ExecutionError(
                    f"expected the state of step {step} from peer {short(peer)}, got a {type(message).__name__}."
                )
            async with turn:
                await asyncio.to_thread(_add_all, writer, envelope.tensors)
            if message.last:
                missing.discard(message.stage)


def _add_all(writer: CheckpointWriter, tensors: Mapping[str, HostTensor]) -> None:
    for entry, tensor in tensors.items():
        writer.add(entry, tensor)


def _model_entries(entries: Iterable[tuple[str, HostTensor]]) -> Iterator[tuple[str, HostTensor]]:
    return ((f"model/{key}", tensor) for key, tensor in entries)
