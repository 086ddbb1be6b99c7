"""The stages that one member runs, and the programs it holds ready for a takeover.

This module validates and loads stages, decides when a loaded stage can serve an attach, and how much memory is left for
others. A program held ready was rehearsed: one microbatch of zeros forward and backward takes care of what a framework
defers to the first pass (shapes, kernel selection and loading, threads, memory), which would delay a takeover.

`execution.training.member` owns it, `ir.validate` checks graphs, `execution.training.runtime` runs."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fusionai.backends.binding import largest
from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.memory import keep_freed_memory, return_freed_memory, spare_memory
from fusionai.backends.state import state_entries
from fusionai.execution.host import Host
from fusionai.execution.training.boundary import LOSS, Boundary
from fusionai.execution.training.runtime import Identity, StageRuntime
from fusionai.ir.schema import Dim, Graph, content_hash
from fusionai.ir.shapes import evaluate
from fusionai.ir.validate import parse
from fusionai.primitives.errors import ExecutionError, GraphError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.scheduling.standby.assignment import ARRIVING
from fusionai.wire import messages as wire
from fusionai.wire.messages import StageOptions

if TYPE_CHECKING:
    from fusionai.execution.training.member import JobMember
    from fusionai.execution.training.snapshots import MemberSnapshots


class Stages:
    """Loaded stages of one job. At most one runtime per stage number."""

    def __init__(self, host: Host, job: str, member: JobMember) -> None:
        self._host = host
        self._job = job
        self._member = member
        self.runtimes: dict[int, StageRuntime] = {}
        self.ahead: dict[int, tuple[Identity, LoadedStage]] = {}
        """Stages with a standby here whose programs are loaded and rehearsed. They have no state."""
        self._standby_of: frozenset[int] = frozenset()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self.runtimes))

    @property
    def all(self) -> tuple[StageRuntime, ...]:
        return tuple(self.runtimes.values())

    async def made(
        self, attach: wire.Attach, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId]
    ) -> StageRuntime:
        """Return the present runtime if this attach describes the same stage, otherwise a new one; `adopt` puts it in
        place. Raises `GraphError`, `ExecutionError`."""
        if places.get(attach.stage) != self._host.peer:
            raise ExecutionError(f"the plan does not place stage {attach.stage} on this peer.")
        identity = _identity(attach)
        present = self.runtimes.get(attach.stage)
        if present is not None and present.identity == identity:
            return present
        ahead = self.ahead.pop(attach.stage, None)
        self.ahead.clear()  # the memory is needed by this stage; other stages it stands by for are prepared again
        if ahead is not None and ahead[0] == identity:
            loaded = ahead[1]
            await self._host.compute.run(loaded.program.discard)  # a recheck may have been in progress
            self._member.kept.give_way(attach.stage, self._host.memory.lacking_bytes(loaded.program))
        else:
            loaded = await load_stage(self._host, attach, tensors, places=places, kept=self._member.kept)
        self._host.memory.use(loaded.program)
        return StageRuntime(
            job=self._job,
            identity=identity,
            graph=loaded.graph,
            boundary=loaded.boundary,
            options=attach.options,
            program=loaded.program,
            host=self._host,
            member=self._member,
        )

    async def prepare(
        self, request: wire.Prepare, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId], here_bytes: int
    ) -> None:
        """Load and rehearse a stage's program at its standby, unless that was done. Nothing is kept if the program does
        not fit in memory beside the most that a standby may hold of this stage's snapshots, of which it has
        `here_bytes`. Raises what an attach would raise."""
        identity = _identity(request)
        runtime, ahead = self.runtimes.get(request.stage), self.ahead.get(request.stage)
        if (runtime is not None and runtime.identity == identity) or (ahead is not None and ahead[0] == identity):
            return
        self.ahead.pop(request.stage, None)
        left_bytes = self._host.memory.left_bytes
        loaded = await load_stage(self._host, request, tensors, places=places)
        if left_bytes is not None:
            entries = state_entries(loaded.graph, request.options.optimizer)
            # Loading made sure that one state and a pass fit; arriving snapshots need room as well.
            if (ARRIVING + 2) * sum(entry.nbytes for entry in entries.values()) > left_bytes + here_bytes:
                return
        await self._host.compute.run(lambda: rehearse(loaded, request.options), rests=False)
        if request.stage in self._standby_of:  # a later round may have begun meanwhile
            self.ahead[request.stage] = (identity, loaded)

    async def lent(
        self, request: wire.Recheck, tensors: Mapping[str, HostTensor], places: Mapping[int, PeerId]
    ) -> LoadedStage:
        """Return a program of a stage that runs elsewhere, to recheck it. If one is ready for a takeover, it is used,
        since a takeover brings its own state; otherwise another is loaded. Raises what an attach would raise."""
        ahead = self.ahead.get(request.stage)
        if ahead is not None and ahead[0] == _identity(request):
            await self._host.compute.run(ahead[1].program.discard)
            loaded = ahead[1]
        else:
            loaded = await load_stage(self._host, request, tensors, places=places)
        self._host.memory.use(loaded.program)
        return loaded

    async def adopt(self, runtime: StageRuntime) -> None:
        former = self.runtimes.get(runtime.stage)
        if former is not runtime:
            self.runtimes[runtime.stage] = runtime
            if former is not None:
                gone = [former]
                del former
                await _end_all(gone, "another stage takes its place")

    def keep_only(
        self,
        stages: frozenset[int],
        *,
        aside: frozenset[int] = frozenset(),
        standby_of: frozenset[int] = frozenset(),
    ) -> Coroutine[object, object, None]:
        """Drop all stages but these. The stages are removed now; await the result until their tasks have ended. Stages
        `aside` stay loaded but send nothing until another attach. Programs of `standby_of` stages that are ready for a
        takeover stay."""
        gone = [self.runtimes.pop(stage) for stage in self.numbers if stage not in stages | aside]
        self._standby_of = standby_of
        self.ahead = {stage: one for stage, one in self.ahead.items() if stage in stages | standby_of}
        for runtime in self.all:
            if runtime.stage not in stages:
                runtime.set_aside()
        return _end_all(gone, "its part in the job is over")

    def make_room(self, nbytes: int) -> int:
        """Return the memory for further snapshots. Programs that only stand ready are given up if `nbytes` would not
        fit beside them: a standby needs its snapshots more."""
        if self.ahead and self._host.memory.room_bytes < nbytes:
            self.ahead.clear()
        return self._host.memory.room_bytes


def _identity(request: wire.Attach | wire.Prepare | wire.Recheck) -> Identity:
    return (request.graph_hash, bytes(request.boundary), request.options)


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


def rehearse(loaded: LoadedStage, options: StageOptions) -> None:
    """Run one microbatch of zeros. Raises what the backend raises. The program's state is unusable afterwards: a
    takeover imports its own or initialises it."""
    graph, boundary, program = loaded.graph, loaded.boundary, loaded.program
    symbols = largest(graph)

    def zeros(values: Iterable[str]) -> dict[str, HostTensor]:
        return {value: _zeros(graph.values[value].dtype, graph.values[value].shape, symbols) for value in values}

    entries = state_entries(graph, options.optimizer)
    missing = program.initialise()
    program.import_state([(name, _zeros(entries[name].dtype, entries[name].shape, symbols)) for name in missing])
    call = Call("train", 0, 0)
    received = [*(value for port in boundary.receives for value in port.values), *boundary.aliases]
    made = program.forward(call, zeros(received), boundary.wanted("train"))
    wished = {value for port in boundary.returned for value in port.values if value in made}
    wished |= {LOSS} & {*boundary.job_outputs("train")}
    gradients = {name: _zeros(made[name].dtype, made[name].shape, symbols) for name in sorted(wished)}
    program.backward(call, gradients)
    if options.weight_lag:
        program.weight_gradients(call)
    program.gradient_norms()
    program.discard()


def _zeros(dtype: str, shape: Iterable[Dim], symbols: dict[str, int]) -> HostTensor:
    sizes = tuple(evaluate(dim, symbols) for dim in shape)
    plain = "int64" if dtype == "symint" else dtype
    return host_tensor(plain, sizes, bytes(tensor_bytes(plain, sizes)))


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A validated stage and its program."""

    graph: Graph
    boundary: Boundary
    program: StageProgram


async def load_stage(
    host: Host,
    request: wire.Attach | wire.Prepare | wire.Recheck,
    tensors: Mapping[str, HostTensor],
    *,
    places: Mapping[int, PeerId],
    kept: MemberSnapshots | None = None,
) -> LoadedStage:
    """Validate and load one stage in the compute thread, into the memory that is left. `places`: the peer of each of
    the job's stages. `kept`: snapshots of other stages that give way to this one. It takes no part in the job yet.
    Raises `GraphError` for a graph or boundary that is not valid,
    `ExecutionError` for a stage that this machine can't run."""
    what = type(request).__name__.lower()
    graph_bytes = tensors.get("graph")
    if graph_bytes is None:
        raise GraphError(f"the {what} of stage {request.stage} carries no graph.")
    try:
        boundary = msgspec.msgpack.decode(request.boundary, type=Boundary)
    except msgspec.MsgspecError as error:
        raise GraphError(f"the boundary of stage {request.stage} does not fit its schema: {error}.") from None
    if boundary.stage != request.stage:
        raise GraphError(f"the {what} of stage {request.stage} carries the boundary of stage {boundary.stage}.")
    if unknown := boundary.others - places.keys():
        raise GraphError(f"stage {request.stage} exchanges tensors with {sorted(unknown)}, which are not in its plan.")
    if len(request.options.codecs) not in (0, len(places) - 1):
        raise GraphError(
            f"the {what} of stage {request.stage} has {len(request.options.codecs)} codecs for {len(places)} stages."
        )

    def load(left_bytes: int | None) -> LoadedStage:
        graph = parse(graph_bytes.data, host.graph_limits)
        if content_hash(graph) != request.graph_hash:
            raise GraphError(f"stage {request.stage}'s graph does not have the announced hash.")
        boundary.check(graph)
        if unsupported := host.backend.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(
                f"backend {host.backend.name} can't run {', '.join(unsupported)} of stage {request.stage}."
            )
        # The allocator's settings are process-wide, so the stage loaded last decides.
        if request.options.recompute or request.options.offload:
            spare_memory()
        else:
            keep_freed_memory()
        program = host.backend.load(
            graph,
            grad_inputs=boundary.grad_inputs,
            options=request.options,
            memory_limit_bytes=left_bytes,
        )
        return LoadedStage(graph, boundary, program)

    async with host.memory.loading() as left_bytes:
        if left_bytes is not None and kept is not None and host.memory.is_one:
            left_bytes += kept.store.nbytes - kept.store.nbytes_of(request.stage)
        loaded, _ = await host.compute.run(lambda: load(left_bytes), rests=False)
        if kept is not None:
            kept.give_way(request.stage, host.memory.lacking_bytes(loaded.program))
        host.memory.add(loaded.program)
    return loaded
