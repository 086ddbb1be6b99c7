"""Attention as one semantic operator, installed through transformers' attention and mask interfaces.

Reads a mask made by transformers as a rule (causal or not, a window, a padding mask) instead of as a tensor. The rule
travels through the model in place of the mask, and the attention function turns it into the operator
`fusion::attention`. A mask that is a tensor is added to the scores by plain operations. A mask function that no rule
describes is refused, because ignoring it would change the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusionai.primitives.errors import ModelError

ATTENTION: Final = "fusion"
"""Name under which our functions are registered with transformers' interfaces."""

_HARMLESS: Final = frozenset(
    {"cache", "cache_position", "is_causal", "layer_idx", "past_key_values", "position_ids", "sliding_window"}
    | {"cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "num_items_in_batch", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "deterministic"}
)
"""Keyword arguments of an attention function that have no effect here, because the mask is known as a rule."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which keys a query sees. `window`: if causal, only keys fewer than this many positions back; otherwise keys at
    most this many positions away on either side. `key_mask` [b, s], bool: true for keys that are not padding. `sizes`:
    b and s of the mask that it stands for."""

    causal: bool
    window: int | None = None
    key_mask: torch.Tensor | None = None
    sizes: tuple[int | torch.SymInt, int | torch.SymInt] = field(default=(1, 1), compare=False)

    def __getitem__(self, place: Any) -> torch.Tensor:
        """Return a part of the mask [b, 1, s, s] as a tensor, true where a key is seen, for a model that cuts it."""
        batch, length = self.sizes
        return (_masked(torch.zeros(batch, 1, length, length), self) == 0)[place]


class RowsAndText(Protocol):
    """A sequence of an encoder's rows and of text. `is_row`: [b, s, 1], where the rows are."""

    is_row: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Hiding:
    """Which keys of a sequence an attention does not see: the encoder's rows (`rows`), or all others."""

    sequence: RowsAndText
    rows: bool


_HIDDEN: Final = -30_000.0
"""Added to the scores of hidden keys, before they are scaled. Every format of a cache can hold it, and its exponential
is 0 also after scaling by the root of the largest heads' widths."""
_COLUMNS: Final = 16
"""Floats in a cache line: keys that are a multiple of it wide are read fastest."""


def _with_hidden(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, rule: MaskRule
) -> tuple[torch.Tensor, torch.Tensor, MaskRule]:
    """Return query and key with further columns, whose product hides keys, and the rule of such attention; what was
    given for a module that hides nothing."""
    hiding: Hiding | None = getattr(module, "hiding", None)
    if hiding is None:
        return query, key, rule
    is_row = hiding.sequence.is_row
    assert is_row is not None
    count = _COLUMNS - key.shape[-1] % _COLUMNS
    hidden = torch.where(is_row if hiding.rows else ~is_row, _HIDDEN, 0.0)[:, None].to(key.dtype)
    of_key = hidden.expand(*key.shape[:3], count)
    of_query = torch.ones_like(hidden).expand(*query.shape[:3], count)
    return torch.cat([query, of_query], -1), torch.cat([key, of_key], -1), MaskRule(causal=True)


@torch.library.custom_op("fusion::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention, forward only and without dropout, to check a module in its own process. query [b, hq, s, d],
    key [b, hkv, s, d], value [b, hkv, s, dv]; returns [b, hq, s, dv]."""
    if dropout:
        raise NotImplementedError("fusion::attention has no eager dropout; run the captured graph instead")
    key, value = _shared(query, key), _shared(query, value)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = _masked(scores, MaskRule(causal, window, key_mask))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = F.softmax(scores.float(), dim=-1).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous().transpose(1, 2)


def _shared(query: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return keys or values repeated for each query head."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _added(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask into a tensor to add to scores: 0 where true, the lowest finite number where false."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen.bool(), torch.finfo(dtype).min)


def _masked(scores: torch.Tensor, rule: MaskRule) -> torch.Tensor:
    """Return scores [b, h, s, t] with hidden places set to the lowest finite number of the dtype."""
    rows = torch.arange(scores.shape[2], device=scores.device)[:, None]
    columns = torch.arange(scores.shape[3], device=scores.device)[None, :]
    seen: torch.Tensor | None = columns <= rows if rule.causal else None
    if rule.window is not None:
        near = columns > rows - rule.window if rule.causal else (columns - rows).abs() <= rule.window
        seen = near if seen is None else seen & near
    if rule.key_mask is not None:
        kept = rule.key_mask.bool()[:, None, None, :]
        seen = kept if seen is None else seen & kept
    return scores if seen is None else scores.masked_fill(~seen, torch.finfo(scores.dtype).min)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG001
    batch, heads, sequence = query.shape[:3]
    # The layout of flash attention's result, so that the caller's transpose and reshape need no copy.
    return query.new_empty(batch, sequence, heads, value.shape[-1]).transpose(1, 2)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: query [b, hq, s, d] in, [b, s, hq, dv] out. With a learned bias ([b or 1, hq,
    s, t], as in T5) or a mask that is a tensor, it consists of plain operations. `indices` [b, s, k]: keys that an
    indexer chose for each query, all of them in texts of at most k tokens."""
    _require_every_key(module, key, indices)
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which `fusion.attention` lacks.",
            hint="Choose a model whose attention takes only scale, window, softcap, sinks and padding.",
        )
    if query.shape[1] % key.shape[1]:
        raise ModelError(
            f"{type(module).__name__} has {query.shape[1]} query heads, which can't share {key.shape[1]} key heads "
            "evenly.",
            hint="Make num_attention_heads a multiple of num_key_value_heads.",
        )
    match attention_mask:
        case MaskRule():
            rule = attention_mask
        case None:
            causal = kwargs.get("is_causal")
            rule = MaskRule(bool(getattr(module, "is_causal", True) if causal is None else causal))
        case _:
            # The model made its own mask: a tensor to add to the scores, or a boolean one.
            own = attention_mask if attention_mask.is_floating_point() else _added(attention_mask, query.dtype)
            position_bias = own if position_bias is None else position_bias + own
            rule = MaskRule(causal=False)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, rule = _with_hidden(module, query, key, rule)
    if position_bias is not None:
        if softcap is not None or s_aux is not None:
            raise ModelError(
                f"{type(module).__name__} has an attention bias and a softcap or sinks, which no operator combines.",
                hint="Choose a model that has only one of them.",
            )
        return _with_bias(module, query, key, value, position_bias, rule, scale, dropout), None
    result = attention(
        query,
        key,
        value,
        s_aux,
        rule.key_mask,
        float(scale),
        rule.causal,
        rule.window,
        None if softcap is None else float(softcap),
        float(dropout),
    )
    return result.transpose(1, 2), None


def _require_every_key(module: torch.nn.Module, key: torch.Tensor, indices: torch.Tensor | None) -> None:
    if indices is not None and not statically_known_true(indices.shape[-1] == key.shape[2]):
        raise ModelError(
            f"{type(module).__name__} chooses keys for each query, which the operator fusion.attention lacks.",
            hint="Ask for sequences of at most as many tokens as it chooses (`index_topk` in its configuration).",
        )


def _with_bias(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    rule: MaskRule,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    scores = query @ _shared(query, key).transpose(-1, -2) * scale + bias
    weights = F.softmax(_masked(scores, rule), dim=-1)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ _shared(query, value)).transpose(1, 2).contiguous()


def scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - keys are shared whenever there are fewer key heads than query heads
) -> torch.Tensor:
    """Replacement for `torch.nn.functional.scaled_dot_product_attention` in a graph: the semantic operator for 4-d
    inputs without a mask tensor, plain operations otherwise."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and query.ndim == 4:
        return attention(query, key, value, None, None, float(factor), is_causal, None, None, float(dropout_p))
    if query.ndim == 4:
        key, value = _shared(query, key), _shared(query, value)
    scores = query @ key.transpose(-1, -2) * factor
    blind = None
    if is_causal:
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        attn_mask = columns[None, :] <= rows[:, None]
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        if not is_causal:
            # PyTorch returns zeros for a query that sees no key (padding, for example). Its scores are replaced as
            # well: the softmax of a row of infinities would have NaN gradients.
            blind = (scores == -torch.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(blind, 0.0)
    weights = F.softmax(scores, dim=-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    return F.dropout(weights, p=dropout_p, training=True) @ value


def mask_rule(
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    batch_size: int | torch.SymInt = 1,
    q_length: int | torch.SymInt = 1,
    **_: Any,
) -> MaskRule:
    """Transformers' mask function: identify `mask_function` instead of running it. Raises `ModelError`."""
    rule = replace(_read(mask_function, q_length), sizes=(batch_size, q_length))
    return rule if attention_mask is None else replace(rule, key_mask=attention_mask)


def _read(function: Callable[..., Any], length: int | torch.SymInt) -> MaskRule:
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return MaskRule(causal=True)
    if function is masks.bidirectional_mask_function:
        return MaskRule(causal=False)
    closure = dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    match function.__qualname__.split(".")[0]:
        case "and_masks":
            window: int | None = None
            rule: MaskRule | None = None
            for part in closure["mask_functions"]:
                match part.__qualname__.split(".")[0]:
                    case "sliding_window_overlay" | "sliding_window_bidirectional_overlay":
                        window = int(part.__closure__[0].cell_contents)
                    case "packed_sequence_mask_function":
                        # Added only while tracing. Every row is taken to be one sequence, with positions counted from
                        # 0.
                        pass
                    case "chunked_overlay":
                        _require_one_chunk(part, length)
                    case _:
                        rule = _read(part, length)
            if rule is not None:
                return rule if window is None else replace(rule, window=window)
        case "remap_positions_for_packed_sequence" | "add_offsets_to_mask_function":
            return _read(closure["mask_function"], length)
        case _:
            pass
    raise ModelError(
        f"the model's attention mask ({function.__qualname__}) is neither causal, windowed nor bidirectional.",
        hint="Blockwise and custom masks are not supported; choose another model.",
    )


def _require_one_chunk(overlay: Callable[..., Any], length: int | torch.SymInt) -> None:
    """Raise `ModelError` unless sequences stay within the first chunk, where attention in chunks sees every earlier
    position."""
    free = dict(zip(overlay.__code__.co_freevars, overlay.__closure__ or (), strict=True))
    chunk = int(free["chunk_size"].cell_contents)
    if not statically_known_true(length <= chunk):
        raise ModelError(
            f"the model's attention sees no position beyond its own chunk of {chunk}, which the operator "
            "fusion.attention lacks.",
            hint=f"Ask for sequences of at most {chunk} tokens.",
        )


@cache
def register() -> None:
    """Register the attention and mask functions with transformers under the name `ATTENTION`, once per process."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask_rule)
