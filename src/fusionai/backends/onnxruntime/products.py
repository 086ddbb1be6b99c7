"""Matrix products, convolutions, pooling, lookups and the semantic operators, in ONNX.

Random numbers are pure functions of counters, with the same bits as on every other backend: the hash is that of
`backends.semantics`, which folds the keys, on unsigned 32-bit integers, whose products wrap. The folds of a call are
inputs of the model, so one session serves every call. The recurrences run one position after the other, by `Scan`, with
the formulas of `backends.torch.semantic`. Neighbours: `building` casts and names, `program` joins the tables and gives
the folds of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, helper

from fusionai.backends.onnxruntime.building import ONNX_TYPES, Builder, Operand, Size, Tensor, key_name
from fusionai.backends.semantics import (
    CONV,
    CONV_TRANSPOSE,
    FIRST_MULTIPLIER,
    SECOND_MULTIPLIER,
    UNIFORM_BITS,
    DropoutKey,
    Sizes,
    adaptive_windows,
    by_name,
    conv_pads,
    folds,
    many,
    visible_keys,
)
from fusionai.ir.schema import Node
from fusionai.ir.serving import RANDOM
from fusionai.primitives.errors import ExecutionError


def linear(b: Builder, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., I] by weight [O, I]. The session transposes the weight once, when it starts."""
    if weight.rank == 1:
        weight = b.unsqueeze(weight, 0)
        y = b.op("MatMul", [x, b.permute(weight, (1, 0))], like=Tensor("", x.dtype, (*b.out.shape, 1)))
        y = b.reshape(y, b.out.shape)
    else:
        y = b.op("MatMul", [x, b.permute(weight, (1, 0))])
    return y if bias is None else b.op("Add", [y, bias])


def expert_linear(b: Builder, x: Tensor, weight: Tensor, experts: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply each row by a gathered copy of its expert's weight; assumes few rows."""
    inner = weight.shape[1] if transposed else weight.shape[2]
    shape = (*x.shape[:1], *weight.shape[1:])
    own = b.op("Gather", [weight, experts], axis=0, like=Tensor("", weight.dtype, shape))
    if not transposed:
        own = b.permute(own, (0, 2, 1))
    rows = b.reshape(x, (*x.shape[:1], 1, inner))
    made = b.op("MatMul", [rows, own], like=Tensor("", x.dtype, (*x.shape[:1], 1, b.out.shape[1])))
    return b.reshape(made, b.out.shape)


def _matmul(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    return b.op("MatMul", [x, y])


def _addmm(b: Builder, bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _matmul(b, x, y)
    if alpha != 1:
        product = b.op("Mul", [product, b.number(alpha, product.dtype)])
    if beta != 1:
        bias = b.op("Mul", [bias, b.number(beta, bias.dtype)], like=bias)
    return b.op("Add", [product, bias])


def _convolution(
    b: Builder,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    transposed: bool = False,
    output_padding: Sizes = 0,
    groups: int = 1,
) -> Tensor:
    spatial = weight.rank - 2
    batched = x.rank == weight.rank
    x = x if batched else b.unsqueeze(x, 0)
    spread = many(dilation, spatial)
    options: dict[str, Any] = {"strides": many(stride, spatial), "dilations": spread, "group": groups}
    pads = conv_pads([weight.size(2 + at) for at in range(spatial)], spread, padding)
    options["pads"] = [before for before, _ in pads] + [after for _, after in pads]
    if transposed:
        options["output_padding"] = many(output_padding, spatial)
    like = Tensor("", x.dtype, b.out.shape if batched else (1, *b.out.shape))
    y = b.op("ConvTranspose" if transposed else "Conv", [x, weight, bias], like=like, **options)
    return y if batched else b.reshape(y, b.out.shape)


_conv = by_name(_convolution, CONV, behind=4)
_conv_transpose = by_name(_convolution, CONV_TRANSPOSE, behind=4, transposed=True)


def _pooled(kind: str) -> Callable[..., Any]:
    def run(b: Builder, x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, *args: Any) -> Any:
        spatial = 1 if "1d" in kind else 2
        window = many(kernel, spatial)
        steps = many(stride, spatial) if not isinstance(stride, Sequence) or stride else window
        sides = many(padding, spatial)
        options: dict[str, Any] = {"kernel_shape": window, "strides": steps, "pads": [*sides, *sides]}
        if kind.startswith("max"):
            options["dilations"] = many(args[0], spatial) if args else [1] * spatial
            options["ceil_mode"] = int(args[1]) if len(args) > 1 else 0
        else:
            options["ceil_mode"] = int(args[0]) if args else 0
            options["count_include_pad"] = int(args[1]) if len(args) > 1 else 1
            if len(args) > 2 and args[2] is not None:
                raise ExecutionError("this backend can't override the divisor of an average pool.")
        batched = x.rank == spatial + 2
        given = x if batched else b.unsqueeze(x, 0)
        like = Tensor("", x.dtype, b.out.shape if batched else (1, *b.out.shape))
        y = b.op("MaxPool" if kind.startswith("max") else "AveragePool", [given], like=like, **options)
        return y if batched else b.reshape(y, b.out.shape)

    return run


def _adaptive(b: Builder, x: Tensor, _size: Sizes) -> Tensor:
    """Pool one dimension after the other; windows may overlap."""
    for at in range(x.rank):
        whole, parts = x.size(at), b.out.size(at)
        if whole == parts:
            continue
        one = (*x.shape[:at], 1, *x.shape[at + 1 :])
        means = [
            b.op("ReduceMean", [b.slice(x, at, *window), b.ints([at])], like=Tensor("", x.dtype, one), keepdims=1)
            for window in adaptive_windows(whole, parts)
        ]
        x = b.op("Concat", means, like=Tensor("", x.dtype, (*one[:at], parts, *one[at + 1 :])), axis=at)
    return x


def _gather(b: Builder, x: Tensor, dim: int, indices: Tensor, *_: Any) -> Tensor:
    if not x.rank:
        return x
    axis = dim % x.rank
    for at in range(x.rank):
        size, wanted = x.shape[at], indices.shape[at]
        if at != axis and isinstance(size, int) and isinstance(wanted, int) and wanted < size:
            x = b.slice(x, at, 0, wanted)
    return b.op("GatherElements", [x, indices], axis=axis)


def _index(b: Builder, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    named = [(at, one) for at, one in enumerate(indices) if one is not None]
    if any(one.dtype == "bool" for _, one in named):
        raise ExecutionError("this backend can't index by a boolean mask: the result's size would depend on the data.")
    if len(named) == 1:
        ((at, places),) = named
        return b.op("Gather", [x, places], axis=at)
    dims = [at for at, _ in named]
    others = [at for at in range(x.rank) if at not in dims]
    shape = np.broadcast_shapes(*(tuple(size for size in one.shape if isinstance(size, int)) for _, one in named))
    wide = [b.unsqueeze(b.expand(b.cast(one, "int64"), shape), len(shape)) for _, one in named]
    places = b.op("Concat", wide, like=Tensor("", "int64", (*shape, len(wide))), axis=len(shape))
    found = Tensor("", x.dtype, (*shape, *(x.shape[at] for at in others)))
    found = b.op("GatherND", [b.permute(x, [*dims, *others]), places], like=found)
    if dims != list(range(dims[0], dims[-1] + 1)):
        return found  # non-adjacent indexed dimensions come first, as in numpy
    before = [len(shape) + at for at in range(dims[0])]
    behind = range(len(shape) + dims[0], found.rank)
    return b.permute(found, [*before, *range(len(shape)), *behind])


def _scatter(b: Builder, x: Tensor, dim: int, indices: Tensor, value: Operand) -> Tensor:
    if not x.rank:
        return b.cast(value, x.dtype)
    updates = b.expand(b.reshape(b.cast(value, x.dtype), (1,) * x.rank), indices.shape)
    return b.op("ScatterElements", [x, indices, updates], axis=dim % x.rank)


def _scatter_from(kind: str) -> Callable[..., Tensor]:
    """Return a scatter operator. `kind`: how values for the same place are combined."""

    def run(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor) -> Tensor:
        for place in range(x.rank):
            source = b.slice(source, place, 0, indices.shape[place])
        return b.op("ScatterElements", [x, indices, b.cast(source, x.dtype)], axis=dim % x.rank, reduction=kind)

    return run


def _triangle(*, upper: bool) -> Callable[..., Tensor]:
    return lambda b, x, diagonal=0: b.op("Trilu", [x, b.number(diagonal, "int64")], upper=int(upper))


def _one_hot(b: Builder, indices: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ExecutionError("one_hot needs num_classes on this backend: the result's size would depend on the data.")
    return b.op("OneHot", [indices, b.ints([num_classes]), b.ints([0, 1])], axis=-1)


def _attention(
    b: Builder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute dense attention as `backends.torch.semantic` does: q [B, Hq, S, D], k [B, Hkv, T, D], v [B, Hkv, T,
    Dv]."""
    batch, heads, queries = (q.size(at) for at in range(3))
    shared, keys = k.size(1), k.size(2)
    groups = heads // shared
    if groups > 1:
        k, v = (_repeated(b, one, groups) for one in (k, v))
    shape = Tensor("", q.dtype, (batch, heads, queries, keys))
    weights = b.op("MatMul", [q, b.permute(k, (0, 1, 3, 2))], like=shape)
    weights = b.op("Mul", [weights, b.number(scale, q.dtype)], like=shape)
    if softcap is not None:
        cap = b.number(softcap, q.dtype)
        weights = b.op("Mul", [b.op("Tanh", [b.op("Div", [weights, cap], like=shape)], like=shape), cap], like=shape)
    mask = visible_keys(np.arange(queries)[:, None], np.arange(keys), causal=causal, window=window)
    least = b.number(float(np.finfo(np.float32).min), q.dtype)
    if mask is not None:
        weights = b.op("Where", [b.constant(mask), weights, least], like=shape)
    if key_mask is not None:
        seen = b.reshape(b.cast(key_mask, "bool"), (batch, 1, 1, keys))
        weights = b.op("Where", [seen, weights, least], like=shape)
    if sinks is None:
        weights = b.op("Softmax", [weights], like=shape, axis=-1)
    else:
        column = b.expand(b.reshape(sinks, (1, heads, 1, 1)), (batch, heads, queries, 1))
        wide = Tensor("", q.dtype, (batch, heads, queries, keys + 1))
        whole = b.op("Concat", [weights, b.cast(column, q.dtype)], like=wide, axis=-1)
        weights = b.slice(b.op("Softmax", [whole], like=wide, axis=-1), 3, 0, keys)
    return b.op("MatMul", [weights, v])


def _repeated(b: Builder, x: Tensor, groups: int) -> Tensor:
    batch, heads, length, width = (x.size(at) for at in range(4))
    wide = b.expand(b.unsqueeze(x, 2), (batch, heads, groups, length, width))
    return b.reshape(wide, (batch, heads * groups, length, width))


PRODUCTS: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": _matmul for name in ("matmul", "mm", "bmm", "mv", "dot")},
    **{f"aten.{name}.default": _addmm for name in ("addmm", "baddbmm")},
    **{f"aten.{name}": _conv for name in ("conv1d.default", "conv2d.default", "conv1d.padding", "conv2d.padding")},
    "aten.linear.default": linear,
    "aten.convolution.default": _convolution,
    "aten.conv_transpose2d.input": _conv_transpose,
    "aten.max_pool2d.default": _pooled("max2d"),
    "aten.avg_pool2d.default": _pooled("avg2d"),
    "aten.avg_pool1d.default": _pooled("avg1d"),
    "aten.adaptive_avg_pool1d.default": _adaptive,
    "aten.adaptive_avg_pool2d.default": _adaptive,
    "aten._adaptive_avg_pool2d.default": _adaptive,
    "aten.embedding.default": lambda b, weight, indices, *_: b.op("Gather", [weight, indices], axis=0),
    "aten.index_select.default": lambda b, x, dim, indices: (
        b.op("Gather", [x, b.reshape(indices, (-1,))], axis=dim % x.rank) if x.rank else x
    ),
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.scatter.value": _scatter,
    "aten.scatter.src": _scatter_from("none"),
    "aten.scatter_add.default": _scatter_from("add"),
    "aten.tril.default": _triangle(upper=False),
    "aten.triu.default": _triangle(upper=True),
    "aten.one_hot.default": _one_hot,
    "fusion.attention": _attention,
    "fusion.expert_linear": expert_linear,
    "fusion.in_training": lambda b, trained, otherwise: otherwise,  # noqa: ARG005 - this backend never trains
    "fusion.dropout": lambda b, x, p: x,  # noqa: ARG005 - outside training nothing is dropped
}


def drawing(nodes: Iterable[Node]) -> tuple[int, ...]:
    """Return the ids of the nodes that draw random numbers."""
    return tuple(node.id for node in nodes if node.op == RANDOM)


def keys(nodes: Iterable[int], key: DropoutKey) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the inputs that a model with these drawing nodes takes at a call."""
    return {key_name(node): np.array(folds(key, node), np.uint32) for node in nodes}


def uniform(b: Builder, x: Tensor) -> Tensor:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    count = prod(x.size(dim) for dim in range(x.rank))
    bits = UNIFORM_BITS[b.declared_dtype]
    word = _Words(b, count)
    key = b.key()
    first, second = (b.slice(key, 0, at, at + 1) for at in (0, 1))
    low, high = word.index()
    drawn = word.mix(word.both(word.mix(word.both(low, first)), word.both(word.mix(high), second)))
    dtype = b.out.dtype
    fraction = b.cast(word.shifted(drawn, 32 - bits), dtype)
    return b.reshape(b.op("Mul", [fraction, b.number(2.0**-bits, dtype)], like=fraction), x.shape)


class _Words:
    """Arithmetic modulo 2**32 on `count` words."""

    def __init__(self, b: Builder, count: int) -> None:
        self._b = b
        self._like = Tensor("", "uint32", (count,))
        self._count = count

    def index(self) -> tuple[Tensor, Tensor]:
        """Return the lower and upper 32 bits of 0, 1, ..., count - 1."""
        b, wide = self._b, Tensor("", "int64", (self._count,))
        place = b.op("Range", [b.number(end, "int64") for end in (0, self._count, 1)], like=wide)
        upper = b.op("Div", [place, b.number(2**32, "int64")], like=wide)
        lower = b.op("Mod", [place, b.number(2**32, "int64")], like=wide)
        return b.cast(lower, "uint32"), b.cast(upper, "uint32")

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        return self._b.op("BitwiseXor", [x, y], like=self._like)

    def shifted(self, x: Tensor, bits: int) -> Tensor:
        """Shift x right by `bits`; for 0 bits no node is added."""
        if bits == 0:
            return x
        return self._b.op("BitShift", [x, self._b.number(bits, "uint32")], like=self._like, direction="RIGHT")

    def mix(self, x: Tensor) -> Tensor:
        b = self._b
        x = self.both(x, self.shifted(x, 16))
        x = b.op("Mul", [x, b.number(FIRST_MULTIPLIER, "uint32")], like=self._like)
        x = self.both(x, self.shifted(x, 15))
        x = b.op("Mul", [x, b.number(SECOND_MULTIPLIER, "uint32")], like=self._like)
        return self.both(x, self.shifted(x, 15))


DRAWING: Final[Mapping[str, Callable[..., Any]]] = {RANDOM: uniform}


POSITIONS: Final = 1
"""Dimension of the positions, along which `Scan` runs."""


def linear_scan(b: Builder, decay: Tensor, x: Tensor) -> Tensor:
    body = _Body(b)
    state = body.op("Add", body.op("Mul", "decay", "before"), "x")
    return body.scan(
        {"decay": decay, "x": x}, state_shape=(x.shape[0], *x.shape[2:]), after=state, result=body.op("Identity", state)
    )


def linear_attention(
    b: Builder, query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    body = _Body(b)
    keys_down = body.op("Unsqueeze", "key", b.ints([3]).name)
    missing = [3] if len(decay.shape) == len(key.shape) else [2, 3]
    kept = body.op("Mul", "before", body.op("Unsqueeze", body.op("Exp", "decay"), b.ints(missing).name))
    over_keys = b.ints([2]).name
    taken = "value"
    scanned = {"query": query, "key": key, "value": value, "decay": decay}
    if beta is not None:
        scanned["beta"] = beta
        known = body.op("ReduceSum", body.op("Mul", kept, keys_down), over_keys, keepdims=0)
        taken = body.op("Mul", body.op("Sub", "value", known), body.op("Unsqueeze", "beta", over_keys))
    state = body.op("Add", kept, body.op("Mul", keys_down, body.op("Unsqueeze", taken, over_keys)))
    asked = body.op("Unsqueeze", "query", b.ints([3]).name)
    read = body.op("ReduceSum", body.op("Mul", state, asked), over_keys, keepdims=0)
    batch, _, heads, width = key.shape
    return body.scan(scanned, state_shape=(batch, heads, width, value.shape[3]), after=state, result=read)


class _Body:
    """The computation at one position. Operands have the names under which `scan` gives them; the state is `before`.
    Names in a body must differ from the model's, so all get the current value's name as prefix."""

    def __init__(self, b: Builder) -> None:
        self._b = b
        self._nodes: list[NodeProto] = []
        self._own = {"before"}
        self._prefix = f"{b.out.name}:"

    def op(self, kind: str, *inputs: str, **options: Any) -> str:
        made = f"step{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, [*inputs], [made], **options))
        self._own.add(made)
        return made

    def scan(self, scanned: Mapping[str, Tensor], *, state_shape: Sequence[Size], after: str, result: str) -> Tensor:
        """Run the body along the positions of `scanned`, from a state of zeros. Raises `ExecutionError` if there is
        nothing to scan: ONNX Runtime would divide by zero."""
        if any(size == 0 for sizes in (state_shape, *(one.shape for one in scanned.values())) for size in sizes):
            raise ExecutionError("ONNX Runtime can't scan tensors without elements.")
        b = self._b
        dtype = b.out.dtype
        own = self._own | set(scanned)
        nodes = [
            helper.make_node(
                node.op_type,
                [self._prefix + name if name in own else name for name in node.input],
                [self._prefix + name for name in node.output],
                **{option.name: helper.get_attribute_value(option) for option in node.attribute},
            )
            for node in self._nodes
        ]

        def declared(name: str) -> Any:
            return helper.make_tensor_value_info(self._prefix + name, ONNX_TYPES[dtype], None)

        body = helper.make_graph(
            nodes, "position", [declared(name) for name in ("before", *scanned)], [declared(after), declared(result)]
        )
        start = b.expand(b.number(0.0, dtype), state_shape)
        _, made = b.op(
            "Scan",
            [start, *(b.cast(value, dtype) for value in scanned.values())],
            count=2,
            body=body,
            num_scan_inputs=len(scanned),
            scan_input_axes=[POSITIONS] * len(scanned),
            scan_output_axes=[POSITIONS],
        )
        return made


SCANS: Final[Mapping[str, Callable[..., Any]]] = {
    "fusion.linear_scan": linear_scan,
    "fusion.linear_attention": linear_attention,
}
