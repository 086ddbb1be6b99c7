"""A device's pace: what is run for it, and what is made of three times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.backends.interface import Call, Speeds
from fusionai.backends.measurement import (
    LARGE,
    NARROW,
    SMALL,
    Sample,
    block_graph,
    card_of,
    fitted,
    measured_pace,
    with_pace,
)
from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.cost import block_costs
from fusionai.primitives.errors import UsageError
from fusionai.primitives.pace import TrainingSpeed
from fusionai.primitives.tensors import HostTensor
from harness.null_backend import NullBackend, NullStageProgram


class Machine:
    """Takes `call_s` for a call, `byte_s` for a byte and computes at `speed`. Runs what it is given: it must run."""

    def __init__(self, device: str, call_s: float, speed: float, byte_s: float = 0.0, half: float = 2.0) -> None:
        pace = TrainingSpeed(flops_per_s=speed, call_s=call_s, byte_s=byte_s)
        self.device, self.pace, in_half = device, pace, msgspec.structs.replace(pace, flops_per_s=half * speed)
        self.runs = iter(((SMALL, pace), (NARROW[device], pace), (LARGE[device], pace), (LARGE[device], in_half)))
        self.load = NullBackend().load

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        size, pace = next(self.runs)
        (cost,) = block_costs(block_graph(*size), {}, training=True)
        computed_s = pace.seconds(cost.forward_flops + cost.backward_flops, 0, cost.moved_bytes)
        called_s = self.pace.seconds(0, cost.calls, 0)
        return called_s + computed_s if self.device == "cpu" else max(called_s, computed_s)


@pytest.mark.parametrize(
    ("call_s", "speed", "byte_s"), [(1e-4, 3e10, 0.0), (0.0, 1e9, 1e-9), (1e-2, 1e12, 1e-10), (4e-5, 8e10, 5e-11)]
)
def test_three_times_give_three_figures(call_s: float, speed: float, byte_s: float):
    machine = Machine("cpu", call_s, speed, byte_s)
    pace = measured_pace(machine, machine.seconds)
    assert pace is not None
    assert pace.flops_per_s == pytest.approx(speed)
    assert pace.call_s == pytest.approx(call_s, abs=1e-9)
    assert pace.byte_s == pytest.approx(byte_s, abs=1e-14)


def test_where_calls_are_made_while_computing_the_longer_of_both_counts():
    machine = Machine("cuda", 2e-5, 2e13, 1e-12)
    pace = measured_pace(machine, machine.seconds)
    assert pace is not None
    assert pace.flops_per_s == pytest.approx(2e13)
    assert pace.call_s == pytest.approx(2e-5)
    assert pace.byte_s == pytest.approx(1e-12)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("half", [0.25, 4.0])
def test_half_precision_has_a_speed_of_its_own(device: str, half: float):
    machine = Machine(device, 1e-6, 3e10, 1e-12, half)
    pace = measured_pace(machine, machine.seconds)
    assert pace is not None
    assert pace.half_flops_per_s == pytest.approx(half * 3e10, rel=1e-3)
    assert pace.at("bf16").flops_per_s == pace.half_flops_per_s
    assert pace.at("fp32") == pace
    assert pace.slowed(2.0).half_flops_per_s == pytest.approx(pace.half_flops_per_s / 2)


@given(
    st.lists(
        st.builds(Sample, st.floats(1e3, 1e15), st.integers(0, 10**4), st.floats(0, 1e12), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_was_measured_no_figure_is_below_zero(samples: list[Sample]):
    pace = fitted(samples)
    if pace is not None:
        assert 0 < pace.flops_per_s < math.inf
        assert 0 <= pace.call_s < math.inf
        assert 0 <= pace.byte_s < math.inf


def test_hardly_any_bytes_are_none():
    pace = fitted([Sample(1000.0, 0, 0.0, 2.0), Sample(1000.0, 0, 2.225073858507e-311, 1.0)])
    assert pace is not None
    assert math.isfinite(pace.byte_s)


def test_a_block_that_noise_made_too_short_takes_no_figure_below_zero():
    """The narrow one would have bytes that give time back."""
    samples = [Sample(1e4, 100, 1e5, 3e-3), Sample(1e9, 100, 1e8, 9e-3), Sample(5e9, 100, 2e8, 53e-3)]
    pace = fitted(samples)
    assert pace is not None
    assert pace.byte_s == 0.0
    for sample in samples:
        assert pace.seconds(sample.flops, sample.calls, sample.moved_bytes) == pytest.approx(sample.took_s, rel=0.3)


def test_a_block_does_not_compute_faster_than_a_matrix_product_by_far():
    """Other programs slowed the narrow block down: its bytes seem to explain all of the time of the wide one."""
    samples = [Sample(1e4, 100, 1e5, 3e-3), Sample(1e9, 100, 1e8, 53e-3), Sample(5e9, 100, 1e8, 53.1e-3)]
    free = fitted(samples)
    assert free is not None
    assert free.flops_per_s > 1e13
    held = fitted(samples, most_flops_per_s=3e11)
    assert held is not None
    assert held.flops_per_s <= 3e11
    assert fitted(samples, most_flops_per_s=1e3) is None
    speeds, machine = Speeds(1.0, 2.0, 3.0), Machine("cpu", 1e-4, 1e9)
    assert with_pace(speeds, machine, machine.seconds).pace is None
    machine = Machine("cpu", 1e-4, 1e9)
    found = with_pace(replace(speeds, flops_per_s=1e9), machine, machine.seconds).pace
    assert found is not None
    assert found.flops_per_s == pytest.approx(1e9)


def test_what_the_first_two_microbatches_compile_is_not_in_the_time(monkeypatch: pytest.MonkeyPatch):
    ran, run_before, plain = [0], list[int](), NullStageProgram.backward

    def counted(self: NullStageProgram, call: Call, gradients: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
        ran[0] += 1
        return plain(self, call, gradients)

    monkeypatch.setattr(NullStageProgram, "backward", counted)
    machine = Machine("cpu", 1e-4, 1e9)

    def seconds(call: Callable[[], object]) -> float:
        run_before.append(ran[0])
        return machine.seconds(call)

    assert measured_pace(machine, seconds) is not None
    assert run_before[0] == 8, "two of each size, and of the large one in bfloat16"


def test_a_machine_for_which_size_makes_no_difference_has_no_pace():
    machine = Machine("cpu", 1e-4, 1e9)
    speeds = Speeds(1.0, 2.0, 3.0)
    assert measured_pace(machine, lambda call: 1.0) is None
    machine = Machine("cpu", 1e-4, 1e9)
    assert with_pace(speeds, machine, lambda call: 1.0) == speeds


@pytest.mark.parametrize("size", [SMALL, *NARROW.values(), *LARGE.values()])
def test_the_block_is_one_of_a_language_model(size: tuple[int, int, int]):
    width, tokens, rows = size
    graph = block_graph(*size)
    (cost,) = block_costs(graph, {}, training=True)
    assert cost.parameter_bytes == 4 * (10 * width**2 + 2 * width)
    products = 2 * 10 * width**2 * tokens * rows
    assert products < cost.forward_flops < 1.7 * products
    assert cost.calls == len(graph.nodes)
    assert {"fusion.attention", "aten.linear.default", "aten.reshape.default"} <= set(cost.ops)


@pytest.mark.slow
def test_torch_reports_it():
    report = TorchBackend("cpu", threads=1).probe()
    assert report.pace is not None
    assert report.pace.flops_per_s > 0
    assert 0 <= report.pace.call_s < 1
    assert 0 <= report.pace.byte_s < 1
    assert TorchBackend("cpu").probe(report.speeds).speeds == report.speeds


@pytest.mark.parametrize(
    ("device", "card"),
    [("auto", ("auto", None)), ("cpu", ("cpu", None)), ("cuda", ("cuda", None)), ("cuda:3", ("cuda", 3))],
)
def test_a_card_is_named_by_kind_and_number(device: str, card: tuple[str, int | None]):
    assert card_of(device, "torch", ("cpu", "cuda")) == card


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "auto:1", "cuda:", "cuda:-1", "cuda:x", ""])
def test_a_card_that_cannot_be_meant_is_refused(device: str):
    with pytest.raises(UsageError, match="expected a device auto, cpu or cuda for backend torch"):
        card_of(device, "torch", ("cpu", "cuda"))
