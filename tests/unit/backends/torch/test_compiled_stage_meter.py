"""Memory that operators take inside, as it is computed without allocating, compared with what they allocate."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.schema import Graph, InitOp, Node, ParamSpec, Ref, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import OptimizerSpec, StageOptions

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


@pytest.mark.parametrize("recompute", [False, True])
def test_copies_of_weights_that_microbatches_in_flight_keep_are_counted(recompute: bool) -> None:
    """In bfloat16, backward reads copies of the weights, one for each microbatch that was not recomputed."""
    width, microbatches = 256, 3
    weight = ParamSpec(
        key="w",
        kind="parameter",
        trainable=True,
        shape=(width, width),
        dtype="float32",
        init=(InitOp(op="fill", args=(0.5,)),),
    )
    row = ValueSpec((1, width), "float32")
    graph = Graph(
        name="two products",
        inputs=("x",),
        outputs={"y": "y"},
        values={"x": row, "m": row, "y": row, **dict.fromkeys(("w", "v"), ValueSpec((width, width), "float32"))},
        params={"w": weight, "v": msgspec.structs.replace(weight, key="v")},
        nodes=(
            Node(id=0, op="aten.linear.default", args=(Ref("x"), Ref("w")), outputs=("m",), block=0),
            Node(id=1, op="aten.linear.default", args=(Ref("m"), Ref("v")), outputs=("y",), block=1),
        ),
    )
    options = StageOptions(optimizer=OptimizerSpec(), precision="bf16", in_flight=microbatches, recompute=recompute)
    program = TorchBackend("cpu", threads=1).load(graph, grad_inputs=("x",), options=options)
    program.initialise()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    fed = {"x": host_tensor("float32", (1, width), torch.ones(width).numpy().data)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for microbatch in range(microbatches):
            program.forward(Call("train", 0, microbatch), fed)
    copies_bytes = 2 * 2 * width * width
    if not recompute:
        assert sum(kept.values()) >= microbatches * copies_bytes, "each microbatch does keep them"
    counted_bytes = program.size.in_use_bytes
    expected_bytes = copies_bytes if recompute else microbatches * copies_bytes
    gradients_bytes = (2 + 4) * width * width  # of one weight: in bfloat16, then in float32
    update_bytes = 3 * 4 * width * width
    most_bytes = max(expected_bytes + gradients_bytes, update_bytes) + 64 * 1024
    assert expected_bytes <= counted_bytes < most_bytes
