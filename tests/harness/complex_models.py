"""Models that compute with complex numbers: rotary positions as Meta's Llama writes them, and Fourier transforms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

POSITIONS = 40


class RotaryAttention(nn.Module):
    """Attention whose positions turn pairs of features, as complex numbers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def turned(y: torch.Tensor) -> torch.Tensor:
            y = y.view(batch, length, self.heads, self.size)
            pairs = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(y)

        query, key = turned(self.query(x)).transpose(1, 2), turned(self.key(x)).transpose(1, 2)
        value = self.value(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.size)
        places = torch.arange(length, device=x.device)
        scores = scores.masked_fill(places[:, None] < places, float("-inf"))
        mixed = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class RotaryLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RotaryAttention(width, heads)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), turns)
        return x + self.narrow(F.silu(self.wide(self.after(x))))


class ComplexRotary(nn.Module):
    """As Meta's Llama: the turns are a complex table that the model keeps without registering it."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, width), nn.Linear(width, 31, bias=False)
        self.layers = nn.ModuleList(RotaryLayer(width, heads) for _ in range(layers))
        size = width // heads
        speeds = 1.0 / 10_000 ** (torch.arange(0, size, 2)[: size // 2].float() / size)
        angles = torch.outer(torch.arange(POSITIONS), speeds).float()
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        turns = self.turns[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(x)


class FourierMixing(nn.Module):
    """As FNet (arXiv 2105.03824): the transform over positions and features stands for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x + torch.fft.fftn(x, dim=(1, 2)).real)
        return self.head(x)


class FrequencyFilters(nn.Module):
    """As GFNet (arXiv 2107.00645): learnt filters multiply the frequencies of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ParameterList(nn.Parameter(torch.randn(6, 4, 5, 2) * 0.02) for _ in range(4))
        self.mixes = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for filters, mix in zip(self.filters, self.mixes, strict=True):
            frequencies = torch.fft.rfft2(image, dim=(1, 2), norm="ortho") * torch.view_as_complex(filters)
            image = image + F.gelu(mix(torch.fft.irfft2(frequencies, s=(6, 6), dim=(1, 2), norm="ortho")))
        return self.head(image.mean(dim=(1, 2)))
