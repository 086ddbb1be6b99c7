"""Scans against their definition, one position after the other, and against transformers' own formulas."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.torch.semantic import CHANNEL_CHUNK, CHUNK, linear_attention, linear_scan

LIMIT = 1e-12


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(positions: int) -> tuple[torch.Tensor, ...]:
    """query, key (of length 1), value, decay, beta."""
    key = drawn(2, positions, 3, 4, seed=1)
    return (
        drawn(2, positions, 3, 4),
        key / key.norm(dim=-1, keepdim=True),
        drawn(2, positions, 3, 5, seed=2),
        -drawn(2, positions, 3, seed=3).abs(),
        drawn(2, positions, 3, seed=4).sigmoid(),
    )


def one_after_the_other(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    made: list[torch.Tensor] = []
    decay = decay if decay.dim() == key.dim() else decay[..., None]
    for at in range(value.shape[1]):
        state = state * decay[:, at, ..., None].exp()
        taken = value[:, at]
        if beta is not None:
            taken = (taken - torch.einsum("bhkv,bhk->bhv", state, key[:, at])) * beta[:, at, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, at], taken)
        made.append(torch.einsum("bhkv,bhk->bhv", state, query[:, at]))
    return torch.stack(made, dim=1)


@pytest.mark.parametrize("positions", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
@pytest.mark.parametrize("corrected", [False, True])
def test_chunks_give_what_single_positions_give(positions: int, corrected: bool) -> None:
    query, key, value, decay, beta = operands(positions)
    share = beta if corrected else None
    made = linear_attention(query, key, value, decay=decay, beta=share)
    torch.testing.assert_close(made, one_after_the_other(query, key, value, decay, share), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("positions", [1, CHANNEL_CHUNK, CHANNEL_CHUNK + 1, 3 * CHANNEL_CHUNK])
@pytest.mark.parametrize("corrected", [False, True])
def test_each_channel_may_have_its_own_decay(positions: int, corrected: bool) -> None:
    query, key, value, _, beta = operands(positions)
    decay = -drawn(2, positions, 3, 4, seed=6).abs()
    share = beta if corrected else None
    made = linear_attention(query, key, value, decay=decay, beta=share)
    torch.testing.assert_close(made, one_after_the_other(query, key, value, decay, share), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("corrected", [False, True])
def test_gradients_are_those_of_single_positions(corrected: bool) -> None:
    given = [x.requires_grad_() for x in operands(CHUNK + 3)]
    query, key, value, decay, beta = given
    share = beta if corrected else None
    used = given if corrected else given[:4]
    weights = drawn(*value.shape, seed=9)
    made = linear_attention(query, key, value, decay=decay, beta=share)
    found = torch.autograd.grad((made * weights).sum(), used)
    wanted = torch.autograd.grad((one_after_the_other(query, key, value, decay, share) * weights).sum(), used)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_a_decay_that_forgets_everything_makes_no_nan() -> None:
    query, key, value, decay, beta = operands(5)
    decay = (decay - 1e4).requires_grad_()
    made = linear_attention(query, key, value, decay=decay, beta=beta)
    assert made.isfinite().all()
    (gradient,) = torch.autograd.grad(made.sum(), decay)
    assert gradient.isfinite().all()


@pytest.mark.slow
def test_the_delta_rule_is_transformers_own() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next  # three seconds that other tests need not wait

    query, key, value, decay, beta = (x.float() for x in operands(CHUNK + 9))
    wanted, _ = modeling_qwen3_next.torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=beta)
    made = linear_attention(query * query.shape[-1] ** -0.5, key, value, decay=decay, beta=beta)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_without_it_the_scan_is_mamba_2s() -> None:
    from transformers.models.mamba2 import modeling_mamba2

    query, key, value, decay, _ = (x.float() for x in operands(CHUNK + 9))
    step = drawn(2, CHUNK + 9, 3, seed=7).float().sigmoid()
    a = torch.tensor([-0.5, -1.0, -2.0])
    wanted = modeling_mamba2.mamba2_chunk_scan(value, step, a, key, query, chunk_size=16)
    made = linear_attention(query, key, value * step[..., None], decay=a * step)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(made, linear_attention(query, key, value, decay=decay), atol=1e-3)


def test_a_linear_scan_is_its_definition() -> None:
    decay, x = drawn(2, 9, 3).sigmoid(), drawn(2, 9, 3, seed=1)
    state = torch.zeros(2, 3, dtype=torch.float64)
    for at, made in enumerate(linear_scan(decay, x).unbind(1)):
        state = decay[:, at] * state + x[:, at]
        torch.testing.assert_close(made, state, rtol=0, atol=LIMIT)


def test_its_gradients_are_right() -> None:
    decay, x = drawn(2, 6, 3).sigmoid().requires_grad_(), drawn(2, 6, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(linear_scan, (decay, x))


def test_decays_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        linear_scan(drawn(2, 6, 1), drawn(2, 6, 3))
