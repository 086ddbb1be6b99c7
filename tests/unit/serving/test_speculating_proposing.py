"""Guesses: which ones, how many, and that they change nothing but the speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fusionai.serving.generating import Generating
from fusionai.serving.interface import Generation, Sampling
from fusionai.serving.sampling import TokenHistory, choose
from fusionai.serving.speculating import Acceptance, NgramProposer, PassTimes, best_count, expected_tokens

VOCABULARY = 40


def proposal(prompt: Sequence[int], answer: Sequence[int] = (), count: int = 4) -> tuple[int, ...]:
    proposer = NgramProposer()
    proposer.begin(7, prompt, Sampling())
    proposer.extend(7, answer)
    return proposer.propose({7: count}).get(7, ())


def test_what_came_last_after_the_longest_run() -> None:
    assert proposal([1, 2, 3, 4, 5, 6], [9, 2, 3]) == (4, 5, 6, 9)
    # After (1, 2, 3) came 7, though after (2, 3) came 8 more recently.
    assert proposal([1, 2, 3, 7, 5, 2, 3, 8, 1, 2], [3], 2) == (7, 5)
    assert proposal([2, 3, 7, 2, 3, 8, 9], [2, 3], 1) == (8,)


def test_no_guess_without_a_run_seen_before() -> None:
    assert proposal([1, 2, 3, 4]) == ()
    assert proposal([1]) == ()
    assert proposal([]) == ()
    assert proposal([1, 2, 9, 1], []) == ()


def test_a_repetition_goes_on() -> None:
    assert proposal([5, 6, 7, 5, 6, 7], [5, 6], 7) == (7, 5, 6, 7, 5, 6, 7)
    assert proposal([4, 4, 4], [], 3) == (4, 4, 4)


def test_sessions_are_apart_and_end() -> None:
    proposer = NgramProposer()
    proposer.begin(1, [1, 2, 3, 1, 2], Sampling())
    proposer.begin(2, [1, 2, 4, 1, 2], Sampling())
    assert proposer.propose({1: 1, 2: 1, 3: 1}) == {1: (3,), 2: (4,)}
    proposer.end(1)
    proposer.extend(1, [3])
    assert proposer.propose({1: 1, 2: 1}) == {2: (4,)}


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """A model: what comes next depends on the last two tokens, and often repeats."""
    return np.random.default_rng([*tokens[-2:], 1]).standard_normal(VOCABULARY).astype(np.float32) * 3


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0), Sampling(seed=5, temperature=0.4), Sampling(seed=3, frequency_penalty=0.4, top_p=0.9)],
)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_tokens_are_those_of_plain_decoding(sampling: Sampling, count: int) -> None:
    prompt = [1, 2, 3]
    wanted = 120
    plain: list[int] = []
    history = TokenHistory(prompt)
    while len(plain) < wanted:
        token = choose(logits_after([*prompt, *plain]), sampling, history, len(plain))
        history.add(token)
        plain.append(token)

    proposer = NgramProposer()
    proposer.begin(0, prompt, sampling)
    asked = Generation(prompt=tuple(prompt), max_tokens=wanted, sampling=sampling)
    generating = Generating(0, asked, lambda number: None)
    passes = held = 0
    while not generating.finished:
        guesses = proposer.propose({0: count}).get(0, ())
        known = len(generating.tokens)
        rows = np.stack([logits_after([*generating.tokens, *guesses[:n]]) for n in range(len(guesses) + 1)])
        verdict = generating.judge(rows, known - 1, guesses)
        assert verdict.proposed == len(guesses)
        assert verdict.accepted in (len(verdict.tokens) - 1, len(verdict.tokens))
        generating.adopt(verdict, (), 0)
        proposer.extend(0, verdict.tokens)
        passes += 1
        held += verdict.accepted
    assert generating.tokens[len(prompt) :] == plain
    assert passes + held >= wanted
    if sampling.temperature == 0:
        assert passes < wanted / 1.3, "a text that repeats itself was not guessed"


def test_nothing_is_emitted_behind_an_end() -> None:
    rows = np.eye(9, dtype=np.float32)[[3, 5, 6, 7]]
    for stops, most, tokens, reason in [
        ({5}, 9, [3], "stop"),
        (set(), 2, [3, 5], "length"),
        (set(), 3, [3, 5, 6], "length"),
    ]:
        asked = Generation(prompt=(1,), max_tokens=most, sampling=Sampling(temperature=0), stop_tokens=frozenset(stops))
        verdict = Generating(0, asked, lambda number: None).judge(rows, 0, (3, 5, 6))
        assert (verdict.tokens, verdict.ended) == (tokens, reason)


def test_expected_tokens_is_the_mean_of_what_comes() -> None:
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(1, 5) == 6
    generator = np.random.default_rng(0)
    for rate, count in [(0.3, 2), (0.8, 4), (0.95, 8)]:
        held = generator.random((20_000, count)) < rate
        tokens = 1 + np.cumprod(held, axis=1).sum(axis=1)
        assert expected_tokens(rate, count) == pytest.approx(tokens.mean(), rel=0.02)


def test_acceptance_follows_what_is_seen() -> None:
    acceptance = Acceptance(0.5)
    assert acceptance.rate == 0.5
    for _ in range(100):
        acceptance.observe([1, 2, 3], [1, 2, 3, 9])
    assert acceptance.rate > 0.95
    for _ in range(200):
        # Behind a guess that fails nothing is learned.
        acceptance.observe([1, 2, 3], [8, 2, 3])
    assert acceptance.rate < 0.05
    before = acceptance.rate
    acceptance.observe([], [4])
    assert acceptance.rate == before


def test_guesses_are_sent_where_rows_are_cheap_and_guesses_hold() -> None:
    times = PassTimes()
    assert best_count(0.9, times) == 0, "nothing measured: nothing predicted"
    times.observe(1, 0.1)
    assert best_count(0.9, times) == 8, "a first try tells what rows cost"
    for _ in range(20):
        times.observe(1, 0.100)
        times.observe(5, 0.104)
    assert times.predict(9) == pytest.approx(0.108, rel=0.02)
    assert best_count(0.9, times) == 8
    assert best_count(0.02, times) == 0
    assert 0 < best_count(0.4, times) < 8


def test_guesses_are_not_sent_where_each_row_costs_a_pass() -> None:
    times = PassTimes()
    for rows in (1, 2, 4, 8) * 10:
        times.observe(rows, 0.05 * rows)
    assert best_count(0.7, times) == 0
    # Many sessions in the pass: the rows of one weigh little, and help little.
    flat = PassTimes()
    for rows in (1, 64) * 10:
        flat.observe(rows, 0.05 + rows * 1e-4)
    assert best_count(0.8, flat, rows=64) > 0


def test_a_predicted_time_is_never_less_for_more_rows() -> None:
    times = PassTimes()
    times.observe(1, 0.2)
    times.observe(8, 0.1)
    assert times.predict(8) == times.predict(1)
