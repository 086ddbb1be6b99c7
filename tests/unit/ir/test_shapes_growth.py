"""Upper bounds on results against what torch really makes at the largest sizes."""

from __future__ import annotations

from typing import Any

import pytest

from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import ListArg, Node, Ref
from fusionai.ir.shapes import Operands, largest_elements

TENSORS: dict[str, tuple[int, ...]] = {
    "x": (3, 4),
    "row": (1, 4),
    "column": (3, 1),
    "cube": (2, 3, 4),
    "weight": (5, 4),
    "w45": (4, 5),
    "bias": (5,),
    "index": (7,),
    "pairs": (7, 2),
    "image": (2, 3, 8, 6),
    "kernel": (5, 3, 3, 3),
    "grouped": (6, 1, 3, 3),
    "turned": (3, 5, 2, 2),
    "wave": (2, 3, 9),
    "filter": (4, 3, 2),
    "q": (2, 4, 6, 8),
    "k": (2, 2, 6, 8),
    "v": (2, 2, 6, 10),
    "columns": (2, 12, 12),
    "places": (2, 5, 4, 2),
}
SIZES = {"n": (1, 9)}


def bound(op: str, *args: Any, **kwargs: Any) -> int:
    def arg(a: Any) -> Any:
        match a:
            case str() if a in TENSORS or a in SIZES:
                return Ref(a)
            case list():
                return ListArg(tuple(arg(item) for item in a))
            case _:
                return a

    node = Node(id=0, op=op, args=tuple(arg(a) for a in args), kwargs={k: arg(a) for k, a in kwargs.items()})
    return largest_elements(Operands(node, TENSORS, SIZES))


@pytest.mark.parametrize(
    ("expected", "op", "args"),
    [
        (12, "aten.relu.default", ["x"]),
        (2 * 3 * 16 * 12, "aten.max_unpool2d.default", ["image", "image", [16, 12]]),
        (12, "aten.sum.default", ["x"]),
        (1, "aten.scalar_tensor.default", [2.0]),
        (12, "aten.add.Tensor", ["row", "column"]),
        (24, "aten.where.self", ["cube", "row", "column"]),
        (24, "aten.expand.default", ["x", [2, -1, 4]]),
        (9 * 4, "aten.expand.default", ["row", ["n", 4]]),
        (20, "aten.full.default", [[4, 5], 0.0]),
        (18, "aten.new_zeros.default", ["x", [2, "n"]]),
        (12 * 6, "aten.repeat.default", ["x", [2, 3]]),
        (36, "aten.repeat_interleave.self_int", ["x", 3, 0]),
        (24, "aten.cat.default", [["x", "x"], 0]),
        (30, "aten.linear.default", ["cube", "weight"]),
        (30, "aten.matmul.default", ["cube", "w45"]),
        (15, "aten.addmm.default", ["bias", "x", "w45"]),
        (2 * 4 * 6 * 10, "fusion.attention", ["q", "k", "v"]),
        (2 * 5 * 8 * 6, "aten.conv2d.default", ["image", "kernel"]),
        (2 * 5 * 10 * 8, "aten.conv2d.default", ["image", "kernel", None, [1, 1], [1, 1]]),
        (2 * 5 * 12 * 10, "aten.conv2d.default", ["image", "kernel", None, 1, 2]),
        (2 * 5 * 8 * 6, "aten.conv2d.padding", ["image", "kernel", None, 1, "same"]),
        (2 * 4 * 9, "aten.conv1d.default", ["wave", "filter"]),
        (2 * 5 * 18 * 14, "aten.conv_transpose2d.input", ["image", "turned", None, 2]),
        (14, "aten.gather.default", ["cube", 0, "pairs"]),
        (7 * 4, "aten.embedding.default", ["weight", "index"]),
        (14 * 4, "aten.embedding.default", ["weight", "pairs"]),
        (7 * 3 * 4, "aten.index.Tensor", ["cube", ["index"]]),
        (7 * 2 * 4, "aten.index.Tensor", ["cube", [None, "index"]]),
        (14 * 4, "aten.index.Tensor", ["cube", ["pairs", "pairs"]]),
        (7 * 12, "aten.index_select.default", ["x", 0, "index"]),
        (70, "aten.one_hot.default", ["index", 10]),
        (5 * 8, "aten.constant_pad_nd.default", ["x", [1, 3, 0, 2]]),
        (2 * 3 * 10 * 8, "aten.max_pool2d.default", ["image", 3, 1, 1]),
        (2 * 3 * 20, "aten.adaptive_avg_pool2d.default", ["image", [4, 5]]),
    ],
)
def test_bounds(expected: int, op: str, args: list[Any]) -> None:
    assert bound(op, *args) == expected


@pytest.mark.parametrize(
    ("expected", "args"), [(11, (10,)), (4, (3, 6)), (4, (0, 6, 2)), (7, (9, 3, -1)), (10, ("n",)), (9, ("n", 0, 1))]
)
def test_arange(expected: int, args: tuple[Any, ...]) -> None:
    op = {1: "aten.arange.default", 2: "aten.arange.start", 3: "aten.arange.start_step"}[len(args)]
    # One more than there are: a bound, whatever the rounding of the ends.
    assert expected <= bound(op, *args) <= expected + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.conv2d.default", ["image", "kernel", None, [2, 1], [3, 0]]),
        ("aten.conv2d.default", ["image", "grouped", None, [1, 1], [2, 2], [1, 1], 3]),
        ("aten.conv1d.default", ["wave", "filter", None, [1], [4]]),
        ("aten.conv_transpose2d.input", ["image", "turned", None, [3, 2], [0, 0], [1, 1]]),
        ("aten.conv_transpose2d.input", ["image", "turned", None, [1, 1], [0, 0], [0, 0], 1, [4, 4]]),
        ("aten.max_pool2d.default", ["image", [3, 3], [1, 1], [1, 1]]),
        ("aten.avg_pool2d.default", ["image", [2, 2]]),
        ("aten.constant_pad_nd.default", ["x", [1, 3, -1, 2]]),
        ("aten.matmul.default", ["q", "w8"]),
        ("aten.matmul.default", ["bias", "b5"]),
        ("aten.index.Tensor", ["cube", ["index", None, "index"]]),
        ("aten.arange.start_step", [0, 10, 3]),
        ("aten.repeat.default", ["x", [2, 1, 3]]),
        ("aten.broadcast_tensors.default", [["row", "column"]]),
        ("aten.diff.default", ["x"]),
        ("aten.stack.default", [["x", "x", "x"]]),
        ("aten.unfold.default", ["image", 2, 3, 1]),
        ("aten.im2col.default", ["image", [3, 2], [1, 1], [1, 0], [2, 1]]),
        ("aten.col2im.default", ["columns", [5, 4], [2, 2], [1, 1], [0, 0], [1, 1]]),
        ("aten.linspace.default", [0.0, 1.0, 7]),
        ("aten._cdist_forward.default", ["q", "k8", 2.0, None]),
        ("aten._trilinear.default", ["x", "b45", "b3", [1, 3], [0], [1, 2], [2, 3]]),
        ("aten.grid_sampler_2d.default", ["image", "places", 0, 0, False]),
        ("aten.adaptive_max_pool2d.default", ["image", [9, 7]]),
        ("aten.max_pool3d_with_indices.default", ["q", [1, 1, 1], [1, 1, 1], [0, 0, 0]]),
    ],
)
def test_torch_never_makes_more(op: str, args: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(TENSORS, "w8", (8, 3))
    monkeypatch.setitem(TENSORS, "b5", (5, 2))
    monkeypatch.setitem(TENSORS, "k8", (2, 4, 9, 8))
    monkeypatch.setitem(TENSORS, "b45", (7, TENSORS["x"][1], 2))
    monkeypatch.setitem(TENSORS, "b3", (TENSORS["x"][0], 2))

    def real(a: Any) -> Any:
        if isinstance(a, list):
            return [real(item) for item in a]
        if isinstance(a, str):
            return torch.zeros(TENSORS[a], dtype=torch.int64 if a in ("index", "pairs") else torch.float32)
        return a

    _, name, overload = op.split(".")
    made = getattr(getattr(torch.ops.aten, name), overload)(*(real(a) for a in args))
    results = made if isinstance(made, list | tuple) else [made]
    assert max(result.numel() for result in results) <= bound(op, *args)


def test_every_rule_is_reachable() -> None:
    """Each operator that may grow has a rule above: a new rule needs a row here."""
    assert {operator.growth for operator in OPERATORS.values()} == {
        "operand",
        "grid",
        "unpool",
        "windows",
        "broadcast",
        "sizes",
        "repeat",
        "arange",
        "join",
        "matmul",
        "conv",
        "conv_transpose",
        "lookup",
        "one_hot",
        "pad",
        "window",
        "adaptive",
    }
