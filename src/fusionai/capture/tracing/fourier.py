"""Trace discrete Fourier transforms (`torch.fft`) as products with matrices of cosines and sines.

While a module is traced, each function of `torch.fft` is replaced by the definition of the transform, one product along
each dimension, for varying sizes too. It takes n * n steps instead of n log n and rounds differently: results agree to
about 1e-6 of the largest, not bit for bit. Angles are reduced modulo the full circle in integers first, so they are as
exact for long dimensions as for short ones.

Neighbours: `capture.tracing.export` traces under `Fourier`; `capture.tracing.complex_parts` turns the complex values
into pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from fusionai.primitives.errors import ModelError

LARGEST: Final = 32_768
"""Largest size of a transform. Above, position times frequency exceeds 31 bits, and a matrix takes 4 GiB."""
Parts = tuple[torch.Tensor, torch.Tensor | None]
"""Real and imaginary part; None is zero."""


class Fourier(TorchFunctionMode):
    """While open, functions of `torch.fft` are products."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function, named = _FUNCTIONS.get(func), dict(kwargs or {})
        if function is None:
            return func(*args, **named)
        if "input" in named:
            args = (named.pop("input"), *args)
        return function(*args, **named)


def _split(x: torch.Tensor) -> Parts:
    if x.is_complex():
        return x.real, x.imag
    return (x if x.is_floating_point() else x.to(torch.get_default_dtype())), None


def _tables(rows: Any, columns: Any, size: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the angle of position times frequency, [rows, columns]."""
    if isinstance(size, int) and size > LARGEST:
        raise ModelError(
            f"a Fourier transform over {size} numbers is too large for a product with a matrix.",
            hint=f"Transform at most {LARGEST} numbers at once.",
        )
    places = torch.arange(rows, device=like.device)[:, None] * torch.arange(columns, device=like.device)
    turns = (places % size).to(like.dtype) / size
    angle = turns * (2 * math.pi)
    return torch.cos(angle), torch.sin(angle)


def _scaled(x: torch.Tensor, size: Any, norm: str | None, inverse: bool) -> torch.Tensor:
    if norm not in (None, "backward", "forward", "ortho"):
        raise ModelError(f"the normalisation {norm!r} of a Fourier transform is not 'backward', 'forward' or 'ortho'.")
    if norm == "ortho":
        count = torch.full((1,), size, dtype=x.dtype, device=x.device)
        return x * torch.rsqrt(count)
    return x / size if (norm == "forward") != inverse else x


class _Dimension:
    """One dimension of some tensors, moved to the second-last place unless it is the last."""

    def __init__(self, x: torch.Tensor, dim: int) -> None:
        self._dim = dim % x.ndim
        self._place = x.ndim - 1 if self._dim == x.ndim - 1 else x.ndim - 2

    def taken(self, x: torch.Tensor, count: Any) -> torch.Tensor:
        """Move the dimension into place and keep at most `count` elements of it."""
        x = x.transpose(self._dim, self._place) if self._dim != self._place else x
        if count is None or statically_known_true(count == x.shape[self._place]):
            return x
        return x[..., :count] if self._place == x.ndim - 1 else x[..., :count, :]

    def size(self, x: torch.Tensor) -> Any:
        return x.shape[self._place]

    def product(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x @ table if self._place == x.ndim - 1 else table.transpose(0, 1) @ x

    def back(self, x: torch.Tensor) -> torch.Tensor:
        # In the layout of torch.fft: strides in another order would be compared by sizes that vary.
        return x.transpose(self._dim, self._place).contiguous() if self._dim != self._place else x


def _transform(parts: Parts, size: Any, dim: int, norm: str | None, *, inverse: bool, half: bool = False) -> Parts:
    """Transform along one dimension; `half`: only frequencies up to the middle one."""
    along = _Dimension(parts[0], dim)
    real, imaginary = (None if part is None else along.taken(part, size) for part in parts)
    assert real is not None
    size = parts[0].shape[dim] if size is None else size
    cosine, sine = (
        _scaled(table, size, norm, inverse)
        for table in _tables(along.size(real), size // 2 + 1 if half else size, size, real)
    )
    # e^(-ix) forward, e^(ix) inverse.
    made, turned = along.product(real, cosine), along.product(real, sine)
    turned = turned if inverse else -turned
    if imaginary is not None:
        crossed, kept = along.product(imaginary, sine), along.product(imaginary, cosine)
        made, turned = made - crossed if inverse else made + crossed, turned + kept
    return along.back(made), along.back(turned)


def _real_from_half(parts: Parts, size: Any, dim: int, norm: str | None, *, inverse: bool) -> torch.Tensor:
    """Return the real signal with these frequencies up to the middle one; the other frequencies are their
    conjugates."""
    along = _Dimension(parts[0], dim)
    size = 2 * (parts[0].shape[dim] - 1) if size is None else size
    real, imaginary = (None if part is None else along.taken(part, size // 2 + 1) for part in parts)
    assert real is not None
    cosine, sine = _tables(along.size(real), size, size, real)
    places = torch.arange(along.size(real), device=real.device)
    twice = ((places != 0) & (2 * places != size)).to(real.dtype)[:, None] + 1.0
    made = along.product(real, _scaled(cosine, size, norm, inverse) * twice)
    if imaginary is not None:
        crossed = along.product(imaginary, _scaled(sine, size, norm, inverse) * twice)
        made = made - crossed if inverse else made + crossed
    return along.back(made)


def _joined(parts: Parts) -> torch.Tensor:
    real, imaginary = parts
    return torch.complex(real, torch.zeros_like(real) if imaginary is None else imaginary)


def _function(
    *, inverse: bool, half: bool = False, real: bool = False, dims: tuple[int, ...] | None = None
) -> Callable[..., torch.Tensor]:
    """Return a transform over several dimensions, by default `dims` or all. `half`: of real numbers, to frequencies up
    to the middle one. `real`: from such frequencies to real numbers."""

    def function(
        x: torch.Tensor,
        s: Sequence[int] | None = None,
        dim: Sequence[int] | int | None = dims,
        norm: str | None = None,
    ) -> torch.Tensor:
        parts, (*others, (last, size)) = _split(x), _dims(x, s, dim)
        if real:
            for at, own in others:
                parts = _transform(parts, own, at, norm, inverse=True)
            return _real_from_half(parts, size, last, norm, inverse=inverse)
        parts = _transform(parts, size, last, norm, inverse=inverse, half=half)
        for at, own in reversed(others):
            parts = _transform(parts, own, at, norm, inverse=inverse)
        return _joined(parts)

    return function


def _one(*, inverse: bool, half: bool = False, real: bool = False) -> Callable[..., torch.Tensor]:
    along = _function(inverse=inverse, half=half, real=real)

    def function(x: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> torch.Tensor:
        return along(x, None if n is None else (n,), (dim,), norm)

    return function


def _dims(x: torch.Tensor, sizes: Sequence[int] | None, dim: Sequence[int] | int | None) -> list[tuple[int, Any]]:
    """Return each dimension with its requested size; None keeps the dimension's own size."""
    if isinstance(dim, int):
        dim = (dim,)
    if dim is None:
        dim = range(-len(sizes), 0) if sizes is not None else range(x.ndim)
    given = [None] * len(dim) if sizes is None else [None if size == -1 else size for size in sizes]
    return list(zip(dim, given, strict=True))


_FUNCTIONS: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    torch.fft.fft: _one(inverse=False),
    torch.fft.ifft: _one(inverse=True),
    torch.fft.rfft: _one(inverse=False, half=True),
    torch.fft.ihfft: _one(inverse=True, half=True),
    torch.fft.irfft: _one(inverse=True, real=True),
    torch.fft.hfft: _one(inverse=False, real=True),
    torch.fft.fft2: _function(inverse=False, dims=(-2, -1)),
    torch.fft.ifft2: _function(inverse=True, dims=(-2, -1)),
    torch.fft.rfft2: _function(inverse=False, half=True, dims=(-2, -1)),
    torch.fft.irfft2: _function(inverse=True, real=True, dims=(-2, -1)),
    torch.fft.fftn: _function(inverse=False),
    torch.fft.ifftn: _function(inverse=True),
    torch.fft.rfftn: _function(inverse=False, half=True),
    torch.fft.irfftn: _function(inverse=True, real=True),
}
