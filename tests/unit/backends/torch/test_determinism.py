"""Which devices and stages promise bits, and under which settings a card trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fusionai.backends.torch import backend as torch_backend
from fusionai.backends.torch import determinism
from fusionai.backends.torch.backend import fingerprint
from fusionai.backends.torch.determinism import (
    card_repeats,
    long_attention,
    promises_bits,
    repeated_bits,
    repeating,
    repeats_itself,
)
from fusionai.ir.schema import Arg, Graph, ListArg, Node, Ref, ValueSpec

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


def settings() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def test_only_devices_whose_kernels_are_known_to_repeat_their_bits_promise_them(monkeypatch):
    assert [promises_bits(device) for device in (CPU, CUDA, MPS)] == [True, True, False]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert [promises_bits(device) for device in (CPU, CUDA)] == [True, False]
    assert fingerprint(CUDA) == "", "nothing is computed there"


def test_a_card_that_computes_other_bits_the_second_time_has_an_empty_fingerprint(monkeypatch):
    monkeypatch.setattr(torch_backend, "repeated_bits", lambda device, compute: None)
    assert fingerprint(CPU) == ""


def test_bits_are_those_of_two_equal_runs_with_deterministic_kernels():
    seen: list[tuple[bool, bool]] = []

    def equal(device: torch.device) -> list[Tensor]:
        seen.append(settings())
        return [torch.arange(3.0)]

    found = repeated_bits(CUDA, equal)
    assert found is not None
    assert [bytes(one) for one in found] == [torch.arange(3.0).numpy().tobytes()]
    assert seen == [(True, False), (True, False)]
    made: Iterator[Tensor] = iter([torch.zeros(3), torch.full((3,), -0.0)])
    assert repeated_bits(CUDA, lambda device: [next(made)]) is None

    def refused(device: torch.device) -> list[Tensor]:
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    assert repeated_bits(CUDA, refused) is None


def test_the_cpu_computes_once_and_its_settings_stay():
    calls: list[tuple[bool, bool]] = []
    repeated_bits(CPU, lambda device: calls.append(settings()) or [torch.zeros(1)])
    assert calls == [(False, False)]


def test_settings_hold_in_the_block_only():
    with repeating(CUDA):
        assert settings() == (True, False)
        with repeating(CUDA, strict=False):
            assert settings() == (True, True)
        assert settings() == (True, False)
    assert settings() == (False, False)
    with repeating(CPU):
        assert settings() == (False, False)


@pytest.mark.slow
def test_the_settings_load_no_compiler():
    code = (
        "import sys, torch\nfrom fusionai.backends.torch.determinism import repeating\n"
        "with repeating(torch.device('cuda')): pass\nprint('torch._inductor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_trial_is_long_and_has_gradients_in_both_precisions():
    made = long_attention(CPU)
    assert {tuple(one.shape[2:]) for one in made} == {(1024, 64)}
    assert [one.dtype for one in made] == [torch.float32] * 4 + [torch.bfloat16] * 4


def one_node(op: str, *more: Arg, dtype: str = "float32", rank: int = 2) -> Graph:
    spec = ValueSpec((4,) * rank, dtype)
    node = Node(id=0, op=op, args=(Ref("x"), *more), outputs=("y",))
    return Graph(name="one", inputs=("x",), outputs={"y": "y"}, values={"x": spec, "y": spec}, params={}, nodes=(node,))


@pytest.mark.parametrize(
    ("graph", "on_a_card"),
    [
        (one_node("aten.relu.default"), True),
        (one_node("aten.avg_pool3d.default"), False),
        (one_node("aten.cumsum.default", 0), False),
        (one_node("aten.cumsum.default", 0, dtype="int64"), True),
        (one_node("aten.pad.default", ListArg((1, 1)), "reflect"), False),
        (one_node("aten.pad.default", ListArg((1, 1)), "constant"), True),
        (one_node("aten.cross_entropy_loss.default"), True),
        (one_node("aten.cross_entropy_loss.default", rank=3), False),
        (one_node("fusion.linear_attention"), False),
    ],
)
def test_operators_without_a_deterministic_kernel_promise_nothing_on_a_card(
    graph: Graph, on_a_card: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(determinism, "card_repeats", lambda device: True)
    assert repeats_itself(graph, CPU)
    assert repeats_itself(graph, CUDA) == on_a_card
    monkeypatch.setattr(determinism, "card_repeats", lambda device: False)
    assert not repeats_itself(graph, CUDA)


def test_a_card_is_tried_once_and_a_device_of_another_kind_never(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []

    def trial(device: torch.device, compute: object) -> list[memoryview]:
        tried.append(str(device))
        return []

    monkeypatch.setattr(determinism, "repeated_bits", trial)
    try:
        assert [card_repeats(device) for device in (CUDA, CUDA, MPS)] == [True, True, False]
    finally:
        card_repeats.cache_clear()
    assert tried == ["cuda"]
