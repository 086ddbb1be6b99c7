"""The worker's side: opens a backend, then answers questions until its daemon has gone.

Run as `python -m fusionai.backends.worker.server`, with questions on standard input and answers on standard output. It
confines itself (`confinement`) before it loads a framework. Nothing that it prints goes to the daemon as an answer:
standard output of the libraries is standard error here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from fusionai.backends.interface import Backend, ServingProgram, StageProgram
from fusionai.backends.memory import (
    keep_freed_memory,
    numpy_computes_alone,
    return_code_pages,
    return_freed_memory,
    spare_memory,
)
from fusionai.backends.registry import open_backend
from fusionai.backends.worker.channel import (
    ARGUMENTS,
    CALLS,
    ENCODER,
    PIECE_BYTES,
    Arena,
    Failure,
    LoadedProgram,
    TensorPlace,
    WorkerCall,
    WorkerReply,
    end_of,
    receive,
    send,
)
from fusionai.backends.worker.confinement import Confinement, confine, limit_memory
from fusionai.ir.schema import decode
from fusionai.primitives.errors import FusionError
from fusionai.primitives.printing import log_to_stderr
from fusionai.primitives.tensors import HostTensor

Named = list[tuple[str, HostTensor]]


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker begins. `memory_bytes`: private memory beyond what it has when its backend is open; None: no limit.
    `arena`: descriptor of the memory that it shares with its daemon, or the path of a file. `directory`: where it may
    write; None: not confined."""

    backend: str
    device: str
    threads: int | None
    arena: int | str
    arena_bytes: int
    directory: str | None
    memory_bytes: int | None


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker that has begun. `devices`: those that its backend sees. `measures`: those of `confinement` that hold."""

    name: str
    device: str
    devices: tuple[str, ...]
    works_in: str
    measures: tuple[str, ...]


RESIZING: Final = {
    *("load", "serve", "initialise", "allocate", "gradient_norms", "apply", "discard"),
    *("backward", "weight_gradients"),
    *("import_state", "import_weights", "import_gradients"),
}
"""Methods after which a program may take more or less memory than before. Other passes give back what they take."""


class Server:
    """Answers questions about one backend. Programs are numbered in the order in which they were loaded."""

    def __init__(self, backend: Backend, arena: Arena) -> None:
        self._backend = backend
        self._arena = arena
        self._programs: dict[int, StageProgram | ServingProgram] = {}
        self._exports: dict[int, Iterator[tuple[str, HostTensor]]] = {}
        self._last = 0

    def answer(self, data: bytes) -> WorkerReply:
        """Return the result of a question, or the error that it ended with."""
        begun_s = time.process_time()
        try:
            question = CALLS.decode(data)
            self._arena.follow(question.arena_bytes)
            arguments = ARGUMENTS[question.method].decode(question.arguments)
            tensors = self._arena.take(question.tensors, copy=True)
            result, made = self._call(question.target, question.method, arguments, tensors)
            places = self._arena.put(made, end_of(question.tensors))
            return self._answered(result, places, begun_s, self._resident_bytes(question, result))
        except FusionError as error:
            return self._failed(Failure(type(error).__name__, error.message, error.hint))
        except MemoryError as error:
            return self._failed(Failure("OutOfMemoryError", f"the worker's memory does not suffice: {error}.", None))
        except Exception as error:  # noqa: BLE001 - a process boundary: the daemon gets every error as a message
            first = (str(error).strip().splitlines() or [""])[0]
            return self._failed(Failure("ExecutionError", f"the backend failed: {type(error).__name__}: {first}", None))

    def _answered(
        self, result: object, places: list[TensorPlace], begun_s: float, resident_bytes: int | None
    ) -> WorkerReply:
        return WorkerReply(
            msgspec.Raw(ENCODER.encode(result)),
            tuple(places),
            self._arena.nbytes,
            time.process_time() - begun_s,
            resident_bytes,
        )

    def _resident_bytes(self, question: WorkerCall, result: object) -> int | None:
        """Return the memory of the program that was called or loaded, if the call may have changed it."""
        if question.method not in RESIZING:
            return None
        program = self._programs.get(result.number if isinstance(result, LoadedProgram) else question.target)
        return None if program is None else program.resident_bytes

    def _failed(self, failure: Failure) -> WorkerReply:
        return WorkerReply(msgspec.Raw(ENCODER.encode(None)), failure=failure)

    def _call(self, target: int, method: str, arguments: tuple[Any, ...], tensors: Named) -> tuple[object, Named]:
        if target == 0:
            return self._of_backend(method, arguments), []
        program: Any = self._programs[target]
        match method:
            case "export_state":
                self._exports[target] = program.export_state(*arguments)
                return self._piece(target)
            case "export_more":
                return self._piece(target)
            case "export_entries" | "export_gradients":
                return None, getattr(program, method)(*arguments)
            case "import_state" | "import_weights":
                return getattr(program, method)(tensors), []
            case "import_gradients":
                return program.import_gradients(tensors, add=arguments[0]), []
            case "forward":
                call, wanted = arguments
                return None, list(program.forward(call, dict(tensors), wanted).items())
            case "backward":
                call, gradients = arguments
                made = program.backward(call, dict(tensors[:gradients]), dict(tensors[gradients:]))
                return None, list(made.items())
            case "apply":
                return program.apply(scale=arguments[0], learning_rate=arguments[1]), []
            case "allocate":
                program.allocate()
                return_freed_memory()
                return_code_pages()
                return None, []
            case "run":
                segments, wanted, rows = arguments
                return None, list(program.run(segments, dict(tensors), wanted=wanted, rows=rows).items())
            case "missing" | "cached":
                return getattr(program, method), []
            case _:
                return getattr(program, method)(*arguments), []

    def _of_backend(self, method: str, arguments: tuple[Any, ...]) -> object:
        match method:
            case "load":
                graph, grad_inputs, options, limit = arguments
                # The allocator's settings are process-wide, so the stage loaded last decides.
                spare_memory() if options.recompute or options.offload else keep_freed_memory()
                return self._kept(
                    self._backend.load(
                        decode(graph), grad_inputs=grad_inputs, options=options, memory_limit_bytes=limit
                    )
                )
            case "serve":
                graph, options, limit = arguments
                return self._kept(self._backend.serve(decode(graph), options=options, memory_limit_bytes=limit))
            case "drop":
                self._programs.pop(arguments[0], None)
                self._exports.pop(arguments[0], None)
                self._backend.release_memory()
                return_freed_memory()
                return None
            case "limit_memory":
                self._arena.limit_bytes = arguments[0]
                self._backend.limit_memory(arguments[0])
                return self._backend.device == "cpu" and limit_memory(arguments[0])
            case "warm_up":
                self._backend.warm_up()
                return_freed_memory()
                return_code_pages()
                return None
            case _:
                return getattr(self._backend, method)(*arguments)

    def _kept(self, program: StageProgram | ServingProgram) -> LoadedProgram:
        self._last += 1
        self._programs[self._last] = program
        return LoadedProgram(self._last, program.size, not isinstance(program, StageProgram) or program.repeats)

    def _piece(self, target: int) -> tuple[bool, Named]:
        """Return whether more follows, and the next tensors of an export."""
        pending, piece, nbytes = self._exports[target], list[tuple[str, HostTensor]](), 0
        for name, tensor in pending:
            piece.append((name, tensor))
            nbytes += tensor.nbytes
            if nbytes >= PIECE_BYTES:
                return True, piece
        self._exports.pop(target)
        return False, piece


def begin(opening: Opening) -> tuple[Server, Opened]:
    """Confine this process, open the backend, limit its memory."""
    keep_freed_memory()
    numpy_computes_alone()
    if isinstance(opening.arena, str):
        arena = Arena.at(Path(opening.arena), opening.arena_bytes)
    else:
        arena = Arena(opening.arena, opening.arena_bytes)
    arena.follow(os.fstat(arena.descriptor).st_size)
    measures: tuple[str, ...] = ()
    if opening.directory is not None:
        measures = confine(Confinement(Path(opening.directory)))
    backend = open_backend(opening.backend, device=opening.device, threads=opening.threads)
    if opening.memory_bytes is not None and backend.device == "cpu" and limit_memory(opening.memory_bytes):
        measures = (*measures, "memory")
    opened = Opened(
        name=backend.name,
        device=backend.device,
        devices=backend.devices,
        works_in=backend.works_in,
        measures=measures,
    )
    return Server(backend, arena), opened


def serve(questions: BinaryIO, answers: BinaryIO, answer: Callable[[bytes], WorkerReply]) -> None:
    while (data := receive(questions)) is not None:
        send(answers, answer(data))


def end_with_daemon() -> None:
    """Have the system kill this process when its daemon has ended, instead of finishing a long call."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    end_with_daemon()
    log_to_stderr("WARNING")
    questions = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    data = receive(questions)
    if data is None:
        return
    try:
        server, opened = begin(msgspec.msgpack.decode(data, type=Opening))
    except FusionError as error:
        send(
            answers, WorkerReply(msgspec.Raw(b"\xc0"), failure=Failure(type(error).__name__, error.message, error.hint))
        )
        return
    send(answers, WorkerReply(msgspec.Raw(msgspec.msgpack.encode(opened))))
    serve(questions, answers, server.answer)


if __name__ == "__main__":
    main()
