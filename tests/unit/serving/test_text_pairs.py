"""Texts and pairs of texts of limited length are cut as transformers cuts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from fusionai.serving.text import Tokenizer, shares
from harness.small_encoders import write_tokenizer

SHORT, LONG = "a pool of peers", "one model to all who ask for vectors and scores in the evening or by night"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(place, types=True)
    return place


@pytest.mark.parametrize("limit", [2, 3, 7, 48])
def test_a_text_is_cut_behind_its_first_tokens(limit: int, directory: Path) -> None:
    own = transformers.AutoTokenizer.from_pretrained(directory)
    assert Tokenizer.load(directory).limited(LONG, limit) == own(LONG, truncation=True, max_length=limit)["input_ids"]


@pytest.mark.parametrize("limit", [None, 5, 8, 10, 15, 48])
@pytest.mark.parametrize("texts", [(SHORT, LONG), (LONG, SHORT), (LONG, LONG), (SHORT, SHORT)])
def test_of_a_pair_the_longer_text_is_cut_first(texts: tuple[str, str], limit: int | None, directory: Path) -> None:
    own = transformers.AutoTokenizer.from_pretrained(directory)
    expected = own(*texts, truncation="longest_first" if limit else False, max_length=limit)
    tokens, second_from = Tokenizer.load(directory).pair(*texts, limit)
    assert tokens == expected["input_ids"]
    assert [int(place >= second_from) for place in range(len(tokens))] == expected["token_type_ids"]


def test_the_second_text_may_have_a_limit_of_its_own(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.pair(SHORT, LONG, most=3) == tokenizer.pair(SHORT, "one model to")


def test_far_too_long_texts_are_not_tokenized_as_a_whole(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.limited("pool " * 200_000, 9) == tokenizer.limited("pool " * 20, 9)
    assert tokenizer.is_beyond("pool " * 200_000, 9)
    assert not tokenizer.is_beyond("pool " * 200_000, 200_000)


def test_what_two_texts_keep() -> None:
    assert shares(3, 4, 9) == (3, 4)
    assert shares(3, 9, 8) == (3, 5)
    assert shares(9, 3, 8) == (5, 3)
    assert shares(9, 9, 7) == (3, 4)
    assert shares(9, 9, 0) == (0, 0)
