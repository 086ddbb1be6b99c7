"""The stages that one member runs, and the programs it holds ready for a takeover.

This module decides when a loaded stage can serve an attach, and how much memory is left for others.
`execution.training.member` owns it, `execution.training.loading` validates and loads, `execution.training.runtime`
runs."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Final

from fusionai.backends.state import state_entries
from fusionai.execution.allocator import return_freed_memory
from fusionai.execution.host import Host
from fusionai.execution.training.loading import LoadedStage, load_stage
from fusionai.execution.training.postman import Postman
from fusionai.execution.training.rehearsal import rehearse
from fusionai.execution.training.runtime import Identity, StageRuntime
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.standby.assignment import ARRIVING
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

HELD_WITHOUT_LIMIT_BYTES: Final = 8 * 2**30
"""Bytes of tensors a stage may hold for later work, and of snapshots, if the provider set no limit (chosen)."""


class Stages:
    """Loaded stages of one job. At most one runtime per stage number."""

    def __init__(self, host: Host, job: str, postman: Postman) -> None:
        self._host = host
        self._job = job
        self._postman = postman
        self._runtimes: dict[int, StageRuntime] = {}
        self._ahead: dict[int, tuple[Identity, LoadedStage]] = {}
        """Guarded stages whose programs are loaded and rehearsed. They have no state."""
        self._guarded: frozenset[int] = frozenset()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self._runtimes))

    @property
    def all(self) -> tuple[StageRuntime, ...]:
        return tuple(self._runtimes.values())

    @property
    def ready(self) -> frozenset[int]:
        """Guarded stages that an attach need not load."""
        return frozenset(self._ahead)

    def __getitem__(self, stage: int) -> StageRuntime:
        return self._runtimes[stage]

    def accepting(self, stage: int, fence: Fence) -> StageRuntime | None:
        """Return the stage if it is here and at exactly this fence."""
        runtime = self._runtimes.get(stage)
        return runtime if runtime is not None and runtime.accepts(fence) else None

    async def made(
        self, attach: wire.Attach, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId]
    ) -> StageRuntime:
        """Return the present runtime if this attach describes the same stage, otherwise a new one; `adopt` puts it in
        place.

        Raises `GraphError`, `ExecutionError`.
        """
        if places.get(attach.stage) != self._host.peer:
            raise ExecutionError(f"the plan does not place stage {attach.stage} on this peer.")
        identity = _identity(attach)
        present = self._runtimes.get(attach.stage)
        if present is not None and present.identity == identity:
            return present
        ahead = self._ahead.pop(attach.stage, None)
        self._ahead.clear()  # the memory is needed by this stage; other guarded stages are prepared again
        if ahead is not None and ahead[0] == identity:
            loaded = ahead[1]
            await self._host.compute.run(loaded.program.discard)  # a recheck may have been in progress
        else:
            loaded = await load_stage(
                self._host, attach, tensors, places=places, memory_limit_bytes=self._unused_bytes()
            )
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

    async def prepare(
        self, told: wire.Prepare, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId], kept_bytes: int
    ) -> None:
        """Load and rehearse a guarded stage's program, unless that was done.

        Nothing is kept if the program does not fit in memory beside the snapshots: `kept_bytes` of other stages, and
        the most that a guard may hold of this one. Raises what an attach would raise.
        """
        identity = _identity(told)
        runtime, ahead = self._runtimes.get(told.stage), self._ahead.get(told.stage)
        if (runtime is not None and runtime.identity == identity) or (ahead is not None and ahead[0] == identity):
            return
        self._ahead.pop(told.stage, None)
        limit_bytes = self._unused_bytes()
        if limit_bytes is not None:
            limit_bytes -= kept_bytes + sum(loaded.program.resident_bytes for _, loaded in self._ahead.values())
        loaded = await load_stage(self._host, told, tensors, places=places, memory_limit_bytes=limit_bytes)
        if limit_bytes is not None:
            entries = state_entries(loaded.graph, told.options.optimizer)
            # Loading made sure that one state and a pass fit; arriving snapshots need room as well.
            if (ARRIVING + 2) * sum(entry.nbytes for entry in entries.values()) > limit_bytes:
                return
        await self._host.compute.run(lambda: rehearse(loaded, told.options))
        if told.stage in self._guarded:  # a later round may have begun meanwhile
            self._ahead[told.stage] = (identity, loaded)

    async def lent(
        self, told: wire.Recheck, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId], kept_bytes: int
    ) -> LoadedStage:
        """Return a program of a stage that runs elsewhere, to recheck it. If one is ready for a takeover, it is used,
        since a takeover brings its own state; otherwise another is loaded into the memory left beside `kept_bytes` of
        snapshots.

        Raises what an attach would raise.
        """
        ahead = self._ahead.get(told.stage)
        if ahead is not None and ahead[0] == _identity(told):
            await self._host.compute.run(ahead[1].program.discard)
            return ahead[1]
        limit_bytes = self._unused_bytes()
        if limit_bytes is not None:
            limit_bytes -= kept_bytes + sum(loaded.program.resident_bytes for _, loaded in self._ahead.values())
        return await load_stage(self._host, told, tensors, places=places, memory_limit_bytes=limit_bytes)

    async def adopt(self, runtime: StageRuntime) -> None:
        former = self._runtimes.get(runtime.stage)
        if former is not runtime:
            self._runtimes[runtime.stage] = runtime
            if former is not None:
                gone = [former]
                del former
                await _end_all(gone, "another stage takes its place")

    def keep_only(
        self,
        stages: frozenset[int],
        *,
        aside: frozenset[int] = frozenset(),
        guarded: frozenset[int] = frozenset(),
    ) -> Coroutine[object, object, None]:
        """Drop all stages but these. The stages are removed now; await the result until their tasks have ended.

        Stages `aside` stay loaded but send nothing until another attach. Programs of `guarded` stages that are ready
        for a takeover stay.
        """
        gone = [self._runtimes.pop(stage) for stage in self.numbers if stage not in stages | aside]
        self._guarded = guarded
        self._ahead = {stage: one for stage, one in self._ahead.items() if stage in stages | guarded}
        for runtime in self.all:
            if runtime.stage not in stages:
                runtime.set_aside()
        return _end_all(gone, "its part in the job is over")

    @property
    def snapshot_room_bytes(self) -> int:
        """Memory that snapshots may use: what the provider lends minus what stages need."""
        unused_bytes = self._unused_bytes()
        return HELD_WITHOUT_LIMIT_BYTES if unused_bytes is None else unused_bytes

    def _unused_bytes(self) -> int | None:
        """Memory not used by stages, None without a limit. Snapshots do not count, because a guard may need their
        memory for the stage it takes over, and no stage is given up for a snapshot."""
        if self._host.memory_limit_bytes is None:
            return None
        return self._host.memory_limit_bytes - sum(runtime.resident_bytes for runtime in self._runtimes.values())


def _identity(told: wire.Attach | wire.Prepare | wire.Recheck) -> Identity:
    return (told.graph_hash, bytes(told.boundary), told.options)


async def _end_all(gone: list[StageRuntime], reason: str) -> None:
    """End these runtimes, empty the list, and return their memory to the system."""
    if not gone:
        return
    while gone:
        await _end(gone.pop(0), reason)
    return_freed_memory()


async def _end(runtime: StageRuntime, reason: str) -> None:
    runtime.detach(reason)
    await runtime.close()
