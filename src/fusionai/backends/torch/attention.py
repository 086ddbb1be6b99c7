"""`fusion.attention` on dense tensors, for training and evaluation. Chooses the kernel; keeps no cache.

If torch's fused kernel can express the request, the calls are those of transformers' `sdpa_attention_forward`, in the
same order and on the same layouts, so forward and backward are equal bit for bit. Soft capping, sinks and dropout use
the explicit formula of transformers' eager attention. Neighbours: `operators` maps the operator's name to this module.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from fusionai.backends.counters import DropoutKey
from fusionai.backends.torch.dropout import scaled_mask

MAX_GROUPED_HEAD_DIM = 256
"""Widest head for which a fused kernel supports grouped queries."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    dropout: float,
    key: DropoutKey,
    node: int,
) -> torch.Tensor:
    """Return [B, Hq, S, Dv] for q [B, Hq, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv].

    `window`: a causal query sees itself and the `window - 1` positions before it; a query that is not causal sees up to
    `window` positions on either side (transformers' two conventions). `key_mask` [B, T]: non-zero where a key may be
    seen. `sinks` [Hq]: one extra logit per head, which takes weight but adds no value. `dropout`: probability of
    dropping a weight, 0.0 outside training.
    """
    if softcap is not None or sinks is not None or dropout > 0.0:
        mask = _visible(q, k, causal=causal, window=window, key_mask=key_mask)
        return _explicit(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, key=key, node=node)
    mask = None
    if _needs_mask(k, window, key_mask):
        mask = _visible(q, k, causal=causal, window=window, key_mask=key_mask)
    return _fused(q, k, v, mask, scale=scale, causal=causal)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, scale: float, causal: bool
) -> torch.Tensor:
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
    if q.device.type == "meta" and mask is None and k.shape[-1] == v.shape[-1]:
        # On the shape-only device torch would choose the kernel that keeps all weights; the kernels of real devices
        # keep none.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, scale=scale)[
            0
        ].reshape(batch, heads, queries, v.shape[-1])
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=is_causal, enable_gqa=grouped_kernel
    )
    return out.reshape(batch, heads, queries, v.shape[-1])


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
    key: DropoutKey,
    node: int,
) -> torch.Tensor:
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


def _needs_mask(k: torch.Tensor, window: int | None, key_mask: torch.Tensor | None) -> bool:
    if window is not None and k.shape[2] >= window:
        return True
    # Reading the mask pays: without a mask, the fused kernel skips keys that causality hides.
    return key_mask is not None and (key_mask.device.type == "meta" or not bool(key_mask.all()))


def _visible(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, window: int | None, key_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return bool [B or 1, 1, S, T], True where query s may see key t; None if every query sees every key."""
    queries = torch.arange(q.shape[2], device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)[None, :]
    visible = None
    if causal:
        visible = keys <= queries
    if window is not None:
        visible = visible & (keys > queries - window) if visible is not None else (keys - queries).abs() <= window
    if visible is not None:
        visible = visible[None, None]
    if key_mask is not None:
        seen = key_mask.to(torch.bool)[:, None, None, :]
        visible = seen.expand(-1, 1, q.shape[2], -1) if visible is None else visible & seen
    return visible


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    if groups == 1:
        return x
    batch, heads, length, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, groups, length, dim).reshape(batch, heads * groups, length, dim)
