"""The known traps of tracing, each with a module that falls into it when the remedy is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.capture.tasks import ExampleInput, Task
from fusionai.ir.schema import DeviceArg, Graph
from fusionai.primitives.errors import ModelError

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """A linear layer, and a body given by the test."""

    def __init__(self, body: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = body
        self.plain = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def captured(
    body: Callable[[Net, torch.Tensor], torch.Tensor], task: Task = "regression", train: bool = True
) -> Captured:
    example = {"x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))}
    return capture(FactorySource(lambda: Net(body)), task=task, batch=(1, 8), train=train, example_inputs=example)


def ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


def assert_equal_to_module(made: Captured) -> None:
    result = self_check(made)
    assert result.forward_diff == 0.0
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-6


def test_views_are_reshapes() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        # A view of a transposed copy: its strides at capture are not those of another kernel.
        return net.fc(x).transpose(1, 2).contiguous().view(x.shape[0], -1)[:, :4]

    made = captured(body)
    assert "aten.reshape.default" in ops(made.graph)
    assert not {op for op in ops(made.graph) if "view" in op}
    assert_equal_to_module(made)


def test_sums_by_an_equation_are_products_of_matrices() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("bij,kj->bik", x, net.fc.weight)
        return torch.einsum("bij,bkj->bik", h, x)

    made = captured(body)
    assert "aten.bmm.default" in ops(made.graph)
    assert_equal_to_module(made)


def test_writing_in_place_is_functional() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.fc(x)
        h[:, 0] = 0.5
        h[:, 1:3] *= 2
        h += 1
        other = h
        other.mul_(3)
        return F.relu(h, inplace=True)

    made = captured(body)
    assert not {op for op in ops(made.graph) if op.split(".")[1].endswith("_")}
    assert_equal_to_module(made)


def test_batch_statistics_are_state_writes_in_training_only() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    example = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}
    source = FactorySource(Normed)
    trained = capture(source, task="regression", example_inputs=example)
    assert sorted(trained.graph.state_writes.values()) == [
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert_equal_to_module(trained)
    evaluated = capture(source, task="none", train=False, example_inputs=example)
    assert evaluated.graph.state_writes == {}
    assert self_check(evaluated).forward_diff == 0.0


def test_a_tensor_assigned_to_a_buffer_is_a_state_write() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.fc(x)
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(dim=(0, 1))
            return h - self.mean

    example = {"x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))}
    made = capture(FactorySource(Kept), task="regression", batch=(1, 8), example_inputs=example)
    assert set(made.graph.state_writes.values()) == {"mean"}
    assert_equal_to_module(made)


def test_a_buffer_may_not_take_the_shape_of_a_batch() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(3, 5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.fc(x)
            return self.last

    example = {"x": torch.zeros(3, 5, 4)}
    with pytest.raises(ModelError, match=r"gives its buffer 'last' another shape: \[3, 5, 4\] becomes"):
        capture(FactorySource(Kept), task="regression", batch=(1, 8), example_inputs=example)


def test_forward_may_not_change_a_parameter() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            net.fc.weight.clamp_(-0.1, 0.1)
        return net.fc(x)

    with pytest.raises(ModelError, match=r"forward changes the parameter fc\.weight, and only the optimizer may"):
        captured(body)


def test_other_names_of_an_operator_are_that_operator() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = torch.multiply(net.fc(x), torch.expm1(x))
        h = torch.subtract(torch.divide(h, 3.0), torch.negative(x))
        return torch.clip(torch.concat([h, torch.absolute(h)], -1), -1.0, 2.0) * torch.greater(x, 0.0).sum()

    made = captured(body)
    assert {"aten.mul.Tensor", "aten.expm1.default", "aten.clamp.default"} <= ops(made.graph)
    assert_equal_to_module(made)


def test_devices_are_the_stages_device() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.fc(x) + torch.zeros(x.shape[0], 1, 1, device=x.device) + torch.arange(4, device=x.device)

    made = captured(body)
    devices = [arg for node in made.graph.nodes for arg in node.kwargs.values() if isinstance(arg, DeviceArg)]
    assert devices
    assert "cpu" not in str([(node.args, node.kwargs) for node in made.graph.nodes])
    assert_equal_to_module(made)


def test_buffers_outside_the_state_dict_ship_by_value() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(4) / 4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * torch.cos(self.frequencies)

    made = capture(FactorySource(Rotary), task="regression", example_inputs={"x": torch.randn(2, 4)}, batch=(1, 4))
    assert made.owed == ("frequencies",)
    values = dict(made.state(made.owed))["frequencies"]
    assert bytes(values.data) == bytes((1.0 / 10000 ** (torch.arange(4) / 4)).numpy())
    assert_equal_to_module(made)


def test_constants_of_the_forward_ship_by_value() -> None:
    made = captured(lambda net, x: net.fc(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + net.plain)
    assert {spec.kind for spec in made.graph.params.values()} == {"parameter", "constant"}
    assert sorted(tensor.shape for _, tensor in made.state(made.owed)) == [(4,), (4,)]
    assert_equal_to_module(made)


def test_ties_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids))

    made = capture(FactorySource(Tied), task="causal_lm", sequence=(1, 16))
    (spec,) = made.graph.params.values()
    assert (spec.key, spec.aliases) == ("embed.weight", ("head.weight",))
    assert made.n_parameters == 44
    assert_equal_to_module(made)


def test_gradients_stop_where_the_module_stops_them() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.fc(x)
        with torch.no_grad():
            target = net.fc(x * 2)
        return h * target + h.detach()

    made = captured(body)
    assert "aten.detach.default" in ops(made.graph)
    assert_equal_to_module(made)


def test_transformers_masks_are_never_computed() -> None:
    # Run on fake or meta tensors its mask code asks for `.item()`, or bakes a mask tensor into the graph.
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11, "pad_token_id": 0}
    made = capture(ConfigSource(config | {"bos_token_id": 1, "eos_token_id": 2}), sequence=(1, 16))
    assert "bool" not in {spec.dtype for spec in made.graph.values.values()}
    (attention,) = [node for node in made.graph.nodes if node.op == "fusion.attention"]
    assert attention.kwargs["causal"] is True
    assert attention.kwargs["key_mask"] is None


def test_experts_are_products_of_ours() -> None:
    # The default of transformers leaves an operator of its own in the graph, and sorts tokens by the data.
    config = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11, "pad_token_id": 0}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    for train in (True, False):
        made = capture(ConfigSource(config), sequence=(1, 16), train=train)
        assert not {op for op in ops(made.graph) if op.startswith("transformers.")}
        assert "fusion.expert_linear" in ops(made.graph)
        # Against transformers' default, which adds in another order.
        result = self_check(made)
        assert result.forward_diff <= 1e-6
        assert (result.gradient_diff is not None) == train
        assert (result.gradient_diff or 0.0) <= 1e-5


def test_assertions_and_dead_code_are_dropped() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 0)
        _unused = torch.sin(net.fc(x))
        return net.fc(x).to(torch.float32)

    made = captured(body, task="none")
    assert "aten.sin.default" not in ops(made.graph)
    assert not {op for op in ops(made.graph) if "assert" in op or "constrain" in op}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda net, x: net.fc(x) if x.sum() > 0 else x, "branches on the values of tensors"),
        (lambda net, x: x[: int(x.max().item())], "values of tensors"),
        (lambda net, x: x[x > 0], "depends on the data"),
        (lambda net, x: torch.linalg.inv(net.fc(x)[:, :4]), "aten.linalg_inv"),
        (lambda net, x: net.missing(x), "AttributeError"),
        (lambda net, x: torch.stack(list(x)).reshape(3, -1), "one size of the batch"),
    ],
    ids=["branch", "item", "nonzero", "unknown", "broken", "specialised"],
)
def test_what_a_graph_cannot_hold_is_refused(body: Callable[[Net, torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        captured(body, task="none")
    assert message in refused.value.message
    assert refused.value.hint
    assert "\n" not in str(refused.value)


def test_a_refused_branch_names_its_line() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return net.fc(x)

    with pytest.raises(ModelError, match=r"test_capture_traps\.py:\d+ in body \(`if x\.sum\(\) > 0:`\)"):
        captured(body, task="none")


def test_dropout_is_semantic_and_absent_without_effect() -> None:
    class Dropping(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(p)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.fc(x))

    def count(p: float, train: bool) -> int:
        example = {"x": torch.randn(2, 4)}
        made = capture(FactorySource(lambda: Dropping(p)), task="none", train=train, example_inputs=example)
        assert not {op for op in ops(made.graph) if "aten" in op and "dropout" in op}
        return sum(node.op == "fusion.dropout" for node in made.graph.nodes)

    assert count(0.25, train=True) == 1
    assert count(0.25, train=False) == 0
    assert count(0.0, train=True) == 0


def test_plain_attention_becomes_semantic() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    example = {"x": ExampleInput(torch.randn(2, 6, 8), ("b", "s", None))}
    made = capture(FactorySource(Attend), task="regression", sequence=(1, 32), example_inputs=example)
    assert made.attention_layers == made.attention_nodes == 1
    assert_equal_to_module(made)


@pytest.mark.parametrize("task", ["classification", "regression", "module_loss", "none"])
def test_tasks_of_a_plain_module(task: Task) -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.fc(x)[:, 0]
        return h.square().mean() if task == "module_loss" else h

    made = captured(body, task=task)
    expected: Mapping[Task, set[str]] = {
        "classification": {"logits", "loss"},
        "regression": {"output", "loss"},
        "module_loss": {"loss"},
        "none": {"output"},
    }
    assert set(made.graph.outputs) == expected[task]
    assert self_check(made).forward_diff == 0.0


def test_a_length_that_the_model_treats_apart_is_named() -> None:
    """Masks cut from one buffer: the whole of it is another path."""
    config = {
        "model_type": "gpt_neo", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 31,
        "max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]], "window_size": 5,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    with pytest.raises(ModelError, match="treats a sequence of exactly 32 apart") as refused:
        capture(ConfigSource(config), batch=(1, 4), sequence=(1, 32))
    assert refused.value.hint == "Ask for at most 31."
    assert capture(ConfigSource(config), batch=(1, 4), sequence=(1, 31)).graph.nodes


def test_what_is_no_score_names_the_task_for_a_module_that_returns_its_loss() -> None:
    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).pow(2).mean()

    source = FactorySource(lambda: (OwnLoss(), {"x": torch.zeros(4, 8)}))
    with pytest.raises(ModelError, match=r"expects scores \[batch, sequence, vocabulary\].* got shape \[\]") as error:
        capture(source)
    assert "module_loss" in (error.value.hint or "")


def test_who_gives_no_examples_is_told_what_was_tried(capfd: pytest.CaptureFixture[str]) -> None:
    class TakesRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(ModelError, match="could not be traced") as error:
        capture(FactorySource(TakesRows))
    assert "given token ids" in (error.value.hint or "")
    assert "Traceback" not in capfd.readouterr().err
