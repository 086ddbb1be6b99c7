"""Attention by tiles: right, and of the same bits whatever pieces a prompt comes in."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.semantics import Scores
from fusionai.backends.serving.page_table import TILE_POSITIONS, RowSpan, first_key
from fusionai.backends.torch.paged_attention import (
    BLOCK_KEYS,
    levels_and_scales,
    numbers_of_levels,
    tiled_attention,
    tiles,
)
from fusionai.coordination.serving.together import between, cut_before

pytestmark = pytest.mark.slow

WIDTH, GROUPS, SHARED = 16, 3, 2
LONG = BLOCK_KEYS + 3 * TILE_POSITIONS + 5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = (drawn(1, heads, LONG, WIDTH) for heads in (GROUPS * SHARED, SHARED, SHARED))
K, V = (rows[0].transpose(0, 1).contiguous().transpose(0, 1)[None] for rows in (K, V))
SINKS = drawn(GROUPS * SHARED)


Ranges = tuple[tuple[int, int], ...]
TOGETHER: Ranges = ((0, 3), (40, 47), (60, 170), (171, 172), (BLOCK_KEYS - 9, BLOCK_KEYS + 40), (LONG - 2, LONG))
"""Within a tile, over several, over a block of keys, beside each other, and at both ends."""


def piece(
    start: int,
    end: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    together: Ranges = (),
) -> torch.Tensor:
    span = RowSpan(1, 0, start, end - start, (), -1, together=between(together, start, end))
    first = first_key(start, window)
    return tiled_attention(
        span,
        window,
        Q[:, :, start:end],
        K[:, :, first:end],
        V[:, :, first:end],
        Scores(0.25, softcap, sinks),
    )


def plainly(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, together: Ranges = ()
) -> torch.Tensor:
    q, k, v = Q.double(), K.double().repeat_interleave(GROUPS, 1), V.double().repeat_interleave(GROUPS, 1)
    weights = q @ k.transpose(2, 3) * 0.25
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    at = torch.arange(LONG)
    seen = at[None, :] <= at[:, None]
    for first, end in together:
        seen[first:end, first:end] = True
    if window is not None:
        seen &= at[None, :] > at[:, None] - window
    weights = weights.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        weights = torch.cat([weights, sinks.double().reshape(1, -1, 1, 1).expand(1, -1, LONG, 1)], dim=-1)
    weights = torch.softmax(weights, dim=-1)
    return weights[..., :LONG] @ v


@pytest.mark.parametrize("window", [None, 1, 40, BLOCK_KEYS])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, None), (None, SINKS), (2.0, SINKS)])
def test_it_is_attention_and_pieces_change_no_bit(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    whole = piece(0, LONG, window, softcap, sinks)
    assert (whole.double() - plainly(window, softcap, sinks)).abs().max() < 2e-6
    for length in (1, 2, 7):
        ends = [*range(length * TILE_POSITIONS, LONG, length * TILE_POSITIONS), LONG]
        parts = [piece(start, end, window, softcap, sinks) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        assert torch.equal(torch.cat(parts, dim=2), whole)


@pytest.mark.parametrize("window", [None, 1, 40, BLOCK_KEYS])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, SINKS)])
def test_positions_that_see_each_other_do_and_pieces_change_no_bit(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    whole = piece(0, LONG, window, softcap, sinks, TOGETHER)
    assert (whole.double() - plainly(window, softcap, sinks, TOGETHER)).abs().max() < 2e-6
    for ends in ((3, LONG), (32, 40, 60, 170, LONG), (47, 64 * 4, LONG - 2, LONG)):
        starts = [0, *ends[:-1]]
        ends = tuple(cut_before(TOGETHER, end) for end in ends)
        parts = [piece(*one, window, softcap, sinks, TOGETHER) for one in zip(starts, ends, strict=True)]
        assert torch.equal(torch.cat(parts, dim=2), whole)


def test_parameters_stay_as_they_are() -> None:
    before = SINKS.clone()
    first = piece(0, 1, None, None, SINKS)
    assert torch.equal(piece(0, 1, None, None, SINKS), first)
    assert torch.equal(SINKS, before)


def test_tiles_end_at_multiples_of_the_text_not_of_the_piece() -> None:
    size = TILE_POSITIONS
    assert list(tiles(RowSpan(1, 0, size - 3, size + 5, (), -1))) == [
        (size - 3, size),
        (size, 2 * size),
        (2 * size, 2 * size + 2),
    ]


def test_a_byte_for_each_number_is_right_to_half_a_level() -> None:
    """Of vectors of very different sizes, of zeros, and of what is not finite, which stays so."""
    vectors = torch.randn((40, 3, 20), generator=torch.Generator().manual_seed(8))
    vectors *= 10.0 ** torch.arange(-20, 20)[:, None, None]
    vectors[7] = 0.0
    stored = levels_and_scales(vectors)
    assert (stored.dtype, stored.shape) == (torch.uint8, (40, 3, 24))
    made = numbers_of_levels(stored)
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    assert ((made - vectors).abs() <= largest * (0.5 / 127 + 1e-6)).all()
    assert torch.equal(made[7], vectors[7])
    for wrong in (float("nan"), float("inf")):
        vectors[3, 1, 5] = wrong
        assert not numbers_of_levels(levels_and_scales(vectors))[3, 1, 5].isfinite()
