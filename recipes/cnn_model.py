"""The network of cnn_classifier.toml: an example of a job owner's own code."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class DigitNet(nn.Module):
    """image float32 [b, 1, 28, 28], labels int64 [b] -> logits [b, 10] and the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.first_norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.second_norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 7 * 7, 10)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = functional.max_pool2d(functional.relu(self.first_norm(self.first(image))), 2)
        hidden = functional.max_pool2d(functional.relu(self.second_norm(self.second(hidden))), 2)
        logits = self.head(hidden.flatten(1))
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


def build() -> nn.Module:
    """What `factory` names: called without arguments, returns the module to train."""
    return DigitNet()
