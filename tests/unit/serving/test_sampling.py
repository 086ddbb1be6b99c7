"""The next token: order of the steps, reproducibility, frequencies, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.primitives.errors import ExecutionError
from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory, choose, uniform

VOCABULARY = 97
FIRST_DRAWS = [0.011546754286331562, 0.30931491118583454, 0.3336157643809733]
"""Of Philox4x64-10: a seed of today must give the same tomorrow."""


def row(seed: int = 0, size: int = VOCABULARY, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def mask_of(allowed: list[int], size: int = VOCABULARY) -> memoryview:
    words = np.zeros(-(-size // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return memoryview(words)


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The definition, step by step, over a fully sorted vocabulary."""
    scores = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores.max())
    keep = np.ones(len(weights), dtype=bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    keep &= weights >= sampling.min_p
    weights = np.where(keep, weights, 0)
    before = np.cumsum(weights) - weights
    weights[1:][before[1:] >= sampling.top_p * weights.sum()] = 0
    result = np.zeros_like(weights)
    result[order] = weights / weights.sum()
    return result


def test_greedy_takes_the_best_and_the_smallest_of_equals() -> None:
    logits = row()
    greedy = Sampling(temperature=0)
    assert choose(logits, greedy, TokenHistory(), 0) == int(np.argmax(logits))
    assert choose(np.zeros(9, dtype=np.float32), greedy, TokenHistory(), 3) == 0
    logits[[40, 20, 60]] = 50
    assert choose(logits, greedy, TokenHistory(), 0) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=1.7, top_k=7),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01),
        Sampling(top_p=0.0),
        Sampling(top_k=10_000),
        Sampling(min_p=5.0),
    ],
)
def test_draws_follow_the_defined_distribution(sampling: Sampling) -> None:
    logits = row(3, spread=1.5)
    wanted = (
        probabilities(logits, sampling)
        if sampling.min_p <= 1
        else (np.arange(VOCABULARY) == logits.argmax()).astype(float)
    )
    draws = 800
    counts = np.bincount([choose(logits, sampling, TokenHistory(), n) for n in range(draws)], minlength=VOCABULARY)
    assert not counts[wanted == 0].any()
    deviation = np.sqrt(wanted * (1 - wanted) / draws)
    assert (np.abs(counts / draws - wanted) <= 5 * deviation + 1e-9).all()


def test_border_of_top_k_and_top_p_among_equals_is_the_smaller_id() -> None:
    flat = np.zeros(VOCABULARY, dtype=np.float32)
    drawn = {choose(flat, Sampling(top_k=5), TokenHistory(), n) for n in range(200)}
    assert drawn == {0, 1, 2, 3, 4}
    drawn = {choose(flat, Sampling(top_p=3 / VOCABULARY), TokenHistory(), n) for n in range(200)}
    assert drawn == {0, 1, 2}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = np.stack([row(n, spread=1) for n in range(6)])
    sampling = [Sampling(seed=n, temperature=1.3 if n % 2 else 0) for n in range(6)]
    forwards = [choose(logits[n], sampling[n], TokenHistory(), 10 + n) for n in range(6)]
    backwards = [choose(logits[n], sampling[n], TokenHistory(), 10 + n) for n in reversed(range(6))]
    assert backwards[::-1] == forwards
    assert len({uniform(seed, position) for seed in range(30) for position in range(30)}) == 900
    assert uniform(7, 0) == uniform(7 + 2**64, 0)
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_draws_stay_what_they_were() -> None:
    assert [uniform(0, 0), uniform(1, 2), uniform(2**63, 9)] == FIRST_DRAWS


def test_penalties() -> None:
    greedy = Sampling(temperature=0)
    logits = np.array([2.0, 1.9, 1.0, -1.0], dtype=np.float32)
    history = TokenHistory([0])
    assert choose(logits, greedy, history, 0) == 0
    assert choose(logits, Sampling(temperature=0, repetition_penalty=1.2), history, 0) == 1
    # Presence and frequency count the answer alone.
    assert choose(logits, Sampling(temperature=0, presence_penalty=1.5), history, 0) == 0
    history.add(0)
    assert choose(logits, Sampling(temperature=0, presence_penalty=1.5), history, 0) == 1
    once = Sampling(temperature=0, frequency_penalty=0.06)
    assert choose(logits, once, history, 0) == 0
    history.add(0)
    assert choose(logits, once, history, 0) == 1
    # A negative logit is multiplied: a penalty never helps.
    below = np.array([-1.0, -1.5], dtype=np.float32)
    assert choose(below, Sampling(temperature=0, repetition_penalty=2), TokenHistory([0]), 0) == 1


def test_history_counts_as_it_grows() -> None:
    history = TokenHistory([5, 5, 9])
    for token in [*range(100, 300), 9, 150]:
        history.add(token)
    counts = dict(zip(history.seen.tolist(), history.generated_counts.tolist(), strict=True))
    assert counts == {5: 0, 9: 1, 150: 2, **{token: 1 for token in range(100, 300) if token != 150}}
    assert history.generated_tokens == 202


def test_bias_and_mask() -> None:
    logits = row()
    greedy = Sampling(temperature=0)
    best = int(logits.argmax())
    assert choose(logits, Sampling(temperature=0, logit_bias=((best, -100), (4, 90))), TokenHistory(), 0) == 4
    allowed = [3, 33, 96]
    assert choose(logits, greedy, TokenHistory(), 0, mask_of(allowed)) == max(allowed, key=lambda token: logits[token])
    drawn = {choose(logits, Sampling(temperature=5), TokenHistory(), n, mask_of(allowed)) for n in range(300)}
    assert drawn == set(allowed)
    # A mask shorter than the logits: the padding of a model's vocabulary is forbidden.
    padded = np.concatenate([logits, np.full(40, 99, dtype=np.float32)])
    assert choose(padded, greedy, TokenHistory(), 0, mask_of([8])) == 8
    with pytest.raises(ExecutionError, match="every token is forbidden"):
        choose(logits, greedy, TokenHistory(), 0, mask_of([]))
    with pytest.raises(ExecutionError, match="below 97, got 97"):
        choose(logits, Sampling(logit_bias=((97, 1.0),)), TokenHistory(), 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), Sampling(top_k=2)])
def test_logits_that_are_no_numbers_are_named(value: float, sampling: Sampling) -> None:
    logits = row()
    logits[31] = value
    message = f"got {value} at token 31"
    with pytest.raises(ExecutionError, match=message):
        choose(logits, sampling, TokenHistory(), 0)
    with pytest.raises(ExecutionError, match=message):
        # Even where the mask hides it: the model is broken.
        choose(logits, sampling, TokenHistory(), 0, mask_of([1]))


def test_ruled_out_tokens_never_come() -> None:
    logits = np.full(2000, -np.inf, dtype=np.float32)
    logits[[700, 1500]] = [1.0, 1.1]
    drawn = {choose(logits, Sampling(temperature=100.0, seed=n), TokenHistory(), 0) for n in range(60)}
    assert drawn == {700, 1500}
    with pytest.raises(ExecutionError, match="-inf for every token"):
        choose(np.full(5, -np.inf, dtype=np.float32), Sampling(), TokenHistory(), 0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = row(size=5000)
    token = choose(logits, Sampling(temperature=temperature), TokenHistory(), 0)
    if temperature < 1:
        assert token == int(logits.argmax())
    else:
        assert token == int(uniform(0, 0) * 5000)
