"""Joining siblings changes how many operators run, never a bit of what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.interpreter import compile_graph
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.packed_siblings import Joined, join_siblings
from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate

HIDDEN, WIDTH, TOKENS = 32, 8, 5


class Draft:
    def __init__(self) -> None:
        self.values: dict[str, ValueSpec] = {"x": ValueSpec((1, "s", HIDDEN), "float32")}
        self.params: dict[str, ParamSpec] = {}
        self.nodes: list[Node] = []

    def node(self, op: str, *args: Any, shape: tuple[int | str, ...], dtype: str = "float32") -> str:
        name = f"v{len(self.nodes)}"
        refs = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
        self.values[name] = ValueSpec(shape, dtype)
        self.nodes.append(Node(id=len(self.nodes), op=op, args=refs, outputs=(name,)))
        return name

    def param(self, key: str, *shape: int) -> str:
        self.params[f"p_{key}"] = ParamSpec(key=key, kind="parameter", shape=shape, dtype="float32")
        self.values[f"p_{key}"] = ValueSpec(shape, "float32")
        return f"p_{key}"

    def linear(self, x: str, key: str, rows: int, *, bias: bool = False) -> str:
        args = (self.param(key, rows, HIDDEN), *((self.param(f"{key}.bias", rows),) if bias else ()))
        return self.node("aten.linear.default", x, *args, shape=(1, "s", rows))

    def heads(self, x: str, rows: int) -> str:
        length = self.node("aten.sym_size.int", "x", 1, shape=(), dtype="symint")
        heads = rows // WIDTH
        split = self.node("aten.reshape.default", x, ListArg((1, Ref(length), -1, WIDTH)), shape=(1, "s", heads, WIDTH))
        return self.node("aten.transpose.int", split, 1, 2, shape=(1, heads, "s", WIDTH))

    def turned(self, x: str, rows: int, cosine: str) -> str:
        """A rotary embedding, without its tables."""
        heads, half = rows // WIDTH, WIDTH // 2
        whole = self.node("aten.mul.Tensor", x, cosine, shape=(1, heads, "s", WIDTH))
        first = self.node("aten.slice.Tensor", x, 3, 0, half, shape=(1, heads, "s", half))
        second = self.node("aten.slice.Tensor", x, 3, half, 2**63 - 1, shape=(1, heads, "s", half))
        minus = self.node("aten.neg.default", second, shape=(1, heads, "s", half))
        swapped = self.node("aten.cat.default", ListArg((Ref(minus), Ref(first))), -1, shape=(1, heads, "s", WIDTH))
        sine = self.node("aten.mul.Tensor", swapped, cosine, shape=(1, heads, "s", WIDTH))
        return self.node("aten.add.Tensor", whole, sine, shape=(1, heads, "s", WIDTH))

    def finished(self, outputs: dict[str, str]) -> Graph:
        return validate(
            Graph(
                name="siblings",
                symbols={"s": (1, 64)},
                inputs=("x",),
                outputs=outputs,
                values=self.values,
                params=self.params,
                nodes=tuple(self.nodes),
            )
        )


def attention(*, bias: bool = False, sizes: tuple[int, int, int] = (32, 16, 16)) -> Graph:
    draft = Draft()
    table = draft.param("table", 1, 1, 1, WIDTH)
    q, k, v = (draft.linear("x", name, rows, bias=bias) for name, rows in zip("qkv", sizes, strict=True))
    split = [draft.heads(x, rows) for x, rows in zip((q, k, v), sizes, strict=True)]
    return draft.finished(
        {
            "q": draft.turned(split[0], sizes[0], table),
            "k": draft.turned(split[1], sizes[1], table),
            "v": split[2],
            "flat": v,
        }
    )


def run(graph: Graph, parts: dict[str, tuple[str, ...]], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    program = compile_graph(graph, graph.outputs, with_state_writes=False, device=torch.device("cpu"))
    given = {
        name: torch.cat([weights[part] for part in parts[name]]) if name in parts else weights[name]
        for name in graph.params
    }
    x = torch.randn((1, TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2))
    found, _ = program.run(TorchContext(training=False, key=DropoutKey(0, 0, 0)), {"x": x}, given)
    return found


def weights_of(graph: Graph) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    return {name: torch.randint(-3, 4, spec.shape, generator=generator).float() for name, spec in graph.params.items()}


def ops(joined: Joined, name: str) -> int:
    return sum(node.op.split(".")[1] == name for node in joined.graph.nodes)


@pytest.mark.parametrize("bias", [False, True])
def test_what_reads_one_value_is_one_product_with_the_same_results(bias: bool) -> None:
    graph = attention(bias=bias)
    joined = join_siblings(graph)
    weights = weights_of(graph)
    plain, fewer = run(graph, {}, weights), run(joined.graph, dict(joined.parts), weights)
    assert plain.keys() == fewer.keys()
    for name, value in plain.items():
        assert value.shape == fewer[name].shape
        assert torch.allclose(value, fewer[name], rtol=1e-5, atol=1e-5)
    assert (ops(joined, "linear"), ops(joined, "reshape"), ops(joined, "transpose"), ops(joined, "neg")) == (1, 1, 1, 1)
    # Rotations of q and k are one, v stays out of them.
    assert (ops(joined, "mul"), ops(joined, "add"), ops(joined, "cat")) == (2, 1, 1)
    assert joined.parts["p_q~p_k~p_v"] == ("p_q", "p_k", "p_v")
    assert ("p_q.bias~p_k.bias~p_v.bias" in joined.parts) == bias


def test_matrices_above_a_limit_stay_alone() -> None:
    """Cards pack the parts of a stack one by one, so they have none."""
    graph, together = attention(), 4 * (32 + 16 + 16) * HIDDEN
    assert join_siblings(graph, most_bytes=together).parts
    assert not join_siblings(graph, most_bytes=together - 1).parts


def test_operands_of_their_own_keep_siblings_apart() -> None:
    draft = Draft()
    own = [draft.param(f"norm.{name}", WIDTH) for name in "qk"]
    heads = [draft.heads(draft.linear("x", name, 16), 16) for name in "qk"]
    scaled = [
        draft.node("aten.mul.Tensor", x, scale, shape=(1, 2, "s", WIDTH)) for x, scale in zip(heads, own, strict=True)
    ]
    graph = draft.finished(dict(zip("qk", scaled, strict=True)))
    joined = join_siblings(graph)
    assert (ops(joined, "linear"), ops(joined, "mul")) == (1, 2)
    weights = weights_of(graph)
    plain, fewer = run(graph, {}, weights), run(joined.graph, dict(joined.parts), weights)
    assert all(torch.allclose(plain[name], fewer[name], rtol=1e-5, atol=1e-5) for name in plain)


def test_matrices_that_others_read_or_that_would_misalign_stay_alone() -> None:
    assert join_siblings(attention(sizes=(24, 8, 8))).parts == {}
    draft = Draft()
    first, second = draft.linear("x", "a", 32), draft.linear("x", "b", 32)
    tied = draft.node("aten.linear.default", first, "p_b", shape=(1, "s", 32))
    assert join_siblings(draft.finished({"second": second, "tied": tied})).parts == {}


def test_nodes_that_do_the_same_to_the_same_run_once() -> None:
    draft = Draft()
    twice = [draft.node("aten.neg.default", "x", shape=(1, "s", HIDDEN)) for _ in range(2)]
    both = draft.node("aten.add.Tensor", *twice, shape=(1, "s", HIDDEN))
    joined = join_siblings(draft.finished({"both": both}))
    assert ops(joined, "neg") == 1
