"""What an opinion is made of: marks and norms beside each other, who is held against whom, and what leaves none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fusionai.coordination.round.verification import Check, Opinion
from fusionai.training.inspection import EXACT, Inspection, WorkTolerance, limits
from fusionai.wire.messages import Fence, Prepared, Rechecked, Sketch, SketchesOf, StageOptions, StepNorms

FENCE = Fence(1, 1, 0)
OWNER = "owner"
CHECK = Check(1, "b", "g", 4, 5)
NORMS = {"w": 3.0, "v": 4.0}
LOOSE = WorkTolerance(sketches=1e-3, norms=1e-3, state=1e-2)


def values(of: float) -> tuple[float, ...]:
    return (of, 2 * of, -of)


def got(other: int, size: float, *, forward: bool = True) -> Sketch:
    return Sketch(False, forward, other, 0, values(size))


def gave(other: int, size: float, *, forward: bool = True) -> Sketch:
    return Sketch(True, forward, other, 0, values(size))


OWN = (got(0, 1.0), gave(2, 5.0), got(2, 2.0, forward=False), gave(0, 7.0, forward=False))
"""Of stage 1, whose neighbours are 0 and 2."""


def inspection() -> Inspection:
    made = Inspection(b"s" * 32, OWNER)
    for peer, stage, sketches in (
        ("a", 0, (gave(1, 1.5), got(1, 70.0, forward=False))),
        ("b", 1, OWN),
        ("c", 2, (got(1, 50.0), gave(1, 2.5, forward=False))),
    ):
        made.hear(peer, Prepared(fence=FENCE, stage=stage, step=4, norms=NORMS, sketches=sketches))
    return made


def said(**changes: Any) -> Rechecked:
    """As an honest verifier would of an honest peer."""
    fields: dict[str, Any] = {
        "fence": FENCE,
        "stage": 1,
        "first": 4,
        "below": 5,
        "sketches": (
            SketchesOf(1, 4, OWN),
            SketchesOf(0, 4, (got(1, 70.0, forward=False),)),
            SketchesOf(2, 4, (got(1, 50.0),)),
        ),
        "norms": (StepNorms(4, NORMS),),
    }
    return Rechecked(**{**fields, **changes})


def sketches(**own: Sketch) -> dict[str, Any]:
    """Stage 1's with some replaced, by their place in `OWN`."""
    changed = list(OWN)
    for place, mark in own.items():
        changed[int(place.removeprefix("at"))] = mark
    return {"sketches": (SketchesOf(1, 4, tuple(changed)), *said().sketches[1:])}


def test_where_all_agree_there_is_nothing_to_say():
    assert inspection().opinion(CHECK, said(), EXACT) == Opinion()


def test_what_the_peer_computed_is_held_against_it_in_words():
    opinion = inspection().opinion(CHECK, said(**sketches(at1=gave(2, 5.05))), LOOSE)
    assert "activations for stage 2, microbatch 0 of step 4" in opinion.own
    assert not opinion.inputs
    assert (
        "gradients for stage 0"
        in inspection().opinion(CHECK, said(**sketches(at3=gave(0, 6, forward=False))), LOOSE).own
    )


def test_what_it_got_is_between_it_and_who_gave_it():
    assert inspection().opinion(CHECK, said(**sketches(at0=got(0, 1.1))), LOOSE).inputs == {"a"}
    assert inspection().opinion(CHECK, said(**sketches(at2=got(2, 1.1, forward=False))), LOOSE).inputs == {"c"}


def test_what_it_gave_is_between_it_and_who_got_it():
    changed = (*said().sketches[:2], SketchesOf(2, 4, (got(1, 51.0),)))
    assert inspection().opinion(CHECK, said(sketches=changed), LOOSE).links == {"c"}


def test_small_differences_are_machines_and_large_ones_are_not():
    near = said(**sketches(at1=gave(2, 5.0 * (1 + 1e-4))))
    assert inspection().opinion(CHECK, near, LOOSE) == Opinion()
    assert inspection().opinion(CHECK, near, EXACT).own


@pytest.mark.parametrize(
    "norms", [{"w": 3.1, "v": 4.0}, {"w": 3.0}, {"w": math.nan, "v": 4.0}, {"w": 3.0, "v": 4.0, "u": 1.0}]
)
def test_gradients_that_it_summed_otherwise(norms: dict[str, float]):
    assert inspection().opinion(CHECK, said(norms=(StepNorms(4, norms),)), LOOSE).own


def test_a_norm_that_is_rounding_beside_the_others_says_nothing():
    assert inspection().opinion(CHECK, said(norms=(StepNorms(4, {"w": 3.004, "v": 4.0}),)), LOOSE) == Opinion()


@pytest.mark.parametrize("what", ["state_distance", "begin_distance"])
def test_a_state_that_does_not_follow(what: str):
    assert "state" in inspection().opinion(CHECK, said(**{what: 0.05}), LOOSE).own
    assert "state" in inspection().opinion(CHECK, said(**{what: math.nan}), LOOSE).own
    assert inspection().opinion(CHECK, said(**{what: 0.005}), LOOSE) == Opinion()


@pytest.mark.parametrize(
    "changes",
    [{"reason": "no room"}, {"sketches": ()}, {"norms": ()}, {"sketches": (*said().sketches, SketchesOf(3, 4, ()))}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_whole_is_no_opinion(changes: dict[str, Any]):
    assert inspection().opinion(CHECK, said(**changes), LOOSE).void


def test_a_mark_that_the_peer_left_out_is_held_against_it():
    bare = Inspection(b"s" * 32, OWNER)
    for stage, peer in ((0, "a"), (1, "b"), (2, "c")):
        bare.hear(peer, Prepared(fence=FENCE, stage=stage, step=4, norms=NORMS))
    assert bare.opinion(CHECK, said(), LOOSE).own


def test_keys_are_given_only_where_all_words_are_there_and_the_peer_had_the_stage():
    made = inspection()
    assert {(key.stage, key.step) for key in made.keys(CHECK, (0, 2))} == {(0, 4), (1, 4), (2, 4)}
    assert made.keys(Check(1, "another", "g", 4, 5), (0, 2)) == ()
    assert made.keys(Check(1, "b", "g", 3, 5), (0, 2)) == ()
    made.forget(5)
    assert made.keys(CHECK, (0, 2)) == ()


def test_secrets_differ_between_stages_and_peers():
    made = inspection()
    assert len({made.secret_of(stage, peer) for stage in (0, 1) for peer in "ab"}) == 4


def test_limits_follow_from_numerics():
    fp32, bf16 = StageOptions(), StageOptions(precision="bf16")
    assert limits(fp32, "x", "x") == EXACT
    assert limits(fp32, "", "").sketches > EXACT.sketches
    assert EXACT.sketches < limits(fp32, "x", "y").sketches < 0.01 / 2.5 < limits(bf16, "x", "y").sketches
    packed = StageOptions(codecs=("int8",))
    assert limits(packed, "x", "y").sketches > limits(fp32, "x", "y").sketches


def test_a_peer_promises_bits_only_if_all_of_its_stages_do() -> None:
    one, options = inspection(), StageOptions()
    loose = limits(options, "", "")
    assert one.limits(options, CHECK) == loose, "nothing is known"
    for peer in (CHECK.peer, CHECK.verifier):
        one.enlisted(peer, "bits")
        one.attached(peer, "bits")
    assert one.limits(options, CHECK) == EXACT
    for fingerprint in ("bits", "", "bits"):
        one.attached(CHECK.peer, fingerprint)
    assert one.limits(options, CHECK) == loose
    one.enlisted(CHECK.peer, "bits")
    assert one.limits(options, CHECK) == EXACT, "another round, other stages"
