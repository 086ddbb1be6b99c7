"""Whose work is checked is said, and whose is not, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fusionai.client.serving_checks import checking_sentence


def said(guards: dict[int, str], checkable: set[int], *, spot: bool = True, peers: str = "oabo") -> str | None:
    stages = [SimpleNamespace(stage=number, peer=peer) for number, peer in enumerate(peers)]
    plan = SimpleNamespace(
        stages=stages, feed="o", guards=[SimpleNamespace(stage=stage, peer=peer) for stage, peer in guards.items()]
    )
    return checking_sentence(cast(Any, plan), frozenset(checkable), spot=spot)


def test_checked_stages_and_those_that_are_not_are_named():
    both = {1: "g", 2: "g"}
    assert said(both, {0, 1, 2}) == ("spot checks: machines that stand by read part of the texts of stages 1, 2 again")
    assert said({1: "g"}, {0, 1, 2}) == (
        "spot checks: machines that stand by read part of the texts of stage 1 again; "
        "nobody checks stage 2: none stands by for it"
    )
    assert said({}, {0, 1, 2}) == "nobody checks stages 1, 2: none stands by for them"
    assert said(both, {0, 1}) == (
        "spot checks: machines that stand by read part of the texts of stage 1 again; "
        "nobody checks stage 2: what goes in or comes out is seen by no other stage"
    )


def test_where_nothing_is_to_be_checked_that_is_all_there_is_to_say():
    assert said({1: "g"}, {0, 1, 2}, spot=False) == "nobody checks what the machines compute (--checks off)"
    assert said({}, {0, 1, 2}, peers="oooo") is None
