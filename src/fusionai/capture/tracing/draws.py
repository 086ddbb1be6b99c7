"""Express the random numbers of a forward by `fusion::uniform`, whose counters give the same numbers in every run.

A draw by torch depends on the draws before it in the same process, which a stage does not run. Each of torch's draws is
computed from uniform numbers here: by a comparison, an inverse distribution function or the Box-Muller method.

Neighbours: `capture.tracing.export` decomposes by `draws`, `capture.checking.comparison` replaces the module's own
draws by the same functions, `capture.tracing.by_mode` keeps draws of training out of evaluation,
`capture.graph.lowering` turns the operator into the IR's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Returns uniform numbers in [0, 1) of the shape and dtype of a tensor."""


@torch.library.custom_op("fusion::uniform", mutates_args=())
def uniform(like: torch.Tensor) -> torch.Tensor:
    """Draw uniform numbers. Exists in traces only: running it eagerly raises."""
    raise NotImplementedError("fusion::uniform runs only in a captured graph")


@uniform.register_fake
def _(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


def draws(draw: Draw) -> dict[Any, Callable[..., Any]]:
    """Return operator of torch -> the same as a function of `draw`. In-place operators have their functional form."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {
        aten.rand.default: partial(_of_sizes, draw),
        aten.randn.default: partial(_of_sizes, partial(_normal, draw)),
        aten.rand_like.default: partial(_alike, draw),
        aten.randn_like.default: partial(_alike, partial(_normal, draw)),
        aten.uniform.default: partial(_between, draw),
        aten.normal_functional.default: partial(_with_moments, draw),
        aten.normal.Tensor_float: partial(_with_moments_of, draw),
        aten.normal.Tensor_Tensor: partial(_with_moments_of, draw),
        aten.normal.float_Tensor: partial(_with_moments_of, draw),
        aten.normal.float_float: lambda mean, std, size, **how: _normal(draw, _empty(size, how)) * std + mean,
        aten.bernoulli.p: partial(_bernoulli, draw),
        aten.bernoulli.default: lambda p, generator=None: _bernoulli(draw, p, p),  # noqa: ARG005
        aten.bernoulli.Tensor: lambda x, p, generator=None: _bernoulli(draw, x, p),  # noqa: ARG005
        aten.exponential.default: partial(_exponential, draw),
        aten.randint.default: lambda high, size, **how: _whole(draw, 0, high, _empty(size, how), how),
        aten.randint.low: lambda low, high, size, **how: _whole(draw, low, high, _empty(size, how), how),
        aten.randint_like.default: lambda x, high, **how: _whole(draw, 0, high, x, {"dtype": x.dtype, **how}),
        aten.randint_like.low_dtype: lambda x, low, high, **how: _whole(draw, low, high, x, {"dtype": x.dtype, **how}),
        aten.randperm.default: lambda n, **how: draw(_empty([n], how)).argsort().to(how.get("dtype") or torch.int64),
        aten.multinomial.default: partial(_multinomial, draw),
        aten.rrelu_with_noise_functional.default: partial(leaky_by_chance, draw),
    }
    return table


IN_PLACE: Final = {
    torch.ops.aten.uniform_.default: torch.ops.aten.uniform.default,
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.bernoulli_.Tensor: torch.ops.aten.bernoulli.Tensor,
    torch.ops.aten.exponential_.default: torch.ops.aten.exponential.default,
    torch.ops.aten.rrelu_with_noise_.default: torch.ops.aten.rrelu_with_noise_functional.default,
}
"""Operator that draws in place -> its functional form."""


def _empty(size: Sequence[int], how: dict[str, Any]) -> torch.Tensor:
    dtype = how.get("dtype")
    floating = dtype if dtype is not None and dtype.is_floating_point else torch.get_default_dtype()
    return torch.zeros(size, dtype=floating, device=how.get("device"))


def _of_sizes(draw: Draw, size: Sequence[int], **how: Any) -> torch.Tensor:
    return draw(_empty(size, how))


def _alike(draw: Draw, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return draw(x.detach() if dtype in (None, x.dtype) else x.detach().to(dtype))


def _normal(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    """Draw normal numbers by the Box-Muller method, in float32 at least."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    radius = torch.sqrt(torch.log(1.0 - draw(wide)) * -2.0)
    return (radius * torch.cos(draw(wide) * (2.0 * math.pi))).to(x.dtype)


def _between(draw: Draw, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> torch.Tensor:
    return draw(x.detach()) * (high - low) + low


def _with_moments(draw: Draw, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return _normal(draw, x.detach()) * std + mean


def _with_moments_of(draw: Draw, mean: torch.Tensor | float, std: torch.Tensor | float = 1.0, **_: Any) -> torch.Tensor:
    """Draw normal numbers with these moments, to which no gradient flows."""
    means, stds = (one.detach() if isinstance(one, torch.Tensor) else one for one in (mean, std))
    return _normal(draw, torch.zeros_like(torch.as_tensor(means + stds))) * stds + means


def _bernoulli(draw: Draw, x: torch.Tensor, p: torch.Tensor | float = 0.5, **_: Any) -> torch.Tensor:
    chosen = p.detach() if isinstance(p, torch.Tensor) else p
    like = x.detach()
    return (draw(like if like.is_floating_point() else like.to(torch.float32)) < chosen).to(x.dtype)


def _exponential(draw: Draw, x: torch.Tensor, rate: float = 1.0, **_: Any) -> torch.Tensor:
    return torch.log(1.0 - draw(x.detach())) * (-1.0 / rate)


def _whole(draw: Draw, low: int, high: int, like: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    # In float64, uniform numbers are multiples of 2**-32: every integer of the range is equally likely up to 2**-32.
    places = torch.floor(draw(like.detach().to(torch.float64)) * (high - low)) + low
    return places.to(how.get("dtype") or torch.int64)


def leaky_by_chance(
    draw: Draw,
    x: torch.Tensor,
    noise: torch.Tensor,  # noqa: ARG001 - what it held is overwritten
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    generator: Any = None,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (result, slope of each element). In training the slopes of elements that are not positive are drawn,
    otherwise they are the mean of the bounds."""
    if not training:
        slope = (lower + upper) / 2
        return torch.nn.functional.leaky_relu(x, slope), torch.ones_like(x)
    drawn = _between(draw, x, lower, upper)
    slopes = torch.where(x.detach() <= 0, drawn, torch.ones((), dtype=x.dtype, device=x.device))
    return x * slopes, slopes


def _multinomial(draw: Draw, weights: torch.Tensor, samples: int, replacement: bool = False, **_: Any) -> torch.Tensor:
    """Choose the smallest of exponential times whose rates are the weights, as torch does."""
    rates = weights.detach()
    if replacement:
        rates = rates[..., None, :].expand(*rates.shape[:-1], samples, rates.shape[-1])
    times = _exponential(draw, rates)
    if replacement:
        return (rates / times).argmax(-1)
    return (rates / times).topk(samples, -1).indices
