"""`fusion.linear_scan` and `fusion.linear_attention`: the recurrences of state-space and linear-attention models.

Fixes the order of sums. Neighbours: `operators` maps the names to this module; `backends.jax.scans` follows the same
formulas, `capture.recurrence` says which models' layers they stand for.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

CHUNK: Final = 64
"""Positions whose mutual influence is computed at once."""


def linear_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return all `h[t] = decay[t] * h[t - 1] + x[t]`, starting from a zero state.

    decay, x and the result have the same shape [batch, positions, ...].
    """
    if decay.shape != x.shape:
        raise ValueError(f"expected decays and inputs of one shape, got {list(decay.shape)} and {list(x.shape)}")
    if x.is_meta or not x.numel():
        return torch.empty_like(x)
    result = _LinearScan.apply(decay, x)
    assert isinstance(result, torch.Tensor)
    return result


class _LinearScan(torch.autograd.Function):
    """Linear scan, one position after the other, forward and backward: the bits of a plain loop, in linear time."""

    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        states = torch.empty_like(x, memory_format=torch.contiguous_format)
        state = x[:, 0]
        states[:, 0] = state
        for position in range(1, x.shape[1]):
            state = torch.addcmul(x[:, position], decay[:, position], state)
            states[:, position] = state
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, states = ctx.saved_tensors
        (arriving,) = gradients
        of_x = torch.empty_like(states)
        carried = arriving[:, -1]
        of_x[:, -1] = carried
        for position in range(states.shape[1] - 2, -1, -1):
            carried = torch.addcmul(arriving[:, position], decay[:, position + 1], carried)
            of_x[:, position] = carried
        of_decay = torch.zeros_like(states)
        torch.mul(of_x[:, 1:], states[:, :-1], out=of_decay[:, 1:])
        return of_decay, of_x


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the results of a state `S` [key width, value width] per head that decays, adds each position's key and
    value, and is read by each query:

    S = exp(decay) * S;  S = S + key (value - S' key)' * beta;  result = S' query

    Without `beta` the value itself is added (Mamba-2, arXiv 2405.21060). With `beta` only the part that the state does
    not hold yet is added (gated delta rule, arXiv 2412.06464). Positions are processed in chunks as in that paper
    (section 3.3 and appendix A).

    query and key [batch, positions, heads, key width], value [batch, positions, heads, value width], decay (at most 0)
    and beta [batch, positions, heads]; the result has value's shape.
    """
    batch, positions, heads, width = value.shape
    if value.is_meta or not value.numel():
        return torch.empty_like(value)
    chunk = min(CHUNK, positions)
    missing = -positions % chunk

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """Return x as [batch, heads, chunks, chunk, ...]."""
        x = x.transpose(1, 2)
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing))
        return x.reshape(batch, heads, -1, chunk, *x.shape[3:])

    q, k, v = chunked(query), chunked(key), chunked(value)
    total = chunked(decay).cumsum(dim=3)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    inside = (q @ k.transpose(-1, -2)) * between
    faded = k * total.exp()[..., None]
    if beta is not None:
        # A position's addition depends on those of earlier positions in the chunk: a triangular system.
        share = chunked(beta)[..., None]
        system = (k * share) @ k.transpose(-1, -2) * between
        solved = torch.linalg.solve_triangular(
            system, torch.cat([v * share, faded * share], dim=-1), upper=False, unitriangular=True
        )
        v, faded = solved[..., :width], solved[..., width:]
    reading = q * total.exp()[..., None]
    leaving = k * (total[..., -1:] - total).exp()[..., None]
    fading = total[..., -1].exp()[..., None, None]
    state = value.new_zeros(batch, heads, key.shape[-1], width)
    made: list[torch.Tensor] = []
    for at in range(q.shape[2]):
        taken = v[:, :, at] if beta is None else v[:, :, at] - faded[:, :, at] @ state
        made.append(reading[:, :, at] @ state + inside[:, :, at] @ taken)
        state = state * fading[:, :, at] + leaving[:, :, at].transpose(-1, -2) @ taken
    joined = torch.stack(made, dim=2).reshape(batch, heads, -1, width)
    return joined[:, :, :positions].transpose(1, 2).contiguous()
