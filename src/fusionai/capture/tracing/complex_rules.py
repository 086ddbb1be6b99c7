"""Formulas of operators on complex values in terms of real ones; `capture.tracing.complex_parts` applies them.

Operators that move, choose or sum elements do the same to both parts. Products follow PyTorch's formula and have the
bits of its vectorised kernels, which round every product. Its scalar kernels (for the elements at the end of a row that
fill no whole vector) use fused multiply-add, so the last bit may differ there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from fusionai.capture.tracing.complex_parts import REAL_DTYPES, NoForm, Operand, Pair, Parts, Rule

_aten: Final = torch.ops.aten
Part = fx.Node | float | None
"""Real or imaginary part of a value; None is zero."""


def _parts(value: Operand) -> tuple[Part, Part]:
    match value:
        case Pair(real=real, imaginary=imaginary):
            return real, imaginary
        case complex():
            return value.real or None, value.imag or None
        case _:
            return (value or None, None) if isinstance(value, int | float) else (value, None)


def _times(parts: Parts, left: Part, right: Part) -> Part:
    if left is None or right is None:
        return None
    if isinstance(left, fx.Node):
        return parts.call(_aten.mul.Tensor, left, right)
    return parts.call(_aten.mul.Tensor, right, left) if isinstance(right, fx.Node) else left * right


def _sum(parts: Parts, left: Part, right: Part, op: Any = _aten.add.Tensor) -> Part:
    """Return the sum, or the difference if `op` is a subtraction. Operands have the result's shape or are numbers."""
    if right is None:
        return left
    if left is None:
        return right if op is _aten.add.Tensor else _negative(parts, right)
    if isinstance(left, fx.Node):
        return parts.call(op, left, right)
    if isinstance(right, fx.Node):
        if op is _aten.add.Tensor:
            return parts.call(op, right, left)
        return parts.call(_aten.rsub.Scalar, right, left)
    return left + right if op is _aten.add.Tensor else left - right


def _negative(parts: Parts, part: Part) -> Part:
    if part is None:
        return None
    return parts.call(_aten.neg.default, part) if isinstance(part, fx.Node) else -part


def _pair(parts: Parts, real: Part, imaginary: Part) -> Pair:
    """Return a pair; a part that is a number becomes a tensor of the other part's shape."""
    like = real if isinstance(real, fx.Node) else imaginary
    if not isinstance(like, fx.Node):
        raise NoForm("no part of its result is a tensor")

    def made(part: Part) -> fx.Node | None:
        return parts.call(_aten.full_like.default, like, part) if isinstance(part, int | float) else part

    return Pair(made(real), made(imaginary))


def _product(parts: Parts, left: Operand, right: Operand, times: Callable[[Parts, Part, Part], Part] = _times) -> Pair:
    (a, b), (c, d) = _parts(left), _parts(right)
    real = _sum(parts, times(parts, a, c), times(parts, b, d), _aten.sub.Tensor)
    return _pair(parts, real, _sum(parts, times(parts, a, d), times(parts, b, c)))


def _square(parts: Parts, _node: fx.Node, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Pair:
    x, *exponent = args
    if exponent not in ([], [2]):
        raise NoForm("it is a power other than the square")
    return _product(parts, x, x)


def _quotient(parts: Parts, left: Operand, right: Operand) -> Pair:
    (a, b), (c, d) = _parts(left), _parts(right)
    if d is None:
        if c is None:
            raise NoForm("it divides by zero")
        return _pair(parts, *(part if part is None else _divided(parts, part, c) for part in (a, b)))
    size = _sum(parts, _times(parts, c, c), _times(parts, d, d))
    real = _sum(parts, _times(parts, a, c), _times(parts, b, d))
    imaginary = _sum(parts, _times(parts, b, c), _times(parts, a, d), _aten.sub.Tensor)
    assert size is not None
    return _pair(parts, *(part if part is None else _divided(parts, part, size) for part in (real, imaginary)))


def _divided(parts: Parts, part: fx.Node | float, by: fx.Node | float) -> Part:
    if isinstance(part, fx.Node):
        return parts.call(_aten.div.Tensor, part, by)
    if isinstance(by, fx.Node):
        return parts.call(_aten.mul.Tensor, parts.call(_aten.reciprocal.default, by), part)
    return part / by


def _div(parts: Parts, _node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    if kwargs.get("rounding_mode") is not None:
        raise NoForm("it rounds")
    return _quotient(parts, args[0], args[1])


def _add(op: Any, swapped: bool = False) -> Rule:
    def rule(parts: Parts, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
        left, right = args[:2] if not swapped else args[1::-1]
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        if alpha != 1:
            right = _scaled(parts, right, alpha)
        made: list[Part] = []
        for one, other in zip(_parts(left), _parts(right), strict=True):
            # A part without a counterpart must be expanded to the shape of the sum.
            if one is None or other is None:
                one, other = _wide(parts, node, one), _wide(parts, node, other)
            made.append(_sum(parts, one, other, op))
        return _pair(parts, *made)

    return rule


def _scaled(parts: Parts, value: Operand, by: Any) -> Operand:
    if isinstance(by, complex):
        raise NoForm("its factor alpha is complex")
    if isinstance(value, fx.Node):
        return parts.call(_aten.mul.Tensor, value, by)
    return _product(parts, value, by) if isinstance(value, Pair) else value * by


def _wide(parts: Parts, node: fx.Node, part: Part) -> Part:
    """Return the part expanded to the shape of the node's result."""
    shape = node.meta["val"].shape
    if not isinstance(part, fx.Node) or tuple(map(str, part.meta["val"].shape)) == tuple(map(str, shape)):
        return part
    sizes = [size if isinstance(size, int) else _size(parts, node, dim) for dim, size in enumerate(shape)]
    return parts.call(_aten.expand.default, part, sizes)


def _size(parts: Parts, node: fx.Node, dim: int) -> fx.Node:
    """Return one size of the node's result, read from an operand that has it."""
    wanted = str(node.meta["val"].shape[dim])
    rank = node.meta["val"].ndim
    for operand in node.all_input_nodes:
        source = parts.pairs.get(operand)
        tensor = operand if source is None else source.real or source.imaginary
        assert tensor is not None
        own = tensor.meta["val"]
        at = own.ndim - rank + dim
        if isinstance(own, torch.Tensor) and at >= 0 and str(own.shape[at]) == wanted:
            return parts.call(_aten.sym_size.int, tensor, at)
    raise NoForm("its result has a size that no operand has")


def _view_as_real(parts: Parts, node: fx.Node, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> fx.Node:
    parts.seen_apart[node] = args[0]
    return parts.call(_aten.stack.default, list(parts.full(args[0])), -1)


def _polar(parts: Parts, _node: fx.Node, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Pair:
    length, angle = args
    direction = [parts.call(op, angle) for op in (_aten.cos.default, _aten.sin.default)]
    return Pair(*(parts.call(_aten.mul.Tensor, length, part) for part in direction))


def _exp(parts: Parts, _node: fx.Node, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Pair:
    real, imaginary = args[0].real, args[0].imaginary
    length = None if real is None else parts.call(_aten.exp.default, real)
    if imaginary is None:
        return Pair(length, None)
    direction = [parts.call(op, imaginary) for op in (_aten.cos.default, _aten.sin.default)]
    return Pair(*(part if length is None else parts.call(_aten.mul.Tensor, length, part) for part in direction))


def _conjugate(parts: Parts, _node: fx.Node, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Pair | fx.Node:
    if not isinstance(args[0], Pair):
        return args[0]
    return _pair(parts, args[0].real, _negative(parts, args[0].imaginary))


def _abs(parts: Parts, _node: fx.Node, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> fx.Node:
    """Compute the length of a vector of two, whose gradient at zero is zero, as that of PyTorch's complex `abs`."""
    return parts.call(
        _aten.linalg_vector_norm.default, parts.call(_aten.stack.default, list(parts.full(args[0])), -1), 2, [-1]
    )


def _matrix(op: Any) -> Rule:
    """Return the rule of a matrix product: four products of real parts, or two if one operand is real."""

    def times(parts: Parts, left: Part, right: Part) -> Part:
        return None if left is None or right is None else parts.call(op, left, right)

    return lambda parts, _node, args, _kwargs: _product(parts, args[0], args[1], times)


def _cast(parts: Parts, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair | fx.Node:
    """Convert to another dtype; a real result is the real part, as in PyTorch."""
    kwargs = {name: REAL_DTYPES.get(value, value) if name == "dtype" else value for name, value in kwargs.items()}
    args = tuple(REAL_DTYPES.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
    x = args[0]
    if not isinstance(x, Pair):
        return Pair(parts.call(node.target, *args, **kwargs), None)
    if not node.meta["val"].is_complex():
        return parts.call(node.target, parts.full(x)[0], *args[1:], **kwargs)
    return _each(parts, node, (x, *args[1:]), kwargs)


def _created(parts: Parts, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair | fx.Node:
    """Create a tensor filled with one number, complex or in the likeness of a complex one."""
    value = node.meta["val"]
    args = tuple(parts.full(arg)[0] if isinstance(arg, Pair) else arg for arg in args)
    numbers = [at for at, arg in enumerate(args) if isinstance(arg, complex)]
    kwargs = {name: REAL_DTYPES.get(arg, arg) if name == "dtype" else arg for name, arg in kwargs.items()}
    if not value.is_complex():
        return parts.call(node.target, *args, **kwargs)
    # A graph has no default dtype. Without a dtype, `zeros_like` of a real tensor would have that tensor's.
    kwargs["dtype"] = REAL_DTYPES[value.dtype]

    def part(name: str) -> fx.Node:
        return parts.call(
            node.target, *(getattr(arg, name) if at in numbers else arg for at, arg in enumerate(args)), **kwargs
        )

    return Pair(part("real"), part("imag") if numbers else None)


def _each(parts: Parts, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the operator to both parts. A part that is zero stays so, unless other complex tensors join it."""
    joined = sum(isinstance(item, Pair) for arg in args for item in (arg if isinstance(arg, list) else [arg])) > 1
    joined = joined or str(node.target) in _JOINS

    def of(arg: Any, index: int) -> Any:
        match arg:
            case Pair():
                return parts.full(arg)[index] if joined else (arg.real, arg.imaginary)[index]
            case list():
                return [of(item, index) for item in arg]
            case fx.Node() if joined and arg.meta["val"].is_floating_point():
                return arg if index == 0 else parts.call(_aten.zeros_like.default, arg)
            case _:
                return arg

    def made(index: int) -> Any:
        own = tuple(of(arg, index) for arg in args)
        return None if own[0] is None else parts.call(node.target, *own, **kwargs)

    real, imaginary = made(0), made(1)
    if not isinstance(node.meta["val"], list | tuple):
        return Pair(real, imaginary)
    count = len(node.meta["val"])
    return [Pair(*pair) for pair in zip(real or [None] * count, imaginary or [None] * count, strict=True)]


def _filled(parts: Parts, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    """Fill elements chosen by a mask with a number."""
    x, mask, value = args
    number = complex(value)
    real, imaginary = parts.full(x)
    return Pair(
        parts.call(node.target, real, mask, number.real, **kwargs),
        parts.call(node.target, imaginary, mask, number.imag, **kwargs),
    )


def _padded(parts: Parts, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    if any(isinstance(value, int | float | complex) and value != 0 for value in (*args[2:], *kwargs.values())):
        raise NoForm("it pads with a number other than zero")
    return _each(parts, node, args, kwargs)


_JOINS: Final = frozenset(
    {
        "aten.where.self", "aten.slice_scatter.default", "aten.select_scatter.default", "aten.copy.default",
        "aten.cat.default", "aten.concat.default", "aten.stack.default", "aten.broadcast_tensors.default",
    }
)  # fmt: skip
"""Operators that join several tensors: a real one beside complex ones gets an imaginary part of zeros."""
_EACH: Final = (
    "view.default _unsafe_view.default reshape.default flatten.using_ints unflatten.int transpose.int permute.default"
    " t.default alias.default detach.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims slice.Tensor"
    " select.int narrow.default diagonal.default expand.default clone.default contiguous.default flip.default"
    " roll.default lift_fresh_copy.default split.Tensor split_with_sizes.default chunk.default unbind.int cat.default"
    " concat.default stack.default index_select.default gather.default index.Tensor repeat.default"
    " repeat_interleave.self_int broadcast_tensors.default copy.default slice_scatter.default select_scatter.default"
    " where.self tril.default triu.default neg.default negative.default sum.default sum.dim_IntList mean.default"
    " mean.dim cumsum.default"
)
_RULES: Final[tuple[tuple[str, Rule], ...]] = (
    (_EACH, _each),
    ("mul.Tensor multiply.Tensor mul.Scalar", lambda parts, _node, args, _: _product(parts, args[0], args[1])),
    ("square.default pow.Tensor_Scalar", _square),
    ("div.Tensor div.Scalar", _div),
    ("reciprocal.default", lambda parts, _node, args, _: _quotient(parts, 1.0, args[0])),
    ("add.Tensor add.Scalar", _add(_aten.add.Tensor)),
    ("sub.Tensor sub.Scalar", _add(_aten.sub.Tensor)),
    ("rsub.Scalar", _add(_aten.sub.Tensor, swapped=True)),
    ("mm.default", _matrix(_aten.mm.default)),
    ("bmm.default", _matrix(_aten.bmm.default)),
    ("matmul.default", _matrix(_aten.matmul.default)),
    ("complex.default", lambda parts, node, args, _: _pair(parts, *(_wide(parts, node, part) for part in args))),
    ("view_as_complex.default", lambda parts, _node, args, _: parts.halves(args[0])),
    ("view_as_real.default", _view_as_real),
    ("polar.default", _polar),
    ("exp.default", _exp),
    ("abs.default", _abs),
    ("real.default", lambda parts, _node, args, _: parts.full(args[0])[0]),
    ("imag.default", lambda parts, _node, args, _: parts.full(args[0])[1]),
    ("_conj.default conj.default _conj_physical.default conj_physical.default", _conjugate),
    ("resolve_conj.default resolve_neg.default", lambda _parts, _node, args, _: args[0]),
    ("_to_copy.default to.dtype", _cast),
    (
        "zeros.default ones.default full.default zeros_like.default ones_like.default full_like.default"
        " new_zeros.default new_ones.default new_full.default scalar_tensor.default empty.memory_format"
        " empty_like.default new_empty.default",
        _created,
    ),
    ("masked_fill.Scalar", _filled),
    ("constant_pad_nd.default pad.default", _padded),
)
RULES: Final[Mapping[str, Rule]] = {f"aten.{name}": rule for names, rule in _RULES for name in names.split()}
"""Operator -> its rule."""
