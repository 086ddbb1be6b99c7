"""Which texts are read again, one after the other, and what an answer about a text that is gone is worth."""

from __future__ import annotations

from fusionai.coordination.round.verification import NEEDED, Inspector, Opinion, Reputation
from fusionai.coordination.serving.admission import BatchLimits
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.checks import MOST_WAITING, TextChecks
from fusionai.coordination.serving.sessions import SessionSpec

PLACES = {0: "me", 1: "a", 2: "b", 3: "me"}
GUARDS = {1: "g", 2: "h"}
FINE = Opinion()
WRONG = Opinion(own="activations differ", links=frozenset({"b"}))


def stand(pages: int = 400) -> tuple[Batcher, TextChecks]:
    limits = BatchLimits(
        pages=pages, page_tokens=4, sessions=8, pass_tokens=16, in_flight=1, chunk_tokens=8, queue=64, prefix=False
    )
    return Batcher(limits, holds=True), TextChecks(Inspector(b"s" * 32, "me", 1))


def over(batcher: Batcher, *numbers: int) -> None:
    """Texts of two passes."""
    for number in numbers:
        batcher.submit(SessionSpec(number=number, scope="", prompt=(1, 2, 3), max_tokens=2), 0.0)
        while (plan := batcher.next_pass(0.0)) is not None:
            batcher.returned(plan.number, dict.fromkeys(plan.wanted_sessions, (7,)), (), 0.0)


def test_texts_are_checked_one_after_the_other_at_all_with_standby_stages():
    batcher, checks = stand()
    over(batcher, 1, 2)
    due = checks.due(batcher, PLACES, GUARDS)
    assert [(one.stage, one.peer, one.verifier, one.first, one.below) for one in due] == [
        (1, "a", "g", 0, 2),
        (2, "b", "h", 0, 2),
    ]
    assert checks.due(batcher, PLACES, GUARDS) == ()
    for one in due:
        assert batcher.is_held(1)
        assert checks.answered(batcher, one, FINE) is not None
    assert not batcher.is_held(1)
    assert checks.answered(batcher, due[0], WRONG) is None
    assert [one.first for one in checks.due(batcher, PLACES, GUARDS)] == [2, 2]
    assert checks.texts == 2
    assert (checks.inspector.tasks, checks.inspector.checked_tasks) == (8, 4)


def test_without_standbys_nothing_is_held():
    batcher, checks = stand()
    over(batcher, 1)
    assert checks.due(batcher, PLACES, {}) == ()
    assert not batcher.is_held(1)
    assert checks.inspector.tasks == 0


def test_few_texts_of_who_is_trusted_are_checked_and_the_others_let_go():
    batcher, checks = stand()
    checks.inspector.reputations = dict.fromkeys("ab", Reputation(10 * NEEDED))
    drawn = 0
    for number in range(1, 201):
        over(batcher, number)
        for one in checks.due(batcher, PLACES, GUARDS):
            drawn += 1
            checks.answered(batcher, one, FINE)
        assert not batcher.is_held(number)
    assert 0 < drawn < 120


def test_no_more_wait_than_may():
    batcher, checks = stand()
    over(batcher, *range(1, MOST_WAITING + 3))
    assert checks.due(batcher, PLACES, GUARDS)
    assert [batcher.is_held(number) for number in (1, MOST_WAITING, MOST_WAITING + 1)] == [True, True, False]


def test_a_text_that_waited_while_much_was_computed_is_not_checked():
    """Stages have marks of so much, and no more: none of them is to be taken for silent."""
    batcher, checks = stand(pages=40)
    over(batcher, 1, 2, 3)
    due = checks.due(batcher, PLACES, GUARDS)
    batcher.computed_positions += 40 * 4 + 1
    for one in due:
        checks.answered(batcher, one, FINE)
    assert checks.due(batcher, PLACES, GUARDS) == ()
    assert not batcher.is_held(2)
    assert not batcher.is_held(3)


def test_what_is_said_of_a_text_whose_pages_are_gone_says_nothing():
    batcher, checks = stand()
    over(batcher, 1)
    first, second = checks.due(batcher, PLACES, GUARDS)
    batcher.let_go(1)
    found = checks.answered(batcher, first, WRONG)
    assert found is not None
    assert (found.outcome, found.faulty_peer, found.again) == ("void", "", None)
    assert checks.answered(batcher, second, FINE) is not None
    assert checks.inspector.checked_tasks == 0


def test_an_accusation_holds_the_text_until_the_owner_has_read_it():
    batcher, checks = stand()
    over(batcher, 1)
    first, second = checks.due(batcher, PLACES, GUARDS)
    checks.answered(batcher, second, FINE)
    found = checks.answered(batcher, first, WRONG)
    assert found is not None
    assert found.again is not None
    assert found.again.verifier == "me"
    assert batcher.is_held(1)
    settled = checks.answered(batcher, found.again, WRONG)
    assert settled is not None
    assert settled.faulty_peer == "a"
    assert not batcher.is_held(1)


def test_a_round_ends_all_checks():
    batcher, checks = stand()
    over(batcher, 1, 2)
    (first, _) = checks.due(batcher, PLACES, GUARDS)
    checks.drop()
    batcher.rewind()
    assert checks.answered(batcher, first, WRONG) is None
    assert checks.due(batcher, PLACES, GUARDS) == ()
    assert not batcher.is_held(2)
