"""The operator allow-list. Decides which operators a graph may hold; runs and infers nothing.

An operator enters the list only if it reads nothing but its operands (no file, no ambient random source, no
environment), is functional, and its memory is bounded by a rule of `ir.shapes`. To add one, add a line to `_table`.

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
"""How `ir.cost` counts operations. none: 0; element: one per result element; reduce: one per operand element; softmax,
norm: a few per operand element; matmul, conv, conv_transpose, attention: two per multiply-add; scan: a few per element
of the state that is carried from position to position."""

Growth = Literal[
    "operand", "broadcast", "sizes", "repeat", "arange", "join", "matmul", "conv", "conv_transpose", "lookup",
    "one_hot", "pad", "window", "windows", "adaptive", "grid", "unpool",
]  # fmt: skip
"""The rule by which `ir.shapes` bounds the size of results. For example: at most the largest operand; the broadcast of
the operands; a list of sizes among the arguments."""

Saves = Literal["nothing", "operands", "result"]
"""What must be kept from forward to backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Properties of one operator. `results` is the number of results, None if the arguments determine it (`split`).
    `view` means that the result shares memory with its first operand, so it costs neither time nor memory.
    `differentiable` is False if no gradient flows from result to operands, whatever their dtype."""

    name: str
    category: Category
    flops: FlopRule
    growth: Growth
    saves: Saves
    results: int | None = 1
    view: bool = False
    differentiable: bool = True


_RULES: Final[Mapping[Category, tuple[FlopRule, Growth, Saves]]] = {
    "size": ("none", "operand", "nothing"),
    "view": ("none", "operand", "nothing"),
    "copy": ("none", "operand", "nothing"),
    "create": ("none", "sizes", "nothing"),
    "elementwise": ("element", "broadcast", "operands"),
    "reduce": ("reduce", "operand", "nothing"),
    "matmul": ("matmul", "matmul", "operands"),
    "conv": ("conv", "conv", "operands"),
    "pool": ("reduce", "window", "operands"),
    "norm": ("norm", "operand", "operands"),
    "softmax": ("softmax", "operand", "result"),
    "index": ("none", "lookup", "nothing"),
    "join": ("none", "join", "nothing"),
    "attention": ("attention", "matmul", "operands"),
    "scan": ("scan", "operand", "operands"),
    "dropout": ("element", "operand", "nothing"),
    "loss": ("softmax", "operand", "operands"),
}
"""What holds for the operators of a category unless their line in `_table` says otherwise."""


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
    """Yield operators by name. The namespace `aten` and the overload `default` are left out of `names`."""
    of_category = _RULES[category]
    for name in names.split():
        yield Operator(
            name=_full_name(name),
            category=category,
            flops=flops or of_category[0],
            growth=growth or of_category[1],
            saves=saves or of_category[2],
            results=results,
            view=category == "view",
            differentiable=differentiable and category not in ("size", "create"),
        )


def _full_name(name: str) -> str:
    if name.startswith(("sym.", "fusion.")):
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _table() -> Iterator[Operator]:
    # Sizes: integers computed from shapes, never tensors.
    yield from _operators("size", "sym_size.int sym.add sym.sub sym.mul sym.floordiv sym.mod sym.neg sym.max sym.min")

    # Views and other ways to see the same elements. `aten.view` is absent, because capture writes reshape.
    yield from _operators(
        "view",
        "reshape flatten.using_ints unflatten.int transpose.int permute t alias unsqueeze squeeze squeeze.dim"
        " squeeze.dims slice.Tensor select.int narrow diagonal",
    )
    yield from _operators("view", "expand", growth="sizes")
    yield from _operators("view", "expand_as", growth="broadcast")
    yield from _operators("view", "broadcast_tensors", growth="broadcast", results=None)
    yield from _operators("view", "detach", differentiable=False)
    yield from _operators("view", "split.Tensor split_with_sizes chunk unbind.int", results=None)

    # Copies and casts.
    yield from _operators(
        "copy",
        "_to_copy to.dtype to.dtype_layout clone contiguous type_as flip roll lift_fresh_copy select_scatter"
        " slice_scatter",
    )

    # Tensors made from numbers.
    yield from _operators("create", "full zeros ones empty.memory_format new_zeros new_ones new_full")
    yield from _operators("create", "full_like zeros_like ones_like empty_like scalar_tensor", growth="operand")
    yield from _operators("create", "linspace arange arange.start arange.start_step", growth="arange")

    # Elementwise arithmetic whose derivative needs no operand.
    yield from _operators(
        "elementwise",
        "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar neg mul.Scalar div.Scalar",
        saves="nothing",
    )
    # ... that needs the operands.
    yield from _operators(
        "elementwise",
        "mul.Tensor div.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar square abs log log1p sin cos gelu silu"
        " softplus mish hardswish hardsigmoid leaky_relu elu erf clamp clamp.Tensor clamp_min clamp_max hardtanh relu6"
        " maximum minimum where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar masked_fill.Tensor prelu"
        " lerp.Scalar erfc erfinv tan asin acos atan sinh cosh asinh acosh atanh log2 log10 lgamma sinc logit"
        " nan_to_num celu threshold glu clamp_min.Tensor clamp_max.Tensor addcmul addcdiv lerp.Tensor fmax fmin atan2"
        " hypot xlogy.Tensor logaddexp copysign.Tensor fmod.Scalar fmod.Tensor linalg_cross",
    )
    yield from _operators("elementwise", "deg2rad rad2deg frac", saves="nothing")
    # ... that needs the result.
    yield from _operators("elementwise", "exp2 relu tanh sigmoid exp sqrt rsqrt expm1 reciprocal", saves="result")
    yield from _operators("elementwise", "log_sigmoid")
    # ... with integer or boolean results, or no gradient.
    yield from _operators(
        "elementwise",
        "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar"
        " ge.Tensor ge.Scalar logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_or.Tensor"
        " bitwise_not bitwise_xor.Tensor __and__.Tensor __or__.Tensor floor_divide floor ceil round sign"
        " remainder.Scalar remainder.Tensor isnan isinf trunc sgn signbit heaviside",
        saves="nothing",
        differentiable=False,
    )
    yield from _operators("elementwise", "div.Tensor_mode div.Scalar_mode", saves="nothing")

    # Reductions.
    yield from _operators("reduce", "sum sum.dim_IntList mean mean.dim cumsum amax amin var.correction logsumexp trace")
    yield from _operators("reduce", "diff", growth="join")
    yield from _operators(
        "reduce",
        "std.correction linalg_vector_norm max min cumprod logcumsumexp prod prod.dim_int nansum",
        saves="operands",
    )
    yield from _operators("reduce", "max.dim min.dim topk sort kthvalue median.dim cummax cummin aminmax", results=2)
    yield from _operators("reduce", "var_mean.correction std_mean.correction", results=2, saves="operands")
    yield from _operators(
        "reduce",
        "argmax argmin any any.dim all all.dim count_nonzero count_nonzero.dim_IntList",
        differentiable=False,
    )

    # Products.
    yield from _operators("matmul", "linear matmul mm bmm addmm baddbmm mv dot _trilinear _cdist_forward")

    # Vision.
    yield from _operators("conv", "conv1d conv2d convolution conv1d.padding conv2d.padding")
    yield from _operators("conv", "conv_transpose2d.input", flops="conv_transpose", growth="conv_transpose")
    yield from _operators("pool", "max_pool2d avg_pool2d avg_pool1d avg_pool3d")
    yield from _operators("pool", "max_pool2d_with_indices max_pool3d_with_indices", results=2)
    yield from _operators(
        "pool",
        "adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d",
        growth="adaptive",
    )
    yield from _operators("pool", "adaptive_max_pool2d adaptive_max_pool3d", growth="adaptive", results=2)
    yield from _operators("pool", "max_unpool2d", growth="unpool", saves="nothing")
    yield from _operators("pool", "grid_sampler_2d grid_sampler_3d", growth="grid")
    yield from _operators("copy", "unfold im2col col2im", growth="windows")
    yield from _operators("copy", "constant_pad_nd pad", growth="pad")

    # Normalisation.
    yield from _operators("norm", "layer_norm rms_norm group_norm batch_norm")
    yield from _operators(
        "norm",
        "native_layer_norm native_group_norm _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training",
        results=3,
    )
    yield from _operators("norm", "_native_batch_norm_legit_functional", results=5)
    yield from _operators("norm", "_weight_norm_interface", results=2)

    # Softmax and losses.
    yield from _operators("softmax", "softmax.int _softmax log_softmax.int _log_softmax")
    yield from _operators(
        "loss",
        "cross_entropy_loss nll_loss_nd nll_loss mse_loss l1_loss smooth_l1_loss huber_loss"
        " binary_cross_entropy_with_logits binary_cross_entropy soft_margin_loss",
    )
    yield from _operators("loss", "nll_loss_forward", results=2)

    # Lookups and joins.
    yield from _operators("index", "embedding index_select gather index.Tensor")
    yield from _operators(
        "index",
        "tril triu scatter.value scatter.src scatter_add scatter_reduce.two index_add index_copy"
        " index_fill.int_Scalar index_put",
        growth="operand",
    )
    yield from _operators("index", "bucketize.Tensor searchsorted.Tensor", growth="operand", differentiable=False)
    yield from _operators("index", "one_hot", growth="one_hot", differentiable=False)
    yield from _operators("join", "cat stack")
    yield from _operators("join", "repeat repeat_interleave.self_int", growth="repeat")

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

IN_BFLOAT16: Final = frozenset({"matmul", "conv", "attention"})
"""Categories of operators whose operands are converted to bfloat16 under bf16 precision."""
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
