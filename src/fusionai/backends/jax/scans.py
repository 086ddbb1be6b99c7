"""`fusion.linear_scan` and `fusion.linear_attention`: the recurrences of state-space and linear-attention models.

The order of sums is that of `backends.torch.scans`. Neighbours: `operators` maps the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

CHUNK: Final = 64
"""Positions whose mutual influence is computed at once."""


def linear_scan(decay: jax.Array, x: jax.Array) -> jax.Array:
    """Return all `h[t] = decay[t] * h[t - 1] + x[t]`; decay, x and the result have the same shape [batch, positions,
    ...]."""
    if decay.shape != x.shape:
        raise ValueError(f"expected decays and inputs of one shape, got {list(decay.shape)} and {list(x.shape)}")

    def step(state: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        faded, entering = now
        state = faded * state + entering
        return state, state

    by_position = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(x, 1, 0))
    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), by_position)
    return jnp.moveaxis(states, 0, 1)


def linear_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, decay: jax.Array, beta: jax.Array | None = None
) -> jax.Array:
    """Compute the formula of `backends.torch.scans.linear_attention`.

    query and key [batch, positions, heads, key width], value [batch, positions, heads, value width], decay and beta
    [batch, positions, heads]; the result has value's shape.
    """
    batch, positions, heads, width = value.shape
    chunk = max(1, min(CHUNK, positions))
    missing = -positions % chunk

    def chunked(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 1, 2)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])
        return x.reshape(batch, heads, -1, chunk, *x.shape[3:])

    q, k, v = chunked(query), chunked(key), chunked(value)
    total = jnp.cumsum(chunked(decay), axis=3)
    earlier = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_))
    # Masked before exp: later positions could overflow, and so could their gradients.
    between = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    inside = (q @ jnp.swapaxes(k, -1, -2)) * between
    faded = k * jnp.exp(total)[..., None]
    if beta is not None:
        share = chunked(beta)[..., None]
        system = (k * share) @ jnp.swapaxes(k, -1, -2) * between
        solved = jax.scipy.linalg.solve_triangular(
            system, jnp.concatenate([v * share, faded * share], axis=-1), lower=True, unit_diagonal=True
        )
        v, faded = solved[..., :width], solved[..., width:]
    reading = q * jnp.exp(total)[..., None]
    leaving = k * jnp.exp(total[..., -1:] - total)[..., None]
    fading = jnp.exp(total[..., -1])[..., None, None]
    state = jnp.zeros((batch, heads, key.shape[-1], width), value.dtype)
    made: list[jax.Array] = []
    for at in range(q.shape[2]):
        taken = v[:, :, at] if beta is None else v[:, :, at] - faded[:, :, at] @ state
        made.append(reading[:, :, at] @ state + inside[:, :, at] @ taken)
        state = state * fading[:, :, at] + jnp.swapaxes(leaving[:, :, at], -1, -2) @ taken
    joined = jnp.stack(made, axis=2).reshape(batch, heads, -1, width)
    return jnp.moveaxis(joined[:, :, :positions], 1, 2)


SCANS: Final[Mapping[str, Callable[..., Any]]] = {
    "fusion.linear_scan": linear_scan,
    "fusion.linear_attention": linear_attention,
}
