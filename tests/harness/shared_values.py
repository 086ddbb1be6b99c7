"""Small models whose values and parameters several stages use: what a cut must not change the gradients of.

Each is a module with a loss of its own and inputs for several microbatches. Neighbours: `cut_training` cuts and trains
them, `tests/integration/test_shared_values.py` compares with plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8
VOCABULARY = 23


@dataclass(frozen=True)
class SharedModel:
    """`draw(generator)`: one microbatch."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], dict[str, torch.Tensor]]


class UNet(nn.Module):
    """Three levels, a time embedding read by every block, skips joined by addition and by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.enter = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1) for _ in range(2))
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2) for _ in range(2))
        self.scales = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.GroupNorm(2, WIDTH)
        self.leave = nn.Conv2d(2 * WIDTH, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> dict[str, torch.Tensor]:
        when = self.time(time)

        def told(index: int) -> torch.Tensor:
            return self.scales[index](F.silu(when))[:, :, None, None]

        x = self.enter(image) + told(0)
        first = x
        skips: list[torch.Tensor] = []
        for index, down in enumerate(self.down):
            skips.append(x)
            x = F.silu(self.norm(down(x))) + told(1 + index)
        x = self.middle(x) * (1 + told(3)) + x
        for index, up in enumerate(self.up):
            x = F.silu(up(torch.cat([x, skips[-1 - index] if x.shape[-1] == skips[-1 - index].shape[-1] else x], 1)))
            x = x + told(4 + index)
        return {"loss": F.mse_loss(self.leave(torch.cat([x, first], 1)), image) + 1e-3 * when.square().mean()}


class Conditioned(nn.Module):
    """FiLM: scale and shift of every layer from one vector, which the loss reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.films = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, about: torch.Tensor) -> dict[str, torch.Tensor]:
        condition = torch.tanh(self.condition(about))
        target = x
        for layer, film in zip(self.layers, self.films, strict=True):
            scale, shift = film(condition).chunk(2, dim=-1)
            x = x + F.gelu(layer(x) * (1 + scale) + shift) * condition
        return {"loss": F.mse_loss(self.head(x), target) + (condition * x).mean()}


class _Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        scores = self.q(self.norm(x)) @ self.k(memory).transpose(1, 2) / WIDTH**0.5
        x = x + self.out(scores.softmax(-1) @ self.v(memory))
        return x + self.mlp(x)


class CrossAttention(nn.Module):
    """Every decoder layer reads the same memory, which an encoder layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.layers = nn.ModuleList(_Cross() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.encoder(source)
        y = x
        for layer in self.layers:
            y = layer(y, memory)
        return {"loss": F.mse_loss(self.head(y), x)}


class SharedRouter(nn.Module):
    """Experts in every layer, weighted by one router that all layers share and by its first decision."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        target = x
        first = self.router(x)
        for experts in self.layers:
            gates = (self.router(x) + first).softmax(-1)
            x = x + sum(torch.tanh(expert(x)) * gates[..., i : i + 1] for i, expert in enumerate(experts))  # pyright: ignore
        return {"loss": F.mse_loss(self.head(x), target) + 0.01 * first.square().mean()}


class TiedLanguageModel(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class TwoWays(nn.Module):
    """One weight multiplied as it is and transposed, in three places; a scale that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        nn.init.normal_(self.weight, std=0.4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x @ self.weight
        for index, layer in enumerate(self.layers):
            y = y + torch.tanh(layer(y)) * self.scale
            if index == 1:
                y = F.linear(y, self.weight) + y @ self.weight
        return {"loss": F.mse_loss(y @ self.weight.t(), x)}


class EncoderDecoder(nn.Module):
    """Encoder layers, decoder layers that all read what the encoder made, one embedding for both and for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.decoder = nn.ModuleList(_Cross() for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, source: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.embedding(source)
        for layer in self.encoder:
            memory = memory + F.gelu(layer(memory))
        x = self.embedding(ids)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = F.linear(x, self.embedding.weight, self.bias)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * memory.abs().mean()}


class Dense(nn.Module):
    """Every layer reads what all layers before it made, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4 * (i + 1), 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for i in range(5)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = [self.enter(image)]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return {"loss": F.cross_entropy(self.head(torch.cat(made, 1).mean((2, 3))), labels)}


class ThreeAndTwo(nn.Module):
    """A value read three times in one layer and twice in another, a product of it with itself among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        value = torch.tanh(self.first(x))
        y = self.layers[0](value) * value + value.exp()
        y = torch.tanh(self.layers[1](y))
        y = self.layers[2](y + value * value) - value.sin()
        y = self.layers[3](y) * torch.cat([value[..., :3], value[..., 3:]], -1)
        return {"loss": F.mse_loss(y, x) + (value * y).mean()}


class Depths(nn.Module):
    """One block run at several depths, with other blocks between, and a norm that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shared = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x
        for layer in self.layers:
            y = y + self.shared(self.norm(y))
            y = y + torch.tanh(layer(self.norm(y)))
        return {"loss": F.mse_loss(y, x)}


class ManyInputs(nn.Module):
    """Three inputs, each embedded once and read by most layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(4, WIDTH)
        self.classes = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.gain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        one, two, three = self.a(a), torch.sigmoid(self.b(b)), self.classes(kind)
        residual = self.gain(three).sigmoid()
        y = x
        for index, layer in enumerate(self.layers):
            y = y + residual * F.gelu(layer(y * two + (one if index % 2 else three)))
        return {"loss": F.huber_loss(y, x) + (one * two * three).mean() + 0.1 * residual.mean()}


class Siamese(nn.Module):
    """The same layers over one input, then over another; a condition read by both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, left: torch.Tensor, right: torch.Tensor, about: torch.Tensor) -> dict[str, torch.Tensor]:
        condition = torch.tanh(self.condition(about))
        found: list[torch.Tensor] = []
        for x in (left, right):
            for layer in self.layers:
                x = x + torch.tanh(layer(x) * condition)
            found.append(x)
        return {"loss": F.mse_loss(found[0], found[1]) + (found[0] * condition).mean()}


class ScaledEncoder(nn.Module):
    """Attention as torch has it, with residual scales that are values of one small network, and a pooled skip."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Linear(4, 3)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.pool = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, knobs: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = self.scales(knobs).softmax(-1)
        pooled = torch.relu(self.pool(x.mean(1, keepdim=True)))
        y = x
        for index, layer in enumerate(self.layers):
            y = layer(y) * scales[:, index, None, None] + pooled * y
        return {"loss": F.mse_loss(y, x) + 1e-2 * scales.square().sum()}


def _normal(*sizes: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(sizes, generator=generator)


def _whole(high: int, *sizes: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randint(0, high, sizes, generator=generator)


def _model(make: type[nn.Module], **inputs: Callable[[torch.Generator], torch.Tensor]) -> SharedModel:
    return SharedModel(make.__name__, make, lambda generator: {name: of(generator) for name, of in inputs.items()})


MODELS = (
    _model(UNet, image=_normal(2, 3, 8, 8), time=_normal(2, 4)),
    _model(Conditioned, x=_normal(3, 6, WIDTH), about=_normal(3, 1, 5)),
    _model(CrossAttention, x=_normal(2, 5, WIDTH), source=_normal(2, 7, WIDTH)),
    _model(SharedRouter, x=_normal(3, 5, WIDTH)),
    _model(TiedLanguageModel, ids=_whole(VOCABULARY, 2, 9), labels=_whole(VOCABULARY, 2, 9)),
    _model(TwoWays, x=_normal(6, WIDTH)),
    _model(
        EncoderDecoder, source=_whole(VOCABULARY, 2, 7), ids=_whole(VOCABULARY, 2, 5), labels=_whole(VOCABULARY, 2, 5)
    ),
    _model(Dense, image=_normal(2, 3, 6, 6), labels=_whole(5, 2)),
    _model(ThreeAndTwo, x=_normal(5, WIDTH)),
    _model(Depths, x=_normal(3, 4, WIDTH)),
    _model(ManyInputs, x=_normal(4, WIDTH), a=_normal(4, 3), b=_normal(4, 4), kind=_whole(7, 4)),
    _model(Siamese, left=_normal(4, WIDTH), right=_normal(4, WIDTH), about=_normal(4, 5)),
    _model(ScaledEncoder, x=_normal(2, 5, WIDTH), knobs=_normal(2, 4)),
)
