"""Memory that operators take inside, as it is computed without allocating, compared with what they allocate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.schema import Graph, Node, Ref, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import StageOptions

MIB = 2**20
SHAPE = (1, 4, 512, 8)
SCORES_BYTES = 4 * 512 * 512 * 4


def one_node(op: str, operands: dict[str, tuple[int, ...]], made: tuple[int, ...], **options: object) -> Graph:
    return Graph(
        name="one",
        symbols={},
        inputs=tuple(operands),
        outputs={"y": "y"},
        values={name: ValueSpec(shape, "float32") for name, shape in {**operands, "y": made}.items()},
        params={},
        nodes=(Node(id=0, op=op, args=tuple(Ref(name) for name in operands), kwargs=options, outputs=("y",)),),  # pyright: ignore[reportArgumentType]
    )


QKV: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "v"), SHAPE)
HUNGRY = {
    "soft-capped scores": one_node("fusion.attention", QKV, SHAPE, scale=1.0, causal=True, softcap=5.0),
    "operands that are repeated": one_node(
        "aten.matmul.default", {"a": (64, 1, 8, 64), "b": (1, 64, 64, 1)}, (64, 64, 8, 1)
    ),
}


class _Allocated(TorchDispatchMode):
    """The largest tensors that operators of this process really make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple) else (made,):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self.largest_bytes = max(self.largest_bytes, value.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("name", HUNGRY)
def test_what_an_operator_takes_inside_is_counted_and_refused(name: str) -> None:
    graph, backend = HUNGRY[name], TorchBackend("cpu", threads=1)
    program = backend.load(graph, grad_inputs=(), options=StageOptions())
    fed = {
        key: host_tensor("float32", tuple(graph.values[key].shape), torch.ones(graph.values[key].shape).numpy().data)  # pyright: ignore
        for key in graph.inputs
    }
    with _Allocated() as allocated:
        program.forward(Call("eval", 0, 0), fed)
    assert allocated.largest_bytes >= 4 * MIB, "it does take more than its operands and results"
    assert program.size.in_use_bytes >= allocated.largest_bytes
    assert program.size.in_use_bytes < 16 * allocated.largest_bytes, "what was freed is not counted"
    with pytest.raises(ExecutionError, match=r"node 0 .* within it needs .* the limit is"):
        backend.load(graph, grad_inputs=(), options=StageOptions(), memory_limit_bytes=allocated.largest_bytes)


@pytest.mark.parametrize("options", [{}, {"window": 64}], ids=["causal", "a window"])
def test_scores_that_a_fused_kernel_never_makes_are_not_counted(options: dict[str, int]) -> None:
    graph = one_node("fusion.attention", QKV, SHAPE, scale=1.0, causal=True, **options)
    program = TorchBackend("cpu", threads=1).load(graph, grad_inputs=(), options=StageOptions())
    mask_bytes = 4 * 512 * 512 if options else 0
    assert program.size.in_use_bytes <= SCORES_BYTES // 2 + 2 * mask_bytes
