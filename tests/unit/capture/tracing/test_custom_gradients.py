"""Gradients a module defines itself: kept by the graph, proven equal to the derived ones, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.tracing.custom_gradients import GradientWatch, watched_gradients
from fusionai.primitives.errors import ModelError

pytestmark = pytest.mark.slow

Function: Any = torch.autograd.Function


class Sign(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


bound_early = Sign.apply


class Reversal(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * grad, None


class Clamp(Function):
    """The identity's gradient, also where it clamps, which small inputs do not show."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-500.0, 500.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Again(Function):
    """A checkpoint of one's own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(grad)
        return None, x.grad


class Square(Function):
    """Exactly what automatic differentiation derives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Scaled(Function):
    """In the newer form, of two inputs, one of them a whole number."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, times: int = 2) -> torch.Tensor:
        return F.linear(x, weight) * times

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, ctx.times = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad * ctx.times
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None


class Net(nn.Module):
    """Two linear layers, and a body given by the test."""

    def __init__(self, body: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self, x))


def captured(body: Callable[[Net, torch.Tensor], torch.Tensor], train: bool = True) -> Captured:
    return captured_module(lambda: Net(body), train)


def captured_module(factory: Callable[[], nn.Module], train: bool = True) -> Captured:
    example = {"x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))}
    task = "regression" if train else "none"
    return capture(FactorySource(factory), task=task, batch=(1, 8), train=train, example_inputs=example)


class Repeated(nn.Module):
    """The function stands in layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(lambda net, x: bound_early(net.fc(x))) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (lambda: Net(lambda net, x: bound_early(net.fc(x))), "Sign"),
        (lambda: Net(lambda net, x: Reversal.apply(net.fc(x), 0.5)), "Reversal"),
        (lambda: Net(lambda net, x: Clamp.apply(net.fc(x))), "Clamp"),
        (lambda: Net(lambda net, x: Again.apply(net.fc, net.fc(x))), "Again"),
        (Repeated, "Sign"),
    ],
    ids=["straight-through", "reversal", "clamp", "checkpoint", "repeated"],
)
def test_a_gradient_of_its_own_is_refused(factory: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(ModelError) as refused:
        captured_module(factory)
    assert f"{__name__}.{name} at test_custom_gradients.py:" in refused.value.message
    assert "apply" in refused.value.message or "bound_early" in refused.value.message
    assert refused.value.hint


def test_forward_alone_may_be_served() -> None:
    made = captured(lambda net, x: bound_early(net.fc(x)), train=False)
    assert self_check(made).forward_diff == 0.0


def _stopped(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.fc(x)
    with torch.no_grad():
        q = torch.round(h)
    return h + (q - h).detach()


def _nested(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        still = net.out(x)
        with torch.enable_grad():
            moving = net.fc(x)
    return still * moving


def _inline(net: Net, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    still = net.fc(x)
    torch.set_grad_enabled(True)
    return net.fc(x) * still


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: Square.apply(net.fc(x)),
        lambda net, x: Scaled.apply(net.fc(x), net.fc.weight, 3),
        lambda net, x: checkpoint(net.fc, net.fc(x), use_reentrant=True),
        lambda net, x: checkpoint(net.fc, net.fc(x), use_reentrant=False),
        lambda net, x: net.fc(x) * net.fc(x).data,
        _stopped,
        _nested,
        _inline,
    ],
    ids=["square", "setup-context", "reentrant", "not-reentrant", "data", "straight-through", "nested", "inline"],
)
def test_what_a_graph_holds_has_the_modules_gradients(body: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    result = self_check(captured(body))
    assert result.forward_diff == 0.0
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-6


def _hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.fc(x)
    h.register_hook(lambda grad: -grad)
    return h


class ParameterHook(Net):
    def __init__(self) -> None:
        super().__init__(lambda net, x: net.fc(x))
        self.fc.weight.register_hook(lambda grad: grad * 2)


class EarlyHook(nn.Module):
    """Hooked before the module knows the parameter."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4))
        weight.register_hook(lambda grad: grad * 2)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ModuleHook(Net):
    def __init__(self) -> None:
        super().__init__(lambda net, x: net.fc(x))
        self.fc.register_full_backward_hook(lambda _module, grads, _outputs: grads)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: Net(_hooked), r"test_custom_gradients\.py:\d+ in _hooked"),
        (ParameterHook, "the parameter fc.weight has a hook"),
        (EarlyHook, "the parameter weight has a hook"),
        (ModuleHook, "the module fc has a backward hook"),
    ],
    ids=["activation", "parameter", "early", "module"],
)
def test_hooks_on_gradients_are_refused(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        captured_module(factory)


@torch.library.custom_op("fusiontest::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"fusiontest\.doubled\.default"):
        captured(lambda net, x: doubled(net.fc(x)))


def _proved(function: Any, *args: Any, **kwargs: Any) -> None:
    watch = GradientWatch()
    watch.note(function, args, kwargs, "")
    watch.require_derived()


@pytest.mark.parametrize("function", [Sign, Clamp, Again], ids=lambda function: function.__name__)
def test_proofs_fail_for_other_gradients(function: Any) -> None:
    args = (nn.Identity(), torch.zeros(3, 5)) if function is Again else (torch.zeros(3, 5),)
    with pytest.raises(ModelError, match="whose backward a graph can't hold"):
        _proved(function, *args)


def test_proofs_hold_at_large_sizes_by_small_ones() -> None:
    _proved(Square, torch.zeros(64, 100_000, device="meta"))
    _proved(Scaled, torch.zeros(2, 4096, device="meta"), torch.zeros(8192, 4096, device="meta"), times=3)


def test_the_watch_leaves_torch_as_it_was() -> None:
    before: Mapping[str, Any] = {
        name: getattr(torch.Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook", "data")
    }
    with watched_gradients() as watch:
        bound_early(torch.ones(2))
    assert [call.function for call in watch.calls.values()] == [Sign]
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    x = torch.ones(1)
    x.data = torch.zeros(1)
    assert x.item() == 0.0
