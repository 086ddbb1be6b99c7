"""Attention and caches by the kernels for cards, in Triton's interpreter, against the operators on the same caches."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusionai.backends.semantics import Scores
from fusionai.backends.serving.base import CheckedPass
from fusionai.backends.serving.page_table import LayerShape, RowSpan, ring_tokens
from fusionai.backends.torch import card_program
from fusionai.backends.torch.card_program import CardProgram
from fusionai.backends.torch.paged_attention import LayerCache, cached_attention, lay_out
from fusionai.backends.torch.row_code import LINE, Field, Op
from fusionai.backends.torch.row_plan import RowPlan
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.serving import CacheFormat, ServeOptions

pytest.importorskip("triton", reason="Triton is for Linux")

import numpy as np

from harness.interpreted_card import CPU, interpreted

pytestmark = pytest.mark.slow
PAGE = 4


@pytest.fixture(autouse=True)
def _interpreted() -> Generator[None]:
    with interpreted():
        yield


@dataclass(frozen=True)
class Layer:
    heads: int
    shared: int
    key_width: int
    value_width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def program(layer: Layer, options: ServeOptions, cache: LayerCache, sinks: Tensor | None) -> CardProgram:
    """A stage that is one attention: a row holds queries, keys, values and the result."""
    q, k, v = layer.heads * layer.key_width, layer.shared * layer.key_width, layer.shared * layer.value_width
    out = layer.heads * layer.value_width
    line = [0] * LINE
    line[0] = Op.ATTENTION
    line[Field.DIMS : Field.DIMS + 3] = layer.heads, layer.shared, layer.key_width
    line[Field.OUT], line[Field.A], line[Field.B] = q + k + v, 0, q
    line[Field.EXTRA : Field.EXTRA + 5] = layer.value_width, q + k, 0, 1 if layer.softcap else -1, -1
    constants: dict[int, str | float] = {0: layer.key_width**-0.5, 1: layer.softcap or 0.0}
    if sinks is not None:
        constants[2], line[Field.EXTRA + 4] = "sinks", 2
    plan = RowPlan(
        code=np.array([line], dtype=np.int64), constants=constants, fixed=64, width=q + k + v + out,
        inputs={"qkv": (0, q + k + v)}, outputs={"out": (q + k + v, (layer.heads, layer.value_width))},
        products={}, attentions=(7,), groups=layer.heads // layer.shared,
    )  # fmt: skip
    values = {} if sinks is None else {"sinks": sinks}
    return CardProgram(plan, {}, lambda names: values, {7: cache}, options, CPU)


def agrees(
    layer: Layer, form: CacheFormat, passes: Sequence[Sequence[tuple[int, int]]], *, tolerance: float = 2e-5
) -> None:
    """Run passes of (session, positions) by both, and compare results and caches. Pages are dealt out in turns, so that
    those of a session are not consecutive."""
    options = ServeOptions(pages=64, sessions=8, pass_tokens=64, page_tokens=PAGE, cache=form, weights="fp32")
    shape = LayerShape(7, layer.heads, layer.shared, layer.key_width, layer.value_width, layer.window)
    ours, theirs = LayerCache(shape, options, CPU), LayerCache(shape, options, CPU)
    generator = torch.Generator().manual_seed(3)
    sinks = torch.randn(layer.heads, generator=generator) if layer.sinks else None
    card = program(layer, options, ours, sinks)
    lengths: dict[int, int] = {}
    pages: dict[int, list[int]] = {}
    free = iter(range(63, -1, -1))
    windows = {} if layer.window is None else {layer.window: ring_tokens(layer.window, options)}
    for one in passes:
        spans: list[RowSpan] = []
        first = 0
        for session, count in one:
            start = lengths.get(session, 0)
            own = pages.setdefault(session, [])
            while len(own) * PAGE < start + count:
                own.append(next(free))
            spans.append(RowSpan(session, first, start, count, tuple(own), session))
            lengths[session], first = start + count, first + count
        q = torch.randn((first, layer.heads, layer.key_width), generator=generator)
        k = torch.randn((first, layer.shared, layer.key_width), generator=generator)
        v = torch.randn((first, layer.shared, layer.value_width), generator=generator)
        layout = lay_out(tuple(spans), options, paged=layer.window is None, windows=windows, device=CPU)
        scores = Scores(layer.key_width**-0.5, layer.softcap, sinks)
        expected = cached_attention(layout, theirs, *(x.transpose(0, 1)[None] for x in (q, k, v)), scores)
        fed = torch.cat([x.reshape(first, -1) for x in (q, k, v)], dim=1).numpy()
        inputs = {"qkv": host_tensor("float32", (1, *fed.shape), np.ascontiguousarray(fed).data)}
        made = card.run(CheckedPass(tuple(spans), inputs, frozenset({"out"}), None, first))["out"]
        got = torch.frombuffer(bytearray(made.data), dtype=torch.float32).reshape(made.shape)
        torch.testing.assert_close(got[0], expected[0].transpose(0, 1), rtol=tolerance, atol=tolerance)
        for own_vectors, other in zip(ours.vectors, theirs.vectors, strict=True):
            assert torch.equal(own_vectors, other)


GROUPED = Layer(4, 2, 8, 8)
RAGGED = [[(0, 9), (1, 1), (2, 5)], [(0, 1), (1, 1), (2, 1)], [(0, 3), (3, 13)]]


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8"])
def test_ragged_sessions_attend_as_by_operators_and_caches_are_equal_to_the_bit(form: CacheFormat) -> None:
    agrees(GROUPED, form, RAGGED)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(6, 2, 6, 10),  # groups, widths that are no powers of two
        Layer(4, 4, 8, 8, window=5),
        Layer(4, 1, 8, 8, softcap=2.0, sinks=True),
    ],
)
def test_layers_of_every_kind_attend_as_by_operators(layer: Layer) -> None:
    agrees(layer, "fp32", RAGGED)


def test_long_texts_are_divided_among_groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_program, "_SHARE_KEYS", 32)
    with interpreted() as launches:
        agrees(Layer(2, 1, 8, 8), "int8", [[(0, 60)], [(0, 20), (1, 2)]])
        agrees(Layer(2, 2, 8, 8, window=40, sinks=True), "fp32", [[(0, 60)], [(0, 3), (1, 2)]])
    assert "combine" in [name for name, _ in launches.kernels]


def test_a_pass_larger_than_a_batch_is_computed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_program, "BATCH_ROWS", 7)
    agrees(GROUPED, "fp32", RAGGED)
    agrees(Layer(4, 2, 8, 8, window=5), "fp32", RAGGED)


def test_launches_do_not_depend_on_the_number_of_sessions() -> None:
    with interpreted() as launches:
        agrees(GROUPED, "fp32", [[(0, 3)]])
        few = len(launches.kernels)
        agrees(GROUPED, "fp32", [[(at, 3) for at in range(8)]])
    assert len(launches.kernels) == 2 * few == 6


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    shared=st.integers(1, 3), groups=st.integers(1, 5), widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.none() | st.integers(1, 12), softcap=st.none() | st.floats(0.5, 30.0), sinks=st.booleans(),
    form=st.sampled_from(("fp32", "bf16", "fp16", "int8")),
    passes=st.lists(
        st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), min_size=1, max_size=5, unique_by=itemgetter(0)),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_attention_of_any_shape_is_that_of_operators(
    shared: int, groups: int, widths: tuple[int, int], window: int | None, softcap: float | None, sinks: bool,
    form: CacheFormat, passes: list[list[tuple[int, int]]],
) -> None:  # fmt: skip
    agrees(Layer(shared * groups, shared, *widths, window, softcap, sinks), form, passes)
