"""A device's pace: what is run for it, and what is made of two times."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from fusionai.backends.interface import Call, Speeds
from fusionai.backends.null.backend import NullBackend
from fusionai.backends.null.program import NullStageProgram
from fusionai.backends.pace import LARGE, SMALL, block_graph, measured_pace, with_pace
from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.cost import block_costs
from fusionai.primitives.tensors import HostTensor


class Machine:
    """Takes `call_s` for a call and computes at `speed`. Runs what it is given: it must run."""

    def __init__(self, device: str, call_s: float, speed: float) -> None:
        self.device, self.call_s, self.speed = device, call_s, speed
        self.sizes = iter((SMALL, LARGE[device]))
        self.load = NullBackend().load

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        (cost,) = block_costs(block_graph(*next(self.sizes)), {}, training=True)
        computed_s = (cost.forward_flops + cost.backward_flops) / self.speed
        called_s = cost.calls * self.call_s
        return called_s + computed_s if self.device == "cpu" else max(called_s, computed_s)


@pytest.mark.parametrize(("call_s", "speed"), [(1e-4, 3e10), (0.0, 1e9), (1e-2, 1e12)])
def test_two_times_give_two_figures(call_s: float, speed: float):
    machine = Machine("cpu", call_s, speed)
    pace = measured_pace(machine, machine.seconds)
    assert pace is not None
    assert pace.flops_per_s == pytest.approx(speed)
    assert pace.call_s == pytest.approx(call_s, abs=1e-9)


def test_where_calls_are_made_while_computing_the_longer_of_both_counts():
    machine = Machine("cuda", 2e-5, 2e13)
    pace = measured_pace(machine, machine.seconds)
    assert pace is not None
    assert pace.flops_per_s == pytest.approx(2e13)
    assert pace.call_s == pytest.approx(2e-5)


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
    assert run_before[0] == 4, "two of each size"


def test_a_machine_for_which_size_makes_no_difference_has_no_pace():
    machine = Machine("cpu", 1e-4, 1e9)
    speeds = Speeds(1.0, 2.0, 3.0)
    assert measured_pace(machine, lambda call: 1.0) is None
    machine = Machine("cpu", 1e-4, 1e9)
    assert with_pace(speeds, machine, lambda call: 1.0) is speeds


@pytest.mark.parametrize("size", [SMALL, *LARGE.values()])
def test_the_block_is_one_of_a_language_model(size: tuple[int, int]):
    width, tokens = size
    graph = block_graph(width, tokens)
    (cost,) = block_costs(graph, {}, training=True)
    assert cost.parameter_bytes == 4 * (10 * width**2 + 2 * width)
    products = 2 * 10 * width**2 * tokens
    assert products < cost.forward_flops < 1.7 * products
    assert cost.calls == len(graph.nodes)
    assert {"fusion.attention", "aten.linear.default", "aten.reshape.default"} <= set(cost.ops)


def test_torch_reports_it():
    report = TorchBackend("cpu", threads=1).probe()
    assert report.block_flops_per_s > 0
    assert 0 < report.call_s < 1
    assert TorchBackend("cpu").probe(report.speeds).speeds == report.speeds
