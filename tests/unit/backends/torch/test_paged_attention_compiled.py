"""Attention in one compiled call: float64 as the judge, and bits that follow from a row's own position alone."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("numba", reason="attention of prompts is machine code, made by numba")

from fusionai.backends.semantics import Scores
from fusionai.backends.serving.page_table import TILE_POSITIONS, LayerShape, RowSpan
from fusionai.backends.torch import paged_attention as wrapper
from fusionai.backends.torch.attention_kernels import KEYS, WIDE
from fusionai.backends.torch.paged_attention import (
    LayerCache,
    attention_scratch_bytes,
    compiled_attention,
    lay_out,
    levels_and_scales,
    numbers_of_levels,
)
from fusionai.coordination.serving.together import between, cut_before
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import CacheFormat, ServeOptions

pytestmark = pytest.mark.slow

LONG = 2 * KEYS + 3 * TILE_POSITIONS + 5
PAGE_TOKENS = 16
PAGES = -(-LONG // PAGE_TOKENS)
FORMS: tuple[CacheFormat, ...] = ("fp32", "bf16", "fp16", "int8")
CPU = torch.device("cpu")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Text:
    """A session's queries, and its keys and values in a cache: `groups` queries to each of `shared` key heads."""

    def __init__(
        self,
        groups: int = 3,
        shared: int = 2,
        width: int = 16,
        value_width: int = 16,
        *,
        window: int | None = None,
        form: CacheFormat = "fp32",
        together: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.together = together
        self.q, self.k = drawn(1, groups * shared, LONG, width), drawn(1, shared, LONG, width)
        self.v = drawn(1, shared, LONG, value_width)
        options = ServeOptions(
            weights="fp32", cache=form, page_tokens=PAGE_TOKENS, pages=2 * PAGES, sessions=2, pass_tokens=LONG
        )
        self.shape = LayerShape(0, groups * shared, shared, width, value_width, window)
        self.cache = LayerCache(self.shape, options, CPU)
        # What others left in the cache is no number anywhere.
        for block in self.cache._blocks:
            block.fill_(255 if form == "int8" else float("nan"))
        # Pages in no order, and a ring that is not the first.
        self.pages = tuple((7 * number + 3) % (2 * PAGES) for number in range(PAGES))
        windows = {} if window is None else {window: self.cache.capacity}
        layout = lay_out((self.span(0, LONG),), options, paged=window is None, windows=windows, device=CPU)
        self.cache.write(layout, self.k, self.v)
        if form == "int8":
            self.k, self.v = (numbers_of_levels(levels_and_scales(one)) for one in (self.k, self.v))
        kept = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form, torch.float32)
        self.k, self.v = self.k.to(kept), self.v.to(kept)

    def span(self, start: int, end: int) -> RowSpan:
        together = between(self.together, start, end)
        return RowSpan(1, 0, start, end - start, self.pages[: -(-end // PAGE_TOKENS)], 1, together=together)

    def piece(
        self, start: int, end: int, *, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[rows, heads, width]."""
        q = self.q[:, :, start:end]
        return compiled_attention(self.span(start, end), self.cache, q, Scores(0.25, softcap, sinks))

    def plainly(self, softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        groups = self.q.shape[1] // self.k.shape[1]
        k, v = (rows[0].double().repeat_interleave(groups, 0) for rows in (self.k, self.v))
        weights = self.q[0].double() @ k.transpose(1, 2) * 0.25
        if softcap is not None:
            weights = torch.tanh(weights / softcap) * softcap
        at = torch.arange(LONG)
        seen = at[None, :] <= at[:, None]
        for first, end in self.together:
            seen[first:end, first:end] = True
        if self.shape.window is not None:
            seen &= at[None, :] > at[:, None] - self.shape.window
        weights = weights.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            weights = torch.cat([weights, sinks.double()[:, None, None].expand(-1, LONG, 1)], dim=-1)
        return (torch.softmax(weights, dim=-1)[..., :LONG] @ v).transpose(0, 1)


@pytest.mark.levels
@pytest.mark.parametrize("window", [None, 1, 40, KEYS, KEYS + 70])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_it_is_attention_and_pieces_change_no_bit(window: int | None, softcap: float | None, sinks: bool) -> None:
    text = Text(window=window)
    given = drawn(6) if sinks else None
    whole = text.piece(0, LONG, softcap=softcap, sinks=given)
    assert (whole.double() - text.plainly(softcap, given)).abs().max() < 3e-6
    for length in (1, 7, TILE_POSITIONS, 100):
        ends = [*range(length, LONG, length), LONG]
        starts = [0, *ends[:-1]]
        parts = [text.piece(start, end, softcap=softcap, sinks=given) for start, end in zip(starts, ends, strict=True)]
        assert torch.equal(torch.cat(parts).view(torch.int32), whole.view(torch.int32))


TOGETHER = ((0, 3), (40, 47), (60, 170), (171, 172), (KEYS - 9, 2 * KEYS + 40), (LONG - 2, LONG))
"""Within a tile, over several, over blocks of keys, beside each other, and at both ends."""


@pytest.mark.levels
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "groups"),
    [
        (None, None, False, 3), (1, None, False, 3), (40, 2.0, True, 3), (KEYS, None, False, 1),
        (KEYS + 70, None, False, 3), (None, 2.0, True, 1), (40, None, False, WIDE + 1),
    ],
)  # fmt: skip
def test_positions_that_see_each_other_do_and_pieces_change_no_bit(
    window: int | None, softcap: float | None, sinks: bool, groups: int
) -> None:
    text = Text(groups, window=window, together=TOGETHER)
    given = drawn(2 * groups) if sinks else None
    whole = text.piece(0, LONG, softcap=softcap, sinks=given)
    assert (whole.double() - text.plainly(softcap, given)).abs().max() < 3e-6
    for length in (1, 30, 100) if groups < WIDE else (30,):
        places = sorted({cut_before(TOGETHER, end) for end in (*range(0, LONG, length), LONG)})
        parts = [text.piece(*one, softcap=softcap, sinks=given) for one in itertools.pairwise(places)]
        assert torch.equal(torch.cat(parts).view(torch.int32), whole.view(torch.int32))
    causal = Text(groups, window=window).piece(0, LONG, softcap=softcap, sinks=given)
    alone = [row for row in range(LONG) if not any(first <= row < end for first, end in TOGETHER)]
    assert torch.equal(causal[alone].view(torch.int32), whole[alone].view(torch.int32))


@pytest.mark.levels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("groups", "shared", "width", "value_width"),
    [(1, 3, 64, 64), (8, 1, 128, 128), (WIDE + 3, 1, 20, 7), (2, 2, 1, 33), (1, 1, 80, 1)],
)
def test_heads_widths_and_formats_change_no_bit_with_pieces(
    groups: int, shared: int, width: int, value_width: int, form: CacheFormat
) -> None:
    text = Text(groups, shared, width, value_width, form=form)
    whole = text.piece(0, LONG)
    assert (whole.double() - text.plainly()).abs().max() < 2e-5
    ends = [5, 37, 64, KEYS - 1, KEYS + 1, LONG]
    parts = [text.piece(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert torch.equal(torch.cat(parts).view(torch.int32), whole.view(torch.int32))


@pytest.mark.levels
def test_threads_and_strides_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(8, 3, 64, 64)
    whole = text.piece(0, LONG)
    text.q = text.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(text.piece(0, LONG), whole)
    text.q = text.q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(text.piece(0, LONG), whole)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(text.piece(0, LONG), whole)


@pytest.mark.levels
def test_extreme_scores_and_what_is_no_number_stay_where_they_are() -> None:
    text = Text(1, 1, 16, 16)
    text.q[0, 0, 3] *= 1e4
    assert (text.piece(0, LONG).double() - text.plainly()).abs().max() < 2e-4
    text.q[0, 0, 5] = float("nan")
    made = text.piece(0, LONG)
    assert made[5].isnan().all()
    assert not made[[row for row in range(LONG) if row != 5]].isnan().any()


def test_memory_is_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = wrapper.np.empty

    def counted(shape: int, dtype: object) -> object:
        taken.append(4 * shape)
        return empty(shape, dtype)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(wrapper.np, "empty", counted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for text in (Text(), Text(8, 1, 64, 64)):
        taken.clear()
        text.piece(0, LONG)
        assert 0 < sum(taken) <= attention_scratch_bytes((text.shape,), LONG)


def test_operands_that_do_not_suit_the_cache_are_refused() -> None:
    text = Text()
    with pytest.raises(ExecutionError, match="don't fit"):
        compiled_attention(text.span(0, 9), text.cache, text.q, Scores(1.0))
    with pytest.raises(ExecutionError, match="sinks"):
        text.piece(0, 9, sinks=drawn(5))
