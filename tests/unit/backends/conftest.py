"""A builder of small graphs for stages, and one model as a graph and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.schema import Arg, Dim, Graph, InitOp, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.tensors import HostTensor, host_tensor

HIDDEN, INNER, CLASSES = 16, 24, 11


class Stage:
    """Collects inputs, parameters and nodes; every method returns a reference to the value."""

    def __init__(self, **symbols: tuple[int, int]) -> None:
        self.symbols = symbols
        self.inputs: list[str] = []
        self.values: dict[str, ValueSpec] = {}
        self.params: dict[str, ParamSpec] = {}
        self.nodes: list[Node] = []
        self.state_writes: dict[str, str] = {}

    def input(self, name: str, *shape: Dim, dtype: str = "float32") -> Ref:
        self.inputs.append(name)
        self.values[name] = ValueSpec(shape, dtype)
        return Ref(name)

    def param(self, key: str, *shape: int, kind: str = "parameter", dtype: str = "float32", fill: float | None = None):
        name = "p_" + key.replace(".", "_")
        init = (InitOp(op="normal", args=(0.0, 0.2)),) if fill is None else (InitOp(op="fill", args=(fill,)),)
        self.values[name] = ValueSpec(shape, dtype)
        self.params[name] = ParamSpec(
            key=key,
            kind=kind,  # type: ignore[arg-type]
            shape=shape,
            dtype=dtype,
            trainable=kind == "parameter",
            order=len(self.params),
            init=init,
        )
        return Ref(name)

    def node(
        self,
        op: str,
        *args: Arg,
        out: Mapping[str, ValueSpec] | None = None,
        shape: tuple[Dim, ...] = (),
        **kwargs: Arg,
    ) -> Ref:
        """One node. `shape`: of its single float32 result; `out`: names and specs of several results."""
        results = {f"v{len(self.nodes)}": ValueSpec(shape, "float32")} if out is None else dict(out)
        self.values.update(results)
        self.nodes.append(
            Node(id=10 + len(self.nodes), op=op, args=args, kwargs=kwargs, outputs=tuple(results), path="stage")
        )
        return Ref(next(iter(results)))

    def graph(self, *, checked: bool = True, **outputs: Ref) -> Graph:
        graph = Graph(
            name="stage",
            symbols=self.symbols,
            inputs=tuple(self.inputs),
            outputs={meaning: ref.name for meaning, ref in outputs.items()},
            values=self.values,
            params=self.params,
            state_writes=self.state_writes,
            nodes=tuple(self.nodes),
        )
        return validate(graph) if checked else graph


def host(array: np.ndarray) -> HostTensor:
    return host_tensor(str(array.dtype), array.shape, bytearray(array.tobytes()))


def array_of(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def mlp_graph(part: str = "whole") -> Graph:
    """ids -> embedding -> x -> linear, silu, linear, residual -> y -> head -> loss; `first` ends at y, `second`
    starts there."""
    stage = Stage(b=(1, 8), s=(1, 32))
    hidden = ("b", "s", HIDDEN)
    outputs: dict[str, Ref] = {}
    if part != "second":
        ids = stage.input("ids", "b", "s", dtype="int64")
        x = stage.node("aten.embedding.default", stage.param("embed.weight", CLASSES, HIDDEN), ids, shape=hidden)
        weight, bias = stage.param("up.weight", INNER, HIDDEN), stage.param("up.bias", INNER)
        up = stage.node("aten.linear.default", x, weight, bias, shape=("b", "s", INNER))
        act = stage.node("aten.silu.default", up, shape=("b", "s", INNER))
        down = stage.node("aten.linear.default", act, stage.param("down.weight", HIDDEN, INNER), shape=hidden)
        y = stage.node("aten.add.Tensor", x, down, out={"y": ValueSpec(hidden, "float32")})
    else:
        y = stage.input("y", *hidden)
    if part == "first":
        return stage.graph(y=y)
    labels = stage.input("labels", "b", "s", dtype="int64")
    head = stage.param("head.weight", CLASSES, HIDDEN)
    logits = stage.node("aten.linear.default", y, head, shape=("b", "s", CLASSES))
    flat = stage.node("aten.reshape.default", logits, ListArg((-1, CLASSES)), shape=("b*s", CLASSES))
    targets = stage.node("aten.reshape.default", labels, ListArg((-1,)), out={"targets": ValueSpec(("b*s",), "int64")})
    logp = stage.node("aten._log_softmax.default", flat, 1, False, shape=("b*s", CLASSES))
    scalar = ValueSpec((), "float32")
    loss = stage.node(
        "aten.nll_loss_forward.default", logp, targets, None, 1, -100, out={"loss": scalar, "weight_total": scalar}
    )
    return stage.graph(logits=logits, loss=loss, **outputs)


class Mlp(torch.nn.Module):
    """What `mlp_graph` says, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CLASSES, HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, INNER)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)
        self.head = torch.nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        logits = self.head(x + self.down(torch.nn.functional.silu(self.up(x))))
        return torch.nn.functional.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1))


@pytest.fixture
def kit() -> SimpleNamespace:
    """Everything above, for test files (they can't import each other)."""
    torch.manual_seed(0)
    return SimpleNamespace(
        Stage=Stage, mlp_graph=mlp_graph, Mlp=Mlp, host=host, array_of=array_of, classes=CLASSES, hidden=HIDDEN
    )


@pytest.fixture
def backend() -> TorchBackend:
    return TorchBackend("cpu", threads=1)


@pytest.fixture
def load(backend: TorchBackend) -> Callable:
    """Load and initialise a graph: `load(graph, grad_inputs=(), **options)`."""
    from fusionai.wire.messages import StageOptions

    def load_initialised(graph: Graph, grad_inputs: tuple[str, ...] = (), limit_bytes: int | None = None, **options):
        program = backend.load(
            graph, grad_inputs=grad_inputs, options=StageOptions(**options), memory_limit_bytes=limit_bytes
        )
        assert program.initialise() == ()
        return program

    return load_initialised
