"""What a worker does for its backend, called without a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fusionai.backends.state import ProgramSize
from fusionai.backends.worker.channel import ENCODER, Arena, WorkerCall
from fusionai.backends.worker.server import Server
from harness.null_backend import NullStageProgram


@dataclass
class Card:
    """A backend on a card that notes what it is asked."""

    device: str = "cuda"
    asked: list[Any] = field(default_factory=list[Any])

    def limit_memory(self, memory_bytes: int) -> None:
        self.asked.append(memory_bytes)

    def release_memory(self) -> None:
        self.asked.append("released")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(Card(), Arena.new(2**20, tmp_path))  # pyright: ignore


def test_a_dropped_program_s_memory_goes_back_to_the_card(server: Server) -> None:
    server._of_backend("drop", (1,))
    assert server._backend.asked == ["released"]  # pyright: ignore


def test_a_card_s_memory_is_limited_by_its_backend_and_not_by_the_system(server: Server) -> None:
    assert server._of_backend("limit_memory", (2**19,)) is False
    assert server._backend.asked == [2**19]  # pyright: ignore
    assert server._arena.limit_bytes == 2**19


@pytest.mark.parametrize("repeats", [True, False])
def test_the_daemon_knows_whether_a_stage_repeats_its_bits(server: Server, repeats: bool) -> None:
    program = NullStageProgram.__new__(NullStageProgram)
    program.size, program.repeats = ProgramSize(1, 2), repeats
    assert server._kept(program).repeats == repeats
    served: Any = SimpleNamespace(size=ProgramSize(1, 2))
    assert server._kept(served).repeats


def test_a_lack_of_memory_is_told_apart_from_other_failures(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def failure(error: Exception) -> str:
        def call(*_: object) -> None:
            raise error

        monkeypatch.setattr(server, "_call", call)
        made = server.answer(ENCODER.encode(WorkerCall(0, "drop", msgspec.Raw(ENCODER.encode((1,))), (), 2**20)))
        assert made.failure is not None
        return made.failure.kind

    assert (failure(MemoryError()), failure(ValueError())) == ("OutOfMemoryError", "ExecutionError")
