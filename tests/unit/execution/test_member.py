"""Whom a member lets in: by the placement of its round, or by that of a later one which the other side shows."""

from __future__ import annotations

import pytest

from fusionai.execution.member import Roster, refusal_of
from fusionai.primitives.errors import ExecutionError, GraphError, OutOfMemoryError, TrustError
from fusionai.primitives.ids import PeerId
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence
from harness.pool import JOB, OWNER, SEAL, peer_id

ME, ADA, BOB, EVE = (peer_id(number) for number in range(4))
PRESENT, EARLIER, LATER = Fence(2, 1, 3), Fence(2, 1, 2), Fence(3, 1, 0)


def enlist(*peers: PeerId, fence: Fence = PRESENT, standby: PeerId = BOB) -> wire.Enlist:
    places = (*peers, OWNER)
    return wire.Enlist(
        fence=fence,
        job=JOB,
        neighbours=tuple(wire.Neighbour(stage=stage, peer=peer) for stage, peer in enumerate(places)),
        standbys=(0,) if standby == ME else (),
        ticket=b"",
        placement=SEAL.placement(JOB, fence, stages=enumerate(places), standbys=[(0, standby)]),
    )


def opening(fence: Fence, *peers: PeerId) -> wire.OpenJob:
    placement = SEAL.placement(JOB, fence, stages=enumerate(peers), standbys=()) if peers else b""
    return wire.OpenJob(job=JOB, fence=fence, ticket=b"", placement=placement)


def test_before_the_first_round_what_is_shown_counts():
    roster = Roster(JOB, OWNER, ME)
    assert roster.named == frozenset()
    with pytest.raises(TrustError, match="expected a placement"):
        roster.check(ADA, opening(PRESENT))
    roster.check(ADA, opening(PRESENT, ME, ADA))
    assert roster.may_stay(ADA)
    with pytest.raises(TrustError, match=f"does not name {EVE[:8]}"):
        roster.check(EVE, opening(PRESENT, ME, ADA))


def test_in_a_round_its_placement_counts_whatever_is_shown():
    roster = Roster(JOB, OWNER, ME)
    roster.adopt(enlist(ME, ADA))
    for fence in (EARLIER, PRESENT):
        for peer in (ADA, BOB, OWNER):
            roster.check(peer, opening(fence))
        with pytest.raises(TrustError, match="does not name"):
            roster.check(EVE, opening(fence, ME, EVE))


def test_whoever_a_later_round_names_stays_until_that_round_says_otherwise():
    roster = Roster(JOB, OWNER, ME)
    roster.adopt(enlist(ME, ADA))
    roster.check(EVE, opening(LATER, ME, EVE))
    assert roster.may_stay(EVE)
    roster.adopt(enlist(ME, ADA, fence=Fence(2, 1, 4)))
    assert roster.may_stay(EVE), "it came for a round that is still to come"
    roster.adopt(enlist(ME, ADA, fence=LATER))
    assert not roster.may_stay(EVE)
    assert roster.may_stay(ADA)
    roster.adopt(enlist(ME, EVE, fence=Fence(4, 1, 0)))
    assert roster.may_stay(EVE)
    assert not roster.may_stay(ADA)


def test_a_round_that_is_refused_changes_nothing():
    roster = Roster(JOB, OWNER, ME)
    roster.adopt(enlist(ME, ADA))
    wrong = enlist(ME, EVE, fence=LATER)
    for changed in (
        wire.Enlist(**{**_fields(wrong), "placement": b""}),
        wire.Enlist(**{**_fields(wrong), "fence": PRESENT}),
        wire.Enlist(**{**_fields(wrong), "standbys": (0,)}),
        wire.Enlist(**{**_fields(wrong), "neighbours": enlist(ME, ADA).neighbours}),
    ):
        with pytest.raises(TrustError):
            roster.adopt(changed)
    assert roster.named == {ME, ADA, BOB, OWNER}


def test_a_standby_must_be_told_all_that_it_standbys():
    roster = Roster(JOB, OWNER, ME)
    told = enlist(ADA, BOB, standby=ME)
    with pytest.raises(TrustError, match="the standbys of this round differ"):
        roster.adopt(wire.Enlist(**{**_fields(told), "standbys": ()}))
    roster.adopt(told)


def _fields(message: wire.Enlist) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (MemoryError("no room"), "out_of_memory", "MemoryError: no room"),
        (OutOfMemoryError("the worker's memory does not suffice."), "out_of_memory", "the worker's memory"),
        (GraphError("a false shape."), "bad_graph", "a false shape."),
        (ExecutionError("a false size."), "failed", "a false size."),
        (ZeroDivisionError("a bug"), "failed", "ZeroDivisionError: a bug"),
    ],
)
def test_a_stage_reports_what_it_lacks_in_training_and_in_serving(error: Exception, code: str, reason: str):
    found, words = refusal_of(error)
    assert found == code
    assert words.startswith(reason)
