"""Builds an ONNX model from nodes of a graph: names, casts and sizes. The operator table chooses ONNX operators.

All sizes are known except at most one: the number of rows of a pass, if a model is built for any number of them
(`ROWS`). Every value has the dtype that the graph declares, so operands are cast where torch would promote them. Only
bfloat16, for which ONNX Runtime has few CPU kernels, is kept as float32 rounded to bfloat16. Neighbours: `program`
has a function per operator and runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from fusionai.backends.binding import OPERATOR_FAILURES, SIZES, describe, first_line
from fusionai.backends.operands import RULES
from fusionai.backends.semantics import argument
from fusionai.ir.schema import Arg, Graph, Node, Ref
from fusionai.ir.shapes import evaluate
from fusionai.primitives.errors import ExecutionError, FusionError

OPSET: Final = 21
"""ONNX operator-set version of the models."""
IR_VERSION: Final = 10
"""ONNX file-format version of the models."""
ONNX_TYPES: Final[dict[str, int]] = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int16": TensorProto.INT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "uint32": TensorProto.UINT32,
    "bool": TensorProto.BOOL,
}
_TO_THE_END: Final = 2**62
"""End of a slice that reaches to the end of its dimension."""


class SizesError(ExecutionError):
    """Raised if a size is neither fixed nor the number of rows itself."""


class Rows:
    """Placeholder for the number of rows, the only size that may be unknown."""

    def __repr__(self) -> str:
        return "rows"


ROWS: Final = Rows()
"""The number of rows."""
Size = int | Rows


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the model."""

    name: str
    dtype: str
    shape: tuple[Size, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        found = self.shape[dim]
        if isinstance(found, Rows):
            raise SizesError("this backend needs a fixed size here, but the size depends on the number of rows.")
        return found


@dataclass(frozen=True, slots=True)
class DType:
    name: str


Operand = Tensor | bool | int | float


class Builder:
    """Collects the ONNX nodes of a model. `symbols`: name -> size; a size of `ROWS` may be any number."""

    def __init__(self, graph: Graph, symbols: Mapping[str, Size]) -> None:
        self._graph = graph
        self._symbols = dict(symbols)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._known: dict[str, Tensor | Size] = {}
        self._count = 0
        self.outs: list[Tensor] = []
        """Results of the current node, as the graph declares them."""
        self._node: Node | None = None
        self._keys: list[Tensor] = []

    # ------------------------------------------------------------------------------------------------- for operators

    @property
    def out(self) -> Tensor:
        return self.outs[0]

    @property
    def declared_dtype(self) -> str:
        """Dtype of `out` in the graph: bfloat16 although `out` itself is float32."""
        assert self._node is not None
        return self._graph.values[self._node.outputs[0]].dtype

    def key(self) -> Tensor:
        """Return the current node's two folds, uint32 [2]: a model input that differs from call to call."""
        assert self._node is not None
        self._keys.append(Tensor(key_name(self._node.id), "uint32", (2,)))
        return self._keys[-1]

    def op(
        self, kind: str, inputs: Sequence[Tensor | None], *, like: Tensor | None = None, count: int = 1, **options: Any
    ) -> Any:
        """Add a node and return its result, or a list of `count` results. `like`: dtype and shape of the result; None:
        those of `out`."""
        names = [self._fresh() for _ in range(count)]
        given = ["" if value is None else value.name for value in inputs]
        while given and not given[-1]:
            given.pop()  # ONNX Runtime's rewriting of a norm crashes the process on an empty last input
        self.nodes.append(helper.make_node(kind, given, names, **options))
        shown = self.out if like is None else like
        made = [Tensor(name, shown.dtype, shown.shape) for name in names]
        return made[0] if count == 1 else made

    def constant(self, values: npt.NDArray[Any]) -> Tensor:
        name = self._fresh()
        self.constants.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return Tensor(name, str(values.dtype), tuple(values.shape))

    def ints(self, values: Iterable[int]) -> Tensor:
        return self.constant(np.array(list(values), np.int64))

    def number(self, value: bool | int | float, dtype: str) -> Tensor:
        if dtype == "bfloat16":
            return self.cast(self.constant(np.array(value, np.float32)), dtype)
        return self.constant(np.array(value, dtype))

    def cast(self, x: Operand, dtype: str) -> Tensor:
        if not isinstance(x, Tensor):
            return self.number(x, dtype)
        if x.dtype == dtype:
            return x
        return self.op("Cast", [x], like=Tensor("", dtype, x.shape), to=ONNX_TYPES[dtype])

    def sizes(self, wanted: Sequence[Size]) -> Tensor:
        """Return a shape as ONNX takes it: int64 [n]."""
        if all(isinstance(size, int) for size in wanted):
            return self.ints(size for size in wanted if isinstance(size, int))
        like = Tensor("", "int64", (1,))
        parts = [self._rows() if isinstance(size, Rows) else self.ints([size]) for size in wanted]
        return self.op("Concat", parts, like=like, axis=0)

    def reshape(self, x: Tensor, wanted: Sequence[Size]) -> Tensor:
        like = Tensor("", x.dtype, self._inferred(x, wanted))
        unknown = [size for size in wanted if isinstance(size, Rows) or size == -1]
        if len(unknown) <= 1:
            shape = self.ints(-1 if isinstance(size, Rows) else size for size in wanted)
        else:
            shape = self.sizes(like.shape)
        return self.op("Reshape", [x, shape], like=like)

    def slice(self, x: Tensor, dim: int, first: int, end: Size | None, step: int = 1) -> Tensor:
        at = dim % x.rank
        last = _TO_THE_END if end is None or isinstance(end, Rows) else end
        size = x.shape[at]
        left: Size = size if isinstance(size, Rows) else max(0, -(-(min(last, size) - first) // step))
        like = Tensor("", x.dtype, (*x.shape[:at], left, *x.shape[at + 1 :]))
        return self.op("Slice", [x, *(self.ints([one]) for one in (first, last, at, step))], like=like)

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        at = dim % (x.rank + 1)
        like = Tensor("", x.dtype, (*x.shape[:at], 1, *x.shape[at:]))
        return self.op("Unsqueeze", [x, self.ints([at])], like=like)

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        order = [dim % x.rank for dim in dims]
        like = Tensor("", x.dtype, tuple(x.shape[dim] for dim in order))
        return self.op("Transpose", [x], like=like, perm=order)

    def expand(self, x: Tensor, wanted: Sequence[Size]) -> Tensor:
        return self.op("Expand", [x, self.sizes(wanted)], like=Tensor("", x.dtype, tuple(wanted)))

    # -------------------------------------------------------------------------------------------------------- building

    def give(self, name: str) -> Tensor:
        """Declare a value of the graph as a model input under its own name. bfloat16, which numpy lacks, comes as
        float32."""
        tensor = self._known[name] = self._declared(name)
        return tensor

    def add(self, node: Node, table: Mapping[str, Callable[..., Any]]) -> None:
        """Add a node of the graph. Raises `ExecutionError` naming it."""
        if node.op in SIZES:
            self._known[node.outputs[0]] = self._size(node)
            return
        self._node = node
        self.outs = [self._declared(name) for name in node.outputs]
        try:
            args = [self._argument(arg) for arg in node.args]
            options = {name: self._argument(arg) for name, arg in node.kwargs.items()}
            if (rule := RULES.get(node.op)) is not None:
                rule(*args, **options)
            made = table[node.op](self, *args, **options)
        except FusionError as error:
            kind = SizesError if isinstance(error, SizesError) else ExecutionError
            raise kind(f"{describe(node)}: {error.message}", hint=error.hint) from error
        except OPERATOR_FAILURES as error:
            raise ExecutionError(f"{describe(node)} can't run at these sizes: {first_line(error)}") from error
        results = list(made) if isinstance(made, list | tuple) else [made]
        for name, result, declared in zip(node.outputs, results, self.outs, strict=False):
            found = self.cast(result, declared.dtype)
            if self._graph.values[name].dtype == "bfloat16":
                found = self.cast(self.cast(found, "bfloat16"), declared.dtype)
            self._known[name] = Tensor(found.name, declared.dtype, declared.shape)

    def model(self, outputs: Sequence[str], *, weights: Mapping[str, Tensor], inputs: Sequence[str]) -> onnx.ModelProto:
        """Return the model. `weights`: initializers that are given to the session when it starts."""
        finals: list[onnx.ValueInfoProto] = []
        for name in outputs:
            value = self._known[name]
            assert isinstance(value, Tensor), "sizes are no outputs"
            shown = self.cast(value, self._declared(name).dtype)
            self.nodes.append(helper.make_node("Identity", [shown.name], [f"out:{name}"]))
            finals.append(self._info(f"out:{name}", shown))
        graph = helper.make_graph(
            self.nodes,
            "part",
            [
                *(self._info(name, self._declared(name)) for name in inputs),
                *(self._info(x.name, x) for x in self._keys),
            ],
            finals,
            initializer=[*self.constants, *(_external(name, tensor) for name, tensor in weights.items())],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def _info(self, name: str, value: Tensor) -> onnx.ValueInfoProto:
        shape = ["rows" if isinstance(size, Rows) else size for size in value.shape]
        return helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], shape)

    def _declared(self, name: str) -> Tensor:
        spec = self._graph.values[name]
        dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
        return Tensor(name, dtype, tuple(self._evaluated(dim) for dim in spec.shape))

    def _evaluated(self, dim: int | str) -> Size:
        """Return a size, evaluated for two numbers of rows: equal results are a fixed size, results equal to those
        numbers are the rows."""
        found = [
            evaluate(dim, {name: rows if isinstance(size, Rows) else size for name, size in self._symbols.items()})
            for rows in (7, 11)
        ]
        return self._one_of(found)

    def _one_of(self, found: Sequence[int]) -> Size:
        if found[0] == found[1]:
            return found[0]
        if found == [7, 11]:
            return ROWS
        raise SizesError("this backend needs sizes that do not depend on the number of rows.")

    def _size(self, node: Node) -> Size:
        found: list[int] = []
        for rows in (7, 11):
            args: list[Any] = []
            for arg in node.args:
                if isinstance(arg, Ref) and node.op == "aten.sym_size.int":
                    shape = self._declared(arg.name).shape
                    args.append(np.empty([rows if isinstance(size, Rows) else size for size in shape], np.bool_))
                    continue
                value = self._argument(arg)
                args.append(rows if isinstance(value, Rows) else value)
            found.append(SIZES[node.op](*args))
        return self._one_of(found)

    def _argument(self, arg: Arg) -> Any:
        return argument(arg, self._value, DType)

    def _value(self, name: str) -> Tensor | Size:
        if name not in self._known and self._graph.values[name].dtype == "symint":
            raise ExecutionError(f"size {name!r} is not known here.")
        return self._known[name]

    def _rows(self) -> Tensor:
        """Return the number of rows at run time: int64 [1]."""
        for value in self._known.values():
            if isinstance(value, Tensor) and any(isinstance(size, Rows) for size in value.shape):
                at = next(place for place, size in enumerate(value.shape) if isinstance(size, Rows))
                like = Tensor("", "int64", (1,))
                return self.op("Shape", [value], like=like, start=at, end=at + 1)
        raise ExecutionError("no input of the model has rows.")

    def _inferred(self, x: Tensor, wanted: Sequence[Size]) -> tuple[Size, ...]:
        if -1 not in wanted:
            return tuple(wanted)
        if any(isinstance(size, Rows) for size in x.shape) and not any(isinstance(size, Rows) for size in wanted):
            return tuple(ROWS if size == -1 else size for size in wanted)
        total = prod(size for size in x.shape if isinstance(size, int))
        known = prod(size for size in wanted if isinstance(size, int) and size != -1)
        return tuple(total // max(known, 1) if size == -1 else size for size in wanted)

    def _fresh(self) -> str:
        self._count += 1
        return f"t{self._count}"


def key_name(node: int) -> str:
    """Return the name of the input for a node's two folds. No value of a graph has a colon in its name."""
    return f"key:{node}"


def _external(name: str, tensor: Tensor) -> onnx.TensorProto:
    """Return an initializer that is named in the model and given to the session."""
    proto = TensorProto()
    proto.name = name
    proto.data_type = ONNX_TYPES[tensor.dtype]
    proto.dims.extend(size for size in tensor.shape if isinstance(size, int))
    proto.data_location = TensorProto.EXTERNAL
    entry = proto.external_data.add()
    entry.key, entry.value = "location", "given"
    return proto
