"""Trace functions of PyTorch whose own trace a graph can't hold, in a form that it can.

Dropout and other draws with `inplace=True` become the function and a copy of its result: PyTorch's decomposition into
draws and products would hide that they are dropout, which evaluation leaves out. `fill_diagonal_` becomes a selection
by row and column instead of a strided view. `F.gaussian_nll_loss` does not check that variances are positive, a branch
on data. `take_along_dim` does not compare sizes, `einsum` orders its products by the example's sizes, and `kron` is
written as a product of reshaped operands: PyTorch's own would fix a size that varies. Indices of a triangle are
constants.

Other functions with values that a graph can't hold:

- A mask from `generate_square_subsequent_mask` is recognised as causal by how it was made, because PyTorch would
  compare its values. Any other mask is applied as it is, which gives the same numbers.
- `momentum=None` in batch normalisation: PyTorch computes the weight of a batch as a Python number. Here the operator
  computes the batch's own statistics (momentum 1), and operators of the graph average them with the running ones.
- `torch.distributions` does not validate its arguments; bad values give NaN or infinity instead.
- Losses per row are traced by the operator beneath PyTorch's composite one, which loses the shape when traced twice.
- Recurrent layers are traced step by step, with the dropout between layers, which PyTorch's decomposition omits.
- Functions that no graph can hold are refused by the name that the model's author uses, with what to write instead.

Neighbours: `capture.tracing.export` traces under `Functions`; `capture.tracing.by_mode` and `capture.tracing.draws`
handle the draws.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch._C import DispatchKey
from torch._functorch import eager_transforms
from torch.backends import opt_einsum
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.decompositions import FOURIER
from fusionai.capture.tracing.patching import patched
from fusionai.primitives.errors import ModelError


class Functions(TorchFunctionMode):
    """While open, these functions are traced in their other form."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        functional = _IN_PLACE.get(func)
        if functional is None and func in _ASKED and named.pop("inplace", False):
            functional = func
        if functional is not None:
            return args[0].copy_(functional(*args, **named))
        return _OTHER.get(func, func)(*args, **(kwargs or {}))


def _fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    if wrap or x.ndim != 2:
        raise ModelError(
            "the model calls fill_diagonal_ with wrap or on a tensor that is no matrix, which a graph can't hold.",
            hint="Select by torch.where on rows and columns instead.",
        )
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return x.copy_(x.masked_fill(rows[:, None] == columns, fill_value))


def _take_along(
    input: torch.Tensor,  # noqa: A002 - PyTorch's names, which callers may use
    indices: torch.Tensor,
    dim: int | None = None,
) -> torch.Tensor:
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    along = dim % input.ndim
    others = [at for at in range(input.ndim) if at != along]
    if indices.ndim == input.ndim and all(statically_known_true(input.shape[i] == indices.shape[i]) for i in others):
        return input.gather(along, indices)
    return torch.take_along_dim(input, indices, dim)


def _kron(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's names
    rank = max(input.ndim, other.ndim)
    one, two = (x.reshape((1,) * (rank - x.ndim) + tuple(x.shape)) for x in (input, other))
    spread = one.reshape([size for own in one.shape for size in (own, 1)])
    repeated = two.reshape([size for own in two.shape for size in (1, own)])
    return (spread * repeated).reshape([a * b for a, b in zip(one.shape, two.shape, strict=True)])


def _triangle(kept: Callable[[int, int], bool]) -> Callable[..., torch.Tensor]:
    """Return a function for the rows and columns of the places with `kept` (column, row + offset)."""

    def indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64, **how: Any) -> torch.Tensor:
        places = [(at, along) for at in range(row) for along in range(col) if kept(along, at + offset)]
        found = torch.tensor(places, dtype=dtype, device=how.get("device")).reshape(-1, 2)
        return found.transpose(0, 1).contiguous()

    return indices


def _einsum(equation: str, *operands: Any) -> torch.Tensor:
    """Multiply three or more operands in the order that opt_einsum finds best for the example's sizes."""
    given: list[torch.Tensor] = list(operands[0]) if isinstance(operands[0], list | tuple) else list(operands)
    if len(given) <= 2 or not opt_einsum.enabled or not opt_einsum.is_available():
        return torch.einsum(equation, *operands)
    shapes = [
        tuple(size if isinstance(size, int) else int(size.node.hint) for size in operand.shape) for operand in given
    ]
    search = opt_einsum.get_opt_einsum()
    path = search.contract_path(equation, *shapes, optimize=opt_einsum.strategy, shapes=True)[0]
    return torch._VF.einsum(equation, given, path=list(chain.from_iterable(path)))  # pyright: ignore


def _gaussian_nll_loss(
    input: torch.Tensor,  # noqa: A002 - PyTorch's names, which callers may use
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    variance = var.clone() if isinstance(var, torch.Tensor) else var * torch.ones_like(input)
    if variance.ndim == input.ndim - 1:
        variance = variance.unsqueeze(-1)
    with torch.no_grad():
        variance.clamp_(min=eps)
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    match reduction:
        case "mean":
            return loss.mean()
        case "sum":
            return loss.sum()
        case _:
            return loss


_IN_PLACE: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    torch.dropout_: torch.dropout,
    torch.feature_dropout_: torch.feature_dropout,
    torch.alpha_dropout_: torch.alpha_dropout,
    torch.feature_alpha_dropout_: torch.feature_alpha_dropout,
    torch.rrelu_: torch.rrelu,
}
_ASKED: Final = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}
)
"""Functions with an argument `inplace`, which PyTorch passes on by name."""
_OTHER: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
    torch.kron: _kron,
    torch.Tensor.kron: _kron,
    torch.tril_indices: _triangle(operator.le),
    torch.triu_indices: _triangle(operator.ge),
    torch.einsum: _einsum,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    **FOURIER,
}


_REFUSED: Final[tuple[tuple[Any, str, str, str, str], ...]] = (
    (
        torch,
        "ctc_loss",
        "torch.nn.functional.ctc_loss",
        "its recursion reads the lengths as numbers",
        "Train on the cross-entropy of aligned frames, or write the recursion over a fixed number of frames with "
        "torch.logaddexp, and torch.where for the lengths.",
    ),
    (
        torch._VF,
        "_pack_padded_sequence",
        "torch.nn.utils.rnn.pack_padded_sequence",
        "the shape of a PackedSequence depends on the lengths",
        "Give the recurrent layer the padded batch, multiply its output by "
        "(torch.arange(steps) < lengths[:, None])[..., None], and take the last step of each row by gather.",
    ),
    (
        eager_transforms,
        "_jvp_with_argnums",
        "torch.func.jvp",
        "a graph has reverse-mode gradients only",
        "Write the directional derivative with operations: for y = tanh(x) along t it is (1 - y * y) * t.",
    ),
)


"""Place and attribute of the function that every call goes through, its public name, the reason, what to do instead."""


def refused_by_name() -> AbstractContextManager[None]:
    """While open, a call of one of these functions raises `ModelError` with the line of the model."""

    def refusal(name: str, reason: str, hint: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            where = code_lines.of_frame(sys._getframe(1))
            raise ModelError(f"the model calls {name}{where}, which a graph can't hold: {reason}.", hint=hint)

        return refuse

    return patched(*((place, attribute, refusal(*words)) for place, attribute, *words in _REFUSED))


def recognised_causal_masks() -> AbstractContextManager[None]:
    """While open, PyTorch does not compare the values of masks."""
    generate = transformer._generate_square_subsequent_mask
    made = WeakTensorKeyDictionary()

    def generated(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask = generate(*args, **kwargs)
        made[mask] = True
        return mask

    def detected(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is not None or mask is None:
            return is_causal is True
        return mask in made and (size is None or statically_known_true(mask.shape[-1] == size))

    return patched(
        (transformer, "_generate_square_subsequent_mask", generated), (transformer, "_detect_is_causal_mask", detected)
    )


def averaged_statistics() -> AbstractContextManager[None]:
    """While open, modules with `momentum=None` that keep statistics trace as arithmetic on tensors."""
    forward = _BatchNorm.forward

    def averaged(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that callers may use
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        if self.momentum is not None or mean is None or variance is None or count is None:
            return forward(self, input)
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(input, mean, variance, self.weight, self.bias, False, 1.0, self.eps)
        own_mean, own_variance = mean.clone(), variance.clone()
        result = F.batch_norm(input, own_mean, own_variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            count.add_(1)
            share = 1.0 / count.double()
            # In float64, like PyTorch's kernel.
            for running, own in ((mean, own_mean), (variance, own_variance)):
                running.copy_((share * own.double() + (1.0 - share) * running.double()).to(running.dtype))
        return result

    return patched((_BatchNorm, "forward", averaged))


def unchecked_arguments() -> AbstractContextManager[None]:
    """While open, new distributions validate nothing, even with `validate_args=True`."""
    begin = Distribution.__init__

    def unchecked(self: Distribution, *args: Any, **kwargs: Any) -> None:
        # The third positional argument is `validate_args`.
        begin(self, *args[:2], **{**kwargs, "validate_args": False})

    return patched((Distribution, "_validate_args", False), (Distribution, "__init__", unchecked))


_NO_REDUCTION = 0
_MEAN = 1


def losses_per_row() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its replacement without reduction. With a reduction the operator stays unchanged."""
    aten = torch.ops.aten
    return {
        aten.nll_loss_nd.default: _negative_log_likelihood,
        aten.nll_loss.default: _negative_log_likelihood,
        aten.cross_entropy_loss.default: _cross_entropy,
    }


def _negative_log_likelihood(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    if reduction != _NO_REDUCTION or x.ndim != 2:
        return NotImplemented
    return torch.ops.aten.nll_loss_forward.default(x, target, weight, reduction, ignore_index)[0]


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if reduction != _NO_REDUCTION or x.ndim != 2 or target.ndim != 1 or label_smoothing:
        return NotImplemented
    scores = torch.ops.aten.log_softmax.int(x, 1, x.dtype)
    return torch.ops.aten.nll_loss_forward.default(scores, target, weight, reduction, ignore_index)[0]


def recurrent_layers() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its steps, which fix the length of the sequence."""
    aten = torch.ops.aten
    packets = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
    steps = {packet.input: packet.input.py_kernels[DispatchKey.CompositeImplicitAutograd] for packet in packets}
    return {op: partial(_stacked, kernel) for op, kernel in steps.items()}


def _stacked(
    kernel: Callable[..., Any],
    x: torch.Tensor,
    states: torch.Tensor | Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Return what the operator returns: the last layer's outputs, then the last states. `states`: of all layers,
    [layers * directions, batch, width]; the LSTM has two."""
    if layers == 1 or dropout == 0 or not training:
        return kernel(x, states, parameters, biases, layers, 0.0, training, bidirectional, batch_first)
    directions, per_layer = 2 if bidirectional else 1, len(parameters) // layers
    x = x.transpose(0, 1) if batch_first else x
    last: list[Sequence[torch.Tensor]] = []
    for layer in range(layers):
        if layer:
            x = torch.ops.aten.dropout.default(x, dropout, True)
        start = layer * directions
        if isinstance(states, torch.Tensor):
            own: Any = states[start : start + directions]
        else:
            own = [state[start : start + directions] for state in states]
        weights = parameters[layer * per_layer : (layer + 1) * per_layer]
        x, *left = kernel(x, own, weights, biases, 1, 0.0, training, bidirectional, False)
        last.append(left)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(kind) for kind in zip(*last, strict=True)))
