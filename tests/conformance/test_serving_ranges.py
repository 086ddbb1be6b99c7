"""Positions that see each other, on every backend that serves: what they see, in pieces and among others, and ranges
that no owner may send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from conformance.test_serving_backend import (
    HEADS,
    LAYERS,
    POSITIONS,
    SHARED,
    VARIANTS,
    WIDTH,
    Draft,
    array,
    assert_close,
    logits,
    pages_of,
    serve,
    text,
    weights,
)
from fusionai.coordination.serving.together import between
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import Segment, ServeOptions

pytestmark = pytest.mark.slow

LENGTH = POSITIONS - 4
TOGETHER = ((0, 2), (9, 13), (13, 14), (25, 46))
OPTIONS = ServeOptions(pages=40, sessions=8, pass_tokens=LENGTH, page_tokens=4)


@pytest.fixture(params=["torch", "onnxruntime", pytest.param("jax", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def by_formula(graph: Graph, ids: Sequence[int], options: dict[str, Any]) -> np.ndarray:
    """The logits of `Draft` with a mask that is written down place by place."""
    own = {key: array(tensor) for key, tensor in weights(graph).items()}
    count = len(ids)
    at = np.arange(count)
    seen = at[None] <= at[:, None]
    for start, end in TOGETHER:
        seen[start:end, start:end] = True
    if (window := options.get("window")) is not None:
        seen &= at[None] > at[:, None] - window
    x = own["words"][list(ids)] + own["places"][:count]
    for layer in range(LAYERS):
        q, k, v = (
            (x @ own[f"{layer}.{name}"].T).reshape(count, heads, WIDTH).transpose(1, 0, 2)
            for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED))
        )
        k, v = (np.repeat(one, HEADS // SHARED, 0) for one in (k, v))
        scores = q @ k.transpose(0, 2, 1) * WIDTH**-0.5
        if (cap := options.get("softcap")) is not None:
            scores = np.tanh(scores / cap) * cap
        scores = np.where(seen, scores, -np.inf)
        sinks = own[f"{layer}.sinks"][:, None, None] if options.get("sinks") else np.full((HEADS, 1, 1), -np.inf)
        scores = np.concatenate([scores, np.broadcast_to(sinks, (HEADS, count, 1))], -1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares = (shares / shares.sum(-1, keepdims=True))[..., :count]
        x = x + (shares @ v).transpose(1, 0, 2).reshape(count, -1) @ own[f"{layer}.o"].T
        wide = x @ own[f"{layer}.up"].T
        x = x + (wide / (1 + np.exp(-wide))) @ own[f"{layer}.down"].T
    return x @ own["words"].T


def in_pieces(program: Any, ids: Sequence[int], ends: Sequence[int], session: int = 0, page: int = 0) -> np.ndarray:
    found: list[np.ndarray] = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        pages = pages_of(LENGTH + 4, page) if not start else ()
        first = 0 if not start else len(pages_of(LENGTH + 4))
        segment = Segment(session, start, end - start, first, pages, together=between(TOGETHER, start, end))
        found.append(logits(program, [segment], ids[start:end]))
    return np.concatenate(found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_of_a_range_see_all_of_it_and_those_behind_go_on(kind: str, variant: str):
    graph = Draft(**VARIANTS[variant]).graph
    ids = text(5, LENGTH)
    expected = by_formula(graph, ids, VARIANTS[variant])
    whole = in_pieces(serve(graph, OPTIONS, kind), ids, (LENGTH,))
    assert_close(whole, expected)
    # A range of few positions behind others, and few positions one by one at the end.
    assert_close(in_pieces(serve(graph, OPTIONS, kind), ids, (2, 9, 14, 25, 46, 50, LENGTH)), expected)


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_bits_of_a_range_do_not_depend_on_pieces(variant: str):
    """Of torch, whose pieces follow the clock."""
    graph = Draft(**VARIANTS[variant]).graph
    ids = text(5, LENGTH)
    whole = in_pieces(serve(graph, OPTIONS), ids, (LENGTH,))
    for ends in ((25, LENGTH), (13, 32 + 14, LENGTH), (14, 46, LENGTH)):
        if all(end - start > 16 for start, end in zip(ends, (*ends[1:], LENGTH + 99), strict=True)):
            assert np.array_equal(in_pieces(serve(graph, OPTIONS), ids, ends), whole)


def test_others_in_the_pass_change_no_bit(kind: str):
    """A range of few positions is computed beside a session that decodes, in a stage with compiled calls for those."""
    graph = Draft(window=6).graph
    ids, other = text(5, LENGTH), text(6, 12)
    alone = in_pieces(serve(graph, OPTIONS, kind), ids, (9, 14))
    program = serve(graph, OPTIONS, kind)
    logits(program, [Segment(3, 0, 11, 0, pages_of(12, 30))], other[:11])
    first = in_pieces(program, ids, (9,))
    both = [Segment(3, 11, 1), Segment(0, 9, 5, together=between(TOGETHER, 9, 14))]
    assert np.array_equal(np.concatenate([first, logits(program, both, [other[11], *ids[9:14]])[1:]]), alone)


WRONG: tuple[Any, ...] = (
    ((8, 12),), ((10, 31),), ((12, 12),), ((14, 12),), ((10, 14), (13, 16)), ((15, 18), (10, 12)), ((2**61, 2**62),),
)  # fmt: skip


def test_ranges_beyond_their_segment_or_out_of_order_are_refused_and_change_nothing(kind: str):
    graph = Draft(window=6).graph
    ids = text(5, LENGTH)
    program, untouched = serve(graph, OPTIONS, kind), serve(graph, OPTIONS, kind)
    for one in (program, untouched):
        logits(one, [Segment(0, 0, 10, 0, pages_of(LENGTH))], ids[:10])
    for wrong in WRONG:
        with pytest.raises(ExecutionError, match="can't see each other"):
            logits(program, [Segment(0, 10, 20, together=wrong)], ids[10:30])
        assert program.cached == {0: 10}
    after = [logits(one, [Segment(0, 10, 20)], ids[10:30]) for one in (program, untouched)]
    assert np.array_equal(*after)
