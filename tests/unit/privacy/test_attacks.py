"""Every token tried: what is found is what was there, and the cached trial is the plain forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusionai.privacy.attacks import DepthComparison, Matcher, matched, reconstructed
from fusionai.privacy.subject import AttackedModel, Prefixes
from harness.attacked import tiny


@pytest.fixture(scope="module")
def attacked() -> AttackedModel:
    return tiny()


def trial(attacked: AttackedModel) -> Tensor:
    return torch.randint(attacked.vocabulary, (3, 9), generator=torch.Generator().manual_seed(1))


def whole(attacked: AttackedModel, ids: Tensor) -> dict[int, Matcher]:
    seen = attacked.boundaries(ids)
    return {depth: Matcher((DepthComparison(depth, seen[depth]),)) for depth in range(attacked.depth + 1)}


def test_a_tried_token_has_the_boundary_it_has_in_the_text(attacked: AttackedModel):
    ids = trial(attacked)
    prefixes = Prefixes(attacked)
    prefixes.advance(ids[:, :5])
    prefixes.advance(ids[:, 5:6])
    tried = prefixes.tried(torch.arange(attacked.vocabulary).expand(3, -1))
    expected = attacked.boundaries(ids[:, :7])[:, :, 6]
    own = tried[:, torch.arange(3), ids[:, 6]]
    assert torch.allclose(own, expected, atol=1e-5)


def test_clean_boundaries_give_every_token_at_every_depth(attacked: AttackedModel):
    ids, places = trial(attacked), []
    found = matched(attacked, ids, 2, whole(attacked, ids), places.append)
    assert set(found) == set(range(attacked.depth + 1))
    assert all(torch.equal(tokens, ids[:, 2:]) for tokens in found.values())
    assert places == list(range(1, 8))


def test_nothing_known_not_even_a_beginning(attacked: AttackedModel):
    ids = trial(attacked)
    assert torch.equal(reconstructed(attacked, ids[:, :0], 9, whole(attacked, ids)[2]), ids)


def test_another_models_boundaries_give_little(attacked: AttackedModel):
    """The positive results above are the text's, not the matcher's."""
    ids = trial(attacked)
    found = matched(attacked, ids, 0, {0: whole(tiny(seed=5), ids)[2]}, lambda _: None)
    assert (found[0] == ids).float().mean() < 0.3


def test_what_the_model_expects_decides_where_the_boundary_says_nothing(attacked: AttackedModel):
    ids = trial(attacked)
    nothing = DepthComparison(0, torch.zeros(3, 9, 1), torch.zeros(1, attacked.width))
    found = matched(attacked, ids, 1, {0: Matcher((nothing,), expected=True)}, lambda _: None)
    assert torch.equal(found[0], attacked.expectations(ids)[:, 1:].argmax(-1))
