"""A worker that crashes, hangs or takes too much is ended and started again; its daemon goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusionai.backends.interface import Call
from fusionai.backends.worker import channel
from fusionai.backends.worker.client import WorkerBackend, WorkerLost, WorkerOptions
from fusionai.backends.worker.confinement import measures
from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import StageOptions

pytestmark = pytest.mark.slow

OPTIONS = StageOptions()
EVAL = Call("eval", 0, 0)
MIB = 2**20


@pytest.fixture(scope="module")
def backend() -> Iterator[WorkerBackend]:
    made = WorkerBackend(
        WorkerOptions(backend="torch", device="cpu", threads=1, memory_bytes=256 * MIB, longest_call_s=60.0)
    )
    yield made
    made.close()


def doubling(rows: int = 4) -> Graph:
    values = {name: ValueSpec((rows,), "float32") for name in ("x", "y")}
    node = Node(id=0, op="aten.add.Tensor", args=(Ref("x"), Ref("x")), outputs=("y",))
    return Graph(name="double", symbols={}, inputs=("x",), outputs={"y": "y"}, values=values, params={}, nodes=(node,))


def scaling(rows: int = 4) -> Graph:
    values = {name: ValueSpec((rows,), "float32") for name in ("x", "w", "y")}
    node = Node(id=0, op="aten.mul.Tensor", args=(Ref("x"), Ref("w")), outputs=("y",))
    params = {"w": ParamSpec(key="w", kind="parameter", shape=(rows,), dtype="float32", trainable=True)}
    return Graph(
        name="scale", symbols={}, inputs=("x",), outputs={"y": "y"}, values=values, params=params, nodes=(node,)
    )


def numbers(*values: float) -> HostTensor:
    return host_tensor("float32", (len(values),), np.array(values, np.float32).tobytes())


def doubled(backend: WorkerBackend) -> list[float]:
    program = backend.load(doubling(), grad_inputs=(), options=OPTIONS)
    made = program.forward(EVAL, {"x": numbers(1, 2, 3, 4)})
    return np.frombuffer(made["y"].data, np.float32).tolist()


def test_tensors_cross_both_ways(backend: WorkerBackend) -> None:
    assert doubled(backend) == [2, 4, 6, 8]
    assert "files" in backend.process.opened.measures or measures()["files"]


def test_a_crash_loses_the_programs_and_nothing_else(backend: WorkerBackend) -> None:
    program = backend.load(doubling(), grad_inputs=(), options=OPTIONS)
    first = backend.process.pid
    os.kill(first, signal.SIGSEGV)
    with pytest.raises(WorkerLost, match=r"SIGSEGV|is lost"):
        program.forward(EVAL, {"x": numbers(1, 2, 3, 4)})
    with pytest.raises(WorkerLost, match="that held this stage"):
        program.forward(EVAL, {"x": numbers(1, 2, 3, 4)})
    assert doubled(backend) == [2, 4, 6, 8]
    assert backend.process.pid != first


def test_a_worker_that_hangs_is_ended() -> None:
    backend = WorkerBackend(WorkerOptions(backend="torch", device="cpu", threads=1, longest_call_s=60.0))
    try:
        program = backend.load(doubling(), grad_inputs=(), options=OPTIONS)
        process = backend.process
        process._options = replace(process._options, longest_call_s=1.0)  # of this worker, not of the next one
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="did not answer forward within 1 s"):
            program.forward(EVAL, {"x": numbers(1, 2, 3, 4)})
        assert doubled(backend) == [2, 4, 6, 8]
    finally:
        backend.close()


def test_memory_beyond_the_limit_is_refused_and_the_worker_lives(backend: WorkerBackend) -> None:
    rows = 512 * MIB // 4
    values = {"x": ValueSpec((1,), "float32"), "y": ValueSpec((rows,), "float32"), "z": ValueSpec((rows,), "float32")}
    nodes = (
        Node(id=0, op="aten.repeat.default", args=(Ref("x"), ListArg((rows,))), outputs=("y",)),
        Node(id=1, op="aten.neg.default", args=(Ref("y"),), outputs=("z",)),
    )
    graph = Graph(name="large", symbols={}, inputs=("x",), outputs={"z": "z"}, values=values, params={}, nodes=nodes)
    pid = backend.process.pid
    program = backend.load(graph, grad_inputs=(), options=OPTIONS)
    with pytest.raises(ExecutionError, match=r"memory|allocate"):
        program.forward(EVAL, {"x": numbers(1)})
    assert backend.process.pid == pid
    assert doubled(backend) == [2, 4, 6, 8]


def test_an_error_of_the_backend_keeps_its_kind_and_text(backend: WorkerBackend) -> None:
    with pytest.raises(ExecutionError, match="expected input 'x'"):
        backend.load(doubling(), grad_inputs=(), options=OPTIONS).forward(EVAL, {})


def test_a_program_is_dropped_by_the_next_call_whichever_thread_let_go_of_it(backend: WorkerBackend) -> None:
    held = [backend.load(doubling(), grad_inputs=(), options=OPTIONS)]
    letting_go = threading.Thread(target=held.clear)
    letting_go.start()
    letting_go.join()
    assert len(backend.process.dropped) >= 1
    assert doubled(backend) == [2, 4, 6, 8]
    assert len(backend.process.dropped) <= 1, "that of the call itself"


def test_shared_memory_can_be_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems that pass no descriptors on; a confined worker opens it in its own directory."""
    monkeypatch.setattr(channel, "NAMED_ARENAS", True)
    backend = WorkerBackend(WorkerOptions(backend="torch", device="cpu", threads=1))
    try:
        assert backend.devices == ("cpu",)
        assert doubled(backend) == [2, 4, 6, 8]
    finally:
        backend.close()


def test_calls_of_several_threads_take_turns(backend: WorkerBackend) -> None:
    """As when a job's compute thread works and the event loop asks for something."""
    program = backend.load(doubling(), grad_inputs=(), options=OPTIONS)
    pid, wrong = backend.process.pid, list[object]()

    def work(number: float) -> None:
        for _ in range(100):
            made = np.frombuffer(program.forward(EVAL, {"x": numbers(*[number] * 4)})["y"].data, np.float32)
            if made.tolist() != [2 * number] * 4 or backend.unsupported(("aten.add.Tensor", f"no.{number}")) != (
                f"no.{number}",
            ):
                wrong.append((number, made))

    threads = [threading.Thread(target=work, args=(float(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert backend.process.pid == pid


def test_a_closed_worker_touches_no_descriptor_that_others_have_since(tmp_path: Path) -> None:
    backend = WorkerBackend(WorkerOptions(backend="torch", device="cpu", threads=1))
    program = backend.load(doubling(), grad_inputs=(), options=OPTIONS)
    process = backend.process
    arena = process._arena.descriptor
    process.close()
    kept = tmp_path / "journal"
    other = os.open(kept, os.O_RDWR | os.O_CREAT)
    taken = other if other == arena else os.dup2(other, arena)
    try:
        process.close()
        with pytest.raises(WorkerLost):
            process.ask(program._number, "forward", (EVAL, None), {"x": numbers(*[1.0] * MIB)})  # pyright: ignore[reportAttributeAccessIssue]
        assert os.fstat(taken).st_size == 0, "the shared memory of the worker that was grew into a file of ours"
    finally:
        os.close(taken)
        if taken != other:
            os.close(other)


def test_the_size_of_a_program_is_known_without_a_call(backend: WorkerBackend) -> None:
    program = backend.load(scaling(), grad_inputs=(), options=OPTIONS)
    program.import_state([("model/w", numbers(1, 2, 3, 4))])
    assert program.resident_bytes == 16
    with backend.process._turn:
        read: list[int] = []
        reading = threading.Thread(target=lambda: read.append(program.resident_bytes))
        reading.start()
        reading.join(10.0)
    assert read == [16]
