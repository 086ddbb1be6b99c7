"""Log-probabilities as the model gave them, and answers that another engine began."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fusionai.serving.generating import Generating, token_logprob
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling, StreamEvent


def test_they_are_the_logarithm_of_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(np.float32) + np.float32(900)
    told = token_logprob(logits, 2, 2)
    assert told.token == 2
    assert told.logprob == pytest.approx(math.log(0.125), abs=1e-4)
    assert [token for token, _ in told.top] == [0, 1]
    assert told.top[1][1] == pytest.approx(math.log(0.25), abs=1e-4)


def test_equals_are_told_by_the_smaller_id_and_no_more_than_there_are() -> None:
    flat = np.zeros(6, dtype=np.float32)
    assert [token for token, _ in token_logprob(flat, 5, 3).top] == [0, 1, 2]
    assert [token for token, _ in token_logprob(flat, 5, 20).top] == [0, 1, 2, 3, 4, 5]
    assert token_logprob(flat, 5, 0).top == ()


def test_a_token_the_model_rules_out() -> None:
    assert token_logprob(np.array([1.0, -np.inf], dtype=np.float32), 1, 1).logprob == -math.inf


VOCABULARY = 12
SAMPLING = Sampling(temperature=1.3, seed=7, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2)


def _logits(position: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What a model gives after the token at this position, whichever engine computes it."""
    return np.random.default_rng(position).normal(size=(1, VOCABULARY)).astype(np.float32)


def _answered(generation: Generation) -> list[StreamEvent]:
    """All events of a generation that is computed a token at a time."""
    generating = Generating(1, generation, lambda _number: None)
    while not generating.finished:
        last = len(generating.tokens) - 1
        generating.adopt(generating.judge(_logits(last), last, ()), (), 0)
    return [generating._events.get_nowait() for _ in range(generating._events.qsize())]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_an_answer_that_another_engine_began_goes_on_with_the_same_draws_and_penalties(count: int) -> None:
    asked = Generation(prompt=(1, 2, 3), max_tokens=9, sampling=SAMPLING, logprobs=2)
    whole = [event for event in _answered(asked) if isinstance(event, Emitted)]
    begun = tuple(event.token for event in whole[:count])
    rest = _answered(Generation(prompt=(1, 2, 3), max_tokens=9, sampling=SAMPLING, logprobs=2, answered=begun))
    assert [event for event in rest if isinstance(event, Emitted)] == whole[count:]
    assert rest[-1] == Finished("length")
    assert [event.index for event in whole] == list(range(9))
