"""The torch backend as a whole: device choice, clipping, fingerprint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionai.backends.torch.backend import TorchBackend, fingerprint
from fusionai.backends.torch.optimizers import parameter_norms, scale_gradients
from fusionai.primitives.errors import UsageError


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1.0, 1e4])
def test_clipping_equals_clip_grad_norm_bit_for_bit(backend, max_norm):
    rng = np.random.default_rng(0)
    for trial in range(20):
        shapes = [tuple(rng.integers(1, 40, rng.integers(1, 3))) for _ in range(rng.integers(1, 30))]
        gradients = [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) * 10.0**trial for shape in shapes]
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
        total, scale = backend.clip_scale(parameter_norms(gradients), max_norm)
        assert total == expected
        scale_gradients(gradients, scale)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_norms_that_are_not_finite_are_not_hidden(backend):
    total, scale = backend.clip_scale([1.0, float("nan")], 1.0)
    assert np.isnan(total)
    assert np.isnan(scale)
    assert backend.clip_scale([1.0, float("inf")], 1.0) == (float("inf"), 0.0)


@pytest.mark.parametrize(
    ("device", "threads", "message"),
    [("tpu", None, "auto, cpu, cuda or mps"), ("cpu", 0, "at least one thread"), ("auto", -1, "at least one thread")],
)
def test_settings_that_can_not_be_are_the_users_mistake(device, threads, message):
    with pytest.raises(UsageError, match=message):
        TorchBackend(device, threads=threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="no cuda device"):
        TorchBackend("cuda")
    assert TorchBackend("auto").device in ("cpu", "mps")


def test_the_fingerprint_says_how_many_threads_computed():
    cpu = torch.device("cpu")
    one = fingerprint(cpu)
    assert fingerprint(cpu) == one
    try:
        torch.set_num_threads(2)
        assert fingerprint(cpu) != one
    finally:
        torch.set_num_threads(1)


def test_the_fingerprint_sees_a_change_of_one_bit(monkeypatch):
    cpu = torch.device("cpu")
    one = fingerprint(cpu)
    silu = torch.nn.functional.silu

    def nearly_silu(x: torch.Tensor) -> torch.Tensor:
        y = silu(x)
        with torch.no_grad():
            y.view(-1)[:1].nextafter_(torch.full((1,), 9.0))
        return y

    monkeypatch.setattr(torch.nn.functional, "silu", nearly_silu)
    assert fingerprint(cpu) != one
