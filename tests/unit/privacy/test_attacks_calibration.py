"""What known text teaches: a linear disguise comes off, noise is weighed, and too little text changes little."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionai.privacy.attacks import DepthComparison, calibrated

WIDTH, WORDS = 12, 200
DICE = torch.Generator().manual_seed(4)
TABLE = torch.randn(WORDS, WIDTH, generator=DICE)
TURN = torch.eye(WIDTH) + 0.5 * torch.randn(WIDTH, WIDTH, generator=DICE)
SHIFT = torch.randn(WIDTH, generator=DICE)


def disguised(rows: Tensor) -> Tensor:
    return rows @ TURN + SHIFT


def right(part: DepthComparison) -> float:
    """Of the table's own rows, seen in disguise."""
    assert part.projection is not None
    badness = torch.cdist(part.target[0], TABLE @ part.projection.T)
    return float((badness.argmin(1) == torch.arange(WORDS)).float().mean())


def test_a_linear_disguise_comes_off_with_enough_known_text():
    known = torch.randn(400, WIDTH, generator=DICE)
    part = calibrated(1, known, disguised(known), disguised(TABLE)[None])
    assert part.depth == 1
    assert right(part) == 1
    nothing = torch.cdist(disguised(TABLE), TABLE).argmin(1)
    assert (nothing == torch.arange(WORDS)).float().mean() < 0.6


def test_nothing_is_made_of_nothing():
    """Equal boundaries stay comparable although there is no difference to learn from."""
    part = calibrated(0, TABLE[:50], TABLE[:50], TABLE[None])
    assert right(part) == 1


def test_the_directions_that_noise_spares_count_more():
    spread = torch.tensor([0.01] * 3 + [3.0] * (WIDTH - 3))
    known = torch.randn(500, WIDTH, generator=DICE)
    seen = known + spread * torch.randn(500, WIDTH, generator=DICE)
    target = TABLE + spread * torch.randn(WORDS, WIDTH, generator=DICE)
    plain = (torch.cdist(target, TABLE).argmin(1) == torch.arange(WORDS)).float().mean()
    assert right(calibrated(0, known, seen, target[None])) > plain + 0.3
