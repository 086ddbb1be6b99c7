"""The daemon's side: a backend whose work is done by a worker process (`server`).

`WorkerBackend` is a `Backend` and a `ServingBackend`. A worker that crashes, hangs or answers nonsense is ended; all
programs it had are lost: their calls raise `WorkerLost`, so that the job sees lost stages. The next program that is
loaded starts a new worker; the daemon and its other workers go on. Calls from several threads take turns.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

import msgspec

from fusionai.backends.interface import (
    NOTHING_BEGUN,
    Backend,
    Call,
    DeviceReport,
    ServingProgram,
    Speeds,
    StageProgram,
    WorksIn,
)
from fusionai.backends.worker.channel import (
    ENCODER,
    PIECE_BYTES,
    REPLIES,
    RESULTS,
    Arena,
    Failure,
    LoadedProgram,
    WorkerCall,
    WorkerReply,
    receive,
)
from fusionai.backends.worker.confinement import own_directory
from fusionai.backends.worker.server import Opened, Opening
from fusionai.ir.schema import Graph, encode
from fusionai.primitives import errors
from fusionai.primitives.environment import card_kernels_directory, for_workers, scratch_directory
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import Segment, ServeOptions

log = logging.getLogger(__name__)

READING_CACHES: Final = {
    "NUMBA_CACHE_LOCATOR_CLASSES": "fusionai.backends.worker.kernel_cache.ReadOnlyLocator",
    # Triton would start a program to find the driver's library, which it needs only to compile.
    "TRITON_LIBCUDA_PATH": "/",
}
Entries = Iterable[tuple[str, HostTensor]]

LONGEST_CALL_S: Final = 600.0
"""Longest call of a kind that has not been seen yet: loading a large stage from a slow disk takes minutes."""
SHORTEST_LIMIT_S: Final = 30.0
SLACK: Final = 20.0
"""A call may take this many times the longest of its kind so far; chosen: other programs may starve the worker."""
WATCH_S: Final = 0.5
SPARE_BYTES: Final = 512 << 20
"""Private memory of a worker beyond what is lent: code that compiles, stacks, the allocator's reserve. Chosen."""
LARGEST_ARENA_BYTES: Final = 1 << 40
"""Limit on shared memory if the provider sets none: only addresses are reserved."""


_CORES: Final = os.cpu_count() or 1


class WorkerLost(ExecutionError):
    """The worker process has ended, and with it what it had loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How workers are started. `confined`: without keys, network and foreign files. `memory_bytes`: most private memory
    of a worker beyond what its backend has when it is open; None: no limit. `longest_call_s`: see `LONGEST_CALL_S`."""

    backend: str = "auto"
    device: str = "auto"
    threads: int | None = None
    confined: bool = True
    memory_bytes: int | None = None
    longest_call_s: float = LONGEST_CALL_S


@dataclass
class _Watch:
    """Ends a process that answers too late. `deadline_s`: on the monotonic clock; None while nothing is asked."""

    process: subprocess.Popen[bytes]
    deadline_s: float | None = None
    late: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.over.wait(WATCH_S):
            deadline_s = self.deadline_s
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.late = True
                self.process.kill()
                return


def arena_limit_bytes(options: WorkerOptions) -> int:
    """Return the most memory that a worker may share with its daemon."""
    return LARGEST_ARENA_BYTES if options.memory_bytes is None else options.memory_bytes


def start_process(arena: Arena, environment: Mapping[str, str], directory: Path) -> subprocess.Popen[bytes]:
    """Start a worker that shares the memory `arena`."""
    return subprocess.Popen(
        [sys.executable, "-m", "fusionai.backends.worker.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(arena.descriptor,) if arena.path is None else (),
        env=environment,
        cwd=directory,
    )


class WorkerProcess:
    """One worker: its process, its pipes, its arena."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        limit = arena_limit_bytes(options)
        self._directory = own_directory(scratch_directory())
        self._arena = Arena.new(limit, self._directory)
        self.used_s = 0.0
        """Processor time of all calls so far."""
        self.dropped: deque[int] = deque()
        """Programs that nothing refers to any more and that the worker still has."""
        self._longest_s: dict[str, float] = {}
        self._turn = threading.RLock()
        """Held for a whole call: questions and answers have no numbers, and the shared memory holds those of one."""
        self._closed = False
        # A confined worker may read what is there when it starts, and what is made below it.
        with suppress(OSError):
            card_kernels_directory().mkdir(parents=True, exist_ok=True)
        environment = {**for_workers(), "TMPDIR": str(self._directory), **(READING_CACHES if options.confined else {})}
        self._process = start_process(self._arena, environment, self._directory)
        self._watch = _Watch(self._process)
        threading.Thread(target=self._watch.run, name="worker-watch", daemon=True).start()
        opening = Opening(
            backend=options.backend,
            device=options.device,
            threads=options.threads,
            arena=self._arena.descriptor if self._arena.path is None else str(self._arena.path),
            arena_bytes=limit,
            directory=str(self._directory) if options.confined else None,
            memory_bytes=options.memory_bytes,
        )
        self.opened: Opened = msgspec.msgpack.decode(
            self._exchange("open", msgspec.msgpack.encode(opening)).result, type=Opened
        )
        log.info("worker %d computes, limited in: %s", self.pid, ", ".join(self.opened.measures) or "nothing")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self,
        target: int,
        method: str,
        arguments: tuple[Any, ...],
        tensors: Mapping[str, HostTensor] | Sequence[tuple[str, HostTensor]] = (),
    ) -> tuple[Any, list[tuple[str, HostTensor]]]:
        """Return a call's result and tensors. Raises what the backend raised, or `WorkerLost`."""
        return self.ask_with_size(target, method, arguments, tensors)[:2]

    def ask_with_size(
        self,
        target: int,
        method: str,
        arguments: tuple[Any, ...],
        tensors: Mapping[str, HostTensor] | Sequence[tuple[str, HostTensor]] = (),
    ) -> tuple[Any, list[tuple[str, HostTensor]], int | None]:
        """Like `ask`, with the memory of the program after the call in bytes; None if the call can't have changed
        it."""
        with self._turn:
            while self.dropped:
                self._call(0, "drop", (self.dropped.popleft(),), ())
            return self._call(target, method, arguments, tensors)

    def _call(
        self,
        target: int,
        method: str,
        arguments: tuple[Any, ...],
        tensors: Mapping[str, HostTensor] | Sequence[tuple[str, HostTensor]],
    ) -> tuple[Any, list[tuple[str, HostTensor]], int | None]:
        if self._closed:
            raise WorkerLost(f"the worker process for {self._options.backend} is lost.")
        places = self._arena.put(tensors, 0) if tensors else []
        encoded = msgspec.Raw(ENCODER.encode(arguments))
        question = WorkerCall(target, method, encoded, tuple(places), self._arena.nbytes)
        answer = self._exchange(method, ENCODER.encode(question))
        try:
            self._arena.follow(answer.arena_bytes)
            made = self._arena.take(answer.tensors, copy=True)
            self._arena.release()
            return RESULTS[method].decode(answer.result), made, answer.resident_bytes
        except (ExecutionError, msgspec.MsgspecError, OSError) as error:
            raise self._lost(f"it answered {method} with nonsense: {error}") from None

    def _exchange(self, method: str, data: bytes) -> WorkerReply:
        longest_s = self._longest_s.get(method)
        limit_s = self._options.longest_call_s
        if longest_s is not None:
            limit_s = min(limit_s, max(SHORTEST_LIMIT_S, SLACK * longest_s))
        begun_s = time.monotonic()
        self._watch.deadline_s = begun_s + limit_s
        try:
            questions, answers = cast("BinaryIO", self._process.stdin), cast("BinaryIO", self._process.stdout)
            questions.write(len(data).to_bytes(4, "little") + data)
            questions.flush()
            received = receive(answers)
        except (OSError, ExecutionError):
            received = None
        finally:
            self._watch.deadline_s = None
        if received is None:
            raise self._lost(f"it did not answer {method} within {limit_s:.0f} s" if self._watch.late else "")
        took_s = time.monotonic() - begun_s
        self._longest_s[method] = max(took_s, self._longest_s.get(method, 0.0))
        try:
            answer = REPLIES.decode(received)
        except msgspec.MsgspecError as error:
            raise self._lost(f"it answered {method} with nonsense: {error}") from None
        self.used_s += max(0.0, min(answer.used_s, took_s * _CORES))
        if answer.failure is not None:
            raise _raised(answer.failure)
        return answer

    def limit_arena(self, limit_bytes: int) -> None:
        """Limit the memory that is shared with the worker, which has been given the same limit."""
        with self._turn:
            self._arena.limit_bytes = limit_bytes

    def _lost(self, reason: str) -> WorkerLost:
        """End the process and return the error that says why."""
        self.close()
        code = self._process.returncode
        if not reason:
            reason = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
        log.warning("worker %d is lost: %s", self.pid, reason)
        return WorkerLost(f"the worker process for {self._options.backend} is lost: {reason}.")

    def close(self) -> None:
        """End the process; what it had is lost. A call under way on another thread ends first, with `WorkerLost`.
        Idempotent: after the first call, the number of the descriptor may belong to another file."""
        self._watch.over.set()
        with suppress(OSError):
            self._process.kill()
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    cast("BinaryIO", pipe).close()
            self._arena.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _raised(failure: Failure) -> errors.FusionError:
    known = getattr(errors, failure.kind, None)
    kind = known if isinstance(known, type) and issubclass(known, errors.FusionError) else ExecutionError
    return kind(failure.message, hint=failure.hint)


class WorkerBackend(Backend):
    """A backend in a worker process, which starts with the first call and again after it was lost."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._process: WorkerProcess | None = None
        self._used_before_s = 0.0
        self._memory_limited = False
        self._opened = self.process.opened
        super().__init__(self._opened.device, (), self._loaded, self._prepared)
        self.name = self._opened.name

    @property
    def process(self) -> WorkerProcess:
        """The worker that runs now."""
        if self._process is None or not self._process.alive:
            if self._process is not None:
                self._used_before_s += self._process.used_s
                self._process.close()
            self._process = WorkerProcess(self._options)
        return self._process

    @property
    def devices(self) -> tuple[str, ...]:
        return self._opened.devices

    @property
    def isolation(self) -> tuple[str, ...]:
        """Return the measures that hold for the worker that runs, with its memory limit."""
        return (*self._opened.measures, *(("memory",) if self._memory_limited else ()))

    @property
    def works_in(self) -> WorksIn:
        return cast("WorksIn", self._opened.works_in)

    @property
    def used_s(self) -> Callable[[], float]:
        return lambda: self._used_before_s + (self._process.used_s if self._process is not None else 0.0)

    def limit_memory(self, memory_bytes: int) -> None:
        """Limit the private memory of this worker and of later ones: what they have when their backend is open,
        `memory_bytes` and `SPARE_BYTES`."""
        self._options = replace(self._options, memory_bytes=memory_bytes + SPARE_BYTES)
        self._memory_limited = self._ask("limit_memory", memory_bytes + SPARE_BYTES)
        self.process.limit_arena(arena_limit_bytes(self._options))

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self.process.ask(0, method, arguments)[0]

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        return self._ask("probe", speeds)

    def warm_up(self) -> None:
        self._ask("warm_up")

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        return self._ask("unsupported", tuple(ops))

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        return self._ask("clip_scale", tuple(norms), max_norm)

    def _loaded(
        self, graph: Graph, *, grad_inputs: Sequence[str], options: StageOptions, memory_limit_bytes: int | None
    ) -> StageProgram:
        process = self.process
        asked = (encode(graph), tuple(grad_inputs), options, memory_limit_bytes)
        loaded, _, size_bytes = process.ask_with_size(0, "load", asked)
        # It has all methods; what the base class keeps of a stage is in the worker.
        return cast("StageProgram", WorkerStageProgram(process, loaded, size_bytes))

    def _prepared(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None) -> ServingProgram:
        process = self.process
        loaded, _, size_bytes = process.ask_with_size(0, "serve", (encode(graph), options, memory_limit_bytes))
        return cast("ServingProgram", WorkerServingProgram(process, loaded, size_bytes))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class _Program:
    """A program in a worker. It is dropped there by the first call after it is dropped here."""

    def __init__(self, process: WorkerProcess, loaded: LoadedProgram, size_bytes: int | None) -> None:
        self._process = process
        self._number = loaded.number
        self.size = loaded.size
        self.repeats = loaded.repeats
        self.resident_bytes = size_bytes or 0
        """Bytes of memory after the last call that may have changed it. Reading it calls nothing, so
        that any thread may read it at any time."""

    def _ask(
        self, method: str, *arguments: Any, tensors: Mapping[str, HostTensor] | Sequence[tuple[str, HostTensor]] = ()
    ) -> tuple[Any, list[tuple[str, HostTensor]]]:
        if not self._process.alive:
            raise WorkerLost("the worker process that held this stage is lost.")
        result, made, size_bytes = self._process.ask_with_size(self._number, method, arguments, tensors)
        if size_bytes is not None:
            self.resident_bytes = size_bytes
        return result, made

    def _import(self, method: str, entries: Entries, *arguments: Any) -> None:
        for piece in _pieces(entries):
            self._ask(method, *arguments, tensors=piece)

    def __del__(self) -> None:
        # The last reference may end on any thread, in the middle of a call: the next call drops it.
        self._process.dropped.append(self._number)


class WorkerStageProgram(_Program):
    """A `StageProgram` in a worker."""

    def initialise(self) -> tuple[str, ...]:
        return self._ask("initialise")[0]

    def import_state(self, entries: Entries) -> None:
        self._import("import_state", entries)

    def export_state(self, parts: Sequence[Literal["model", "optimizer"]]) -> Iterator[tuple[str, HostTensor]]:
        more, piece = self._ask("export_state", tuple(parts))
        yield from piece
        while more:
            more, piece = self._ask("export_more")
            yield from piece

    def export_entries(self, names: Sequence[str]) -> list[tuple[str, HostTensor]]:
        return self._ask("export_entries", tuple(names))[1]

    def forward(
        self, call: Call, inputs: Mapping[str, HostTensor], wanted: Sequence[str] | None = None
    ) -> dict[str, HostTensor]:
        return dict(self._ask("forward", call, None if wanted is None else tuple(wanted), tensors=inputs)[1])

    def backward(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> dict[str, HostTensor]:
        tensors = [*gradients.items(), *begun.items()]
        return dict(self._ask("backward", call, len(gradients), tensors=tensors)[1])

    def weight_gradients(self, call: Call) -> None:
        self._ask("weight_gradients", call)

    def gradient_norms(self) -> dict[str, float]:
        return self._ask("gradient_norms")[0]

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        return self._ask("export_gradients", tuple(keys))[1]

    def import_gradients(self, entries: Entries, *, add: bool) -> None:
        self._import("import_gradients", entries, add)

    def apply(self, *, scale: float, learning_rate: float) -> None:
        self._ask("apply", scale, learning_rate)

    def discard(self) -> None:
        self._ask("discard")


class WorkerServingProgram(_Program):
    """A `ServingProgram` in a worker."""

    def import_weights(self, entries: Entries) -> None:
        self._import("import_weights", entries)

    @property
    def missing(self) -> tuple[str, ...]:
        return self._ask("missing")[0]

    def joined(self, keys: Iterable[str]) -> tuple[str, ...]:
        return self._ask("joined", tuple(keys))[0]

    def allocate(self) -> None:
        self._ask("allocate")

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        chosen = None if rows is None else tuple(rows)
        return dict(self._ask("run", tuple(segments), tuple(wanted), chosen, tensors=inputs)[1])

    def forget(self, sessions: Iterable[int]) -> None:
        self._ask("forget", tuple(sessions))

    def forget_all(self) -> None:
        self._ask("forget_all")

    @property
    def cached(self) -> dict[int, int]:
        return self._ask("cached")[0]


def _pieces(entries: Entries) -> Iterator[list[tuple[str, HostTensor]]]:
    """Yield entries in pieces of about `PIECE_BYTES`, at least one, which may be empty."""
    piece, nbytes, any_yet = list[tuple[str, HostTensor]](), 0, False
    for name, tensor in entries:
        piece.append((name, tensor))
        nbytes += tensor.nbytes
        if nbytes >= PIECE_BYTES:
            yield piece
            piece, nbytes, any_yet = [], 0, True
    if piece or not any_yet:
        yield piece
