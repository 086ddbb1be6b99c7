from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.corpus.order import (
    ALONE,
    IGNORED,
    Deal,
    Permutation,
    SampleOrder,
    Split,
    derived_key,
    evaluation_samples,
    mask_rows,
    mix,
)
from harness.examples import examples


def order(samples: int, *, batch: int = 6, microbatches: int = 3, seed: int = 1, shuffle: bool = True) -> SampleOrder:
    return SampleOrder(samples=samples, batch_size=batch, microbatches=microbatches, seed=seed, shuffle=shuffle)


@given(size=st.integers(1, 2000), seed=st.integers(0, 2**62))
@settings(max_examples=examples(60), deadline=None)
def test_a_permutation_takes_every_element_once(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(permutation.at(index) for index in range(size)) == list(range(size))
    for outside in (-1, size):
        with pytest.raises(IndexError):
            permutation.at(outside)


def test_the_order_is_fixed_for_all_time() -> None:
    """Another order would break the replay of every running job."""
    assert [Permutation(10, 7, "epoch", 0).at(index) for index in range(10)] == [0, 8, 2, 4, 3, 5, 9, 1, 7, 6]
    assert derived_key(7, "mask", 1, 2) == 0xC9B6ADFFCFC135A3
    assert mix(0) == 0xE220A8397B1DCDAF  # first output of SplitMix64 with seed 0


@pytest.mark.slow
def test_a_permutation_is_shuffled_and_depends_on_its_key() -> None:
    size = 10_000
    orders = [[Permutation(size, *key).at(index) for index in range(size)] for key in ((1, "a"), (1, "b"), (2, "a"))]
    for first in range(3):
        # Positions of a random permutation correlate with standard deviation 1/sqrt(n).
        assert abs(np.corrcoef(orders[first], np.arange(size))[0, 1]) < 0.05
        for second in range(first):
            assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 0.05


@given(samples=st.integers(1, 50), batch=st.integers(1, 12), shuffle=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_every_data_epoch_takes_every_sample_once(samples: int, batch: int, shuffle: bool) -> None:
    feed = order(samples, batch=batch, microbatches=1, shuffle=shuffle)
    epochs = 3
    steps = -(-samples * epochs // batch)
    taken = [sample for step in range(steps) for sample in feed.microbatch(step, 0)]
    for epoch in range(epochs):
        assert sorted(taken[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    for step in range(steps):
        assert feed.cursor(step) == step * batch


def test_random_access_microbatches_join_to_the_step() -> None:
    whole, parts = order(100, batch=12, microbatches=1), order(100, batch=12, microbatches=4)
    for step in (5, 0, 11):
        joined = [sample for number in (0, 1, 2, 3) for sample in parts.microbatch(step, number)]
        assert joined == whole.microbatch(step, 0)
    assert order(100).microbatch(0, 0) != order(100, seed=2).microbatch(0, 0)
    assert order(6).microbatch(0, 0) != order(6).microbatch(1, 0), "the next data epoch is shuffled anew"
    for step, number in ((0, 4), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            parts.microbatch(step, number)


def test_evaluation_samples_are_disjoint_and_end() -> None:
    taken = [sample for index in range(5) for sample in evaluation_samples(23, 4, 1, index)]
    assert len(set(taken)) == 20
    with pytest.raises(IndexError, match="5 microbatches, got number 5"):
        evaluation_samples(23, 4, 1, 5)


@given(fraction=st.floats(0, 0.99), seed=st.integers(0, 1000), start=st.integers(0, 10**9), count=st.integers(1, 300))
@settings(max_examples=examples(100), deadline=None)
def test_any_run_of_pieces_gives_its_share_to_evaluation(fraction: float, seed: int, start: int, count: int) -> None:
    split = Split(fraction, seed)
    kept = sum(split.is_evaluation(index) for index in range(start, start + count))
    assert abs(kept - count * fraction) < 1.001


def test_no_fraction_keeps_nothing() -> None:
    assert not any(Split(0.0, seed).is_evaluation(index) for seed in range(20) for index in range(100))


def masked(tokens: np.ndarray, key: int = 3, fraction: float = 0.15) -> tuple[np.ndarray, np.ndarray]:
    return mask_rows(tokens, key=key, fraction=fraction, mask_id=1, end_id=0, vocabulary=500)


def test_masking_hides_the_share_and_labels_what_it_hid() -> None:
    tokens = np.full((64, 512), 7, dtype=np.int64)
    tokens[:, ::10] = 0
    inputs, labels = masked(tokens)
    chosen = labels != IGNORED
    assert (labels[chosen] == 7).all()
    assert (inputs[~chosen] == tokens[~chosen]).all()
    assert not chosen[:, ::10].any(), "ends of documents are never hidden"
    assert chosen.sum() / (tokens != 0).sum() == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == 1).mean() == pytest.approx(0.8, abs=0.02)
    assert (inputs[chosen] == 7).mean() == pytest.approx(0.1, abs=0.02)
    replaced = inputs[chosen & (inputs != 1) & (inputs != 7)]
    assert len(np.unique(replaced)) > 200
    assert replaced.max() < 500
    again, other = masked(tokens), masked(tokens, key=4)
    assert (again[0] == inputs).all()
    assert (other[0] != inputs).any()


@pytest.mark.parametrize("token", [7, 0])
def test_masking_hides_at_least_one_token(token: int) -> None:
    for key in range(20):
        tokens = np.full((1, 4), token, dtype=np.int64)
        _, labels = masked(tokens, key=key, fraction=0.001)
        assert (labels != IGNORED).sum() == 1


@given(replicas=st.integers(1, 8), steps=st.integers(1, 20))
def test_every_step_is_dealt_to_one_replica(replicas: int, steps: int) -> None:
    dealt = [Deal(number, replicas).step(step) for number in range(replicas) for step in range(steps)]
    assert sorted(dealt) == list(range(replicas * steps))
    assert [ALONE.step(step) for step in range(steps)] == list(range(steps))


@given(replicas=st.integers(1, 8), first=st.integers(0, 20), step=st.integers(0, 20))
def test_who_begins_late_goes_on_where_the_others_are(replicas: int, first: int, step: int) -> None:
    for number in range(replicas):
        assert Deal(number, replicas, first).step(step) == Deal(number, replicas).step(first + step)
