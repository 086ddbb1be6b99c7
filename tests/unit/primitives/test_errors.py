"""What a message says of an unknown name."""

from __future__ import annotations

from fusionai.primitives.errors import LISTED, nearest


def test_a_similar_name_is_suggested():
    assert nearest("adda", ["bob", "ada"]) == "did you mean 'ada'?"


def test_without_a_similar_name_the_known_ones_are_listed():
    assert nearest("x", ["bob", "ada"]) == "known: ada, bob."
    assert nearest("x", []) == "known: none."


def test_a_long_list_is_cut():
    known = [f"layer{number:03}" for number in range(LISTED + 2)]
    assert nearest("x", known) == f"known: {', '.join(known[:LISTED])} and 2 more."
