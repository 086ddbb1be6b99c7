"""Modules that keep state where a graph has none are refused by what they keep."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fusionai.capture.capture import capture
from fusionai.capture.checking.self_check import SelfCheck, self_check
from fusionai.capture.models.source import FactorySource
from fusionai.primitives.errors import ModelError

pytestmark = pytest.mark.slow


class Keeping(nn.Module):
    """A layer, and `body` with what the module keeps besides."""

    mean: torch.Tensor

    def __init__(self, body: Callable[[Keeping, torch.Tensor], torch.Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body
        self.calls = 0
        self.seen: list[torch.Tensor] = []
        self.register_buffer("mean", torch.ones(4), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


def counting(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x * min(1.0, module.calls / 100)


def remembering(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    module.seen.append(x.detach())
    return x + len(module.seen)


def by_chance(_: Keeping, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def counted(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x


def counting_evaluations(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    module.calls += not module.training
    return x * (1 + module.calls)


def keeping_the_first(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    """Runs alike on the inputs that it saw first; a trace sees no earlier ones."""
    first = module.seen[0] if module.seen else x[0].detach()
    if not isinstance(x, FakeTensor):
        module.seen.append(first)
    return x - first


def counting_in_a_buffer(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    if not module.training:
        module.mean += 1
    return x * module.mean


def averaging(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    """In evaluation too."""
    module.mean.lerp_(x.detach().mean(dim=0), 0.1)
    return x - module.mean


def assigning(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    module.mean = torch.lerp(module.mean, x.detach().mean(dim=0), 0.1)
    return x - module.mean


def checked(make: Callable[[], nn.Module], *, memory_bytes: int | None = None) -> SelfCheck:
    example = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}
    captured = capture(FactorySource(make, "mine"), task="regression", batch=(1, 8), example_inputs=example)
    return self_check(captured, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (counting, r", which changes its attributes calls \(\d+ becomes \d+\): a graph keeps no state"),
        (remembering, "mine gives other results on the same inputs when it runs again: a graph keeps no state"),
        (
            counting_evaluations,
            r"other results in evaluation on the same inputs .* attributes calls \(\d+ becomes \d+\)",
        ),
        (by_chance, "mine gives other results on the same inputs when it runs again: a graph keeps no state"),
    ],
)
def test_other_results_the_second_time_are_refused(
    body: Callable[[Keeping, torch.Tensor], torch.Tensor], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        checked(lambda: Keeping(body))


def test_a_forward_may_change_its_inputs() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.mul_(2.0))

    assert checked(Scaling).ok


def test_an_attribute_that_changes_without_effect_is_noted() -> None:
    result = checked(lambda: Keeping(counted))
    assert result.ok
    (note,) = result.notes
    assert note.startswith("The module changes its attributes calls (")


@pytest.mark.parametrize("body", [averaging, assigning])
def test_a_buffer_that_evaluation_changes_too_is_compared_from_its_first_value(
    body: Callable[[Keeping, torch.Tensor], torch.Tensor],
) -> None:
    assert checked(lambda: Keeping(body)).ok


@pytest.mark.parametrize("memory_bytes", [None, 0])
def test_what_is_kept_of_earlier_inputs_is_refused(memory_bytes: int | None) -> None:
    with pytest.raises(ModelError, match="differs from the module") as raised:
        checked(lambda: Keeping(keeping_the_first), memory_bytes=memory_bytes)
    assert "register_buffer" in (raised.value.hint or "")


@pytest.mark.parametrize("memory_bytes", [None, 0])
def test_buffers_that_evaluation_writes_are_noted(memory_bytes: int | None) -> None:
    for body in (counting_in_a_buffer, averaging):
        result = checked(lambda body=body: Keeping(body), memory_bytes=memory_bytes)
        assert result.ok
        assert result.notes == (
            "The module writes its buffers mean in evaluation too. The evaluations of a job change no buffers.",
        )


def test_a_module_beyond_the_memory_is_asked_for_what_it_keeps() -> None:
    with pytest.raises(ModelError, match="differs from the module"):
        checked(lambda: Keeping(remembering), memory_bytes=0)
    (note,) = checked(lambda: Keeping(counted), memory_bytes=0).notes
    assert note.startswith("The module changes its attributes calls (0 becomes 2)")


def test_a_buffer_that_the_graph_leaves_as_it_was_is_refused() -> None:
    with pytest.raises(ModelError, match="changes the buffer mean in a way that the captured graph does not see"):
        checked(lambda: Keeping(assigning, persistent=False))


@pytest.mark.parametrize("by_data", [False, True])
def test_two_parameters_in_one_memory_are_refused(by_data: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            if by_data:
                self.two.weight.data = self.one.weight.data
            else:
                self.two.weight = nn.Parameter(self.one.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.tanh(self.one(x)))

    with pytest.raises(ModelError, match=r"one\.weight and two\.weight share memory without being one parameter"):
        checked(Twice)
