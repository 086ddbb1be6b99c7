"""What a gradient says of its texts: all of them while they are fewer than a weight's inputs, nothing beyond."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusionai.primitives.errors import ModelError
from fusionai.privacy.attacks import check_invertible, gradients_of, in_order, texts_of
from fusionai.privacy.audit import low_rank
from fusionai.privacy.subject import AttackedModel
from harness.attacked import tiny


@pytest.fixture(scope="module")
def attacked() -> AttackedModel:
    return tiny(width=64)


def batch(attacked: AttackedModel, texts: int, tokens: int) -> Tensor:
    return torch.randint(attacked.vocabulary, (texts, tokens + 1), generator=torch.Generator().manual_seed(2))


def right(attacked: AttackedModel, ids: Tensor, change=lambda gradient: gradient) -> float:
    texts, tokens = ids.shape[0], ids.shape[1] - 1
    found = texts_of(attacked, gradients_of(attacked, ids).changed(change), texts, tokens)
    truth = [tuple(row) for row in ids[:, :-1].tolist()]
    placed = in_order(found, truth)
    return sum(a == b for guess, text in zip(placed, truth, strict=True) for a, b in zip(guess, text, strict=True)) / (
        texts * tokens
    )


@pytest.mark.parametrize(("texts", "tokens"), [(1, 8), (3, 8)])
def test_texts_come_back_whole(attacked: AttackedModel, texts: int, tokens: int):
    assert right(attacked, batch(attacked, texts, tokens)) == 1


def test_more_tokens_than_inputs_hide_each_other(attacked: AttackedModel):
    assert right(attacked, batch(attacked, 12, 6)) < 0.2


def test_an_adapters_few_rows_span_less_than_the_texts(attacked: AttackedModel):
    ids = batch(attacked, 3, 8)
    assert right(attacked, ids, low_rank(4, seed=0)) < 0.5


def test_no_weight_is_left_asking_for_gradients(attacked: AttackedModel):
    gradients_of(attacked, batch(attacked, 1, 4))
    assert not any(parameter.requires_grad for parameter in attacked.model.parameters())


def test_a_batch_has_no_order():
    assert in_order([(4, 5, 6), (1, 2, 9)], [(1, 2, 3), (4, 5, 6)]) == [(1, 2, 9), (4, 5, 6)]
    assert in_order([(1, 2)], [(1, 2), (3, 4)]) == [(1, 2), ()]


def test_a_model_with_one_block_is_refused_before_the_work():
    check_invertible(tiny())
    with pytest.raises(ModelError, match="one block"):
        check_invertible(tiny(layers=1))
