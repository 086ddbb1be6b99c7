"""The stages that one member runs. Decides when one at hand serves an attach, and how much memory is left for others.

Neighbours: `execution.member` owns it, `execution.loading` validates and loads, `execution.runtime` runs.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Final

from fusionai.execution.allocator import return_freed_memory
from fusionai.execution.host import Host
from fusionai.execution.loading import load_stage
from fusionai.execution.postman import Postman
from fusionai.execution.runtime import StageRuntime
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

HELD_WITHOUT_LIMIT_BYTES: Final = 8 * 2**30
"""Tensors a stage may hold for work to come, and snapshots a member may keep, where the provider set no limit."""


class Stages:
    """At most one runtime per stage number."""

    def __init__(self, host: Host, job: str, postman: Postman) -> None:
        self._host = host
        self._job = job
        self._postman = postman
        self._runtimes: dict[int, StageRuntime] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self._runtimes))

    @property
    def all(self) -> tuple[StageRuntime, ...]:
        return tuple(self._runtimes.values())

    def __getitem__(self, stage: int) -> StageRuntime:
        return self._runtimes[stage]

    def accepting(self, stage: int, fence: Fence) -> StageRuntime | None:
        """The stage, if it is here and at exactly this fence."""
        runtime = self._runtimes.get(stage)
        return runtime if runtime is not None and runtime.accepts(fence) else None

    async def made(
        self, attach: wire.Attach, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId]
    ) -> StageRuntime:
        """The one at hand if this attach describes the same stage, otherwise another, which `adopt` puts in its place.

        Raises `GraphError`, `ExecutionError`."""
        identity = (attach.graph_hash, bytes(attach.boundary), attach.options)
        present = self._runtimes.get(attach.stage)
        if present is not None and present.identity == identity:
            return present
        loaded = await load_stage(self._host, attach, tensors, places=places, memory_limit_bytes=self._unused_bytes())
        return StageRuntime(
            job=self._job,
            identity=identity,
            graph=loaded.graph,
            held_limit_bytes=self._host.memory_limit_bytes or HELD_WITHOUT_LIMIT_BYTES,
            boundary=loaded.boundary,
            options=attach.options,
            program=loaded.program,
            compute=self._host.compute,
            postman=self._postman,
            fingerprint=self._host.fingerprint,
            now_s=self._host.clock.now_s,
        )

    async def adopt(self, runtime: StageRuntime) -> None:
        former = self._runtimes.get(runtime.stage)
        if former is not runtime:
            self._runtimes[runtime.stage] = runtime
            if former is not None:
                gone = [former]
                del former
                await _end_all(gone, "another stage takes its place")

    def keep_only(
        self, stages: frozenset[int], *, aside: frozenset[int] = frozenset()
    ) -> Coroutine[object, object, None]:
        """Those `aside` keep what they have and give nothing away until another attach. The others are forgotten now,
        whatever they are at; await what is returned until their tasks have ended."""
        gone = [self._runtimes.pop(stage) for stage in self.numbers if stage not in stages | aside]
        for runtime in self.all:
            if runtime.stage not in stages:
                runtime.set_aside()
        return _end_all(gone, "its part in the job is over")

    @property
    def snapshot_room_bytes(self) -> int:
        """What snapshots may take: what is lent less what stages need."""
        unused_bytes = self._unused_bytes()
        return HELD_WITHOUT_LIMIT_BYTES if unused_bytes is None else unused_bytes

    def _unused_bytes(self) -> int | None:
        """Snapshots do not count: a guard may need their room for the very stage it takes over, and gives up no stage
        for a snapshot."""
        if self._host.memory_limit_bytes is None:
            return None
        return self._host.memory_limit_bytes - sum(runtime.resident_bytes for runtime in self._runtimes.values())


async def _end_all(gone: list[StageRuntime], reason: str) -> None:
    """Empties `gone`; their memory goes back to the system."""
    if not gone:
        return
    while gone:
        await _end(gone.pop(0), reason)
    return_freed_memory()


async def _end(runtime: StageRuntime, reason: str) -> None:
    runtime.detach(reason)
    await runtime.close()
