"""Whose work is checked is said, and whose is not, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fusionai.client.serving.planning import checking_sentence


def said(standbys: dict[int, str], checkable: set[int], *, spot: bool = True, peers: str = "oabo") -> str | None:
    stages = [SimpleNamespace(stage=number, peer=peer) for number, peer in enumerate(peers)]
    plan = SimpleNamespace(
        stages=stages, feed="o", standbys=[SimpleNamespace(stage=stage, peer=peer) for stage, peer in standbys.items()]
    )
    return checking_sentence(cast(Any, plan), frozenset(checkable), spot=spot)


def test_checked_stages_and_those_that_are_not_are_named():
    both = {1: "g", 2: "g"}
    assert said(both, {0, 1, 2}) == ("spot checks: warm standbys recompute part of the texts of stages 1, 2")
    assert said({1: "g"}, {0, 1, 2}) == (
        "spot checks: warm standbys recompute part of the texts of stage 1; not checked: stage 2, which has no standby"
    )
    assert said({}, {0, 1, 2}) == "not checked: stages 1, 2, which have no standby"
    assert said(both, {0, 1}) == (
        "spot checks: warm standbys recompute part of the texts of stage 1; "
        "not checked: stage 2, whose inputs or outputs no other stage sees"
    )


def test_where_nothing_is_to_be_checked_that_is_all_there_is_to_say():
    assert said({1: "g"}, {0, 1, 2}, spot=False) == "the peers' results are not checked (--checks off)"
    assert said({}, {0, 1, 2}, peers="oooo") is None
