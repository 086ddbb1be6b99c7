"""A builder of small graphs and one small transformer-like model, tied and with sizes, masks and a loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusionai.ir.schema import Arg, Dim, Graph, InitOp, ListArg, Node, ParamSpec, Ref, ValueSpec


class Builder:
    """Collects inputs, parameters and nodes; every method returns the value's name."""

    def __init__(self, **symbols: tuple[int, int]) -> None:
        self.symbols = symbols or {"b": (1, 8), "s": (1, 64)}
        self.inputs: list[str] = []
        self.values: dict[str, ValueSpec] = {}
        self.params: dict[str, ParamSpec] = {}
        self.nodes: list[Node] = []
        self.outputs: dict[str, str] = {}
        self.state_writes: dict[str, str] = {}

    def input(self, name: str, shape: tuple[Dim, ...], dtype: str = "int64") -> str:
        self.inputs.append(name)
        self.values[name] = ValueSpec(shape, dtype)
        return name

    def param(
        self, key: str, shape: tuple[int, ...], *, kind: str = "parameter", dtype: str = "float32", frozen: bool = False
    ) -> str:
        value = "p_" + key.replace(".", "_")
        self.values[value] = ValueSpec(shape, dtype)
        self.params[value] = ParamSpec(
            key=key,
            kind=kind,  # type: ignore[arg-type]
            shape=shape,
            dtype=dtype,
            trainable=kind == "parameter" and not frozen,
            order=len(self.params),
            init=(InitOp("normal", (0.0, 0.02)),),
        )
        return value

    def node(
        self,
        op: str,
        *args: Arg,
        shape: tuple[Dim, ...] = (),
        dtype: str = "float32",
        path: str = "",
        block: int = 0,
        results: int = 1,
        **kwargs: Arg,
    ) -> str:
        number = len(self.nodes)
        names = tuple(f"v{number}" if i == 0 else f"v{number}_{i}" for i in range(results))
        for name in names:
            self.values[name] = ValueSpec(shape, dtype)
        made = tuple(Ref(arg) if isinstance(arg, str) and arg in self.values else arg for arg in args)
        named = {k: Ref(arg) if isinstance(arg, str) and arg in self.values else arg for k, arg in kwargs.items()}
        self.nodes.append(Node(id=number, op=op, args=made, kwargs=named, outputs=names, path=path, block=block))
        return names[0]

    def size(self, tensor: str, dim: int, **where: object) -> str:
        return self.node("aten.sym_size.int", tensor, dim, dtype="symint", **where)  # type: ignore[arg-type]

    def graph(self) -> Graph:
        return Graph(
            name="test",
            symbols=self.symbols,
            inputs=tuple(self.inputs),
            outputs=self.outputs,
            values=self.values,
            params=self.params,
            state_writes=self.state_writes,
            nodes=tuple(self.nodes),
        )


@pytest.fixture
def make() -> Callable[..., Builder]:
    return Builder


@pytest.fixture
def model() -> Graph:
    """Two layers of width 8 over a vocabulary of 16, tied embedding, rotary-like cosine, reshape through sizes."""
    return transformer(layers=2)


@pytest.fixture
def transformer_of() -> Callable[[int], Graph]:
    return lambda layers: transformer(layers=layers)


def transformer(*, layers: int) -> Graph:
    g = Builder()
    ids, positions = g.input("input_ids", ("b", "s")), g.input("position_ids", ("b", "s"))
    labels = g.input("labels", ("b", "s"))
    table = g.param("embed.weight", (16, 8))
    frequencies = g.param("rotary.inv_freq", (8,), kind="buffer")
    hidden_shape: tuple[Dim, ...] = ("b", "s", 8)
    wide = g.node("aten.unsqueeze.default", positions, -1, shape=("b", "s", 1), dtype="int64", path="rotary")
    angles = g.node("aten.mul.Tensor", wide, frequencies, shape=hidden_shape, path="rotary")
    cosine = g.node("aten.cos.default", angles, shape=hidden_shape, path="rotary")
    hidden = g.node("aten.embedding.default", table, ids, shape=hidden_shape, path="embed")
    for layer in range(layers):
        path = f"layers.{layer}"
        norm = g.param(f"{path}.norm.weight", (8,))
        weight = g.param(f"{path}.linear.weight", (8, 8))
        bias = g.param(f"{path}.linear.bias", (8,))
        batch = g.size(hidden, 0, path=path)
        sequence = g.size(hidden, 1, path=path)
        normed = g.node(
            "aten.layer_norm.default",
            hidden,
            ListArg((8,)),
            norm,
            None,
            1e-5,
            shape=hidden_shape,
            path=f"{path}.norm",
        )
        turned = g.node("aten.mul.Tensor", normed, cosine, shape=hidden_shape, path=path)
        flat = g.node(
            "aten.reshape.default",
            turned,
            ListArg((Ref(batch), Ref(sequence), 8)),
            shape=hidden_shape,
            path=path,
        )
        mixed = g.node("aten.linear.default", flat, weight, bias, shape=hidden_shape, path=f"{path}.linear")
        hidden = g.node("aten.add.Tensor", hidden, mixed, shape=hidden_shape, path=path)
    logits = g.node("aten.linear.default", hidden, table, shape=("b", "s", 16), path="head")
    rows = g.node("aten.reshape.default", logits, ListArg((-1, 16)), shape=("b*s", 16))
    column = g.node("aten.reshape.default", labels, ListArg((-1,)), shape=("b*s",), dtype="int64")
    loss = g.node("aten.cross_entropy_loss.default", rows, column)
    g.outputs = {"logits": logits, "loss": loss}
    return g.graph()
