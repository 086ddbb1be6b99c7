"""`fusion.attention` equals transformers' attention functions bit for bit, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch import semantic
from fusionai.backends.torch.operators import repeats_keys
from fusionai.backends.torch.semantic import attention, scaled_mask

KEY = DropoutKey(seed=1, step=2, microbatch=3)
PLAIN = {"window": None, "softcap": None, "sinks": None, "key_mask": None, "dropout": 0.0, "key": KEY, "node": 9}


def sdpa_attention_forward(*given: Any, **choices: Any) -> Any:
    """Transformers' own. Loaded by who calls it: every process of the tests imports this file."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as theirs

    return theirs(*given, **choices)


def operands(heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int | None = None):
    """Two equal sets of leaves, laid out as models make them: [B, S, H, D] transposed."""
    generator = torch.Generator().manual_seed(heads * 1000 + queries)

    def leaf(count: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(2, length, count, width, generator=generator).transpose(1, 2)

    first = [leaf(heads, queries, dim), leaf(kv_heads, keys, dim), leaf(kv_heads, keys, value_dim or dim)]
    return [tensor.clone().requires_grad_() for tensor in first], [tensor.clone().requires_grad_() for tensor in first]


def module(heads: int, kv_heads: int, *, causal: bool = True, **more) -> SimpleNamespace:
    return SimpleNamespace(
        num_key_value_groups=heads // kv_heads, is_causal=causal, training=False, layer_idx=0, **more
    )


def assert_same(got: torch.Tensor, expected: torch.Tensor, leaves, expected_leaves) -> None:
    """Compare values and, for a fixed output gradient, the gradients of all leaves."""
    got = got.transpose(1, 2).contiguous()
    assert torch.equal(got, expected)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    got.backward(direction)
    expected.backward(direction)
    for mine, theirs in zip(leaves, expected_leaves, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "dim"),
    [(4, 4, 17, 17, 8), (4, 2, 17, 17, 8), (8, 1, 65, 65, 64), (4, 2, 1, 1, 16), (4, 2, 5, 9, 8), (4, 1, 33, 33, 320)],
)
def test_dense_attention(heads, kv_heads, queries, keys, dim, causal):
    (q, k, v), (q2, k2, v2) = operands(heads, kv_heads, queries, keys, dim)
    scale = dim**-0.5
    got = attention(q, k, v, scale=scale, causal=causal, **PLAIN)
    expected, _ = sdpa_attention_forward(module(heads, kv_heads, causal=causal), q2, k2, v2, None, scaling=scale)
    assert_same(got, expected, (q, k, v), (q2, k2, v2))


def test_values_narrower_than_keys():
    (q, k, v), (q2, k2, v2) = operands(4, 2, 9, 9, 16, value_dim=8)
    got = attention(q, k, v, scale=0.3, causal=True, **PLAIN)
    expected, _ = sdpa_attention_forward(module(4, 2), q2, k2, v2, None, scaling=0.3)
    assert got.shape == (2, 4, 9, 8)
    assert_same(got, expected, (q, k, v), (q2, k2, v2))


def band(length: int, window: int) -> torch.Tensor:
    place = torch.arange(length)
    near = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - window)
    return near[None, None].expand(2, 1, length, length)


@pytest.mark.parametrize("window", [1, 4, 16, 17, 18, 400])
def test_sliding_window(window):
    (q, k, v), (q2, k2, v2) = operands(4, 2, 17, 17, 8)
    got = attention(q, k, v, scale=0.3, causal=True, **{**PLAIN, "window": window})
    # transformers builds no mask while the sequence is shorter than the window.
    mask = None if window > 17 else band(17, window)
    expected, _ = sdpa_attention_forward(module(4, 2), q2, k2, v2, mask, scaling=0.3)
    assert_same(got, expected, (q, k, v), (q2, k2, v2))


def test_a_window_without_causality_reaches_both_ways():
    (q, k, v), (q2, k2, v2) = operands(4, 4, 9, 9, 8)
    got = attention(q, k, v, scale=0.3, causal=False, **{**PLAIN, "window": 2})
    place = torch.arange(9)
    mask = ((place[None, :] - place[:, None]).abs() <= 2)[None, None].expand(2, 1, 9, 9)
    expected, _ = sdpa_attention_forward(module(4, 4, causal=False), q2, k2, v2, mask, scaling=0.3)
    assert_same(got, expected, (q, k, v), (q2, k2, v2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_key_mask(causal, dtype):
    (q, k, v), (q2, k2, v2) = operands(4, 2, 7, 7, 8)
    seen = torch.ones(2, 7, dtype=torch.bool)
    seen[1, 5:] = False
    got = attention(q, k, v, scale=0.3, causal=causal, **{**PLAIN, "key_mask": seen.to(dtype)})
    mask = seen[:, None, None, :].expand(2, 1, 7, 7)
    if causal:
        mask = mask & torch.ones(7, 7, dtype=torch.bool).tril()
    expected, _ = sdpa_attention_forward(module(4, 2, causal=causal), q2, k2, v2, mask, scaling=0.3)
    assert_same(got, expected, (q, k, v), (q2, k2, v2))


def test_a_key_mask_that_hides_nothing_changes_no_bit():
    (q, k, v), _ = operands(4, 2, 7, 7, 8)
    everything = {**PLAIN, "key_mask": torch.ones(2, 7, dtype=torch.bool)}
    assert torch.equal(
        attention(q, k, v, scale=0.3, causal=True, **everything), attention(q, k, v, scale=0.3, causal=True, **PLAIN)
    )


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.slow  # as loading the model's module is
@pytest.mark.parametrize("window", [None, 4])
def test_soft_capping(window):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention

    (q, k, v), (q2, k2, v2) = operands(4, 2, 9, 9, 8)
    got = attention(q, k, v, scale=2.0, causal=True, **{**PLAIN, "softcap": 3.0, "window": window})
    mask = additive(band(9, window or 9))
    expected, _ = gemma2_attention(module(4, 2), q2, k2, v2, mask, scaling=2.0, softcap=3.0)
    assert_same(got, expected, (q, k, v), (q2, k2, v2))


@pytest.mark.slow  # as loading the model's module is
def test_sinks():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

    (q, k, v), (q2, k2, v2) = operands(4, 2, 9, 9, 8)
    sinks, sinks2 = (torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) for _ in range(2))
    got = attention(q, k, v, scale=0.4, causal=True, **{**PLAIN, "sinks": sinks})
    expected, _ = gpt_oss_attention(module(4, 2, sinks=sinks2), q2, k2, v2, additive(band(9, 9)), scaling=0.4)
    assert_same(got, expected, (q, k, v, sinks), (q2, k2, v2, sinks2))


def test_dropout_drops_weights_by_the_counter_mask():
    (q, k, v), _ = operands(4, 2, 9, 9, 8)
    got = attention(q, k, v, scale=0.3, causal=True, **{**PLAIN, "dropout": 0.25})
    k4, v4 = (x.repeat_interleave(2, dim=1) for x in (k, v))
    weights = torch.softmax((q @ k4.transpose(2, 3)) * 0.3 + additive(band(9, 9)), dim=-1)
    mask = scaled_mask((2, 4, 9, 9), 0.25, KEY, 9, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(got, (weights * mask) @ v4)
    other = attention(q, k, v, scale=0.3, causal=True, **{**PLAIN, "dropout": 0.25, "node": 10})
    assert not torch.equal(got, other)


def test_shapes_are_found_without_memory():
    for extra in ({}, {"window": 4}, {"softcap": 2.0}, {"dropout": 0.5}):
        q, k, v = (torch.empty(2, heads, 9, 8, device="meta") for heads in (4, 2, 2))
        assert attention(q, k, v, scale=0.3, causal=True, **{**PLAIN, **extra}).shape == (2, 4, 9, 8)


def test_shared_key_heads_are_repeated_where_no_fused_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for groups, CUDA's float32 attention would keep every weight."""
    (q, k, v), (again, *_) = operands(8, 2, 5, 5, 16)
    asked: list[tuple[int, bool]] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
        asked.append((k.shape[1], settings["enable_gqa"]))
        return fused(q, k, v, **settings)

    monkeypatch.setattr(semantic, "scaled_dot_product_attention", seen)
    shared = attention(q, k, v, scale=0.25, causal=True, **PLAIN)
    repeated = attention(again, k, v, scale=0.25, causal=True, repeats_keys=True, **PLAIN)
    assert asked == [(2, True), (8, False)]
    torch.testing.assert_close(repeated, shared)


def test_a_card_in_float32_repeats_them_unless_its_fused_kernel_takes_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def takes(params: Any, debug: bool = False) -> bool:
        asked.append(params.enable_gqa)
        return len(asked) > 1

    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", takes)
    cuda = torch.device("cuda")
    with FakeTensorMode():
        assert [repeats_keys(cuda, half_floats=False) for _ in range(2)] == [True, False]
        assert not repeats_keys(cuda, half_floats=True)
    assert not repeats_keys(torch.device("cpu"), half_floats=False)
    assert asked == [True, True]
