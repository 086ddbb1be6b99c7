"""Modules too large for memory are compared with their graphs all the same, parameters in a file.

The limit is an argument, so that small modules go that way here.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import SelfCheck, self_check
from fusionai.capture.checking.shrinking import TooLarge
from fusionai.capture.models.adapter import Lora
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.ir.schema import Node, Ref
from fusionai.primitives.errors import ModelError
from harness.variants import kept

pytestmark = pytest.mark.slow


class Square(torch.autograd.Function):
    """A gradient of its own, the one that is derived."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Parameter(torch.full((width,), 0.1))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        split = [made(read).unflatten(-1, (2, -1)).transpose(1, 2) for made in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.drop(mixed)
        noisy = x + 0.1 if self.training else x
        return x + self.drop(self.down(F.gelu(self.up(noisy)))) + self.gate * Square.apply(x)


class Model(nn.Module):
    """Tied embeddings, several equal layers, dropout, a gradient of its own, another branch in evaluation."""

    def __init__(self, width: int = 16, layers: int = 3, vocabulary: int = 37) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> Captured:
    return capture(FactorySource(Model), sequence=(1, 16))


def streamed(captured: Captured) -> SelfCheck:
    return self_check(captured, memory_bytes=0)


def changed(captured: Captured, change: Callable[[Node], Node]) -> Captured:
    nodes = tuple(map(change, captured.graph.nodes))
    return dataclasses.replace(captured, graph=msgspec.structs.replace(captured.graph, nodes=nodes))


def test_a_module_is_compared_with_its_parameters_in_a_file(model: Captured) -> None:
    result = streamed(model)
    assert (result.streamed, result.reduced, result.parameters) == (True, False, model.n_parameters)
    assert (result.forward_diff, result.gradient_diff, result.evaluation_diff) == (0.0, 0.0, 0.0)
    assert not result.notes


def test_in_memory_the_same_is_found(model: Captured) -> None:
    result = self_check(model)
    assert not result.streamed
    assert (result.forward_diff, result.gradient_diff, result.evaluation_diff) == (0.0, 0.0, 0.0)


def _other_scale(node: Node) -> Node:
    if node.op == "fusion.attention" and node.path.startswith("layers.1"):
        return msgspec.structs.replace(node, kwargs={**node.kwargs, "scale": 1.0})
    return node


def _other_activation(node: Node) -> Node:
    return msgspec.structs.replace(node, kwargs={"approximate": "tanh"}) if node.op == "aten.gelu.default" else node


def _always_training(node: Node) -> Node:
    if node.op != "fusion.in_training":
        return node
    return msgspec.structs.replace(node, op="aten.alias.default", args=node.args[:1])


@pytest.mark.parametrize("change", [_other_scale, _other_activation, _always_training])
def test_a_wrong_operator_is_found(model: Captured, change: Callable[[Node], Node]) -> None:
    with pytest.raises(ModelError, match="differs from the module"):
        streamed(changed(model, change))


def _stopped(captured: Captured) -> Captured:
    """The graph with a gradient stop behind one layer norm: outputs are the same, gradients are not."""
    graph = captured.graph
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(node)
        if node.outputs == ("layer_norm_1",):
            (made,) = node.outputs
            nodes[-1] = msgspec.structs.replace(node, outputs=(f"{made}_before",))
            nodes.append(
                Node(
                    id=10**6,
                    op="aten.detach.default",
                    args=(Ref(f"{made}_before"),),
                    outputs=(made,),
                    path=node.path,
                    block=node.block,
                )
            )
    assert len(nodes) == len(graph.nodes) + 1
    values = {**graph.values, **{f"{made}_before": graph.values[made] for made in graph.values}}
    return dataclasses.replace(captured, graph=msgspec.structs.replace(graph, nodes=tuple(nodes), values=values))


def test_a_wrong_gradient_is_found_with_its_parameter(model: Captured) -> None:
    with pytest.raises(ModelError, match=r"outputs by 0\.0e\+00.*that of layers\.1\.norm"):
        streamed(_stopped(model))


class Around(nn.Module):
    """`inner` between two layers, [batch, 8] in."""

    def __init__(self, inner: Callable[[], nn.Module], shape: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner(), nn.Linear(8, 1)
        self.shape = shape

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.inner(self.first(x).unflatten(-1, self.shape))
        return {"loss": self.last(made.reshape(x.shape[0], 8)).square().mean()}


def around(inner: Callable[[], nn.Module], shape: tuple[int, ...] = (8,)) -> Captured:
    example = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
    return capture(
        FactorySource(lambda: Around(inner, shape)), task="module_loss", example_inputs=example, batch=(1, 8)
    )


class Experts(nn.Module):
    """Parts of one parameter, chosen by number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8) * 0.3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.scale
        return x + self.weights[:, 0].sum(0)


class Codes(nn.Module):
    """A sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach().abs() * 100).long().sum(-1) % 5)


class Turning(nn.Module):
    """A complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Buffer(torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 4, 2)) * self.turn).flatten(1)


class First(nn.Module):
    """The first of several results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs)[0]


class Attends(First):
    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(4, 2, batch_first=True))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs * 3)


class Copied(nn.Module):
    """Can't be built without memory: the parameter is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = copy.deepcopy(self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.one(x)) + self.two(x)


@pytest.mark.parametrize(
    ("inner", "shape"),
    [
        (lambda: nn.BatchNorm1d(8), (8,)),
        (lambda: First(nn.LSTM(4, 4, batch_first=True)), (2, 4)),
        (Attends, (2, 4)),
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), (8,)),
        (lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 4)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(inplace=True)), (8,)),
        (Experts, (8,)),
        (Codes, (8,)),
        (Turning, (8,)),
        (Copied, (8,)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else getattr(value, "__name__", ""),
)
def test_modules_as_people_write_them(inner: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    captured = around(inner, shape)
    assert streamed(captured) == dataclasses.replace(self_check(captured), streamed=True)


def test_values_saved_for_backward_may_lie_in_a_file(model: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionai.capture.checking.streamed_check.SAVED_BYTES", 0)
    monkeypatch.setattr("fusionai.capture.checking.streamed_check._SMALL_BYTES", 0)
    monkeypatch.setattr("fusionai.capture.checking.streamed_check.KEPT_BYTES", 0)
    result = streamed(model)
    assert (result.forward_diff, result.gradient_diff) == (0.0, 0.0)


def test_a_module_that_can_not_run_this_way_is_said_by_name() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                self.weight.detach().numpy()
            return x * self.weight

    with pytest.raises(TooLarge, match=r"with its parameters in a file it fails at test_streamed_check\.py:\d+ in"):
        streamed(around(Reads))


def test_a_disk_without_room_is_said(model: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    with pytest.raises(TooLarge, match="are missing"):
        streamed(model)


def test_progress_is_told(model: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionai.capture.checking.streamed_check._LINE_EVERY_S", 0.0)
    lines: list[str] = []
    self_check(model, memory_bytes=0, progress=lines.append)
    for part in ("initialisation", "evaluation of the module", "training of the graph", "gradients of the graph"):
        assert any(f"self-check: {part}, " in line for line in lines)


def test_of_a_module_above_the_limit_some_layers_of_each_kind_are_compared() -> None:
    captured = capture(FactorySource(lambda: Model(layers=7)), sequence=(1, 16))
    half = captured.n_parameters // 2
    result = self_check(captured, memory_bytes=0, most_parameters=half)
    assert (result.reduced, result.streamed) == (True, True)
    assert result.parameters <= half
    assert (result.forward_diff, result.gradient_diff, result.evaluation_diff) == (0.0, 0.0, 0.0)
    assert not self_check(captured, memory_bytes=half * 24, most_parameters=half).streamed


def test_layers_that_stand_for_no_others_are_said() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for place, layer in enumerate(self.layers):
                x = torch.tanh(layer(x)) * (1 + place)
            return x

    captured = around(Growing)
    with pytest.raises(TooLarge, match="does not stand for the whole: "):
        self_check(captured, memory_bytes=0, most_parameters=captured.n_parameters - 1)


@pytest.mark.parametrize("adapter", kept([None, Lora(4, 8.0)], [None]))
def test_a_configuration_that_can_not_be_made_smaller_is_compared_whole(
    adapter: Lora | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 32}
    captured = capture(ConfigSource(config), sequence=(1, 16), adapter=adapter)

    def refused(*_: Any) -> Captured:
        raise TooLarge("there is none.")

    monkeypatch.setattr("fusionai.capture.checking.self_check.smaller", refused)
    result = streamed(captured)
    assert (result.streamed, result.parameters) == (True, captured.n_parameters)
    assert (result.forward_diff, result.gradient_diff, result.evaluation_diff) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("memory_bytes", [0, None])
def test_draws_in_another_order_are_said(memory_bytes: int | None) -> None:
    class Hidden(nn.Module):
        """Draws once more than the trace shows."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and not torch.compiler.is_exporting():
                torch.rand(3)
            return F.dropout(x, 0.5, self.training)

    result = self_check(around(Hidden), memory_bytes=memory_bytes)
    (note,) = result.notes
    assert note.startswith("In training the module draws random numbers in another order than the graph")
    assert result.ok


def test_statistics_that_a_graph_moves_otherwise_are_found() -> None:
    def other_momentum(node: Node) -> Node:
        if node.op != "aten._native_batch_norm_legit_functional.default":
            return node
        return msgspec.structs.replace(node, args=(*node.args[:6], 0.2, *node.args[7:]))

    captured = around(lambda: nn.BatchNorm1d(8))
    with pytest.raises(ModelError, match="differs from the module"):
        streamed(changed(captured, other_momentum))
