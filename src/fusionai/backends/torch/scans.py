"""`fusion.linear_scan` and `fusion.linear_attention`: what state-space and linear-attention models carry from position
to position. Decides the order of sums.

Neighbours: `operators` maps the names here; `backends.jax.scans` follows the same formulas, `capture.recurrence` says
which layers of which models they are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

CHUNK: Final = 64
"""Positions whose mutual influence is computed at once."""


def linear_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`h[t] = decay[t] * h[t - 1] + x[t]`, all of them; the state before is zero.

    decay and x [batch, positions, ...] of one shape, as the result."""
    if decay.shape != x.shape:
        raise ValueError(f"expected decays and inputs of one shape, got {list(decay.shape)} and {list(x.shape)}")
    if x.is_meta or not x.numel():
        return torch.empty_like(x)
    result = _LinearScan.apply(decay, x)
    assert isinstance(result, torch.Tensor)
    return result


class _LinearScan(torch.autograd.Function):
    """One step after the other, forward and back: as many operations as numbers, and the bits of a plain loop."""

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
    """A state `S` [key width, value width] per head that decays, takes up each position's key and value, and is read by
    its query:

    S = exp(decay) * S;  S = S + key (value - S' key)' * beta;  result = S' query

    Without `beta` the value itself is taken up (Mamba-2, arXiv 2405.21060); with it, what the state does not know yet
    (gated delta rule, arXiv 2412.06464). Positions are worked on in chunks as there (section 3.3 and appendix A).

    query and key [batch, positions, heads, key width], value [batch, positions, heads, value width], decay (at most 0)
    and beta [batch, positions, heads]; result as value."""
    batch, positions, heads, width = value.shape
    if value.is_meta or not value.numel():
        return torch.empty_like(value)
    chunk = min(CHUNK, positions)
    missing = -positions % chunk

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, chunks, chunk, ...]"""
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
        # What a position takes up depends on what those before it in the chunk did: a triangular system.
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
