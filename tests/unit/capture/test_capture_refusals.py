"""What no graph can hold is refused by its name, the model's line and what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fusionai.capture.capture import capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from fusionai.primitives.errors import ModelError

Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class _Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True)
        self.body = body

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.body(self.rnn, self.first(x)).square().mean()}


def _ctc(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    targets, lengths = torch.ones(x.shape[0], 2, dtype=torch.int64), torch.full((x.shape[0],), 5)
    return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), targets, lengths, lengths - 3)


def _packed(rnn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    packed = pack_padded_sequence(x, torch.tensor([5, 3, 2, 1]), batch_first=True)
    return rnn(packed)[0].data


def _directional(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize(
    ("body", "name", "line"),
    [
        (_ctc, "torch.nn.functional.ctc_loss", "F.ctc_loss("),
        (_packed, "torch.nn.utils.rnn.pack_padded_sequence", "packed = pack_padded_sequence("),
        (_directional, "torch.func.jvp", "torch.func.jvp("),
    ],
)
def test_a_call_is_refused_by_name_and_line(body: Body, name: str, line: str) -> None:
    examples = {"x": torch.zeros(4, 5, 8)}
    with pytest.raises(ModelError) as raised:
        capture(FactorySource(lambda: _Net(body)), task="module_loss", batch=(1, 8), example_inputs=examples)
    assert f"calls {name} at test_capture_refusals.py:" in raised.value.message
    assert line in raised.value.message
    assert raised.value.hint


def test_the_functions_are_as_before_after_a_refusal() -> None:
    before = (torch.ctc_loss, torch._VF._pack_padded_sequence)
    with pytest.raises(ModelError):
        capture(
            FactorySource(lambda: _Net(_packed)),
            task="module_loss",
            batch=(1, 8),
            example_inputs={"x": torch.zeros(4, 5, 8)},
        )
    assert (torch.ctc_loss, torch._VF._pack_padded_sequence) == before


@pytest.mark.slow
def test_a_size_that_values_decide_is_named_as_the_reason() -> None:
    def chosen(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.where(x[:, 0] > 0)
        return x[rows, 0, columns]

    examples = {"x": torch.zeros(4, 5, 8)}
    with pytest.raises(ModelError, match=r"aten\.nonzero.*the size of its result depends on values"):
        capture(FactorySource(lambda: _Net(chosen)), task="module_loss", batch=(1, 8), example_inputs=examples)


def test_a_root_of_a_size_is_refused_with_what_to_write_instead() -> None:
    def captured(body: Body) -> None:
        examples = {"x": torch.zeros(4, 5, 8)}
        capture(FactorySource(lambda: _Net(body)), task="module_loss", batch=(1, 8), example_inputs=examples)

    with pytest.raises(ModelError, match=r"fraction of a size that varies.* x\.new_full\(\(\), n\) \*\* 0\.5"):
        captured(lambda _, x: x / x.shape[0] ** 0.5)
    captured(lambda _, x: x / x.new_full((), x.shape[0]) ** 0.5)


def test_a_number_made_of_a_tensor_is_refused_as_such() -> None:
    examples = {"x": torch.zeros(4, 5, 8)}
    source = FactorySource(lambda: _Net(lambda _, x: x / x.abs().max().item()))
    with pytest.raises(
        ModelError, match=r"uses aten\._local_scalar_dense.*a Python number of a tensor's value"
    ) as raised:
        capture(source, task="module_loss", batch=(1, 8), example_inputs=examples)
    assert "other operation" not in raised.value.message


def test_a_loss_without_a_gradient_is_refused() -> None:
    examples = {"x": torch.zeros(4, 5, 8)}
    source = FactorySource(lambda: _Net(lambda _, x: x.detach()))
    captured = capture(source, task="module_loss", batch=(1, 8), example_inputs=examples)
    with pytest.raises(ModelError, match="has no gradient: it reaches no parameter that is trained"):
        self_check(captured)
