"""Every operator of the allow-list on every backend: forward and backward against torch in double precision."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fusionai.backends.interface import Backend, Call
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.tolerance import TOLERANCES, difference
from fusionai.backends.torch.host import DTYPE_NAMES, DTYPES
from fusionai.backends.torch.operators import CONTEXTUAL, PLAIN, TorchContext
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Arg, DTypeArg, Graph, ListArg, Node, Ref, ValueSpec
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire.messages import StageOptions
from harness.operator_cases import Case, DType, Still, cases, tried

SEMANTIC = frozenset({"fusion.attention", "fusion.dropout", "fusion.in_training", "fusion.uniform"})
CASES = list(cases())
CONTEXT = TorchContext(training=True, key=DropoutKey(0, 0, 0))


@cache
def opened(name: str) -> Backend:
    if name == "torch":
        from fusionai.backends.torch.backend import TorchBackend

        return TorchBackend("cpu")
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
        from fusionai.backends.onnxruntime.backend import OnnxBackend

        return OnnxBackend("cpu")
    pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
    from fusionai.backends.jax.backend import JaxBackend

    return JaxBackend("cpu")


def test_every_operator_has_a_case() -> None:
    sizes = {name for name, operator in OPERATORS.items() if operator.category == "size"}
    assert tried() == OPERATORS.keys() - sizes - SEMANTIC


def reference(case: Case, *, double: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, operands that may have a gradient) of torch itself."""
    operands: list[torch.Tensor] = []

    def given(arg: Any) -> Any:
        if isinstance(arg, Still):
            value = torch.from_numpy(np.array(arg.values))
            return value.double() if double else value
        if isinstance(arg, np.ndarray):
            value = torch.from_numpy(np.array(arg))
            if value.is_floating_point():
                value = (value.double() if double else value).requires_grad_()
                operands.append(value)
            return value
        if isinstance(arg, list):
            return [given(item) for item in arg]
        return DTYPES[arg.name] if isinstance(arg, DType) else arg

    args = [given(arg) for arg in case.args]
    options = {name: given(arg) for name, arg in case.kwargs.items()}
    compute = PLAIN.get(case.op)
    result = compute(*args, **options) if compute else CONTEXTUAL[case.op](CONTEXT, 0, *args, **options)
    return list(result) if isinstance(result, list | tuple) else [result], operands


def graph_of(case: Case, results: list[torch.Tensor]) -> tuple[Graph, dict[str, HostTensor]]:
    """One node. What an operator gives besides and nobody may use (empty statistics) is no output."""
    fed: dict[str, HostTensor] = {}

    def argument(arg: Any) -> Arg:
        if isinstance(arg, np.ndarray | Still):
            name = f"{'x' if isinstance(arg, np.ndarray) else 'still'}{len(fed)}"
            arg = arg.values if isinstance(arg, Still) else arg
            fed[name] = host_tensor(str(arg.dtype), arg.shape, np.ascontiguousarray(arg).tobytes())
            return Ref(name)
        if isinstance(arg, list):
            return ListArg(tuple(argument(item) for item in arg))
        return DTypeArg(arg.name) if isinstance(arg, DType) else arg

    args = tuple(argument(arg) for arg in case.args)
    options = {name: argument(arg) for name, arg in case.kwargs.items()}
    names = tuple(f"y{place}" for place in range(len(results)))
    values = {name: ValueSpec(tensor.shape, tensor.dtype) for name, tensor in fed.items()}
    made = {
        # Statistics that nobody may use are empty on a CPU; capture knows them as they are elsewhere.
        name: ValueSpec(
            tuple(result.shape) if result.numel() or _is_shown(case, name) else (case.args[0].shape[1],),
            DTYPE_NAMES[result.dtype],
        )
        for name, result in zip(names, results, strict=True)
    }
    node = Node(id=0, op=case.op, args=args, kwargs=options, outputs=names)
    outputs = {name: name for name in names if _is_shown(case, name)}
    return Graph(
        name="one", symbols={}, inputs=tuple(fed), outputs=outputs, values={**values, **made}, params={}, nodes=(node,)
    ), fed


def _is_shown(case: Case, name: str) -> bool:
    """Statistics that batch normalisation saves are its own business where none are taken."""
    if case.op == "aten._native_batch_norm_legit_functional.default":
        return name in ("y0", "y3", "y4")
    if case.op in ("aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit.no_stats"):
        return name == "y0"
    return not (case.op == "aten.nll_loss_forward.default" and name == "y1")


def numbers(tensor: HostTensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "name", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "onnxruntime"))]
)
def test_an_operator(name: str, case: Case) -> None:
    backend = opened(name)
    if missing := backend.unsupported([case.op]):
        pytest.skip(f"this backend has no {missing[0]}, and says so")
    trains = name != "onnxruntime"
    if not trains and "batch_norm" in case.op and "no_training" not in case.op:
        pytest.skip("in training it is another operator")
    plain, _ = reference(case, double=False)
    exact, operands = reference(case, double=not case.exact)
    graph, fed = graph_of(case, plain)
    floats = tuple(key for key, tensor in fed.items() if key[0] == "x" and tensor.dtype in FLOAT_DTYPES)
    program = backend.load(graph, grad_inputs=floats, options=StageOptions())
    call = Call("train" if trains else "eval", 0, 0)
    made = program.forward(call, fed)
    limit = TOLERANCES["float32"].kernel
    for key, wanted in zip((f"y{place}" for place in range(len(plain))), exact, strict=True):
        if key not in made:
            continue
        assert made[key].dtype == DTYPE_NAMES[plain[int(key[1:])].dtype]
        found, expected = (
            numbers(made[key]),
            wanted.detach().float().numpy() if wanted.dtype == torch.bfloat16 else (wanted.detach().numpy()),
        )
        if case.exact:
            np.testing.assert_array_equal(found, expected)
        else:
            assert difference(found, expected) <= limit, key
    if not trains or not OPERATORS[case.op].differentiable or not floats:
        return
    roots: dict[str, HostTensor] = {}
    weighted: list[torch.Tensor] = []
    for place, wanted in enumerate(exact):
        key = f"y{place}"
        if key in made and wanted.requires_grad and made[key].dtype == "float32":
            drawn = np.random.default_rng(place).standard_normal(tuple(wanted.shape)).astype(np.float32)
            roots[key] = host_tensor("float32", drawn.shape, np.ascontiguousarray(drawn).tobytes())
            weighted.append((wanted * torch.from_numpy(np.array(drawn)).to(wanted.dtype)).sum())
    if not weighted:
        return
    torch.stack([one.double() for one in weighted]).sum().backward()
    gradients = program.backward(call, roots)
    for key, operand in zip(floats, operands, strict=True):
        if operand.grad is None:
            assert key not in gradients or not numbers(gradients[key]).any(), key
        else:
            assert difference(numbers(gradients[key]), operand.grad.numpy()) <= limit, f"gradient of {key}"
