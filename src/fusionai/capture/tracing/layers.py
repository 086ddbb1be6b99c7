"""Replace layers of transformers models by semantic operators: state-space and linear-attention layers, mixtures of
experts.

Transformers computes recurrent layers by fused kernels, or else by loops over positions or blocks, which a trace would
unroll to one length. Its modules call them by a few names that all models share. While a module is traced, those names
mean the same formulas around `fusion::linear_scan` or `fusion::linear_attention`. A call with other options is refused.

Mixtures of experts become grouped matrix products; everything except the products with experts' weights is plain
operators, in the order of transformers' own batched form. That form gathers the weights of each token's experts, whose
copies do not fit in memory. Phi's mixtures choose experts by SparseMixer (arXiv 2409.12136): in
training by random draws, with a gradient that an `autograd.Function` defines. The router here gives
the same numbers and have this gradient by automatic differentiation. In evaluation nothing is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusionai.backends.torch import semantic as scans
from fusionai.backends.torch.semantic import expert_linear as by_groups
from fusionai.capture.tracing.by_mode import in_training
from fusionai.capture.tracing.patching import patched
from fusionai.primitives.errors import ModelError


@torch.library.custom_op("fusion::linear_scan", mutates_args=())
def linear_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return scans.linear_scan(decay, x)


@linear_scan.register_fake
def _(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


@torch.library.custom_op("fusion::linear_attention", mutates_args=())
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    return scans.linear_attention(query, key, value, decay=decay, beta=beta)


@linear_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG001
    return value.new_empty(value.shape)


def _selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Mamba (arXiv 2312.00752), like `mamba_selective_scan`: hidden_states, dt and z [b, d, s], A [d, n], B and C [b,
    n, s], D and delta_bias [d]; returns [b, d, s]."""
    _refuse(others | {"return_last_state": return_last_state}, harmless=("use_mambapy", "use_associative_scan"))
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    step, entering = dt.transpose(1, 2)[..., None], hidden_states.transpose(1, 2)[..., None]
    decay = torch.exp(A[None, None] * step)
    states = linear_scan(decay, step * B.transpose(1, 2)[:, :, None].float() * entering.float())
    read = torch.matmul(states.to(hidden_states.dtype), C.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
    if D is not None:
        read = read + hidden_states * D[None, :, None]
    return read if z is None else read * F.silu(z)


def _chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,  # noqa: ARG001 - sets the order of sums, which each backend chooses itself
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Mamba-2 (arXiv 2405.21060), like `mamba2_chunk_scan`: hidden_states [b, s, h, p], dt [b, s, h], A [h], B and C
    [b, s, g, n], D and dt_bias [h]; returns [b, s, h, p]."""
    _refuse(others | {"initial_states": initial_states, "return_final_states": return_final_states})
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    values, shared = hidden_states.float(), hidden_states.shape[2] // B.shape[2]
    keys, queries = B.float().repeat_interleave(shared, dim=2), C.float().repeat_interleave(shared, dim=2)
    read = linear_attention(queries, keys, values * dt[..., None].float(), A.to(values.dtype) * dt.float(), None)
    return read if D is None else read + D[..., None] * values


def _gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,  # noqa: ARG001
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Gated delta rule (arXiv 2412.06464), like `torch_chunk_gated_delta_rule`: query and key [b, s, hk, k], value [b,
    s, h, v], g and beta [b, s, h]; returns [b, s, h, v] and no state."""
    _refuse(others | {"initial_state": initial_state, "output_final_state": output_final_state})
    dtype, shared = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, g, beta = (x.to(torch.float32) for x in (query, key, value, g, beta))
    if shared > 1:
        query, key = query.repeat_interleave(shared, dim=2), key.repeat_interleave(shared, dim=2)
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    return linear_attention(query * query.shape[-1] ** -0.5, key, value, g, beta).to(dtype), None


def _kimi_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,  # noqa: ARG001
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Kimi delta attention (arXiv 2510.26692), like `chunk_kimi_delta_attention`: the gated delta rule with a decay g
    [b, s, h, k] for each channel of the key; the other operands have the shapes named there."""
    _refuse(others | {"initial_state": initial_state, "output_final_state": output_final_state})
    dtype = query.dtype
    query, key, value, g, beta = (x.to(torch.float32) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    return linear_attention(query * query.shape[-1] ** -0.5, key, value, g, beta).to(dtype), None


def _gated_scan(
    self: nn.Module,  # noqa: ARG001
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, None]:
    """Real-gated linear recurrent unit (arXiv 2402.19427), like `RecurrentGemmaRglru._rnn_scan`: all operands [b, s, d]
    except reset [b, s, 1], where a text begins."""
    _refuse({"recurrent_states": recurrent_states})
    states = linear_scan((recurrent_gate * ~reset).to(acc_dtype), hidden_states.to(acc_dtype))
    return states.to(hidden_states.dtype), None


def _every_key(self: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Choose keys like the indexers of DeepSeek's sparse attention, which choose `index_topk` for each query: all keys
    of texts that are not longer. Returns [b, s, s]. Raises `ModelError` for longer texts."""
    batch, length, most = *hidden_states.shape[:2], cast(Any, self).index_topk
    if not statically_known_true(length <= most):
        raise ModelError(
            f"{type(self).__name__} chooses {most} keys for each query, which the operator fusion.attention lacks.",
            hint=f"Ask for sequences of at most {most} tokens.",
        )
    return torch.arange(length, dtype=torch.int32, device=hidden_states.device).expand(batch, length, length)


RWKV_LARGEST: Final = 60.0
"""Largest magnitude of an RWKV key whose exponential is taken, as in RWKV's own code of versions 2 and 3. Sums of such
exponentials stay within float32 without the running maximum that transformers subtracts."""


def _earlier(x: torch.Tensor) -> torch.Tensor:
    """Return x [b, s, d] moved by one position, with zeros first: as a short convolution, whose window is a state."""
    width = x.shape[2]
    kernel = torch.tensor([1.0, 0.0], dtype=x.dtype, device=x.device).expand(width, 1, 2)
    return F.conv1d(x.transpose(1, 2), kernel, padding=1, groups=width)[:, :, : x.shape[1]].transpose(1, 2)


def _mixed(x: torch.Tensor, before: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return x * share + before * (1 - share)


def _rescaled(layer: Any, made: torch.Tensor) -> torch.Tensor:
    """Return the result of a layer whose last weights transformers divides in evaluation, so that half precision does
    not overflow: divided here, which gives the same bits, because the divisor is a power of two."""
    every = layer.config.rescale_every
    return made if layer.training or every <= 0 else made / 2 ** (layer.layer_id // every)


def _rwkv_attention(
    self: nn.Module, hidden: torch.Tensor, state: Any = None, use_cache: bool = False
) -> tuple[torch.Tensor, None]:
    """RWKV-4 (arXiv 2305.13048), like the forward of `RwkvSelfAttention`: two sums over earlier positions, which decay
    by channel, and the position's own key with a bonus."""
    _refuse({"state": state, "use_cache": use_cache})
    layer = cast(Any, self)
    before = _earlier(hidden)
    key = layer.key(_mixed(hidden, before, layer.time_mix_key)).float()
    value = layer.value(_mixed(hidden, before, layer.time_mix_value))
    receptance = torch.sigmoid(layer.receptance(_mixed(hidden, before, layer.time_mix_receptance)))

    def weight(exponent: torch.Tensor) -> torch.Tensor:
        return exponent.clamp(-RWKV_LARGEST, RWKV_LARGEST).exp()

    entering = torch.cat((weight(key) * value, weight(key)), dim=-1)
    decay = torch.exp(-torch.exp(layer.time_decay)).repeat(2).expand_as(entering)
    above, below = _earlier(linear_scan(decay, entering)).chunk(2, dim=-1)
    own = weight(key + layer.time_first)
    made = ((above + own * value) / (below + own)).to(value.dtype)
    return _rescaled(layer, layer.output(receptance * made)), None


def _rwkv_feed_forward(self: nn.Module, hidden: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, None]:
    """Like the forward of `RwkvFeedForward`."""
    _refuse({"state": state})
    layer = cast(Any, self)
    before = _earlier(hidden)
    inner = torch.square(torch.relu(layer.key(_mixed(hidden, before, layer.time_mix_key))))
    receptance = torch.sigmoid(layer.receptance(_mixed(hidden, before, layer.time_mix_receptance)))
    return receptance * _rescaled(layer, layer.value(inner)), None


def _keep_scale(self: nn.Module) -> None:
    """Leave the weights as they are in the files, where transformers' `RwkvModel` divides them: see `_rescaled`."""
    cast(Any, self).layers_are_rescaled = not self.training


def _lightning_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],  # noqa: ARG001 - used by the softmax layers only
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Lightning attention (arXiv 2401.04658), like the forward of `MiniMaxLightningAttention`: the sums of its loop
    over blocks of the sequence, computed for all blocks at once. The decays are the four buffers that the layer stores
    in files: values computed from a rate would differ wherever the stored ones were rounded."""
    _refuse(others | {"past_key_values": past_key_values})
    layer = cast(Any, self)
    batch, length, _ = hidden_states.shape
    heads, width, size = layer.num_attention_heads, layer.head_dim, layer.block_size
    joined = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        joined = (joined * attention_mask[:, :, None]).to(hidden_states.dtype)
    # Fills the sequence up to whole blocks by indexing, because a trace can't express a pad of unknown size. One block
    # more than needed, because a trace would otherwise treat a sequence of one block as a special case.
    blocks = (length + size - 1) // size + 1
    ended = torch.cat((joined, joined.new_zeros(batch, 1, joined.shape[2])), dim=1)
    rows = torch.arange(blocks, device=ended.device)[:, None] * size + torch.arange(size, device=ended.device)
    joined = ended[:, rows.clamp(max=length)].reshape(batch, blocks, size, heads, 3 * width).permute(0, 3, 1, 2, 4)
    query, key, value = torch.split(joined, width, dim=-1)  # [batch, heads, blocks, size, width]
    inside = torch.matmul(torch.matmul(query, key.transpose(-1, -2)) * layer.diagonal_decay[0, :, None], value)
    left = torch.matmul((key * layer.key_decay[:, None]).transpose(-1, -2), value).transpose(1, 2)
    # Each block reads the state after the blocks before it; the first block reads zeros.
    left = torch.cat((torch.zeros_like(left[:, :1]), left), dim=1)
    states = linear_scan(torch.exp(-layer.slope_rate * size).expand_as(left), left)[:, :blocks]
    read = torch.matmul(query * layer.query_decay[:, None], states.transpose(1, 2)) + inside
    at = torch.arange(length, device=read.device)
    read = read.permute(0, 2, 3, 1, 4)[:, at // size, at % size].reshape(batch, length, heads * width)
    gate = F.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(gate * layer.norm(read)), None


def _refuse(asked: Mapping[str, Any], harmless: tuple[str, ...] = ()) -> None:
    """Raise `ModelError` for arguments that change the result. Those that are off or choose a kernel don't."""
    unknown = sorted(name for name, value in asked.items() if value is not None and value is not False)
    unknown = [name for name in unknown if name not in harmless and name not in _HARMLESS]
    if unknown:
        raise ModelError(
            f"a recurrent layer asks its scan for {', '.join(unknown)}, which the semantic operators lack.",
            hint="Choose a model that runs whole sequences from an empty state.",
        )


_HARMLESS: Final = frozenset(
    {"use_cache", "output_attentions", "output_hidden_states", "return_dict", "position_ids", "position_embeddings"}
)
"""Arguments that the layers above pass on."""


EXPERTS: Final = "fusion"
"""Name under which our function is registered with the interface."""


@torch.library.custom_op("fusion::expert_linear", mutates_args=())
def expert_linear(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, transposed: bool) -> torch.Tensor:
    return by_groups(x, weight, experts, transposed=transposed)


@expert_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, transposed: bool) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Transformers' experts function: hidden_states [s, d], top_k_index and top_k_weights [s, k]; returns [s, d]."""
    layer = cast(Any, self)
    if layer._is_expert_parallel:
        raise ModelError(f"{type(self).__name__} is distributed over processes, which a graph can't express.")
    chosen = top_k_index.shape[-1]
    experts = top_k_index.reshape(-1)
    rows = hidden_states.repeat_interleave(chosen, dim=0)
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    wide = _product(layer, name, rows, experts)
    inner = layer._apply_gate(wide) if layer.has_gate else layer.act_fn(wide)
    made = _product(layer, "down_proj", inner, experts)
    if layer.has_post_expert_norm:
        made = layer.post_expert_norm(made)
    weighted = made * top_k_weights.reshape(-1).unsqueeze(-1)
    return weighted.view(hidden_states.shape[0], chosen, -1).sum(dim=1).to(hidden_states.dtype)


def _product(layer: Any, name: str, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    made = expert_linear(rows, getattr(layer, name), experts, bool(layer.is_transposed))
    return made + getattr(layer, f"{name}_bias")[experts] if layer.has_bias else made


def by_products(module: nn.Module) -> None:
    """Make the replaceable experts layers of `module` trace as grouped products, if it has any."""
    _register()
    choose = getattr(module, "set_experts_implementation", None)
    config = getattr(module, "config", None)
    if choose is not None and getattr(config, "_experts_implementation", None) is not None:
        choose(EXPERTS)


@cache
def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def _sparse_mixer(
    scores: torch.Tensor,
    jitter_eps: float,
    training: bool,
    top_k: int = 2,  # noqa: ARG001 - as transformers', which chooses two
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and indices [tokens, 2] of the two experts of each token, like transformers' `sparsemixer`."""
    first, expert = _chosen(scores, scores, jitter_eps, training)
    others = torch.scatter(scores, -1, expert, float("-inf"))
    second, other = _chosen(scores, others, jitter_eps, training)
    return torch.concat((first, second), dim=-1), torch.concat((expert, other), dim=-1)


def _chosen(
    scores: torch.Tensor, left: torch.Tensor, jitter_eps: float, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one expert of those `left`, and its weight among the experts whose score is close to the best."""
    seen, known = scores.detach(), left.detach()
    best, calm = known.max(dim=-1, keepdim=True)
    far = ((best - seen) / seen.abs().clamp(min=best)) > 2 * jitter_eps
    near = left.masked_fill(far, float("-inf"))
    gates = torch.softmax(near, dim=-1)
    weight = gates.gather(dim=-1, index=calm)
    if not training:
        return weight, calm
    noise = torch.empty_like(known).exponential_().log()
    drawn = (near.detach() - noise).masked_fill(far, float("-inf")).max(dim=-1)[1].unsqueeze(-1)
    largest, middle = gates.detach().max(dim=-1, keepdim=True)
    # The same draws as transformers: for the second expert it draws twice.
    share = torch.rand_like(largest) if left is scores else torch.rand_like(largest).uniform_()
    whole = torch.logical_or(drawn == middle, share > 0.75)
    factor = torch.add(0.3333, whole, alpha=0.6667).type_as(gates)
    own = gates.gather(dim=-1, index=drawn)
    # The factor applies to the value, not to the gradient.
    trained = own.detach() * factor + (own - own.detach())
    return in_training(trained, weight), in_training(drawn, calm)


_NAMES: Final[Mapping[str, Callable[..., Any]]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta_rule,
    "sparsemixer": _sparse_mixer,
}
"""Functions that are replaced."""
_METHODS: Final[Mapping[str, tuple[str, Callable[..., Any]]]] = {
    **dict.fromkeys(("AXK2Indexer", "DeepseekV32Indexer", "GlmMoeDsaIndexer"), ("forward", _every_key)),
    "MiniMaxLightningAttention": ("forward", _lightning_attention),
    "RecurrentGemmaRglru": ("_rnn_scan", _gated_scan),
    "RwkvFeedForward": ("forward", _rwkv_feed_forward),
    "RwkvModel": ("_rescale_layers", _keep_scale),
    "RwkvSelfAttention": ("forward", _rwkv_attention),
}
"""Classes of which a method is replaced."""


def semantic_layers(module: nn.Module) -> AbstractContextManager[None]:
    """While open, these functions and classes are replaced in the transformers files of `module`'s layers."""
    classes = {type(child) for child in module.modules() if type(child).__module__.startswith("transformers.")}
    files = [sys.modules[name] for name in sorted({cls.__module__ for cls in classes})]
    functions = ((file, name, made) for file in files for name, made in _NAMES.items() if hasattr(file, name))
    known = ((cls, _METHODS[cls.__name__]) for cls in classes if cls.__name__ in _METHODS)
    return patched(*functions, *((cls, name, made) for cls, (name, made) in known))
