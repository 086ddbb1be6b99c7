"""Graphs of rows for tests of row plans, with what torch's operators make of them."""

from __future__ import annotations

from typing import Any

import torch

from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.operators import PLAIN
from fusionai.backends.torch.packed_graph import products
from fusionai.backends.torch.row_plan import RowPlan, plan_rows
from fusionai.ir.schema import DTypeArg, FloatArg, Graph, ListArg, Node, ParamSpec, Ref, ValueSpec

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SEED = 5


class Sketch:
    """A graph written down node by node. Each value is [1, s, ...]; its shape is found by running torch beside it, for
    `positions` rows."""

    def __init__(self, *sizes: int, dtype: str = "float32", positions: int = 1) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.nodes: list[Node] = []
        self.params: dict[str, ParamSpec] = {}
        self.values = {"x": ValueSpec((1, "s", *sizes), dtype)}
        self.known: dict[str, Any] = {"x": torch.randn((1, positions, *sizes), generator=generator)}
        self.generator = generator

    def param(self, *shape: int) -> str:
        name = f"p{len(self.params)}"
        self.params[name] = ParamSpec(key=name, kind="parameter", shape=shape, dtype="float32")
        self.values[name] = ValueSpec(shape, "float32")
        self.known[name] = torch.randn(shape, generator=self.generator)
        return name

    def __call__(self, op: str, *args: Any, rows: int = 1, times: int = 1, **kwargs: Any) -> str:
        """One value of the operator `op`; `rows`: the dimension that is the sequence, or `times` as long."""
        made = PLAIN[op](*[self._plain(arg) for arg in args], **{k: self._plain(v) for k, v in kwargs.items()})
        results = list(made) if isinstance(made, list | tuple) else [made]
        names = tuple(f"v{len(self.nodes)}_{number}" for number in range(len(results)))
        for name, result in zip(names, results, strict=True):
            self.known[name] = result
            if isinstance(result, int):
                self.values[name] = ValueSpec((), "symint")
                continue
            along = "s" if times == 1 else f"({times}*s)"
            shape = tuple(along if at == rows else size for at, size in enumerate(result.shape))
            self.values[name] = ValueSpec(shape, _NAMES[result.dtype])
        given = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
        self.nodes.append(Node(id=len(self.nodes), op=op, args=given, kwargs=kwargs, outputs=names))
        return names[0]

    def graph(self, *outputs: str) -> Graph:
        return Graph(
            name="sketch",
            symbols={"s": (1, 64)},
            inputs=("x",),
            outputs={f"out{number}": value for number, value in enumerate(outputs)},
            values=self.values,
            params=self.params,
            nodes=tuple(self.nodes),
        )

    def plan(self, *outputs: str) -> RowPlan:
        graph = self.graph(*outputs)
        return plan_rows(graph, tuple(graph.outputs), products(graph))

    def _plain(self, arg: Any) -> Any:
        match arg:
            case str() | Ref():
                return self.known[arg if isinstance(arg, str) else arg.name]
            case DTypeArg(name):
                return DTYPES[name]
            case FloatArg(name):
                return float(name)
            case ListArg(items):
                return [self._plain(item) for item in items]
            case _:
                return arg
