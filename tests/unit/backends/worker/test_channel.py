"""Places of tensors are checked against the arena before a tensor is touched."""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fusionai.backends.worker import channel
from fusionai.backends.worker.channel import (
    LARGEST_MESSAGE_BYTES,
    MOST_TENSORS,
    Arena,
    TensorPlace,
    WorkerCall,
    end_of,
    receive,
    send,
)
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor


def tensor(count: int, dtype: str = "float32") -> HostTensor:
    return host_tensor(dtype, (count,), np.arange(count).astype(dtype).tobytes())


@pytest.fixture(autouse=True, params=["without a name", "a file"])
def _kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of arenas: files are what systems other than Linux have."""
    monkeypatch.setattr(channel, "NAMED_ARENAS", request.param == "a file")


def test_tensors_come_back_as_they_were_put_and_copies_are_their_own(tmp_path: Path):
    arena = Arena.new(1 << 24, tmp_path)
    placed = {"a": tensor(5), "b": tensor(3, "int64"), "empty": tensor(0)}
    places = arena.put(placed, 0)
    assert all(place.offset % 64 == 0 for place in places)
    copies, views = dict(arena.take(places, copy=True)), dict(arena.take(places, copy=False))
    assert {name: bytes(one.data) for name, one in copies.items()} == {n: bytes(t.data) for n, t in placed.items()}
    arena.put({"other": tensor(64)}, 0)
    assert bytes(copies["a"].data) == bytes(placed["a"].data)
    assert bytes(views["a"].data) == bytes(tensor(64).data)[:20]


def test_it_grows_to_its_limit(tmp_path: Path):
    arena = Arena.new(1 << 22, tmp_path)
    arena.put({"large": tensor(1 << 19)}, 0)
    with pytest.raises(ExecutionError, match="at most 4194304 bytes"):
        arena.put({"larger": tensor((1 << 20) + 1)}, 0)


def test_released_memory_is_the_systems_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "KEPT_ARENA_BYTES", 64 << 10)
    large = tensor(100 << 10)
    arena = Arena.new(1 << 22, tmp_path)
    places = arena.put({"large": large}, 0)
    before = os.fstat(arena.descriptor).st_blocks * 512
    arena.release()
    after = os.fstat(arena.descriptor).st_blocks * 512
    assert before >= 400 << 10
    if hasattr(mmap, "MADV_REMOVE"):
        assert after <= channel.KEPT_ARENA_BYTES
    arena.put({"large": large}, 0)
    assert bytes(dict(arena.take(places, copy=False))["large"].data[-4:]) == bytes(large.data[-4:])


@pytest.mark.parametrize(
    "place",
    [
        TensorPlace("x", "float32", (4,), (), -64),
        TensorPlace("x", "float32", (4,), (), 2**60),
        TensorPlace("x", "float32", (2**40,), (), 0),
        TensorPlace("x", "float32", (-1,), (), 0),
        TensorPlace("x", "object", (4,), (), 0),
        TensorPlace("x", "float32", (4,), (2**30, 0), 0),
        TensorPlace("x", "float32", (1,) * 40, (), 0),
    ],
)
def test_a_place_that_does_not_fit_is_refused(place: TensorPlace, tmp_path: Path):
    with pytest.raises(ExecutionError, match="'x'"):
        Arena.new(1 << 22, tmp_path).take([place], copy=True)


def test_more_shared_memory_than_there_is_is_not_mapped(tmp_path: Path):
    with pytest.raises(ExecutionError, match="but there are fewer"):
        Arena.new(1 << 22, tmp_path).follow(1 << 21)


def test_too_many_tensors_are_refused(tmp_path: Path):
    places = [TensorPlace("x", "float32", (1,), (), 0)] * (MOST_TENSORS + 1)
    with pytest.raises(ExecutionError, match="at most 65536 tensors"):
        Arena.new(1 << 22, tmp_path).take(places, copy=True)


def test_messages_keep_their_bounds():
    pipe = io.BytesIO()
    question = WorkerCall(0, "probe", msgspec.Raw(b"\x90"))
    send(pipe, question)
    pipe.seek(0)
    received = receive(pipe)
    assert received is not None
    assert msgspec.msgpack.decode(received, type=WorkerCall) == question
    assert receive(pipe) is None
    with pytest.raises(ExecutionError, match="expected a message of at most"):
        receive(io.BytesIO((LARGEST_MESSAGE_BYTES + 1).to_bytes(4, "little")))


def test_an_answer_lies_behind_its_question(tmp_path: Path):
    arena = Arena.new(1 << 22, tmp_path)
    asked = arena.put({"a": tensor(5)}, 0)
    answered = arena.put({"b": tensor(5)}, end_of(asked))
    assert answered[0].offset >= end_of(asked)
    assert end_of([]) == 0
