"""Adapters that are loaded and unloaded while the model is served, from one directory that the server was given.

The graph has empty places for them (`AdapterSlots`), so stages keep their caches and only get other values of these
weights. Names are checked here. `serving.engine` has the stages load, the gateway has the requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fusionai.client.serving.model import ServedAdapter, ServedModel, find_adapters
from fusionai.client.serving.names import adapter_name
from fusionai.primitives.errors import UsageError
from fusionai.primitives.process import in_background
from fusionai.serving.pipelines import PipelinedEngine
from fusionai.storage.weight_manifest import ModelWeights


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Where adapters may be loaded from, and how many of which rank have a place at a time."""

    directory: Path
    count: int
    rank: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,) * self.count


class RunningAdapters:
    """Implements `serving.interface.AdapterLoader`. `weights`: the manifest of the engine's job."""

    def __init__(self, directory: Path, model: ServedModel, weights: ModelWeights, engine: PipelinedEngine) -> None:
        assert model.slots is not None
        self._directory = directory.resolve()
        self._model = model
        self._slots = model.slots
        self._weights = weights
        self._engine = engine
        self._one_by_one = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._engine.adapters)

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in `path`, which must be below the directory, on all stages. A load that has begun is
        finished even if the caller is cancelled. Raises `UsageError`, `StorageError`, `ExecutionError`."""
        await asyncio.shield(asyncio.create_task(self._load(name, path)))

    async def unload(self, name: str) -> None:
        """Refuse further generations with this adapter; those that run finish. Its place is free after them."""
        async with self._one_by_one:
            self._engine.drop_adapter(name)

    async def _load(self, name: str, path: str) -> None:
        async with self._one_by_one, self._engine.changing:
            adapter_name(name)
            if name in (self._model.files.name, *self.names):
                raise UsageError(f"the name {name!r} is in use.", hint="Unload the adapter of this name first.")
            (adapter,) = await in_background(lambda: find_adapters([(name, self._inside(path))]))
            number = self._place_for(adapter)
            slots = self._slots.with_adapter(number, adapter.files)
            keys = sorted(slots.keys)
            await in_background(lambda: self._weights.replace((key, slots.tensor(key)) for key in keys))
            self._slots = slots
            await self._engine.load_adapter(name, number)

    def _inside(self, path: str) -> Path:
        """Return the path without links, relative ones seen from the directory. Raises `UsageError` unless it is a
        directory below that one."""
        place = (self._directory / path).resolve()
        if not place.is_relative_to(self._directory) or place == self._directory:
            raise UsageError(
                f"{path} is not below {self._directory}, the directory of --adapter-directory.",
                hint="Links and `..` may not lead out of it either.",
            )
        if not place.is_dir():
            raise UsageError(f"there is no directory {path} below {self._directory}.")
        if away := next((one for one in place.rglob("*") if not one.resolve().is_relative_to(self._directory)), None):
            raise UsageError(f"{away} is a link that leads out of {self._directory}.", hint="Copy the file there.")
        return place

    def _place_for(self, adapter: ServedAdapter) -> int:
        """Return the smallest free place that the adapter fits into, by rank. Raises `UsageError`."""
        free = self._engine.free_adapters
        ranks = self._slots.ranks
        fitting = [number for number in free if ranks[number - 1] >= adapter.files.rank]
        if not fitting:
            raise UsageError(
                f"no place is free for an adapter of rank {adapter.files.rank}: of {len(ranks)} places, {len(free)} "
                f"are free, of rank {', '.join(str(ranks[number - 1]) for number in free) or 'none'}.",
                hint="Unload an adapter and let its answers end, or start with more --adapter-places or a larger "
                "--adapter-rank.",
            )
        return min(fitting, key=lambda number: ranks[number - 1])
