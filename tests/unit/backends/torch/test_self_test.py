"""The self-test of a device, on this processor: sound kernels are right, and broken ones are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionai.backends import self_test as reporting
from fusionai.backends.self_test import DECODING, DeviceCheck, rated
from fusionai.backends.torch import live_memory, packed_linear, program, self_test
from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.self_test import TestedDevice, checks

TestedDevice.__test__ = False  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> TestedDevice:
    monkeypatch.setattr(self_test, "WIDTH", {"cpu": 128})
    monkeypatch.setattr(self_test, "TRAINED", {"cpu": (128, 32)})
    monkeypatch.setattr(self_test, "DECODED", {"cpu": 128})
    monkeypatch.setattr(self_test, "calls_per_s", lambda call, device, measure_s=0.0: (call(), 2.0)[1])
    return TestedDevice(
        backend=TorchBackend("cpu", threads=1),
        device=torch.device("cpu"),
        device_name="a processor",
        threads=1,
        versions=(),
        bits_promised=True,
        memory_bytes=2**30,
        bandwidth_bytes_per_s=1e6,
        matrix_flops_per_s={"fp32": 1e8, "bf16": 1e8},
        busy=0.0,
    )


def run(found: TestedDevice, name: str) -> DeviceCheck:
    return dict(checks(found))[name]()


NAMES = (
    "idle machine",
    *("equal bits, fp32", "equal bits, bf16", "gradients"),
    *("products, fp32", "products, bf16", "products, fp16", "products, int8", "products, int4"),
    *("memory estimate", "memory limit", "out of memory"),
    *("training rate, fp32", "training rate, bf16"),
    *("decoding rate, bf16", "decoding rate, int8", "decoding rate, int4"),
)


@pytest.mark.slow
def test_a_sound_device_is_right_in_everything(found: TestedDevice) -> None:
    results = [check() for _, check in checks(found)]
    assert tuple(name for name, _ in checks(found)) == NAMES == tuple(one.name for one in results)
    verdicts = {one.name: one.verdict for one in results if "rate" not in one.name}
    assert verdicts.pop("out of memory") == "skipped"
    assert set(verdicts.values()) == {"right"}, verdicts


def test_a_busy_machine_is_said(found: TestedDevice) -> None:
    assert run(found, "idle machine").verdict == "right"
    check = run(replace(found, busy=0.5), "idle machine")
    assert check.verdict == "slow"
    assert "50% of the processor" in check.found


def test_sums_that_depend_on_their_order_are_found(found: TestedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Iterator[float] = iter((1.0, 1.0 + 2.0**-20))
    real = program.TorchStageProgram._backward

    def unsteady(self: Any, call: Any, gradients: Any, begun: Any) -> Any:
        made = real(self, call, gradients, begun)
        factor = next(runs)
        for parameter in self._trainable.values():
            parameter.grad.mul_(factor)
        return made

    monkeypatch.setattr(program.TorchStageProgram, "_backward", unsteady)
    check = run(found, "equal bits, fp32")
    assert check.verdict == "wrong"
    assert "jobs would accuse it" in check.found


def test_a_device_that_promises_no_bits_need_not_repeat_them(
    found: TestedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "repeats_itself", lambda graph, device: False)
    check = run(found, "equal bits, fp32")
    assert check.verdict == "right"
    assert "promises no bits" in check.found


def test_a_backward_pass_with_a_wrong_factor_is_found(found: TestedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(found, "gradients").verdict == "right"
    real = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda roots, gradients: real(roots, [1.25 * one for one in gradients])
    )
    check = run(found, "gradients")
    assert check.verdict == "wrong"
    assert check.figures["off"] > self_test.SLOPE_TOLERANCE


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["one scale", "another order"])
def test_a_product_with_wrong_numbers_is_found(
    found: TestedDevice, monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    real = packed_linear.PackedLinear.__call__

    def broken(self: packed_linear.PackedLinear, x: Tensor) -> Tensor:
        made = real(self, x)
        return made * 1.02 if name == "one scale" else made.roll(1, -1)

    monkeypatch.setattr(packed_linear.PackedLinear, "__call__", broken)
    check = run(found, f"products, {form}")
    assert check.verdict == "wrong"
    assert "wrong numbers" in check.found


def test_results_that_are_not_finite_are_wrong(found: TestedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packed_linear.PackedLinear, "__call__", lambda self, x: torch.full((1, x.shape[1], 256), torch.nan)
    )
    assert run(found, "products, int8").verdict == "wrong"


def test_more_memory_than_estimated_is_wrong(found: TestedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    real = program.TorchStageProgram._forward
    kept: list[Tensor] = []

    def hungry(self: Any, *given: Any) -> Any:
        kept.append(torch.zeros(2**21))
        return real(self, *given)

    monkeypatch.setattr(program.TorchStageProgram, "_forward", hungry)
    check = run(found, "memory estimate")
    assert check.verdict == "wrong"
    assert check.figures["ratio"] > 1.1


def test_a_stage_that_is_loaded_beyond_its_limit_is_wrong(found: TestedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.TorchStageProgram, "_check_memory", lambda self: None)
    assert run(found, "memory limit").verdict == "wrong"


@pytest.mark.parametrize(("device", "slow"), [("cpu", 0.19), ("cuda", 0.49)])
def test_a_rate_below_what_such_devices_reach_is_slow(device: str, slow: float) -> None:
    judged = partial(rated, "decoding rate, bf16", "decodes", least=DECODING["bf16"], device=device, figures={})
    assert judged(share=slow).verdict == "slow"
    assert judged(share=slow + 0.02).verdict == "right"
    assert "More than all" in judged(share=1.6).found


def test_an_error_of_a_kernel_is_wrong_and_the_next_checks_run(
    monkeypatch: pytest.MonkeyPatch, found: TestedDevice
) -> None:
    def fails() -> DeviceCheck:
        raise RuntimeError("CUDA error: an illegal memory access")

    passing = DeviceCheck(name="second", verdict="right", found="fine")
    listed: list[tuple[str, Callable[[], DeviceCheck]]] = [("first", fails), ("second", lambda: passing)]
    monkeypatch.setattr(self_test, "tested", lambda backend: found)
    monkeypatch.setattr(self_test, "checks", lambda found: iter(listed))
    begun: list[str] = []
    report = reporting.self_test("cpu", 1, begun.append)
    assert [one.verdict for one in report.checks] == ["wrong", "right"]
    assert "illegal memory access" in report.checks[0].found
    assert begun[1:] == ["first", "second"]
    monkeypatch.setattr(reporting, "LONGEST_S", -1.0)
    assert {one.verdict for one in reporting.self_test("cpu", 1, begun.append).checks} == {"skipped"}


def test_live_memory_counts_until_a_tensor_is_freed() -> None:
    with live_memory.counted_memory(torch.device("cpu")) as count:
        first = torch.zeros(1000)
        view = first[:10]
        del first
        assert count.now_bytes == 4000, "a view holds the whole"
        del view
        second = torch.zeros(250)
        assert (count.now_bytes, count.peak_bytes) == (1000, 4000)
        del second
    with pytest.raises(NotImplementedError, match="mps"), live_memory.counted_memory(torch.device("mps")):
        pass
