"""Runs operators of a backend with operands that disagree, as a hostile graph would, in a process that may crash.

A case of `operator_cases` is changed at random: sizes, ranks, dtypes, values of indices, numbers among the arguments,
views in front of operands. Result shapes are declared as torch's shape inference gives them, so that what passes for a
legal graph goes the whole way: validation, load, forward, backward. The process has `guard_pages.c` preloaded: a kernel
that leaves its operands ends it with a signal, and a result that shows the filling was read where nobody wrote.
`operand_cases` starts such processes and counts what they say.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from fusionai.backends.interface import Backend, Call
from fusionai.backends.operands import MOST_PIECES, RULES
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch import operators
from fusionai.backends.torch.host import DTYPE_NAMES, DTYPES
from fusionai.backends.torch.operators import CONTEXTUAL, PLAIN, TorchContext
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Arg, DTypeArg, Graph, ListArg, Node, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.errors import FusionError
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire.messages import StageOptions
from harness.operator_cases import Case, Draw, DType, Still, cases

FILL: Final = 0x7FE1B2C3
"""What `guard_pages.c` fills memory with."""
MOST_ELEMENTS: Final = 1 << 16
CONTEXT: Final = TorchContext(training=True, key=DropoutKey(0, 0, 0))
SIZES: Final = (0, 1, 2, 3, 5, 8, 17, 64, 1024, 4096)
NUMBERS: Final = (-(2**31), -4097, -3, -2, -1, 0, 1, 2, 3, 5, 16, 1000, 4097, 2**31 - 1, 2**31, 2**40)
FLOATS: Final = (0.0, -1.0, 1.0, 0.5, 1e-30, -1e30, float("inf"), float("nan"))
ARRAY_DTYPES: Final = ("float32", "float64", "float16", "int64", "int32", "uint8", "int8", "bool")


def attention_cases(d: Draw) -> Iterator[Case]:
    """The semantic operators that `operator_cases` leaves to suites of their own."""
    for heads, kept in ((4, 2), (2, 2)):
        q, k, v = d.f(2, heads, 3, 4), d.f(2, kept, 3, 4), d.f(2, kept, 3, 4)
        for options in (
            {"causal": True},
            {"causal": False},
            {"causal": True, "window": 2},
            {"causal": True, "softcap": 5.0},
            {"causal": True, "sinks": d.f(heads)},
            {"causal": True, "key_mask": d.b(2, 3)},
            {"causal": True, "dropout": 0.25},
        ):
            yield Case("fusion.attention", (q, k, v), {"scale": 0.5, **options})
        yield Case("fusion.attention", (d.f(2, heads, 1, 4), d.f(2, kept, 7, 4), d.f(2, kept, 7, 6)), {"scale": 0.5})
    yield Case("fusion.dropout", (d.f(3, 4),), {"p": 0.5})
    yield Case("fusion.uniform", (d.f(3, 4),))
    yield Case("fusion.in_training", (d.f(3, 4), d.f(3, 4)))


@cache
def starting_points() -> list[Case]:
    return [*cases(), *attention_cases(Draw())]


class Mutation:
    """Random changes of one case, all drawn from one generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def mutated(self, case: Case) -> Case:
        for _ in range(int(self.rng.integers(1, 4))):
            places = [("arg", place) for place in range(len(case.args))] + [("option", key) for key in case.kwargs]
            if not places:
                return case
            where, place = places[int(self.rng.integers(len(places)))]
            if where == "arg":
                args = list(case.args)
                args[place] = self.argument(args[place], args)
                case = replace(case, args=tuple(args))
            else:
                case = replace(case, kwargs={**case.kwargs, place: self.argument(case.kwargs[place], list(case.args))})
        return case

    def pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def argument(self, arg: Any, others: list[Any]) -> Any:
        if isinstance(arg, np.ndarray):
            return self.array(arg, others)
        if isinstance(arg, Still):
            return Still(self.array(arg.values, others))
        if isinstance(arg, list):
            return self.items(arg, others)
        if isinstance(arg, bool):
            return not arg
        if isinstance(arg, int):
            return int(self.pick((arg + 1, arg - 1, -arg, *NUMBERS)))
        if isinstance(arg, float):
            return self.pick((arg, *FLOATS))
        if isinstance(arg, DType):
            return DType(self.pick(tuple(DTYPES)))
        return arg

    def items(self, arg: list[Any], others: list[Any]) -> list[Any]:
        changed = list(arg)
        kind = int(self.rng.integers(4))
        if kind == 0 and changed:
            del changed[int(self.rng.integers(len(changed)))]
        elif kind == 1 and changed:
            changed.append(self.pick(changed))
        elif changed:
            place = int(self.rng.integers(len(changed)))
            changed[place] = self.argument(changed[place], others)
        return changed

    def array(self, array: Any, others: list[Any]) -> Any:
        kind = int(self.rng.integers(8))
        shape = list(array.shape)
        if kind <= 2 and shape:
            place = int(self.rng.integers(len(shape)))
            shape[place] = max(0, int(self.pick((shape[place] + 1, shape[place] - 1, shape[place] * 2, *SIZES))))
        elif kind == 3 and shape:
            del shape[int(self.rng.integers(len(shape)))]
        elif kind == 4:
            shape.insert(int(self.rng.integers(len(shape) + 1)), int(self.pick(SIZES[1:5])))
        elif kind == 5:
            return array.astype(self.pick(ARRAY_DTYPES))
        elif kind == 6 and array.dtype.kind in "iu" and array.size:
            changed = array.copy()
            changed.reshape(-1)[int(self.rng.integers(array.size))] = self.number(array.dtype)
            return changed
        else:
            other = self.pick(others)
            return other if isinstance(other, np.ndarray) else array
        if np.prod(shape, dtype=np.float64) > MOST_ELEMENTS:
            return array
        return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)

    def number(self, dtype: Any) -> int:
        limits = np.iinfo(dtype)
        return int(np.clip(self.pick(NUMBERS), limits.min, limits.max))


def declared(case: Case) -> list[torch.Tensor] | None:
    """Results of torch's shape inference, or None where it refuses: a hostile owner declares what it would give."""

    def given(arg: Any) -> Any:
        if isinstance(arg, np.ndarray | Still):
            values = arg.values if isinstance(arg, Still) else arg
            return torch.empty(values.shape, dtype=DTYPES[str(values.dtype)], device="meta")
        if isinstance(arg, list):
            return [given(item) for item in arg]
        return DTYPES[arg.name] if isinstance(arg, DType) else arg

    if case.op == "aten.chunk.default" and case.args[1] > MOST_PIECES:
        return None  # an empty tensor in 2^31 pieces would take this process's memory; test_operands has the rule
    args, options = [given(arg) for arg in case.args], {name: given(arg) for name, arg in case.kwargs.items()}
    compute = PLAIN.get(case.op)
    try:
        result = compute(*args, **options) if compute else CONTEXTUAL[case.op](CONTEXT, 0, *args, **options)
    except Exception:  # noqa: BLE001 - operators fail in many ways
        return None
    results = [one for one in (result if isinstance(result, list | tuple) else [result]) if one is not None]
    if any(one.numel() > 64 * MOST_ELEMENTS for one in results):
        return None
    return results


def graph_of(case: Case, results: list[torch.Tensor]) -> tuple[Graph, dict[str, HostTensor]]:
    """One node whose operands are inputs."""
    fed: dict[str, HostTensor] = {}

    def argument(arg: Any) -> Arg:
        if isinstance(arg, np.ndarray | Still):
            name = f"{'x' if isinstance(arg, np.ndarray) else 'still'}{len(fed)}"
            fed[name] = guarded(arg.values if isinstance(arg, Still) else arg)
            return Ref(name)
        if isinstance(arg, list):
            return ListArg(tuple(argument(item) for item in arg))
        return DTypeArg(arg.name) if isinstance(arg, DType) else arg

    args = tuple(argument(arg) for arg in case.args)
    options = {name: argument(arg) for name, arg in case.kwargs.items()}
    names = tuple(f"y{place}" for place in range(len(results)))
    values = {name: ValueSpec(tensor.shape, tensor.dtype) for name, tensor in fed.items()}
    made = {
        name: ValueSpec(tuple(result.shape), DTYPE_NAMES[result.dtype])
        for name, result in zip(names, results, strict=True)
    }
    node = Node(id=0, op=case.op, args=args, kwargs=options, outputs=names)
    graph = Graph(
        name="hostile",
        symbols={},
        inputs=tuple(fed),
        outputs={name: name for name in names},
        values={**values, **made},
        params={},
        nodes=(node,),
    )
    return graph, fed


def guarded(array: Any) -> HostTensor:
    """The array in memory that torch allocated, and that lies before a page that nobody may touch."""
    data = np.ascontiguousarray(array)
    block = torch.empty(data.nbytes, dtype=torch.uint8)
    block.numpy()[:] = np.frombuffer(data.tobytes(), np.uint8)
    return host_tensor(str(array.dtype), array.shape, block.numpy().data)


def shows_filling(tensor: HostTensor) -> bool:
    """Whether a float32 result holds the number that memory is filled with: an operator handed on what it never
    wrote."""
    if tensor.dtype != "float32" or not tensor.nbytes:
        return False
    return bool(((np.frombuffer(tensor.data, np.uint32) & 0x7FFFFFFF) == FILL).any())


def attempt(backend: Backend, case: Case, *, trains: bool) -> str:
    """Outcome of one case: `impossible` (shape inference refuses), `refused`, `ran`, or `LEAK`."""
    results = declared(case)
    if results is None:
        return "impossible"
    try:
        graph, fed = graph_of(case, results)
        validate(graph)
        floats = tuple(key for key, tensor in fed.items() if key[0] == "x" and tensor.dtype in FLOAT_DTYPES)
        program = backend.load(graph, grad_inputs=floats, options=StageOptions())
        call = Call("train" if trains else "eval", 0, 0)
        made = program.forward(call, fed)
        if any(shows_filling(tensor) for tensor in made.values()):
            return "LEAK"
        if not trains or not OPERATORS[case.op].differentiable or not floats:
            return "ran"
        roots = {
            key: guarded(np.ones(tensor.shape, tensor.dtype))
            for key, tensor in made.items()
            if tensor.dtype in ("float32", "float64")
        }
        if roots and any(shows_filling(tensor) for tensor in program.backward(call, roots).values()):
            return "LEAK"
        return "ran"
    except FusionError:
        return "refused"


def opened(name: str) -> Backend:
    match name:
        case "torch":
            from fusionai.backends.torch.backend import TorchBackend

            return TorchBackend("cpu", threads=1)
        case "jax":
            from fusionai.backends.jax.backend import JaxBackend

            return JaxBackend("cpu")
        case _:
            from fusionai.backends.onnxruntime.backend import OnnxBackend

            return OnnxBackend("cpu")


def case_number(number: int, seed: int, chosen: Callable[[Case], bool] = lambda _: True) -> Case:
    rng = np.random.default_rng((seed, number))
    points = [case for case in starting_points() if chosen(case)]
    return Mutation(rng).mutated(points[number % len(points)])


def main(name: str, seed: int, first: int, last: int, prefix: str = "", broken_rule: str = "") -> None:
    """Run cases [first, last) and say on standard output which one begins, then what came of it."""
    warnings.simplefilter("ignore")
    if broken_rule:
        operators.RULES = {name: rule for name, rule in RULES.items() if name != broken_rule}  # pyright: ignore[reportAttributeAccessIssue]
    backend = opened(name)
    library = ctypes.CDLL(None)
    library.guard_pages_broken.restype = ctypes.c_size_t
    library.guard_pages_on(1)
    missing = set(backend.unsupported(sorted(OPERATORS)))
    seen: Counter[str] = Counter()
    for number in range(first, last):
        case = case_number(number, seed, lambda one: one.op not in missing and one.op.startswith(prefix))
        os.write(1, f"{number} {case.op}\n".encode())
        broken = library.guard_pages_broken()
        try:
            outcome = attempt(backend, case, trains=name != "onnxruntime")
        except BaseException as error:  # noqa: BLE001 - whatever leaves the backend that is not an error of ours
            outcome = f"ESCAPED {type(error).__name__}: {str(error)[:200]!r}"
        if library.guard_pages_broken() != broken:
            outcome = "WROTE beside a block"
        if outcome.isupper() or outcome[:2].isupper():
            os.write(1, f"! {number} {case.name} {outcome}\n".encode())
        seen[outcome.split()[0]] += 1
    os.write(1, f"= {dict(seen)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
