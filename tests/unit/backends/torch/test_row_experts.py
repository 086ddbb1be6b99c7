"""Mixtures of experts in row programs: equal to operators, with bits that are a row's own, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from msgspec import structs

from fusionai.backends.torch.blocked_linear import blocked_product, kernels
from fusionai.backends.torch.packed_graph import PackedParameter, by_experts, products
from fusionai.backends.torch.packed_linear import PackedLinear, pack
from fusionai.backends.torch.row_blocks import LEVELS, Blocks, levels_in_blocks
from fusionai.backends.torch.row_code import Factor, Field, Op, Unplanned, refuse_beyond
from fusionai.backends.torch.row_program import RowPlace, RowProgram, needed_bytes
from fusionai.ir.levels import Levels
from fusionai.ir.schema import DTypeArg, FloatArg, ListArg, Ref, ValueSpec
from fusionai.wire.serving import ServeOptions, WeightFormat
from harness.row_sketch import Sketch

pytestmark = pytest.mark.skipif(kernels() is None, reason="numba does not know this processor")
WIDTH, HIDDEN, EXPERTS = 40, 24, 8
POSITIONS = 37
"""Two batches of rows and a part of one."""
Pack = Callable[[torch.Tensor], PackedLinear]


def as_form(form: WeightFormat) -> Pack:
    return lambda matrix: pack(matrix, None, form, "weight", in_blocks=True)


def as_levels(matrix: torch.Tensor) -> PackedLinear:
    """Levels as a quantised file holds them; their numbers have nothing to do with the matrix but depend on it."""
    columns, count = matrix.shape
    factor = Factor.LEVELS4_32
    layout = next(layout for layout, known in LEVELS.items() if known is factor)
    levels = (matrix.numpy() * 4 + 8).round().clip(0, 15).astype(np.uint8)
    factors = np.abs(matrix.numpy()[:, :: layout.shared]).astype(np.float32)
    middles = np.full((columns, count // layout.group), 8, np.int8)
    data = levels_in_blocks(Levels(levels, factors, middles), layout)
    blocks = Blocks(factor, columns, count, data)
    return PackedLinear(blocked_product(blocks), None, data.nbytes, blocks=blocks)


class Rows:
    """Outputs of a sketch by a row program."""

    def __init__(self, sketch: Sketch, outputs: Sequence[str], packed: Pack) -> None:
        graph = sketch.graph(*outputs)
        uses = products(graph)
        self.plan = sketch.plan(*outputs)
        self.packed: dict[int, list[PackedLinear]] = {}
        held: dict[str, torch.Tensor | PackedParameter] = {name: sketch.known[name] for name in sketch.params}
        for node, use in uses.items():
            weight = sketch.known[use.weight]
            matrices = weight.unbind(0) if weight.dim() == 3 else [weight]
            self.packed[node] = [packed(one.t().contiguous() if use.transposed else one) for one in matrices]
            held[use.weight] = PackedParameter(weight, {node: self.packed[node]})

        def values(names: Sequence[str]) -> Mapping[str, Any]:
            return {name: held[name] for name in names}

        options = ServeOptions(pages=1, sessions=1, pass_tokens=64, page_tokens=4)
        self.program = RowProgram(self.plan, uses, values, {}, options)
        assert self.program.nbytes <= needed_bytes(self.plan, options)

    def run(self, x: torch.Tensor, rows: Sequence[int]) -> list[np.ndarray]:
        made = self.program.run({"x": x[:, list(rows)].numpy()}, [RowPlace(0, (), -1)] * len(rows))
        return [made[name][0] for name in sorted(made)]


def second(name: str) -> str:
    """The second result of the node whose first is `name`."""
    return name.removesuffix("_0") + "_1"


def by_softmax(sketch: Sketch, flat: str) -> tuple[str, str]:
    """Weights and indices of the experts of each row, [s, 3]."""
    scores = sketch("aten.linear.default", flat, sketch.param(EXPERTS, WIDTH), rows=0)
    shares = sketch("aten.softmax.int", scores, -1, DTypeArg("float32"), rows=0)
    top = sketch("aten.topk.default", shares, 3, rows=0)
    total = sketch("aten.sum.dim_IntList", top, ListArg((-1,)), True, rows=0)
    return sketch("aten.div.Tensor", top, total, rows=0), second(top)


def by_groups(sketch: Sketch, flat: str) -> tuple[str, str]:
    """So, of the better of two groups."""
    logits = sketch("aten.linear.default", flat, sketch.param(EXPERTS, WIDTH), rows=0)
    scores = sketch("aten.sigmoid.default", logits, rows=0)
    grouped = sketch("aten.reshape.default", scores, ListArg((-1, 2, EXPERTS // 2)), rows=0)
    best = sketch("aten.topk.default", grouped, 2, rows=0)
    total = sketch("aten.sum.dim_IntList", best, ListArg((-1,)), rows=0)
    group = second(sketch("aten.topk.default", total, 1, -1, True, False, rows=0))
    one = sketch("aten.scatter.value", sketch("aten.zeros_like.default", total, rows=0), 1, group, 1, rows=0)
    wide = sketch("aten.unsqueeze.default", one, -1, rows=0)
    wide = sketch("aten.expand.default", wide, ListArg((-1, 2, EXPERTS // 2)), rows=0)
    flags = sketch("aten.reshape.default", wide, ListArg((-1, EXPERTS)), rows=0)
    others = sketch(
        "aten.bitwise_not.default", sketch("aten._to_copy.default", flags, rows=0, dtype=DTypeArg("bool")), rows=0
    )
    masked = sketch("aten.masked_fill.Scalar", scores, others, FloatArg("-inf"), rows=0)
    indices = second(sketch("aten.topk.default", masked, 3, -1, True, False, rows=0))
    return sketch("aten.gather.default", scores, 1, indices, rows=0), indices


def mixture(sketch: Sketch, choose: Callable[[Sketch, str], tuple[str, str]], *, biased: bool = False) -> str:
    """A layer of experts as transformers computes it; `biased` as GPT-OSS has them."""
    positions = sketch("sym.mul", sketch("aten.sym_size.int", "x", 0), sketch("aten.sym_size.int", "x", 1))
    flat = sketch("aten.reshape.default", "x", ListArg((-1, WIDTH)), rows=0)
    shares, top = choose(sketch, flat)
    indices = sketch("aten.reshape.default", top, ListArg((-1,)), rows=0, times=3)
    each = sketch("aten.repeat_interleave.self_int", flat, 3, 0, rows=0, times=3)

    def product(x: str, columns: int, count: int) -> str:
        shape = (EXPERTS, count, columns) if biased else (EXPERTS, columns, count)
        made = sketch("fusion.expert_linear", x, sketch.param(*shape), indices, rows=0, times=3, transposed=biased)
        if not biased:
            return made
        bias = sketch("aten.index.Tensor", sketch.param(EXPERTS, columns), ListArg((Ref(indices),)), rows=0, times=3)
        return sketch("aten.add.Tensor", made, bias, rows=0, times=3)

    both = product(each, 2 * HIDDEN, WIDTH)
    if biased:
        gate = sketch("aten.slice.Tensor", both, 1, 0, 2**63 - 1, 2, rows=0, times=3)
        up = sketch("aten.slice.Tensor", both, 1, 1, 2**63 - 1, 2, rows=0, times=3)
        gate = sketch("aten.clamp.default", gate, None, 0.7, rows=0, times=3)
        up = sketch("aten.clamp.default", up, -0.7, 0.7, rows=0, times=3)
    else:
        gate = sketch("aten.split.Tensor", both, HIDDEN, -1, rows=0, times=3)
        up = second(gate)
    gated = sketch("aten.mul.Tensor", sketch("aten.silu.default", gate, rows=0, times=3), up, rows=0, times=3)
    made = product(gated, WIDTH, HIDDEN)
    shares = sketch("aten.reshape.default", shares, ListArg((-1,)), rows=0, times=3)
    shares = sketch("aten.unsqueeze.default", shares, -1, rows=0, times=3)
    made = sketch("aten.mul.Tensor", made, shares, rows=0, times=3)
    made = sketch("aten.reshape.default", made, ListArg((Ref(positions), 3, -1)), rows=0)
    made = sketch("aten.sum.dim_IntList", made, ListArg((1,)), rows=0)
    return sketch("aten.reshape.default", made, ListArg((1, Ref(positions), WIDTH)))


@pytest.mark.parametrize(("choose", "biased"), [(by_softmax, False), (by_softmax, True), (by_groups, False)])
def test_a_mixture_equals_operators_and_a_rows_bits_are_its_own(
    choose: Callable[[Sketch, str], tuple[str, str]], biased: bool
) -> None:
    sketch = Sketch(WIDTH, positions=POSITIONS)
    output = mixture(sketch, choose, biased=biased)
    rows = Rows(sketch, [output], as_form("fp32"))
    x = sketch.known["x"]
    (made,) = rows.run(x, range(POSITIONS))
    np.testing.assert_allclose(made, sketch.known[output][0].numpy(), rtol=1e-4, atol=1e-4)
    order = [int(row) for row in np.random.default_rng(0).permutation(POSITIONS)]
    assert np.array_equal(rows.run(x, order)[0], made[order])
    for row in range(POSITIONS):
        assert np.array_equal(rows.run(x, [row])[0][0], made[row])


class Product:
    """A graph of one product: each row with the matrices of the two experts that its first elements choose. `taken`:
    the indices [2 * rows]."""

    def __init__(self, columns: int, count: int, *, transposed: bool = False) -> None:
        self.sketch = sketch = Sketch(count, positions=POSITIONS)
        positions = sketch("aten.sym_size.int", "x", 1)
        flat = sketch("aten.reshape.default", "x", ListArg((-1, count)), rows=0)
        scores = sketch("aten.slice.Tensor", flat, 1, 0, EXPERTS, rows=0)
        top = second(sketch("aten.topk.default", scores, 2, rows=0))
        taken = sketch("aten.reshape.default", top, ListArg((-1,)), rows=0, times=2)
        each = sketch("aten.repeat_interleave.self_int", flat, 2, 0, rows=0, times=2)
        self.weight = sketch.param(*((EXPERTS, count, columns) if transposed else (EXPERTS, columns, count)))
        made = sketch("fusion.expert_linear", each, self.weight, taken, rows=0, times=2, transposed=transposed)
        self.biases = sketch.param(EXPERTS, 2)
        bias = sketch("aten.index.Tensor", self.biases, ListArg((Ref(taken),)), rows=0, times=2)
        self.outputs = [
            sketch("aten.reshape.default", value, ListArg((1, Ref(positions), 2 * size)))
            for value, size in ((made, columns), (bias, 2))
        ]
        self.x, self.each, self.taken = (sketch.known[name] for name in ("x", each, taken))


@pytest.mark.parametrize(
    "packed", [*[pytest.param(as_form(form), id=form) for form in get_args(WeightFormat)], as_levels]
)
@pytest.mark.parametrize(("columns", "count", "transposed"), [(48, 64, False), (32, 96, True), (33, 32, False)])
def test_products_with_experts_have_the_bits_of_operators_in_every_format(
    packed: Pack, columns: int, count: int, transposed: bool
) -> None:
    product = Product(columns, count, transposed=transposed)
    rows = Rows(product.sketch, product.outputs, packed)
    own, _ = rows.run(product.x, range(POSITIONS))
    (matrices,) = rows.packed.values()
    assert np.array_equal(own, by_experts(matrices, product.each, product.taken).reshape(POSITIONS, -1).numpy())
    assert np.unique(own, axis=0).shape[0] == POSITIONS


def test_products_in_bfloat16_of_an_odd_number_of_summands() -> None:
    product = Product(20, 33)
    rows = Rows(product.sketch, product.outputs, as_form("bf16"))
    own, _ = rows.run(product.x, range(POSITIONS))
    (matrices,) = rows.packed.values()
    assert np.array_equal(own, by_experts(matrices, product.each, product.taken).reshape(POSITIONS, -1).numpy())


def test_an_expert_that_does_not_exist_gives_no_number() -> None:
    """No memory is read at such an index: three experts are left of eight that rows choose from."""
    product = Product(20, 32)
    sketch = product.sketch
    for name in (product.weight, product.biases):
        kept = sketch.known[name] = sketch.known[name][:3].clone()
        sketch.params[name] = structs.replace(sketch.params[name], shape=tuple(kept.shape))
    rows = Rows(sketch, product.outputs, as_form("fp32"))
    (matrices,) = rows.packed.values()
    missing = (product.taken >= len(matrices)).numpy()
    assert 0 < missing.sum() < missing.size
    for made in rows.run(product.x, range(POSITIONS)):
        each = made.reshape(2 * POSITIONS, -1)
        assert np.array_equal(np.isnan(each), np.broadcast_to(missing[:, None], each.shape))


def test_one_row_may_take_an_expert_several_times() -> None:
    """All 20 choices of all rows: more operands of one expert than are multiplied at once."""
    sketch = Sketch(32, positions=POSITIONS)
    positions = sketch("aten.sym_size.int", "x", 1)
    flat = sketch("aten.reshape.default", "x", ListArg((-1, 32)), rows=0)
    one = second(sketch("aten.topk.default", sketch("aten.slice.Tensor", flat, 1, 0, 2, rows=0), 1, rows=0))
    spread = sketch("aten.expand.default", one, ListArg((-1, 20)), rows=0)
    taken = sketch("aten.reshape.default", spread, ListArg((-1,)), rows=0, times=20)
    each = sketch("aten.repeat_interleave.self_int", flat, 20, 0, rows=0, times=20)
    made = sketch("fusion.expert_linear", each, sketch.param(2, 20, 32), taken, rows=0, times=20, transposed=False)
    output = sketch("aten.reshape.default", made, ListArg((1, Ref(positions), 400)))
    rows = Rows(sketch, [output], as_form("fp32"))
    (matrices,) = rows.packed.values()
    expected = by_experts(matrices, sketch.known[each], sketch.known[taken]).reshape(POSITIONS, -1).numpy()
    assert np.array_equal(rows.run(sketch.known["x"], range(POSITIONS))[0], expected)


@pytest.mark.parametrize("place", [Field.OUT, Field.A, Field.B, *range(Field.DIMS, Field.DIMS + 3), Field.EXTRA])
def test_a_line_that_leaves_its_memory_is_refused(place: int) -> None:
    seen: set[Op] = set()
    for choose, biased in ((by_softmax, True), (by_groups, False)):
        sketch = Sketch(WIDTH)
        plan = sketch.plan(mixture(sketch, choose, biased=biased))
        for number, line in enumerate(plan.code):
            op = Op(line[0])
            if op not in USED[place]:
                continue
            seen.add(op)
            code = plan.code.copy()
            code[number, place] += 10_000
            with pytest.raises(Unplanned, match=r"leave its memory|the largest"):
                refuse_beyond(code, plan.fixed, plan.width)
    assert seen == USED[place]


_ALL = {Op.TOP, Op.LOOKUP, Op.SCATTER, Op.EXPERTS}
USED: dict[int, set[Op]] = {
    Field.OUT: {*_ALL, Op.MASKED, Op.SOFTMAX},
    Field.A: {Op.TOP, Op.LOOKUP, Op.EXPERTS, Op.MASKED, Op.SOFTMAX},
    Field.B: {Op.LOOKUP, Op.SCATTER, Op.EXPERTS, Op.MASKED},
    Field.DIMS: {*_ALL, Op.MASKED, Op.SOFTMAX},
    Field.DIMS + 1: {*_ALL, Op.MASKED, Op.SOFTMAX},
    Field.DIMS + 2: {*_ALL, Op.MASKED},
    Field.EXTRA: {Op.TOP, Op.LOOKUP, Op.SCATTER, Op.MASKED},
}
"""Place in a line -> operators that use it."""


def test_the_scratch_of_a_choice_stays_in_its_memory() -> None:
    sketch = Sketch(WIDTH)
    plan = sketch.plan(mixture(sketch, by_softmax))
    plan.code[plan.code[:, 0] == Op.TOP, Field.EXTRA + 1] = plan.width - 2 * EXPERTS + 1
    with pytest.raises(Unplanned, match="leave its memory"):
        refuse_beyond(plan.code, plan.fixed, plan.width)


def _flat(sketch: Sketch) -> str:
    return sketch("aten.reshape.default", "x", ListArg((-1, 8)), rows=0)


def _of_others(sketch: Sketch) -> str:
    """The experts of a row, of which the first are chosen as if they were rows."""
    each = sketch("aten.repeat_interleave.self_int", _flat(sketch), 2, 0, rows=0, times=2)
    return sketch("aten.slice.Tensor", each, 0, 0, 1, rows=0)


def _mixed(sketch: Sketch) -> str:
    each = sketch("aten.repeat_interleave.self_int", _flat(sketch), 2, 0, rows=0, times=2)
    return sketch("aten.reshape.default", each, ListArg((2, -1, 8)))


def _uneven(sketch: Sketch) -> str:
    made = sketch("aten.neg.default", _flat(sketch), rows=0)
    sketch.values[made] = ValueSpec(("(s + 1)", 8), "float32")
    return made


def _of_texts(sketch: Sketch) -> str:
    made = sketch("aten.neg.default", _flat(sketch), rows=0)
    sketch.values[made] = ValueSpec(("(b*t)", 8), "float32")
    return made


def _at_floats(sketch: Sketch) -> str:
    top = sketch("aten.topk.default", "x", 2)
    made = sketch("aten.gather.default", "x", -1, second(top))
    sketch.nodes[-1] = structs.replace(sketch.nodes[-1], args=(Ref("x"), -1, Ref(top)))
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda sketch: sketch("aten.topk.default", "x", 2, -1, False), "topk.default of 8"),
        (lambda sketch: sketch("aten.topk.default", "x", 1, 1), "topk.default along 1"),
        (lambda sketch: sketch("aten.softmax.int", "x", 1), "softmax.int along 1"),
        (lambda sketch: sketch("aten.softmax.int", "x", -1, DTypeArg("float64")), "softmax.int in"),
        (lambda sketch: sketch("aten.add.Tensor", second(sketch("aten.topk.default", "x", 2)), 1), "makes no floats"),
        (_of_others, "rows of v1_0 are chosen"),
        (_mixed, "mixes rows of v1_0"),
        (_uneven, r"has sizes \('\(s \+ 1\)', 8\)"),
        (_of_texts, r"has sizes \('\(b\*t\)', 8\)"),
        (_at_floats, "numbers that are no integers"),
    ],
)
def test_what_is_not_supported_is_named(make: Callable[[Sketch], str], why: str) -> None:
    sketch = Sketch(8)
    made = make(sketch)
    with pytest.raises(Unplanned, match=why):
        sketch.plan(sketch("aten.reshape.default", made, ListArg((1, 1, -1))))


AS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="PyTorch takes other ones of equal elements")
HARDEST = [
    *(
        32,
        1,
        29,
        3,
        30,
        5,
        27,
        7,
        28,
        9,
        25,
        11,
        26,
        13,
        31,
        15,
        64,
        17,
        64,
        19,
        64,
        21,
        64,
        23,
        38,
        36,
        34,
        35,
        37,
        33,
    ),
    *(39, 24, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, *[64] * 20),
]
"""Numbers of which each division finds only the next two, so that the rest is selected by a heap."""


@AS_LINUX
def test_the_smallest_steps_end_in_a_heap() -> None:
    sketch = Sketch(len(HARDEST))
    sketch.known["x"] = -torch.tensor(HARDEST).float()[None, None]
    assert_chosen(sketch, 40, ordered=False)


def assert_chosen(sketch: Sketch, chosen: int, *, ordered: bool) -> None:
    """The largest elements and their indices, looked up in a table of numbers, are torch's."""
    x = sketch.known["x"]
    top = sketch("aten.topk.default", "x", chosen, -1, True, ordered)
    table = sketch.param(x.shape[-1], 1)
    sketch.known[table] = torch.arange(x.shape[-1], dtype=torch.float32)[:, None]
    flat = sketch("aten.reshape.default", second(top), ListArg((-1,)), rows=0, times=chosen)
    found = sketch("aten.index.Tensor", table, ListArg((Ref(flat),)), rows=0, times=chosen)
    indices = sketch("aten.reshape.default", found, ListArg((1, -1, chosen)))
    rows = Rows(sketch, [indices, top], as_form("fp32"))
    for made, name in zip(rows.run(x, range(x.shape[1])), (indices, top), strict=True):
        assert np.array_equal(made, sketch.known[name][0].numpy(), equal_nan=True)


@AS_LINUX
@pytest.mark.parametrize("length", [1, 2, 5, 17, 64, 130, 512])
def test_the_largest_are_those_of_torch_also_among_equal_ones(length: int) -> None:
    """Few different numbers, so that most are equal; without an order, with infinities and NaN."""
    rng = np.random.default_rng(length)
    for chosen in {1, 2, 3, 8, 17} & set(range(1, length + 1)):
        for ordered in (True, False):
            sketch = Sketch(length, positions=64)
            x = rng.integers(0, rng.integers(2, 9, (64, 1)), (64, length)).astype(np.float32)
            x[:8] = rng.standard_normal((8, length))
            x[8:16][rng.random((8, length)) < 0.2] = np.nan
            x[16:24][rng.random((8, length)) < 0.5] = -np.inf
            x[24:32] = np.sort(x[24:32])
            x[32:40] = np.sort(x[32:40])[:, ::-1]
            sketch.known["x"] = torch.from_numpy(x)[None]
            assert_chosen(sketch, chosen, ordered=ordered)


def test_all_positions_of_the_batch_are_as_many_as_the_rows() -> None:
    """Passes pack texts into a batch of one."""
    sketch = Sketch(8)
    flat = _flat(sketch)
    sketch.values[flat] = ValueSpec(("(b*s)", 8), "float32")
    assert sketch.plan(sketch("aten.reshape.default", flat, ListArg((1, -1, 8)))).outputs["out0"] == (0, (8,))


def test_more_than_17_in_order_get_no_plan() -> None:
    sketch = Sketch(40)
    with pytest.raises(Unplanned, match="the largest 18 of 40 in order"):
        sketch.plan(sketch("aten.topk.default", "x", 18))
    sketch = Sketch(40)
    assert sketch.plan(sketch("aten.topk.default", "x", 18, -1, True, False))
