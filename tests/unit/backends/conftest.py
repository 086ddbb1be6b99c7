"""Hand-made graphs and the plain torch modules they must equal bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionai.ir.schema import Graph, InitOp, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.primitives.tensors import HostTensor, host_tensor

HIDDEN, INNER, CLASSES = 16, 24, 11


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def parameter(key: str, *shape: int, order: int = 0) -> ParamSpec:
    return ParamSpec(
        key=key,
        kind="parameter",
        shape=shape,
        dtype="float32",
        trainable=True,
        order=order,
        init=(InitOp(op="normal", args=(0.0, 0.2)),),
    )


def host(array: np.ndarray) -> HostTensor:
    return host_tensor(str(array.dtype), array.shape, bytearray(array.tobytes()))


def array_of(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def mlp_graph() -> Graph:
    """ids [b, s] -> embedding -> linear -> silu -> linear -> residual -> logits -> loss."""
    hidden = ("b", "s", HIDDEN)
    return Graph(
        name="mlp",
        symbols={"b": (1, 8), "s": (1, 32)},
        inputs=("ids", "labels"),
        outputs={"logits": "logits", "loss": "loss"},
        values={
            "ids": ValueSpec(("b", "s"), "int64"),
            "labels": ValueSpec(("b", "s"), "int64"),
            "x": ValueSpec(hidden, "float32"),
            "up": ValueSpec(("b", "s", INNER), "float32"),
            "act": ValueSpec(("b", "s", INNER), "float32"),
            "down": ValueSpec(hidden, "float32"),
            "y": ValueSpec(hidden, "float32"),
            "logits": ValueSpec(("b", "s", CLASSES), "float32"),
            "flat": ValueSpec(("b*s", CLASSES), "float32"),
            "targets": ValueSpec(("b*s",), "int64"),
            "logp": ValueSpec(("b*s", CLASSES), "float32"),
            "loss": ValueSpec((), "float32"),
            "weight_total": ValueSpec((), "float32"),
        },
        params={
            "p_embed": parameter("embed.weight", CLASSES, HIDDEN, order=0),
            "p_up": parameter("up.weight", INNER, HIDDEN, order=1),
            "p_up_bias": parameter("up.bias", INNER, order=2),
            "p_down": parameter("down.weight", HIDDEN, INNER, order=3),
            "p_head": parameter("head.weight", CLASSES, HIDDEN, order=4),
        },
        nodes=(
            Node(id=0, op="aten.embedding.default", args=(Ref("p_embed"), Ref("ids")), outputs=("x",), path="embed"),
            Node(
                id=1,
                op="aten.linear.default",
                args=(Ref("x"), Ref("p_up"), Ref("p_up_bias")),
                outputs=("up",),
                block=1,
            ),
            Node(id=2, op="aten.silu.default", args=(Ref("up"),), outputs=("act",), block=1),
            Node(id=3, op="aten.linear.default", args=(Ref("act"), Ref("p_down")), outputs=("down",), block=1),
            Node(id=4, op="aten.add.Tensor", args=(Ref("x"), Ref("down")), outputs=("y",), block=1),
            Node(id=5, op="aten.linear.default", args=(Ref("y"), Ref("p_head")), outputs=("logits",), block=2),
            Node(
                id=6,
                op="aten.reshape.default",
                args=(Ref("logits"), ListArg((-1, CLASSES))),
                outputs=("flat",),
                block=3,
            ),
            Node(id=7, op="aten.reshape.default", args=(Ref("labels"), ListArg((-1,))), outputs=("targets",), block=3),
            Node(id=8, op="aten._log_softmax.default", args=(Ref("flat"), 1, False), outputs=("logp",), block=3),
            Node(
                id=9,
                op="aten.nll_loss_forward.default",
                args=(Ref("logp"), Ref("targets"), None, 1, -100),
                outputs=("loss", "weight_total"),
                block=3,
            ),
        ),
    )


class Mlp(torch.nn.Module):
    """What `mlp_graph` says, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CLASSES, HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, INNER)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)
        self.head = torch.nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        y = x + self.down(torch.nn.functional.silu(self.up(x)))
        logits = self.head(y)
        return logits, torch.nn.functional.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1))


@pytest.fixture
def graph() -> Graph:
    return mlp_graph()


@pytest.fixture
def mlp() -> Mlp:
    return Mlp()
