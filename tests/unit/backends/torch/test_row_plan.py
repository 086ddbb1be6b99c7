"""Row plans: what lines and views make of a graph equals torch's operators, memory is never given away too early, and
what can't be written down is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fusionai.backends.torch.packed_graph import products
from fusionai.backends.torch.row_code import LINE, Field, Op, Unplanned, _Room, refuse_beyond
from fusionai.backends.torch.row_plan import RowPlan
from fusionai.ir.schema import Arg, ListArg, Ref, ValueSpec
from harness.examples import examples
from harness.row_sketch import Sketch

Shape = tuple[int | str, ...]
UNARY = ("neg", "exp", "silu", "sigmoid", "relu", "tanh", "gelu", "cos", "sin")
BINARY = ("add", "sub", "mul")
NUMPY: dict[Op, Callable[..., Any]] = {
    Op.ADD: np.add,
    Op.SUB: np.subtract,
    Op.MUL: np.multiply,
    Op.DIV: np.divide,
    Op.MINIMUM: np.minimum,
    Op.MAXIMUM: np.maximum,
    Op.COPY: np.positive,
    Op.NEG: np.negative,
    Op.SQUARE: np.square,
    Op.CUBE: lambda x: x**3,
    Op.SQRT: np.sqrt,
    Op.RSQRT: lambda x: 1 / np.sqrt(x),
    Op.EXP: np.exp,
    Op.RELU: lambda x: np.maximum(x, 0),
    Op.TANH: np.tanh,
    Op.COS: np.cos,
    Op.SIN: np.sin,
    Op.SILU: lambda x: x / (1 + np.exp(-x)),
    Op.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Op.GELU: lambda x: torch.nn.functional.gelu(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
}


def computed(sketch: Sketch, plan: RowPlan) -> Iterator[np.ndarray]:
    """Each output, line after line in plain numpy, over memory that is NaN where nothing was written."""
    memory = np.full(plan.fixed + plan.width, np.nan)
    for place, what in plan.constants.items():
        value = sketch.known[what].numpy().reshape(-1) if isinstance(what, str) else np.array([what])
        memory[place : place + value.size] = value
    for name, (place, floats) in plan.inputs.items():
        memory[plan.fixed + place : plan.fixed + place + floats] = sketch.known[name].numpy().reshape(-1)
    for number, line in enumerate(plan.code):
        _step(sketch, plan, memory, number, line)
    for place, shape in plan.outputs.values():
        yield memory[plan.fixed + place :][: int(np.prod(shape))].reshape(1, 1, *shape)


def _step(sketch: Sketch, plan: RowPlan, memory: np.ndarray, number: int, line: np.ndarray) -> None:
    op = Op(line[0])

    def at(place: Field, flag: Field) -> int:
        return int(line[place]) + (plan.fixed if line[flag] else 0)

    out, first = plan.fixed + int(line[Field.OUT]), at(Field.A, Field.A_ROW)
    if op <= Op.SIN:
        dims = [int(size) for size in line[Field.DIMS : Field.DIMS + 3]]
        reads = [_read(memory, first, dims, line[Field.A_STRIDES : Field.A_STRIDES + 3])]
        if op <= Op.MASKED:
            reads.append(_read(memory, at(Field.B, Field.B_ROW), dims, line[Field.B_STRIDES : Field.B_STRIDES + 3]))
        memory[out : out + int(np.prod(dims))] = np.asarray(NUMPY[op](*reads)).reshape(-1)
        return
    groups, length = (int(size) for size in line[Field.DIMS : Field.DIMS + 2])
    if op is Op.LINEAR:
        use = products(sketch.graph())[plan.products[number]]
        weight = sketch.known[use.weight].numpy()
        weight = weight.T if use.transposed else weight
        bias = int(line[Field.EXTRA + 2])
        assert (bias < 0) == (use.bias is None)
        memory[out : out + groups] = weight @ memory[first : first + length]
        if bias >= 0:
            memory[out : out + groups] += memory[bias : bias + groups]
        return
    x = memory[first : first + groups * length].reshape(groups, length)
    if op is Op.LAYER_NORM:
        eps, weight, bias = (int(place) for place in line[Field.EXTRA : Field.EXTRA + 3])
        made = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + memory[eps])
        made = made * (1 if weight < 0 else memory[weight : weight + length])
        made = made + (0 if bias < 0 else memory[bias : bias + length])
    else:
        made = x.mean(1) if op is Op.MEAN else x.sum(1)
    memory[out : out + made.size] = made.reshape(-1)


def _read(memory: np.ndarray, start: int, dims: list[int], strides: np.ndarray) -> np.ndarray:
    places = [np.arange(size) * int(step) for size, step in zip(dims, strides, strict=True)]
    return memory[start + places[0][:, None, None] + places[1][:, None] + places[2]]


def assert_equal(sketch: Sketch, *outputs: str) -> RowPlan:
    plan = sketch.plan(*outputs)
    for name, found in zip(outputs, computed(sketch, plan), strict=True):
        np.testing.assert_allclose(found, sketch.known[name].numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
    return plan


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.data())
def test_any_graph_of_rows_equals_operators(data: st.DataObject) -> None:
    """Memory is kept until the last of the values that share it has been read."""
    sketch = Sketch(2, 6)
    names = ["x"]
    for _ in range(data.draw(st.integers(1, 12), label="nodes")):
        kind = data.draw(st.sampled_from(("unary", "binary", "split", "turn", "cat", "mean", "constant")), label="kind")
        one, other = (data.draw(st.sampled_from(names), label="operand") for _ in range(2))
        match kind:
            case "unary":
                name = data.draw(st.sampled_from(UNARY), label="function")
                names.append(sketch(f"aten.{name}.default", sketch("aten.tanh.default", one)))
            case "binary":
                name = data.draw(st.sampled_from(BINARY), label="function")
                names.append(sketch(f"aten.{name}.Tensor", one, other))
            case "constant":
                names.append(sketch("aten.mul.Tensor", one, sketch.param(6)))
            case "split":  # halves change places, by two views of one memory
                half = sketch("aten.split.Tensor", one, 3, 3)
                last = half.removesuffix("_0") + "_1"
                names.append(sketch("aten.cat.default", ListArg((Ref(last), Ref(half))), 3))
            case "turn":  # [1, s, 2, 6] -> [1, s, 6, 2] -> [1, s, 2, 6], which no view can show
                turned = sketch("aten.transpose.int", one, 2, 3)
                names.append(sketch("aten.reshape.default", turned, ListArg((1, 1, 2, 6))))
            case "cat":
                both = sketch("aten.cat.default", ListArg((Ref(one), Ref(other))), 2)
                names.append(sketch("aten.slice.Tensor", both, 2, 1, 3))
            case _:
                mean = sketch("aten.mean.dim", one, ListArg((-1,)), True)
                names.append(sketch("aten.sub.Tensor", one, mean))
    outputs = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True), label="outputs")
    assert_equal(sketch, *outputs)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=60))
def test_places_never_overlap(steps: list[tuple[bool, int]]) -> None:
    room = _Room()
    held: list[tuple[int, int]] = []
    for takes, number in steps:
        if takes or not held:
            held.append((room.take(number), number))
        else:
            room.give(*held.pop(number % len(held)))
        spans = sorted([(start, start + floats + -floats % 16) for start, floats in held])
        spans += [(start, start + length) for start, length in room.free]
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == room.size
        assert all(start % 16 == 0 for start, _ in spans)
    for start, floats in held:
        room.give(start, floats)
    assert room.free == ([(0, room.size)] if room.size else [])


def test_memory_is_used_again() -> None:
    sketch = Sketch(64)
    value = "x"
    for _ in range(20):
        value = sketch("aten.exp.default", sketch("aten.tanh.default", value))
    assert assert_equal(sketch, value).width == 2 * 64


def test_an_output_that_others_read_stays_what_it_is() -> None:
    sketch = Sketch(8)
    early = sketch("aten.exp.default", "x")
    late = sketch("aten.mul.Tensor", sketch("aten.neg.default", early), early)
    assert_equal(sketch, early, late, "x")


@pytest.mark.parametrize("biased", [True, False])
def test_products_of_either_orientation(biased: bool) -> None:
    sketch = Sketch(12)
    bias = sketch.param(5)
    flat = sketch("aten.linear.default", "x", sketch.param(5, 12), *([bias] if biased else []))
    turned = sketch("aten.matmul.default", flat, sketch.param(5, 7))
    plan = assert_equal(sketch, flat, turned)
    assert len(plan.products) == 2


@pytest.mark.parametrize(("weighted", "biased"), [(True, True), (True, False), (False, False)])
def test_layer_norms(weighted: bool, biased: bool) -> None:
    sketch = Sketch(3, 10)
    weight, bias = sketch.param(10), sketch.param(10)
    rest = [*([weight] if weighted else []), *([bias] if biased else [])]
    assert_equal(sketch, sketch("aten.layer_norm.default", "x", ListArg((10,)), *rest))


def test_views_of_views() -> None:
    sketch = Sketch(4, 6)
    turned = sketch("aten.permute.default", "x", ListArg((0, 3, 1, 2)), rows=2)
    taken = sketch("aten.select.int", turned, 1, 2, rows=1)
    stacked = sketch("aten.stack.default", ListArg((Ref(taken), Ref(taken))), -1)
    wide = sketch("aten.expand.default", sketch("aten.unsqueeze.default", taken, 2), ListArg((1, 1, 3, 4)))
    assert_equal(sketch, stacked, wide, sketch("aten.repeat_interleave.self_int", wide, 2, 3))


@pytest.mark.parametrize("step", [1, 2])
def test_values_in_parts(step: int) -> None:
    """Split, written into another value's slice, and added up along a dimension before the last."""
    sketch = Sketch(4, 6)
    part = sketch("aten.split_with_sizes.default", "x", ListArg((2, 4)), -1)
    wide = sketch("aten.slice_scatter.default", "x", part, 3, 2, 2 + 2 * step, step)
    wide = sketch("aten.slice_scatter.default", wide, sketch("aten.slice.Tensor", part, 3, 0, 0), 3, 0, 0)
    total = sketch("aten.sum.dim_IntList", wide, ListArg((2,)))
    one = sketch("aten.sum.dim_IntList", sketch("aten.slice.Tensor", wide, 2, 3, 4), ListArg((2,)), True)
    placed = sketch("aten.select_scatter.default", wide, sketch("aten.select.int", "x", 2, 1), 2, -step)
    assert_equal(sketch, wide, total, one, placed)


def _with(*args: Arg | str, op: str, **kwargs: Any) -> Callable[[Sketch], str]:
    return lambda sketch: sketch(op, *args, **kwargs)


def _table(sketch: Sketch) -> str:
    return sketch("aten.add.Tensor", "x", sketch("aten.mean.dim", sketch.param(2**20 + 1, 8), ListArg((0,)), rows=-1))


def _narrow(sketch: Sketch) -> str:
    """A slice of three elements that takes four."""
    made = sketch("aten.slice_scatter.default", "x", sketch("aten.slice.Tensor", "x", 2, 0, 4), 2, 4, 8)
    sketch.nodes[-1] = structs.replace(sketch.nodes[-1], args=(*sketch.nodes[-1].args[:3], 5, 8))
    return made


def _long(sketch: Sketch) -> str:
    wide = sketch("aten.expand.default", sketch("aten.unsqueeze.default", "x", 2), ListArg((1, 1, 65, 8)))
    return sketch("aten.sum.dim_IntList", wide, ListArg((2,)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_with("x", 2, op="aten.cumsum.default"), "aten.cumsum.default"),
        (_with("x", 1.7, op="aten.pow.Tensor_Scalar"), "power 1.7"),
        (_with("x", 1, 0, 1, op="aten.slice.Tensor"), "rows of x are chosen"),
        (_with("x", 1, 0, op="aten.select.int", rows=-1), "rows of x are chosen"),
        (_with("x", ListArg((1,)), True, op="aten.mean.dim"), "rows of x are chosen"),
        (_with("x", ListArg((0,)), op="aten.mean.dim", rows=0), "aten.mean.dim over"),
        (_with("x", "x", op="aten.maximum.default"), "aten.maximum.default"),
        (_with("x", 0.5, op="aten.add.Tensor", alpha=2), "aten.add.Tensor"),
        (_with("x", 0.5, op="aten.gt.Scalar"), "makes no floats"),
        (_narrow, r"of \(1, 1, 4\) into \(1, 1, 3\)"),
        (_long, "a sum of 65 parts"),
        (_table, "read as a table"),
    ],
)
def test_what_is_unknown_is_named(make: Callable[[Sketch], str], why: str) -> None:
    sketch = Sketch(8)
    with pytest.raises(Unplanned, match=why):
        sketch.plan(make(sketch))


@pytest.mark.parametrize("dtype", ["int64", "bool", "float64"])
def test_rows_of_something_else_than_floats_get_no_plan(dtype: str) -> None:
    sketch = Sketch(8, dtype=dtype)
    with pytest.raises(Unplanned, match="input x is no row of floats"):
        sketch.plan(sketch("aten.neg.default", "x"))


def test_an_output_without_rows_gets_no_plan() -> None:
    sketch = Sketch(8)
    with pytest.raises(Unplanned, match="output out0 has no rows"):
        sketch.plan(sketch("aten.transpose.int", "x", 1, 2, rows=2))


def hostile(seed: int) -> tuple[Sketch, str]:
    """A graph with each kind of line, of which one value is declared with other sizes than it has. Declarations of a
    graph hold where the positions are as many as the other machine says, and a plan is for one."""
    rng = np.random.default_rng(seed)
    sketch = Sketch(2, 8)
    weight, bias = sketch.param(8), sketch.param(8)
    normed = sketch("aten.layer_norm.default", "x", ListArg((8,)), weight, bias)
    product = sketch("aten.linear.default", sketch("aten.select.int", normed, 2, 1), sketch.param(24, 8))
    parts = sketch("aten.split.Tensor", product, 8, -1)
    joined = sketch("aten.cat.default", ListArg((Ref(parts), Ref(parts))), -1)
    mean = sketch("aten.mean.dim", sketch("aten.mul.Tensor", joined, joined), ListArg((-1,)))
    wide = sketch("aten.expand.default", sketch("aten.unsqueeze.default", mean, 2), ListArg((1, 1, 5)))
    last = sketch("aten.repeat_interleave.self_int", wide, 2, 2)
    made = sorted(name for name in sketch.values if name != "x")
    name = made[int(rng.integers(len(made)))]
    shape = list(sketch.values[name].shape)
    at = int(rng.integers(len(shape)))
    shape[at] = rng.choice(np.array([1, 2, 4, 8, 16, 4096], object))
    sketch.values[name] = ValueSpec(tuple(int(size) if size != "s" else "s" for size in shape), "float32")
    return sketch, last


@pytest.mark.parametrize("seed", range(200))
def test_no_plan_believes_a_declared_size(seed: int) -> None:
    """Lines stay within the memory that the plan asks for, or there is no plan."""
    sketch, last = hostile(seed)
    try:
        plan = sketch.plan(last)
    except Unplanned:
        return
    refuse_beyond(plan.code, plan.fixed, plan.width)
    for _ in computed(sketch, plan):
        pass


def test_a_product_wider_than_declared_gets_no_plan() -> None:
    sketch = Sketch(8)
    made = sketch("aten.linear.default", "x", sketch.param(4096, 8))
    sketch.values[made] = ValueSpec((1, "s", "s"), "float32")
    with pytest.raises(Unplanned, match=r"v0_0 has sizes|LINEAR gives"):
        sketch.plan(made)
    sketch.values[made] = ValueSpec((1, "s", 1), "float32")
    with pytest.raises(Unplanned, match="LINEAR gives"):
        sketch.plan(made)


@pytest.mark.parametrize("place", [Field.OUT, Field.A, Field.DIMS, Field.DIMS + 1, Field.DIMS + 2])
def test_a_line_that_leaves_its_memory_is_refused(place: int) -> None:
    sketch = Sketch(3, 8)
    bias = sketch.param(24)
    flat = sketch("aten.reshape.default", sketch("aten.exp.default", "x"), ListArg((1, 1, 24)))
    plan = sketch.plan(
        sketch("aten.layer_norm.default", flat, ListArg((24,)), sketch.param(24), bias),
        sketch("aten.linear.default", flat, sketch.param(24, 24), bias),
    )
    for number in range(len(plan.code)):
        code = plan.code.copy()
        code[number, place] += 10_000
        if (plan.code[number, place] == 0) and place == Field.DIMS + 2:
            continue  # lines over rows have two sizes
        with pytest.raises(Unplanned, match="leave its memory"):
            refuse_beyond(code, plan.fixed, plan.width)


def test_a_line_is_as_long_as_was_agreed() -> None:
    sketch = Sketch(8)
    code = sketch.plan(sketch("aten.exp.default", "x")).code
    assert code.shape == (1, LINE)
    assert code.dtype == np.int64
