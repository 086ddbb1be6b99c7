"""Speeds are those of this process: what others do on the machine at that moment is not measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from fusionai.backends import measurement
from fusionai.backends.torch import backend

CPU = torch.device("cpu")


class Machine:
    """A call computes 10 ms; on this machine that takes `held_up` times as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, held_up: float, threads: int) -> None:
        self.computed_s = 0.0
        self.held_up = held_up
        monkeypatch.setattr(time, "thread_time", lambda: self.computed_s)
        monkeypatch.setattr(time, "perf_counter", lambda: self.computed_s * self.held_up)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def call(self) -> None:
        self.computed_s += 0.01


def test_a_single_thread_is_timed_by_what_it_computes(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, held_up=3.5, threads=1)
    assert backend.calls_per_s(machine.call, CPU) == pytest.approx(100)
    assert machine.computed_s == pytest.approx(0.01 + measurement.MEASURE_S, abs=0.02)


def test_several_threads_and_other_devices_are_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, held_up=3.5, threads=4)
    assert backend.calls_per_s(machine.call, CPU) == pytest.approx(100 / 3.5)
    machine = Machine(monkeypatch, held_up=2.0, threads=1)
    monkeypatch.setattr(backend, "_synchronise", lambda device: None)
    assert backend.calls_per_s(machine.call, torch.device("cuda")) == pytest.approx(50)


def test_a_machine_that_hardly_computes_is_not_measured_for_ever(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, held_up=100.0, threads=1)
    assert backend.calls_per_s(machine.call, CPU) == pytest.approx(100)
    assert machine.computed_s <= 0.01 + measurement.LONGEST_MEASURE_S / 100 + 0.01


def test_copies_are_measured_both_ways_and_a_processor_has_none() -> None:
    def fixed(call: Callable[[], object], device: torch.device, measure_s: float) -> float:
        return 100.0

    assert backend.measured_copies(CPU, fixed) == 0.0
    assert backend.measured_copies(torch.device("meta"), fixed) == 2 * backend.HOST_COPY_BYTES * 100


def test_a_start_of_a_kernel_is_the_time_of_many_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((5.0, 5.25))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert backend.measured_launch(CPU) == pytest.approx(0.25 / backend.LAUNCHES)
