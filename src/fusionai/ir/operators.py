"""The operator allow-list. Decides which operators a graph may hold; runs and infers nothing.

An operator enters the list only if it reads nothing but its operands (no file, no ambient random source, no
environment), is functional, and its memory is bounded by a rule of `ir.growth`. To add one, add a line to `_table`.

`ir.validate` refuses all other operators, `ir.cost` uses the FLOP and saving rules, backends declare which of these
they support, `capture` rewrites other operators into these where it can.

The arguments of the `fusion.*` operators are defined here too (`check_semantic`): ATen operators check their own
arguments when they run, semantic operators are checked only by `ir.validate`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from fusionai.ir.schema import Arg, Node, Ref
from fusionai.primitives.errors import GraphError

Category = Literal[
    "size", "view", "copy", "create", "elementwise", "reduce", "matmul", "conv", "pool", "norm", "softmax", "index",
    "join", "attention", "scan", "dropout", "loss",
]  # fmt: skip

FlopRule = Literal[
    "none", "element", "reduce", "softmax", "norm", "matmul", "conv", "conv_transpose", "attention", "scan",
]  # fmt: skip
"""How `ir.cost` counts operations.

none: 0; element: one per result element; reduce: one per operand element; softmax, norm: a few per operand element;
matmul, conv, conv_transpose, attention: two per multiply-add; scan: a few per element of the state that is carried from
position to position.
"""

Growth = Literal[
    "operand",
    "broadcast",
    "sizes",
    "repeat",
    "arange",
    "join",
    "matmul",
    "conv",
    "conv_transpose",
    "lookup",
    "one_hot",
    "pad",
    "window",
    "windows",
    "adaptive",
    "grid",
    "unpool",
]
"""The rule by which `ir.growth` bounds the size of results.

For example: at most the largest operand; the broadcast of the operands; a list of sizes among the arguments.
"""

Saves = Literal["nothing", "operands", "result"]
"""What must be kept from forward to backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Properties of one operator.

    `results` is the number of results, None if the arguments determine it (`split`). `view` means that the result
    shares memory with its first operand, so it costs neither time nor memory. `differentiable` is False if no gradient
    flows from result to operands, whatever their dtype.
    """

    name: str
    category: Category
    flops: FlopRule
    growth: Growth
    saves: Saves
    results: int | None = 1
    view: bool = False
    differentiable: bool = True


_FLOPS: Final[Mapping[Category, FlopRule]] = {
    "size": "none",
    "view": "none",
    "copy": "none",
    "create": "none",
    "elementwise": "element",
    "reduce": "reduce",
    "matmul": "matmul",
    "conv": "conv",
    "pool": "reduce",
    "norm": "norm",
    "softmax": "softmax",
    "index": "none",
    "join": "none",
    "attention": "attention",
    "scan": "scan",
    "dropout": "element",
    "loss": "softmax",
}
_GROWTH: Final[Mapping[Category, Growth]] = {
    "size": "operand",
    "view": "operand",
    "copy": "operand",
    "create": "sizes",
    "elementwise": "broadcast",
    "reduce": "operand",
    "matmul": "matmul",
    "conv": "conv",
    "pool": "window",
    "norm": "operand",
    "softmax": "operand",
    "index": "lookup",
    "join": "join",
    "attention": "matmul",
    "scan": "operand",
    "dropout": "operand",
    "loss": "operand",
}
_SAVES: Final[Mapping[Category, Saves]] = {
    "size": "nothing",
    "view": "nothing",
    "copy": "nothing",
    "create": "nothing",
    "elementwise": "operands",
    "reduce": "nothing",
    "matmul": "operands",
    "conv": "operands",
    "pool": "operands",
    "norm": "operands",
    "softmax": "result",
    "index": "nothing",
    "join": "nothing",
    "attention": "operands",
    "scan": "operands",
    "dropout": "nothing",
    "loss": "operands",
}


def _operators(
    category: Category,
    names: str,
    *,
    flops: FlopRule | None = None,
    growth: Growth | None = None,
    saves: Saves | None = None,
    results: int | None = 1,
    differentiable: bool = True,
) -> Iterator[Operator]:
    for name in names.split():
        yield Operator(
            name=name,
            category=category,
            flops=_FLOPS[category] if flops is None else flops,
            growth=_GROWTH[category] if growth is None else growth,
            saves=_SAVES[category] if saves is None else saves,
            results=results,
            view=category == "view",
            differentiable=differentiable and category not in ("size", "create"),
        )


def _table() -> Iterator[Operator]:
    # Sizes: integers computed from shapes, never tensors.
    yield from _operators("size", "aten.sym_size.int")
    yield from _operators("size", "sym.add sym.sub sym.mul sym.floordiv sym.mod sym.neg sym.max sym.min")

    # Views and other ways to see the same elements. `aten.view` is absent, because capture writes reshape.
    yield from _operators("view", "aten.reshape.default aten.flatten.using_ints aten.unflatten.int")
    yield from _operators("view", "aten.transpose.int aten.permute.default aten.t.default aten.alias.default")
    yield from _operators("view", "aten.unsqueeze.default aten.squeeze.default aten.squeeze.dim aten.squeeze.dims")
    yield from _operators("view", "aten.slice.Tensor aten.select.int aten.narrow.default aten.diagonal.default")
    yield from _operators("view", "aten.expand.default", growth="sizes")
    yield from _operators("view", "aten.expand_as.default", growth="broadcast")
    yield from _operators("view", "aten.broadcast_tensors.default", growth="broadcast", results=None)
    yield from _operators("view", "aten.detach.default", differentiable=False)
    yield from _operators("view", "aten.split.Tensor aten.split_with_sizes.default aten.chunk.default", results=None)
    yield from _operators("view", "aten.unbind.int", results=None)

    # Copies and casts.
    yield from _operators("copy", "aten._to_copy.default aten.to.dtype aten.to.dtype_layout aten.clone.default")
    yield from _operators("copy", "aten.contiguous.default aten.type_as.default aten.flip.default aten.roll.default")
    yield from _operators("copy", "aten.lift_fresh_copy.default")
    yield from _operators("copy", "aten.select_scatter.default aten.slice_scatter.default")

    # Tensors made from numbers.
    yield from _operators("create", "aten.full.default aten.zeros.default aten.ones.default aten.empty.memory_format")
    yield from _operators("create", "aten.new_zeros.default aten.new_ones.default aten.new_full.default")
    yield from _operators("create", "aten.full_like.default aten.zeros_like.default", growth="operand")
    yield from _operators("create", "aten.ones_like.default aten.empty_like.default", growth="operand")
    yield from _operators("create", "aten.scalar_tensor.default", growth="operand")
    yield from _operators("create", "aten.linspace.default", growth="arange")
    yield from _operators("create", "aten.arange.default aten.arange.start aten.arange.start_step", growth="arange")

    # Elementwise arithmetic whose derivative needs no operand.
    yield from _operators("elementwise", "aten.add.Tensor aten.add.Scalar aten.sub.Tensor", saves="nothing")
    yield from _operators("elementwise", "aten.sub.Scalar aten.rsub.Scalar aten.neg.default", saves="nothing")
    yield from _operators("elementwise", "aten.mul.Scalar aten.div.Scalar", saves="nothing")
    # ... that needs the operands.
    yield from _operators("elementwise", "aten.mul.Tensor aten.div.Tensor aten.pow.Tensor_Scalar")
    yield from _operators("elementwise", "aten.pow.Tensor_Tensor aten.pow.Scalar aten.square.default aten.abs.default")
    yield from _operators("elementwise", "aten.log.default aten.log1p.default aten.sin.default aten.cos.default")
    yield from _operators("elementwise", "aten.gelu.default aten.silu.default aten.softplus.default")
    yield from _operators("elementwise", "aten.mish.default aten.hardswish.default aten.hardsigmoid.default")
    yield from _operators("elementwise", "aten.leaky_relu.default aten.elu.default aten.erf.default")
    yield from _operators("elementwise", "aten.clamp.default aten.clamp.Tensor aten.clamp_min.default")
    yield from _operators("elementwise", "aten.clamp_max.default aten.hardtanh.default aten.relu6.default")
    yield from _operators("elementwise", "aten.maximum.default aten.minimum.default aten.where.self")
    yield from _operators("elementwise", "aten.where.ScalarOther aten.where.ScalarSelf aten.masked_fill.Scalar")
    yield from _operators("elementwise", "aten.masked_fill.Tensor aten.prelu.default aten.lerp.Scalar")
    yield from _operators("elementwise", "aten.erfc.default aten.erfinv.default aten.tan.default aten.asin.default")
    yield from _operators("elementwise", "aten.acos.default aten.atan.default aten.sinh.default aten.cosh.default")
    yield from _operators("elementwise", "aten.asinh.default aten.acosh.default aten.atanh.default aten.log2.default")
    yield from _operators("elementwise", "aten.log10.default aten.lgamma.default aten.sinc.default aten.logit.default")
    yield from _operators("elementwise", "aten.nan_to_num.default aten.celu.default aten.threshold.default")
    yield from _operators("elementwise", "aten.glu.default aten.clamp_min.Tensor aten.clamp_max.Tensor")
    yield from _operators("elementwise", "aten.addcmul.default aten.addcdiv.default aten.lerp.Tensor aten.fmax.default")
    yield from _operators("elementwise", "aten.fmin.default aten.atan2.default aten.hypot.default aten.xlogy.Tensor")
    yield from _operators(
        "elementwise", "aten.logaddexp.default aten.copysign.Tensor aten.fmod.Scalar aten.fmod.Tensor"
    )
    yield from _operators("elementwise", "aten.linalg_cross.default")
    yield from _operators("elementwise", "aten.deg2rad.default aten.rad2deg.default aten.frac.default", saves="nothing")
    # ... that needs the result.
    yield from _operators("elementwise", "aten.exp2.default", saves="result")
    yield from _operators("elementwise", "aten.relu.default aten.tanh.default aten.sigmoid.default", saves="result")
    yield from _operators("elementwise", "aten.exp.default aten.sqrt.default aten.rsqrt.default", saves="result")
    yield from _operators("elementwise", "aten.expm1.default", saves="result")
    yield from _operators("elementwise", "aten.reciprocal.default", saves="result")
    yield from _operators("elementwise", "aten.log_sigmoid.default")
    # ... with integer or boolean results, or no gradient.
    comparisons = "eq ne lt le gt ge"
    for name in comparisons.split():
        yield from _operators(
            "elementwise", f"aten.{name}.Tensor aten.{name}.Scalar", saves="nothing", differentiable=False
        )
    yield from _operators(
        "elementwise",
        "aten.logical_and.default aten.logical_or.default aten.logical_not.default aten.logical_xor.default"
        " aten.bitwise_and.Tensor aten.bitwise_or.Tensor aten.bitwise_not.default aten.bitwise_xor.Tensor"
        " aten.__and__.Tensor aten.__or__.Tensor"
        " aten.floor_divide.default aten.floor.default aten.ceil.default aten.round.default aten.sign.default"
        " aten.remainder.Scalar aten.remainder.Tensor aten.isnan.default aten.isinf.default aten.trunc.default"
        " aten.sgn.default aten.signbit.default aten.heaviside.default",
        saves="nothing",
        differentiable=False,
    )
    yield from _operators("elementwise", "aten.div.Tensor_mode aten.div.Scalar_mode", saves="nothing")

    # Reductions.
    yield from _operators("reduce", "aten.sum.default aten.sum.dim_IntList aten.mean.default aten.mean.dim")
    yield from _operators("reduce", "aten.cumsum.default")
    yield from _operators("reduce", "aten.diff.default", growth="join")
    yield from _operators("reduce", "aten.amax.default aten.amin.default aten.var.correction aten.logsumexp.default")
    yield from _operators("reduce", "aten.std.correction aten.linalg_vector_norm.default", saves="operands")
    yield from _operators("reduce", "aten.max.default aten.min.default", saves="operands")
    yield from _operators("reduce", "aten.max.dim aten.min.dim aten.topk.default aten.sort.default", results=2)
    yield from _operators("reduce", "aten.cumprod.default aten.logcumsumexp.default", saves="operands")
    yield from _operators("reduce", "aten.prod.default aten.prod.dim_int aten.nansum.default", saves="operands")
    yield from _operators("reduce", "aten.trace.default")
    yield from _operators("reduce", "aten.kthvalue.default aten.median.dim aten.cummax.default", results=2)
    yield from _operators("reduce", "aten.cummin.default aten.aminmax.default", results=2)
    yield from _operators("reduce", "aten.var_mean.correction aten.std_mean.correction", results=2, saves="operands")
    yield from _operators(
        "reduce",
        "aten.argmax.default aten.argmin.default aten.any.default aten.any.dim aten.all.default aten.all.dim"
        " aten.count_nonzero.default aten.count_nonzero.dim_IntList",
        differentiable=False,
    )

    # Products.
    yield from _operators("matmul", "aten.linear.default aten.matmul.default aten.mm.default aten.bmm.default")
    yield from _operators("matmul", "aten.addmm.default aten.baddbmm.default aten.mv.default aten.dot.default")
    yield from _operators("matmul", "aten._trilinear.default aten._cdist_forward.default")

    # Vision.
    yield from _operators("conv", "aten.conv1d.default aten.conv2d.default aten.convolution.default")
    yield from _operators("conv", "aten.conv1d.padding aten.conv2d.padding")
    yield from _operators("conv", "aten.conv_transpose2d.input", flops="conv_transpose", growth="conv_transpose")
    yield from _operators("pool", "aten.max_pool2d.default aten.avg_pool2d.default aten.avg_pool1d.default")
    yield from _operators("pool", "aten.max_pool2d_with_indices.default", results=2)
    yield from _operators(
        "pool", "aten.adaptive_avg_pool1d.default aten.adaptive_avg_pool2d.default", growth="adaptive"
    )
    yield from _operators("pool", "aten._adaptive_avg_pool2d.default", growth="adaptive")
    yield from _operators("pool", "aten.avg_pool3d.default")
    yield from _operators("pool", "aten.max_pool3d_with_indices.default", results=2)
    yield from _operators("pool", "aten._adaptive_avg_pool3d.default", growth="adaptive")
    yield from _operators(
        "pool", "aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default", growth="adaptive", results=2
    )
    yield from _operators("pool", "aten.max_unpool2d.default", growth="unpool", saves="nothing")
    yield from _operators("pool", "aten.grid_sampler_2d.default aten.grid_sampler_3d.default", growth="grid")
    yield from _operators("copy", "aten.unfold.default aten.im2col.default aten.col2im.default", growth="windows")
    yield from _operators("copy", "aten.constant_pad_nd.default aten.pad.default", growth="pad")

    # Normalisation.
    yield from _operators("norm", "aten.layer_norm.default aten.rms_norm.default aten.group_norm.default")
    yield from _operators("norm", "aten.native_layer_norm.default aten.native_group_norm.default", results=3)
    yield from _operators("norm", "aten._native_batch_norm_legit_functional.default", results=5)
    yield from _operators("norm", "aten._native_batch_norm_legit.no_stats", results=3)
    yield from _operators("norm", "aten._native_batch_norm_legit_no_training.default", results=3)
    yield from _operators("norm", "aten.batch_norm.default")
    yield from _operators("norm", "aten._weight_norm_interface.default", results=2)

    # Softmax and losses.
    yield from _operators("softmax", "aten.softmax.int aten._softmax.default aten.log_softmax.int")
    yield from _operators("softmax", "aten._log_softmax.default")
    yield from _operators("loss", "aten.cross_entropy_loss.default aten.nll_loss_nd.default aten.nll_loss.default")
    yield from _operators("loss", "aten.nll_loss_forward.default", results=2)
    yield from _operators("loss", "aten.mse_loss.default aten.l1_loss.default aten.smooth_l1_loss.default")
    yield from _operators("loss", "aten.huber_loss.default aten.binary_cross_entropy_with_logits.default")
    yield from _operators("loss", "aten.binary_cross_entropy.default aten.soft_margin_loss.default")

    # Lookups and joins.
    yield from _operators("index", "aten.embedding.default aten.index_select.default aten.gather.default")
    yield from _operators("index", "aten.index.Tensor")
    yield from _operators("index", "aten.tril.default aten.triu.default aten.scatter.value", growth="operand")
    yield from _operators(
        "index", "aten.scatter.src aten.scatter_add.default aten.scatter_reduce.two", growth="operand"
    )
    yield from _operators("index", "aten.index_add.default aten.index_copy.default", growth="operand")
    yield from _operators("index", "aten.index_fill.int_Scalar aten.index_put.default", growth="operand")
    yield from _operators(
        "index", "aten.bucketize.Tensor aten.searchsorted.Tensor", growth="operand", differentiable=False
    )
    yield from _operators("index", "aten.one_hot.default", growth="one_hot", differentiable=False)
    yield from _operators("join", "aten.cat.default aten.stack.default")
    yield from _operators("join", "aten.repeat.default", growth="repeat")
    yield from _operators("join", "aten.repeat_interleave.self_int", growth="repeat")

    # Semantic operators. Every backend has its own implementation.
    yield from _operators("attention", "fusion.attention")
    yield from _operators("matmul", "fusion.expert_linear")
    yield from _operators("scan", "fusion.linear_scan fusion.linear_attention")
    yield from _operators("index", "fusion.embedding_bag")
    yield from _operators("dropout", "fusion.dropout fusion.in_training")
    yield from _operators("dropout", "fusion.uniform", differentiable=False)


WORDS: Final = frozenset(
    {"none", "tanh", "floor", "trunc", "same", "valid", "constant", "reflect", "replicate", "circular"}
    | {"sum", "mean", "prod", "amax", "amin"}
)
"""The strings allowed as arguments: rounding, approximation and padding modes, and reductions."""

OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType({operator.name: operator for operator in _table()})
"""Operator by name: the complete allow-list."""


Option = Literal["number", "number?", "size?", "flag", "share", "tensor", "tensor?"]
_SEMANTIC: Final[dict[str, tuple[int, dict[str, Option]]]] = {
    "fusion.attention": (
        3,
        {
            "scale": "number",
            "causal": "flag",
            "window": "size?",
            "softcap": "number?",
            "dropout": "share",
            "sinks": "tensor?",
            "key_mask": "tensor?",
        },
    ),
    "fusion.expert_linear": (3, {"transposed": "flag"}),
    "fusion.embedding_bag": (
        3,
        {"mode": "number", "weights": "tensor?", "by_frequency": "flag", "last_offset": "flag", "padding": "number"},
    ),
    "fusion.linear_scan": (2, {}),
    "fusion.linear_attention": (3, {"decay": "tensor", "beta": "tensor?"}),
    "fusion.dropout": (1, {"p": "share"}),
    "fusion.in_training": (2, {}),
    "fusion.uniform": (1, {}),
}
"""Operator -> (number of positional tensors, kind of each named argument; `?` allows None)."""


def check_semantic(node: Node, tensors: Container[str]) -> None:
    """Raise `GraphError` unless the operator accepts the node's arguments. `tensors` are the names of known tensors."""
    operands, options = _SEMANTIC[node.op]
    found = [arg for arg in node.args if isinstance(arg, Ref) and arg.name in tensors]
    if len(node.args) != operands or len(found) != operands:
        raise GraphError(f"node {node.id} ({node.op}) takes {operands} tensors, then named arguments.")
    for name, arg in node.kwargs.items():
        option = options.get(name)
        if option is None or not _fits(option, arg, tensors):
            raise GraphError(
                f"node {node.id} ({node.op}): argument {name[:64]!r} is unknown or has a value it can't take;"
                f" known are {', '.join(options)}."
            )


def _fits(option: Option, arg: Arg, tensors: Container[str]) -> bool:
    match option:
        case "flag":
            return isinstance(arg, bool)
        case "tensor?" if arg is None:
            return True
        case "tensor" | "tensor?":
            return isinstance(arg, Ref) and arg.name in tensors
        case "size?":
            return arg is None or (isinstance(arg, int) and not isinstance(arg, bool) and arg > 0)
        case "number?" if arg is None:
            return True
        case "number" | "number?" | "share":
            if isinstance(arg, bool) or not isinstance(arg, int | float):
                return False
            return option == "number" or (0 <= arg < 1 if option == "share" else arg > 0)
