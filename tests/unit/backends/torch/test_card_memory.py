"""When a device's memory runs out: what is unused goes back, the work is tried again, then figures are given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionai.backends.interface import Call
from fusionai.backends.torch import card_memory, program
from fusionai.backends.torch.card_memory import BEYOND_LENT, free_and_total_bytes, limit_card_memory, with_memory
from fusionai.primitives.errors import ExecutionError

CARD = torch.device("mps")
"""Stands for a card: the functions that ask a real one are replaced."""


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices whose unused memory was released, in turn."""
    seen: list[torch.device] = []
    monkeypatch.setattr(card_memory, "release_unused", seen.append)
    monkeypatch.setattr(card_memory, "_figures", lambda device: "Of 8 GB, 1 GB are free.")
    return seen


class Failing:
    """Work that runs out of memory so many times and then succeeds."""

    def __init__(self, times: int, error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("tried 2 GiB")):
        self.times, self.error, self.held = times, error, list[weakref.ref[Tensor]]()

    def __call__(self) -> str:
        held = torch.zeros(3)
        self.held.append(weakref.ref(held))
        if self.times:
            self.times -= 1
            raise self.error()
        return "done"


def test_work_that_runs_out_of_memory_once_is_tried_again_when_its_tensors_are_gone(released, monkeypatch):
    work = Failing(1)
    gone: list[bool] = []
    monkeypatch.setattr(card_memory, "release_unused", lambda device: gone.append(work.held[0]() is None))
    assert with_memory(CARD, "a pass", work) == "done"
    assert gone == [True]


def test_the_second_time_it_is_refused_with_the_figures(released):
    with pytest.raises(
        ExecutionError, match=r"a pass: the memory of mps ran out twice. Of 8 GB, 1 GB are free"
    ) as told:
        with_memory(CARD, "a pass", Failing(2))
    assert "--max-memory" in str(told.value)
    assert "tried 2 GiB" in str(told.value)
    assert released == [CARD, CARD]


def test_work_that_changed_something_is_not_tried_again(released):
    work = Failing(1)
    with pytest.raises(ExecutionError, match=r"the update: the memory of mps ran out. Of"):
        with_memory(CARD, "the update", work, again=False)
    assert work.times == 0
    assert len(work.held) == 1
    assert released == [CARD]


def test_other_errors_are_not_of_memory(released):
    with pytest.raises(ValueError, match="no"):
        with_memory(CARD, "a pass", Failing(1, lambda: ValueError("no")))
    assert released == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_stage_whose_forward_runs_out_of_memory_goes_on(kit, load, released, monkeypatch, times):
    """It keeps nothing of a failed try: the second one has the same results, and a later microbatch may be computed."""
    fed = {"ids": kit.host(np.arange(10).reshape(2, 5)), "labels": kit.host(np.zeros((2, 5), dtype=np.int64))}
    one = {"loss": kit.host(np.asarray(np.float32(1.0)))}
    calm, stage = load(kit.mlp_graph()), load(kit.mlp_graph())
    expected = calm.forward(Call("train", 0, 0), fed)
    calm.backward(Call("train", 0, 0), one)

    def on_card(device: torch.device, *args: Any, **settings: Any) -> Any:
        return with_memory(CARD, *args, **settings)

    monkeypatch.setattr(program, "with_memory", on_card)
    monkeypatch.setattr(program, "to_host", _failing(program.to_host, times))
    if times == 2:
        with pytest.raises(ExecutionError, match="microbatch 0 of step 0: the memory of mps ran out twice"):
            stage.forward(Call("train", 0, 0), fed)
    found = stage.forward(Call("train", 0, 0), fed)
    assert bytes(found["loss"].data) == bytes(expected["loss"].data)
    stage.backward(Call("train", 0, 0), one)
    assert stage.gradient_norms() == calm.gradient_norms()


def test_an_operator_that_runs_out_of_memory_says_so_and_not_that_it_failed(kit, load, released, monkeypatch):
    fed = {"ids": kit.host(np.arange(10).reshape(2, 5)), "labels": kit.host(np.zeros((2, 5), dtype=np.int64))}
    stage = load(kit.mlp_graph())
    stage.forward(Call("eval", 0, 0), fed)

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for interpreter in stage._compiled._interpreters.values():
        object.__setattr__(interpreter.steps[1], "run", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        stage.forward(Call("eval", 0, 1), fed)


def _failing(work: Callable[..., Any], times: int) -> Callable[..., Any]:
    left = [times]

    def run(*args: Any, **settings: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("tried 2 GiB")
        return work(*args, **settings)

    return run


def test_what_is_free_on_a_card_includes_this_processs_unused_blocks_and_its_limit_is_a_share(monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (6, 8))
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *given: asked.append(given), raising=False)
    card = torch.device("cuda", 1)
    assert free_and_total_bytes(card) == (6, 8)
    assert asked == ["emptied", card]
    limit_card_memory(card, 2)
    limit_card_memory(torch.device("cuda"), 16)
    assert asked[3::2] == [(pytest.approx(0.25 * BEYOND_LENT), 1), (1.0, 0)], "a card without a number is the first"
    limit_card_memory(torch.device("cpu"), 2)
