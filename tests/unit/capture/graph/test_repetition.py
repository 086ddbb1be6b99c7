"""Repeated layers are traced twice and copied: the graph is that of the whole trace, whatever tells layers apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fusionai.capture.capture import capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from fusionai.ir.schema import content_hash
from harness.variants import kept
from harness.zoo import Model, models

LAYERS = 4


class Layer(nn.Module):
    """Two linear layers and an index, and a body given by the test. Counts the calls of all layers."""

    calls = 0

    def __init__(self, index: int, body: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.index, self.body = index, body
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        Layer.calls += 1
        return self.body(self, x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    def __init__(self, body: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([Layer(index, body) for index in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def assert_same_as_whole(factory: Callable[[], nn.Module]) -> tuple[int, int]:
    """How often layers were called for the graph with copies and for the whole."""
    example = {"x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))}
    counts: list[int] = []
    hashes: list[str] = []
    for whole in (False, True):
        Layer.calls = 0
        made = capture(FactorySource(factory), task="regression", batch=(1, 8), example_inputs=example, whole=whole)
        counts.append(Layer.calls)
        hashes.append(content_hash(made.graph))
        if not whole:
            assert self_check(made).ok
    assert hashes[0] == hashes[1]
    return counts[0], counts[1]


@dataclass
class Guarded:
    """A configuration that refuses to be asked for a field of which some layers have a value of their own, as those of
    Gemma 4 do."""

    width: int = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise AttributeError("ask the layer's own configuration")
        return super().__getattribute__(name)


@pytest.mark.slow
def test_a_configuration_that_refuses_a_question_is_no_obstacle() -> None:
    def made() -> nn.Module:
        stack, config = Stack(Layer.plain), Guarded()
        for layer in stack.layers:
            layer.config = config
        return stack

    copied, whole = assert_same_as_whole(made)
    assert copied < whole


@pytest.mark.slow
def test_equal_layers_are_traced_twice() -> None:
    copied, whole = assert_same_as_whole(lambda: Stack(Layer.plain))
    # The shapes of labels are found by two runs of all layers.
    assert whole - copied == LAYERS - 2


class Joining(Layer):
    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        Layer.calls += 1
        return self.plain(x) + others[0]


class TwoBatches(nn.Module):
    """Two inputs, of which only the first layer says that they have one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Joining(index, Layer.plain) for index in range(LAYERS)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, y)
        return x


@pytest.mark.slow
def test_layers_are_equal_whose_sizes_the_first_finds_to_be_one() -> None:
    example = {name: torch.zeros(3, 4) for name in ("x", "y")}
    hashes: list[str] = []
    counts: list[int] = []
    for whole in (False, True):
        Layer.calls = 0
        made = capture(FactorySource(TwoBatches), task="none", batch=(1, 8), example_inputs=example, whole=whole)
        hashes.append(content_hash(made.graph))
        counts.append(Layer.calls)
    assert hashes[0] == hashes[1]
    assert counts == [2, LAYERS]


def _by_scale(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.plain(x) * layer.scale


def _by_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.norm(layer.plain(x))


def _scaled(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.plain(x) / (layer.index + 1)


def _alternating(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.plain(x) if layer.index % 2 else x - layer.first(x).sum(-1, keepdim=True)


def _listed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.plain(x) * [0.5, 1.0, 1.5, 2.0, 2.5, 3.0][layer.index]


def _in_place(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x.add_(1.0)
    return layer.plain(x)


def _with_constant(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.plain(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Different(Stack):
    """An attribute that is no index tells layers apart."""

    def __init__(self) -> None:
        super().__init__(_by_scale)
        for place, layer in enumerate(self.layers):
            layer.scale = 1.0 if place < LAYERS - 1 else 2.0


class Kinds(Stack):
    """A number that several layers share makes kinds."""

    def __init__(self) -> None:
        super().__init__(lambda layer, x: layer.plain(x)[:, : layer.width].sum(1, keepdim=True) + x)
        for place, layer in enumerate(self.layers):
            layer.width = 2 + place % 2


class Normed(Stack):
    """Statistics move in each layer."""

    def __init__(self) -> None:
        super().__init__(_by_norm)
        for layer in self.layers:
            layer.norm = nn.BatchNorm1d(5)


class InPlace(Stack):
    """What is given to a layer is another thing afterwards."""

    def __init__(self) -> None:
        super().__init__(_in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = x * 1
            x = layer(given) + given
        return x


class Plain(Stack):
    def __init__(self) -> None:
        super().__init__(Layer.plain)


class WrittenTo(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            before = x
            x = layer(x)
            x *= 0.5
            x = x + before
        return x


class TwoInputs(Plain):
    """The second input changes after half of the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x, place < LAYERS // 2) if place else layer(x, True)
        return x


class Twice(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Remembering(Stack):
    """Each layer reads what the one before left behind."""

    def __init__(self) -> None:
        super().__init__(_remember)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _left.clear()
        return super().forward(x)


_left: list[torch.Tensor] = []


def _remember(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y = layer.plain(x)
    _left.append(layer.first(x).sum())
    return y + sum(_left[-2:-1])


class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__(Layer.plain)
        for place, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _module, _inputs, output, place=place: output * (place + 1))


class Tied(Stack):
    """All layers share one matrix."""

    def __init__(self) -> None:
        super().__init__(Layer.plain)
        for layer in self.layers:
            layer.first.weight = self.layers[0].first.weight


APART: dict[str, Callable[[], nn.Module]] = {
    "index": functools.partial(Stack, _scaled),
    "even": functools.partial(Stack, _alternating),
    "listed": functools.partial(Stack, _listed),
    "in-place": InPlace,
    "constant": functools.partial(Stack, _with_constant),
    "attribute": Different,
    "kinds": Kinds,
    "statistics": Normed,
    "written": WrittenTo,
    "argument": TwoInputs,
    "twice": Twice,
    "remembering": Remembering,
    "hooked": Hooked,
    "tied": Tied,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", kept(APART, ["index", "constant", "attribute", "kinds", "argument", "twice", "hooked"])
)
def test_what_tells_layers_apart_stays(name: str) -> None:
    factory = APART[name]
    assert_same_as_whole(factory)


@pytest.mark.long
@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_each_model_of_the_zoo_has_the_graph_of_its_whole_trace(model: Model) -> None:
    hashes = {
        content_hash(
            capture(
                model.source,
                task=model.task,
                batch=(1, 4),
                sequence=(1, model.positions),
                example_inputs=model.examples,
                whole=whole,
            ).graph
        )
        for whole in (False, True)
    }
    assert len(hashes) == 1
