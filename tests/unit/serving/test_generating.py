"""Log-probabilities as the model gave them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fusionai.serving.generating import token_logprob


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
