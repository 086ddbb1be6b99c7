"""`fusion.attention` on dense tensors, for training and evaluation. Chooses the kernel; keeps no cache.

If torch's fused kernel can express the request, the calls are those of transformers' `sdpa_attention_forward`, in the
same order and on the same layouts, so forward and backward are equal bit for bit. Soft capping, sinks and dropout use
the explicit formula of transformers' eager attention. Neighbours: `operators` maps the operator's name to this module.

The other semantic operators: dropout and random numbers are pure functions of counters (`backends.semantics` folds the
keys, the part that depends on the element is here). `fusion.expert_linear` applies an expert's weight to each row.
`fusion.linear_scan` and `fusion.linear_attention` are the recurrences of state-space and linear-attention models;
`capture.tracing.layers` says which models' layers they stand for. The order of products and sums is fixed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusionai.backends.semantics import (
    FIRST_MULTIPLIER,
    SECOND_MULTIPLIER,
    UNIFORM_BITS,
    DropoutKey,
    folds,
    visible_keys,
)
from fusionai.backends.torch.host import DTYPE_NAMES

MAX_GROUPED_HEAD_DIM = 256
"""Widest head for which a fused kernel supports grouped queries."""


def attention(
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
    dropout: float = 0.0,
    key: DropoutKey,
    node: int,
    repeats_keys: bool = False,
) -> Tensor:
    """Return [B, Hq, S, Dv] for q [B, Hq, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv]. `scale`, `softcap`, `sinks`,
    `causal`, `window`: see `semantics.Scores`. `key_mask` [B, T]: non-zero where a key may be seen. `dropout`:
    probability of dropping a weight, 0.0 outside training. `repeats_keys`: see `operators.TorchContext`."""
    if softcap is None and sinks is None and dropout == 0.0:
        masked = _needs_mask(k, window, key_mask)
        mask = _visible(q, k, causal=causal, window=window, key_mask=key_mask) if masked else None
        if repeats_keys:
            k, v = _repeat(k, q.shape[1] // k.shape[1]), _repeat(v, q.shape[1] // v.shape[1])
        return _fused(q, k, v, mask, scale=scale, causal=causal)
    mask = _visible(q, k, causal=causal, window=window, key_mask=key_mask)
    groups = q.shape[1] // k.shape[1]
    k, v = _repeat(k, groups), _repeat(v, groups)
    weights = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        lowest = torch.full((), torch.finfo(weights.dtype).min, dtype=weights.dtype, device=weights.device)
        weights = weights + torch.where(mask, 0.0, lowest)
    if sinks is None:
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    else:
        column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        logits = torch.cat([weights, column], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    if dropout > 0.0:
        weights = weights * scaled_mask(
            tuple(weights.shape), dropout, key, node, dtype=weights.dtype, device=weights.device
        )
    return torch.matmul(weights.to(v.dtype), v)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, causal: bool) -> Tensor:
    batch, heads, queries, _ = q.shape
    groups = heads // k.shape[1]
    grouped_kernel = False
    if groups > 1:
        if q.device.type == "mps" or (mask is None and k.shape[-1] == v.shape[-1] <= MAX_GROUPED_HEAD_DIM):
            grouped_kernel = True
        elif queries == 1:
            q = q.reshape(batch, heads // groups, groups, q.shape[-1])
        else:
            k, v = _repeat(k, groups), _repeat(v, groups)
    is_causal = queries > 1 and mask is None and causal
    if is_causal and k.shape[2] > queries:
        k, v = k[:, :, :queries, :], v[:, :, :queries, :]
    if q.device.type == "meta" and k.shape[-1] == v.shape[-1]:
        # On the shape-only device torch would choose the kernel that keeps all weights; the kernels of real devices
        # keep none.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )[0].reshape(batch, heads, queries, v.shape[-1])
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=is_causal, enable_gqa=grouped_kernel
    )
    return out.reshape(batch, heads, queries, v.shape[-1])


def _needs_mask(k: Tensor, window: int | None, key_mask: Tensor | None) -> bool:
    if window is not None and k.shape[2] >= window:
        return True
    # Reading the mask pays: without a mask, the fused kernel skips keys that causality hides.
    return key_mask is not None and (key_mask.device.type == "meta" or not bool(key_mask.all()))


def _visible(q: Tensor, k: Tensor, *, causal: bool, window: int | None, key_mask: Tensor | None) -> Tensor | None:
    """Return bool [B or 1, 1, S, T], True where query s may see key t; None if every query sees every key."""
    queries = torch.arange(q.shape[2], device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)[None, :]
    visible = visible_keys(queries, keys, causal=causal, window=window)
    if visible is not None:
        visible = visible[None, None]
    if key_mask is not None:
        seen = key_mask.to(torch.bool)[:, None, None, :]
        visible = seen.expand(-1, 1, q.shape[2], -1) if visible is None else visible & seen
    return visible


def _repeat(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    batch, heads, length, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, groups, length, dim).reshape(batch, heads * groups, length, dim)


_MASK: Final = 0xFFFF_FFFF
_CHUNK_ELEMENTS: Final = 1 << 22
"""Elements hashed at a time. Hashing needs 16 bytes per element, so pieces keep the workspace at 64 MiB."""


def scaled_mask(
    shape: tuple[int, ...], p: float, key: DropoutKey, node: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of `shape` with 0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1)."""
    scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    count = prod(shape)
    mask = torch.empty(count, dtype=dtype, device=device)
    threshold = floor(p * 2**32)
    for piece, hashed in _hashed(count, key, node, device):
        mask[piece] = hashed >= threshold
    return mask.mul_(scale).reshape(shape)


def dropout(x: Tensor, p: float, key: DropoutKey, node: int) -> Tensor:
    """Return x times its mask."""
    return x * scaled_mask(tuple(x.shape), p, key, node, dtype=x.dtype, device=x.device)


def uniform(x: Tensor, key: DropoutKey, node: int) -> Tensor:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    if x.device.type == "meta":
        return torch.empty_like(x)
    bits = UNIFORM_BITS[DTYPE_NAMES[x.dtype]]
    drawn = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    for piece, hashed in _hashed(x.numel(), key, node, x.device):
        drawn[piece] = hashed >> (32 - bits)
    return drawn.mul_(2.0**-bits).reshape(x.shape)


def _hashed(count: int, key: DropoutKey, node: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield u(i) of the elements as int64, piece by piece."""
    first, second = folds(key, node)
    for start in range(0, count, _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, count)
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        high = _mix(index >> 32).bitwise_xor_(second)
        yield slice(start, stop), _mix(_mix(index.bitwise_and_(_MASK).bitwise_xor_(first)).bitwise_xor_(high))


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x.mul_(FIRST_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(SECOND_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    return x


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, *, transposed: bool = False) -> Tensor:
    """Return [rows, out] for x [rows, in], weight [experts, out, in] (`transposed`: [experts, in, out]), experts int64
    [rows]. Computes one product per expert that has rows. Gathering a weight for each row would take `rows` times a
    weight's memory."""
    width = weight.shape[2 if transposed else 1]
    if not x.shape[0]:
        return x.new_zeros(0, width)
    order = experts.argsort(stable=True)
    if x.is_meta:  # where sizes are measured, rows are shared out evenly
        least, more = divmod(x.shape[0], weight.shape[0])
        counts = [least + (expert < more) for expert in range(weight.shape[0])]
    else:
        counts = torch.bincount(experts, minlength=weight.shape[0]).tolist()
    made = [
        rows @ (one if transposed else one.t())
        for one, rows in zip(weight.unbind(0), x[order].split(counts), strict=True)
        if rows.shape[0]
    ]
    return torch.cat(made)[order.argsort()]


CHUNK: Final = 64
"""Positions whose mutual influence is computed at once."""
CHANNEL_CHUNK: Final = 16
"""The same if each channel has its own decay, which takes memory for each channel of each pair of positions."""


def linear_scan(decay: Tensor, x: Tensor) -> Tensor:
    """Return all `h[t] = decay[t] * h[t - 1] + x[t]`, starting from a zero state. decay, x and the result have the same
    shape [batch, positions, ...]."""
    if decay.shape != x.shape:
        raise ValueError(f"expected decays and inputs of one shape, got {list(decay.shape)} and {list(x.shape)}")
    if x.is_meta:  # where sizes are measured: a product keeps as much for backward
        return decay * x
    if not x.numel():
        return torch.empty_like(x)
    result = _LinearScan.apply(decay, x)
    assert isinstance(result, Tensor)
    return result


class _LinearScan(torch.autograd.Function):
    """Linear scan, one position after the other, forward and backward: the bits of a plain loop, in linear time."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, x: Tensor) -> Tensor:
        states = torch.empty_like(x, memory_format=torch.contiguous_format)
        state = x[:, 0]
        states[:, 0] = state
        for position in range(1, x.shape[1]):
            state = torch.addcmul(x[:, position], decay[:, position], state)
            states[:, position] = state
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
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


def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """Return the results of a state `S` [key width, value width] per head that decays, adds each position's key and
    value, and is read by each query:

    S = exp(decay) * S;  S = S + key (value - S' key)' * beta;  result = S' query

    Without `beta` the value itself is added (Mamba-2, arXiv 2405.21060). With `beta` only the part that the state does
    not hold yet is added (gated delta rule, arXiv 2412.06464). Positions are processed in chunks as in that paper
    (section 3.3 and appendix A).

    query and key [batch, positions, heads, key width], value [batch, positions, heads, value width], decay (at most 0)
    and beta [batch, positions, heads]; decay may also have the key's width, a decay for each channel (Kimi delta
    attention, arXiv 2510.26692). The result has value's shape.
    """
    if value.is_meta or not value.numel():
        return torch.empty_like(value)
    batch, _, heads, width = value.shape
    state = value.new_zeros(batch, heads, key.shape[-1], width)
    return carried_attention(query, key, value, decay, beta, state)[0]


def carried_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the results of `linear_attention` that begins with `state` [batch, heads, key width, value width], and the
    state after the last position."""
    batch, positions, heads, width = value.shape
    by_channel = decay.dim() == key.dim()
    chunk = min(CHANNEL_CHUNK if by_channel else CHUNK, positions)
    missing = -positions % chunk

    def chunked(x: Tensor) -> Tensor:
        """Return x as [batch, heads, chunks, chunk, ...]."""
        x = x.transpose(1, 2)
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing))
        return x.reshape(batch, heads, -1, chunk, *x.shape[3:])

    q, k, v = chunked(query), chunked(key), chunked(value)
    faded_by = chunked(decay).cumsum(dim=3)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    total = faded_by if by_channel else faded_by[..., None]
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], float("-inf")).exp()

    def pairs(left: Tensor, right: Tensor) -> Tensor:
        """Return the product of each row of left with each earlier row of right, as decayed in between."""
        if by_channel:
            return (left[..., :, None, :] * right[..., None, :, :] * between).sum(dim=-1)
        return left @ right.transpose(-1, -2) * between[..., 0]

    inside = pairs(q, k)
    faded = k * total.exp()
    if beta is not None:
        # A position's addition depends on those of earlier positions in the chunk: a triangular system.
        share = chunked(beta)[..., None]
        system = pairs(k * share, k)
        solved = torch.linalg.solve_triangular(
            system, torch.cat([v * share, faded * share], dim=-1), upper=False, unitriangular=True
        )
        v, faded = solved[..., :width], solved[..., width:]
    reading = q * total.exp()
    leaving = k * (total[..., -1:, :] - total).exp()
    fading = total[..., -1, :].exp()[..., None]
    made: list[Tensor] = []
    for at in range(q.shape[2]):
        taken = v[:, :, at] if beta is None else v[:, :, at] - faded[:, :, at] @ state
        made.append(reading[:, :, at] @ state + inside[:, :, at] @ taken)
        state = state * fading[:, :, at] + leaving[:, :, at].transpose(-1, -2) @ taken
    joined = torch.stack(made, dim=2).reshape(batch, heads, -1, width)
    return joined[:, :, :positions].transpose(1, 2).contiguous(), state
