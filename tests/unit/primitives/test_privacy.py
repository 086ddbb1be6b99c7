from __future__ import annotations

from fusionai.primitives.privacy import LEVELS, STAYS, keeps_ends


def test_levels_are_in_order_and_each_says_what_stays() -> None:
    assert LEVELS == ("open", "encrypted", "split", "split-k", "trusted")
    assert tuple(STAYS) == LEVELS


def test_what_keeps_the_models_ends() -> None:
    assert [level for level in LEVELS if keeps_ends(level)] == ["split", "split-k"]
