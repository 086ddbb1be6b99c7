"""Every operator of the allow-list on every backend: forward and backward against torch in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from fusionai.primitives.errors import FusionError
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire.messages import StageOptions
from harness.operator_cases import Case, DType, Still, cases, tried

SEMANTIC = frozenset({"fusion.attention", "fusion.dropout", "fusion.in_training", "fusion.uniform"})
CASES = list(cases())
TOGETHER = 30
"""Cases in one program."""
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


@dataclass(frozen=True)
class Asked:
    """A case as a graph of one node with its input, torch's results, and the gradients that are fed back. `floats`:
    inputs that may have a gradient."""

    case: Case
    graph: Graph
    fed: dict[str, HostTensor]
    floats: tuple[str, ...]
    plain: list[torch.Tensor]
    exact: list[torch.Tensor]
    operands: list[torch.Tensor]
    roots: dict[str, HostTensor]


@cache
def asked(number: int, *, trains: bool) -> Asked:
    """Case `number`; with gradients, and torch's own in `operands`, if it `trains`."""
    case = CASES[number]
    plain, _ = reference(case, double=False)
    exact, operands = reference(case, double=not case.exact)
    graph, fed = graph_of(case, plain)
    floats = tuple(key for key, tensor in fed.items() if key[0] == "x" and tensor.dtype in FLOAT_DTYPES)
    roots: dict[str, HostTensor] = {}
    weighted: list[torch.Tensor] = []
    for place, wanted in enumerate(exact if trains and OPERATORS[case.op].differentiable and floats else ()):
        key = f"y{place}"
        if key in graph.outputs and wanted.requires_grad and graph.values[key].dtype == "float32":
            drawn = np.random.default_rng(place).standard_normal(tuple(wanted.shape)).astype(np.float32)
            roots[key] = host_tensor("float32", drawn.shape, np.ascontiguousarray(drawn).tobytes())
            weighted.append((wanted * torch.from_numpy(np.array(drawn)).to(wanted.dtype)).sum())
    if weighted:
        torch.stack([one.double() for one in weighted]).sum().backward()
    return Asked(case, graph, fed, floats, plain, exact, operands, roots)


def merged(parts: Sequence[Asked]) -> Asked:
    """Return all cases as one graph. Names of part `n` begin with `x<n>.`."""

    def renamed(arg: Arg, to: str) -> Arg:
        match arg:
            case Ref(name=name):
                return Ref(to + name)
            case ListArg(items=items):
                return ListArg(tuple(renamed(item, to) for item in items))
            case _:
                return arg

    graph = Graph(name="all", symbols={}, inputs=(), outputs={}, values={}, params={}, nodes=())
    fed, roots, floats = dict[str, HostTensor](), dict[str, HostTensor](), list[str]()
    for number, part in enumerate(parts):
        to, (node,) = f"x{number}.", part.graph.nodes
        graph = Graph(
            name=graph.name,
            symbols={},
            inputs=(*graph.inputs, *(to + name for name in part.graph.inputs)),
            outputs={**graph.outputs, **{to + name: to + value for name, value in part.graph.outputs.items()}},
            values={**graph.values, **{to + name: spec for name, spec in part.graph.values.items()}},
            params={},
            nodes=(
                *graph.nodes,
                Node(
                    id=number,
                    op=node.op,
                    args=tuple(renamed(arg, to) for arg in node.args),
                    kwargs={name: renamed(arg, to) for name, arg in node.kwargs.items()},
                    outputs=tuple(to + name for name in node.outputs),
                ),
            ),
        )
        fed |= {to + name: tensor for name, tensor in part.fed.items()}
        roots |= {to + name: tensor for name, tensor in part.roots.items()}
        floats += [to + name for name in part.floats]
    return replace(parts[0], graph=graph, fed=fed, roots=roots, floats=tuple(floats))


Computed = tuple[dict[str, HostTensor], dict[str, HostTensor]]
"""Results, and gradients, by name."""


def computed(name: str, one: Asked) -> Computed:
    program = opened(name).load(one.graph, grad_inputs=one.floats, options=StageOptions())
    call = Call("eval" if name == "onnxruntime" else "train", 0, 0)
    made = program.forward(call, one.fed)
    return dict(made), dict(program.backward(call, one.roots)) if one.roots else {}


@cache
def in_one_program(name: str, group: int) -> dict[int, Computed] | None:
    """What the backend computes for each case of the group, all compiled at once, which takes less than half the time;
    None if that is not possible, so that the case that is at fault fails alone."""
    backend = opened(name)
    numbers = range(group * TOGETHER, min(len(CASES), (group + 1) * TOGETHER))
    parts = {number: asked(number, trains=True) for number in numbers if not backend.unsupported([CASES[number].op])}
    try:
        made, gradients = computed(name, merged(list(parts.values())))
    except FusionError:
        return None

    def of(tensors: dict[str, HostTensor], place: int) -> dict[str, HostTensor]:
        to = f"x{place}."
        return {key.removeprefix(to): tensor for key, tensor in tensors.items() if key.startswith(to)}

    return {number: (of(made, place), of(gradients, place)) for place, number in enumerate(parts)}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
@pytest.mark.parametrize(
    "name", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "onnxruntime"))]
)
def test_an_operator(name: str, number: int) -> None:
    case = CASES[number]
    if missing := opened(name).unsupported([case.op]):
        pytest.skip(f"this backend has no {missing[0]}, and says so")
    trains = name != "onnxruntime"
    if not trains and "batch_norm" in case.op and "no_training" not in case.op:
        pytest.skip("in training it is another operator")
    one = asked(number, trains=trains)
    # JAX compiles each program, which takes most of the time; its cases share programs.
    shared = in_one_program(name, number // TOGETHER) if name == "jax" else None
    made, gradients = computed(name, one) if shared is None else shared[number]
    limit = TOLERANCES["float32"].kernel
    for key, wanted in zip((f"y{place}" for place in range(len(one.plain))), one.exact, strict=True):
        if key not in made:
            continue
        assert made[key].dtype == DTYPE_NAMES[one.plain[int(key[1:])].dtype]
        found, expected = (
            numbers(made[key]),
            wanted.detach().float().numpy() if wanted.dtype == torch.bfloat16 else (wanted.detach().numpy()),
        )
        if case.exact:
            np.testing.assert_array_equal(found, expected)
        else:
            assert difference(found, expected) <= limit, key
    if not one.roots:
        return
    for key, operand in zip(one.floats, one.operands, strict=True):
        if operand.grad is None:
            assert key not in gradients or not numbers(gradients[key]).any(), key
        else:
            assert difference(numbers(gradients[key]), operand.grad.numpy()) <= limit, f"gradient of {key}"
