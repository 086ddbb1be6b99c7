"""`nn.Transformer` and its parts with every kind of mask train in stages as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import reference_module, self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.tasks import ExampleInput
from harness.cut_training import SEED, Problem, Stages, cuts, plain_gradients
from harness.variants import kept

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

WIDTH = 8
SOURCE, TARGET = 6, 5
Masks = dict[str, torch.Tensor]


class _Decoder(nn.Module):
    def __init__(self, masks: Callable[[int], Masks], *, batch_first: bool, padded: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=batch_first)
        self.layers = nn.TransformerDecoder(layer, 2)
        self.last = nn.Linear(WIDTH, 3)
        self.masks, self.batch_first, self.padded = masks, batch_first, padded

    def forward(self, x: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        given = self.masks(x.shape[1])
        if self.padded:
            given["tgt_key_padding_mask"] = torch.arange(TARGET) >= lengths[:, None]
            given["memory_key_padding_mask"] = torch.arange(SOURCE) >= lengths[:, None]
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        return {"loss": self.last(self.layers(x, memory, **given)).square().mean()}


def _below(size: int, diagonal: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(diagonal)


MASKS: dict[str, Callable[[int], Masks]] = {
    "made by torch": lambda size: {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(size)},
    "true and false": lambda size: {"tgt_mask": ~_below(size, 0)},
    "a window, and memory": lambda size: {
        "tgt_mask": torch.ones(size, size, dtype=torch.bool).triu(1)
        | torch.ones(size, size, dtype=torch.bool).tril(-2),
        "memory_mask": torch.zeros(size, SOURCE).masked_fill(torch.arange(SOURCE) > 3, float("-inf")),
    },
}


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(4, TARGET, WIDTH, generator=generator),
        "memory": torch.randn(4, SOURCE, WIDTH, generator=generator),
        "lengths": torch.tensor([3, 5, 2, 4]),
    }


def _trains_as_pytorch(captured: Captured, batches: tuple[dict[str, torch.Tensor], ...]) -> None:
    self_check(captured)
    assert not any("real memory" in note for note in captured.notes)
    problem = Problem(captured, batches)
    losses, gradients = plain_gradients(problem)
    _, partition = next(cuts(captured.graph, 2, scattered=0))
    found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)]).step()
    assert found_losses == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "batch_first", "padded"),
    kept(
        [(name, not padded, padded) for name in MASKS for padded in (False, True)],
        [("a window, and memory", False, True), ("true and false", True, False), ("made by torch", True, False)],
    ),
)
def test_a_decoder(name: str, batch_first: bool, padded: bool) -> None:
    source = FactorySource(lambda: _Decoder(MASKS[name], batch_first=batch_first, padded=padded))
    captured = capture(source, task="module_loss", batch=(1, 8), seed=SEED, example_inputs=_batch(1))
    _trains_as_pytorch(captured, (_batch(2), _batch(3)))


@pytest.mark.parametrize("added", [False, True])
def test_a_query_that_sees_no_key_gets_zeros(added: bool) -> None:
    """As the rows of padding on the left do under a causal mask."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
            real = torch.arange(TARGET) >= TARGET - lengths[:, None]
            mask = (real[:, None, :] & _below(TARGET, 0))[:, None]
            if added:
                mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
            made = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return self.last(made.transpose(1, 2).flatten(2)).square().mean()

    batches = tuple({name: _batch(seed)[name] for name in ("x", "lengths")} for seed in (1, 2))
    captured = capture(FactorySource(Padded), task="module_loss", batch=(1, 8), seed=SEED, example_inputs=batches[0])
    self_check(captured)
    module = reference_module(captured, SEED).train()
    loss = module(**batches[1])
    loss.backward()
    gradients = {key: p.grad for key, p in captured.source.built.parameters(module).items() if p.grad is not None}
    problem = Problem(captured, batches[1:])
    _, partition = next(cuts(captured.graph, 2, scattered=0))
    found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)]).step()
    assert found_losses == pytest.approx([loss.item()], rel=1e-6)
    assert all(gradient.isfinite().all() for gradient in found.values())
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)


def test_an_encoder_and_a_decoder() -> None:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)
            self.embedding, self.last = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            padding = {"src_key_padding_mask": source == 0, "memory_key_padding_mask": source == 0}
            made = self.layers(
                *(self.embedding(tokens) for tokens in (source, target[:, :-1])),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1),
                tgt_key_padding_mask=target[:, :-1] == 0,
                **padding,
            )
            return F.cross_entropy(self.last(made).flatten(0, 1), target[:, 1:].flatten())

    def batch(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {name: torch.randint(1, 11, (4, 6), generator=generator) for name in ("source", "target")}
        made["source"][::2, 4:] = 0
        return made

    captured = capture(FactorySource(Translation), task="module_loss", batch=(1, 8), seed=SEED, example_inputs=batch(1))
    self_check(captured)
    assert not any("real memory" in note for note in captured.notes)


class _Language(nn.Module):
    """A language model of `nn.TransformerEncoder`, which takes a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.last(self.layers(self.embedding(input_ids), mask=mask))


def test_a_causal_mask_of_torch_is_known_at_every_length() -> None:
    captured = capture(FactorySource(_Language), batch=(1, 4), sequence=(2, 16), seed=SEED)
    attention = [node for node in captured.graph.nodes if node.op == "fusion.attention"]
    assert [node.kwargs["causal"] for node in attention] == [True, True]
    assert captured.attention_nodes == captured.attention_layers
    self_check(captured)


def test_a_batch_in_the_second_dimension() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = nn.LSTM(WIDTH, 16), nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layers(x)[0][-1]).square().mean()

    example = {"x": ExampleInput(torch.randn(5, 3, WIDTH), (None, "b", None))}
    captured = capture(FactorySource(Recurrent), task="module_loss", batch=(1, 8), seed=SEED, example_inputs=example)
    assert captured.graph.values["x"].shape == (5, "b", WIDTH)
    self_check(captured)
