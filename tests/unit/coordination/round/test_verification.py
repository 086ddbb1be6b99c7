"""Whose word counts against whose: the table of outcomes, the owner as last resort, disputes, and the honest stay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.round.verification import (
    NEEDED,
    OUTCOMES,
    Check,
    CheckVerdict,
    Inspector,
    Opinion,
    Reputation,
    outcome_of,
)

OWNER = "owner"
PLACES = {0: "a", 1: "b", 2: "c", 3: OWNER}
GUARDS = {0: "g", 1: "h", 2: "i"}
FINE = Opinion()
WRONG = Opinion(own="activations differ")


def inspector() -> Inspector:
    return Inspector(b"s" * 32, OWNER, tasks_per_step=3)


def due(of: Inspector, first: int = 0) -> dict[int, Check]:
    return {check.stage: check for check in of.due(PLACES, GUARDS, first, first + 2)}


def answer(of: Inspector, check: Check, *opinions: Opinion) -> CheckVerdict:
    """The verifier's, and the owner's where that is asked."""
    found = of.answered(check, opinions[0])
    for opinion in opinions[1:]:
        assert found is not None
        assert found.again is not None
        assert found.again.verifier == OWNER
        found = of.answered(found.again, opinion)
    assert found is not None
    return found


def test_all_newcomers_are_checked_by_others_and_the_line_waits():
    of = inspector()
    checks = due(of)
    assert {(c.stage, c.peer, c.verifier) for c in checks.values()} == {(s, PLACES[s], GUARDS[s]) for s in GUARDS}
    assert of.hold == 0
    for check in checks.values():
        answer(of, check, FINE)
    assert of.hold is None
    assert of.tasks == of.checked_tasks == 18


def test_nobody_checks_itself_and_nobody_checks_the_owner():
    checks = inspector().due({0: "a", 1: OWNER}, {0: "a", 1: "g"}, 0, 2)
    assert checks == ()


@pytest.mark.parametrize(("agree", "outcome"), OUTCOMES.items(), ids=str)
def test_the_table(agree: tuple[bool, bool, bool], outcome: str):
    inputs, own, links = agree
    opinion = Opinion(
        frozenset() if inputs else frozenset({"b"}), "" if own else "wrong", frozenset() if links else frozenset({"c"})
    )
    assert outcome_of(opinion) == outcome


def test_the_table_is_whole_and_void_is_no_word():
    assert set(OUTCOMES) == set(itertools.product((True, False), repeat=3))
    assert outcome_of(Opinion(own="wrong", void="no room")) == "void"


def test_whom_the_owner_contradicts_is_the_faulty_peer():
    of = inspector()
    found = answer(of, due(of)[1], WRONG, WRONG)
    assert (found.faulty_peer, found.trusted) == ("b", 0)
    of = inspector()
    found = answer(of, due(of)[1], WRONG, FINE)
    assert found.faulty_peer == "h"
    assert of.reputations["b"].valid == 1


def test_what_it_did_since_it_was_last_found_honest_is_void():
    of = inspector()
    for check in due(of).values():
        answer(of, check, FINE)
    found = answer(of, due(of, 2)[2], WRONG, WRONG)
    assert (found.faulty_peer, found.trusted) == ("c", 2)
    assert of.open == {}


def test_without_the_owners_word_nobody_is_guilty_and_nobody_trusted():
    of = inspector()
    of.reputations = {"b": Reputation(30), "h": Reputation(30)}
    of.open[1] = Check(1, "b", "h", 0, 2)
    found = answer(of, of.open[1], WRONG, Opinion(void="no room"))
    assert (found.outcome, found.faulty_peer) == ("void", "")
    assert of.reputations["b"].valid == of.reputations["h"].valid == 0


def test_two_that_contradict_each_other_are_both_doubted_and_the_disputed_goes_the_second_time():
    of = inspector()
    found = answer(of, due(of)[1], Opinion(links=frozenset({"c"})))
    assert (found.outcome, found.faulty_peer, found.partners) == ("disputed", "", ("c",))
    assert of.reputations["b"].chance(1) == of.reputations["c"].chance(1) == 1.0
    of.drop()
    found = answer(of, due(of, 2)[1], Opinion(links=frozenset({"c"})))
    assert found.faulty_peer == "b"


def test_who_stands_against_two_others_goes():
    of = inspector()
    checks = due(of)
    assert answer(of, checks[0], Opinion(links=frozenset({"b"}))).faulty_peer == ""
    assert answer(of, checks[2], Opinion(inputs=frozenset({"b"}))).faulty_peer == "b"


def test_against_the_owners_own_stages_nobodys_word_stands_once_the_owner_has_seen_it_itself():
    of, against = inspector(), Opinion(links=frozenset({OWNER}))
    assert answer(of, due(of)[2], against, against).faulty_peer == "c"
    of = inspector()
    assert answer(of, due(of)[2], against, FINE).faulty_peer == "i"


def test_an_answer_to_nothing_changes_nothing():
    of = inspector()
    check = due(of)[1]
    of.drop()
    assert of.answered(check, WRONG) is None
    assert not of.reputations


honest = st.sampled_from([FINE, Opinion(void="it left")])


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[honest] * 3), min_size=1, max_size=40), st.binary(min_size=32, max_size=32))
def test_who_is_never_contradicted_is_never_excluded(rounds: list[tuple[Opinion, ...]], secret: bytes):
    of = Inspector(secret, OWNER, 3)
    for number, opinions in enumerate(rounds):
        for stage, check in due(of, 2 * number).items():
            found = of.answered(check, opinions[stage])
            assert found is not None
            assert not found.faulty_peer
        assert of.hold is None
    assert not of.faulty_peers
    assert of.checked_tasks <= of.tasks


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_a_verifier_alone_excludes_nobody(data: st.DataObject):
    """Whatever one standby says of a stage: as long as the owner's machine finds it right, its peer stays."""
    of = inspector()
    for number in range(NEEDED):
        for stage, check in due(of, 2 * number).items():
            if check.verifier == "h" and data.draw(st.booleans()):
                assert answer(of, check, WRONG, FINE).faulty_peer == "h"
                return
            assert answer(of, check, FINE).faulty_peer == "", stage
    assert "b" not in of.faulty_peers


def test_steps_that_are_done_again_are_nobodys_merit():
    of = inspector()
    for check in due(of).values():
        answer(of, check, FINE)
    of.went_back(1)
    assert answer(of, due(of, 1)[0], WRONG, WRONG).trusted == 1
