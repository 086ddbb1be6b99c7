"""A malicious broker at a peer's door: it signs tickets for whomever it likes, and lets nobody in.

It holds the pool's authority, so certificates and tickets are its own to give; what it has not is the job owner's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.transport.security.signed import Seal
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence
from harness.pool import JOB, OWNER, peer_id
from harness.stand import FENCE, NEIGHBOUR, Stand, receive, signed

INSERTED = peer_id(5)
LATER = Fence(2, 1, 0)
BROKER_KEY = Ed25519PrivateKey.from_private_bytes(b"b" * 32)


def with_stand(body: Callable[[Stand], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Stand() as stand:
            await body(stand)

    asyncio.run(run())


def in_place_of_the_neighbour(stand: Stand) -> tuple[wire.Neighbour, ...]:
    return tuple(
        wire.Neighbour(stage=one.stage, peer=INSERTED if one.peer == NEIGHBOUR else one.peer)
        for one in stand.neighbours()
    )


def brokers_own(stand: Stand, fence: Fence) -> bytes:
    places = [(one.stage, one.peer) for one in in_place_of_the_neighbour(stand)]
    return Seal(BROKER_KEY, "trusted").placement(JOB, fence, stages=places, standbys=())


SHOWN: dict[str, Callable[[Stand, Fence], bytes]] = {
    "nothing": lambda _stand, _fence: b"",
    "the owner's, which does not name it": lambda stand, fence: signed(stand.neighbours(), fence),
    "one that the broker signed": brokers_own,
    "one of another job of the owner": lambda stand, fence: signed(
        in_place_of_the_neighbour(stand), fence, job="job-2"
    ),
    "one of an earlier round": lambda stand, _fence: signed(in_place_of_the_neighbour(stand), Fence(1, 0, 9)),
    "the owner's with a changed byte": lambda stand, fence: _changed(signed(in_place_of_the_neighbour(stand), fence)),
}


def _changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("fence", [FENCE, LATER], ids=["present round", "later round"])
@pytest.mark.parametrize("stream", ["tensors", "state"])
@pytest.mark.parametrize("shown", SHOWN)
def test_a_key_that_the_owner_did_not_place_is_not_let_in(shown: str, stream: wire.Stream, fence: Fence):
    async def body(stand: Stand) -> None:
        await stand.running()
        placement = SHOWN[shown](stand, fence)
        _, answer = await stand.open(stream, as_peer=INSERTED, fence=fence, placement=placement)
        assert isinstance(answer, wire.Refused)
        assert answer.code == "bad_placement", answer

    with_stand(body)


def test_a_neighbour_that_heard_of_the_next_round_first_is_let_in_by_what_it_shows():
    async def body(stand: Stand) -> None:
        await stand.running()
        placement = signed(in_place_of_the_neighbour(stand), LATER)
        _, answer = await stand.open("tensors", as_peer=INSERTED, fence=LATER, placement=placement)
        assert isinstance(answer, wire.Done)

    with_stand(body)


def test_a_placement_of_an_earlier_plan_is_replayed_in_vain():
    """Whoever had a part in plan 1 and has none in plan 2."""

    async def body(stand: Stand) -> None:
        running = await stand.running()
        old = signed(stand.neighbours(), FENCE)
        places = in_place_of_the_neighbour(stand)
        await stand.enlisted(running.control, fence=LATER, neighbours=places)
        for fence, code in ((FENCE, "stale_fence"), (LATER, "bad_placement"), (Fence(3, 1, 0), "bad_placement")):
            _, answer = await stand.open("tensors", as_peer=NEIGHBOUR, fence=fence, placement=old)
            assert isinstance(answer, wire.Refused)
            assert answer.code == code

    with_stand(body)


WRONG: dict[str, Callable[[Stand], dict[str, Any]]] = {
    "no placement": lambda _stand: {"placement": b""},
    "the broker's": lambda stand: {
        "placement": brokers_own(stand, FENCE),
        "neighbours": in_place_of_the_neighbour(stand),
    },
    "another round's": lambda stand: {"placement": signed(stand.neighbours(), LATER)},
    "another job's": lambda stand: {"placement": signed(stand.neighbours(), FENCE, job="job-2")},
    "a peer swapped beside it": lambda stand: {
        "placement": signed(stand.neighbours(), FENCE),
        "neighbours": in_place_of_the_neighbour(stand),
    },
    "a standby slipped in beside it": lambda stand: {"placement": signed(stand.neighbours(), FENCE), "standbys": (1,)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_member_takes_no_part_under_a_placement_that_does_not_hold(wrong: str):
    async def body(stand: Stand) -> None:
        control, _ = await stand.open()
        await control.send(stand.enlist(**WRONG[wrong](stand)))
        answer = (await receive(control)).message
        assert isinstance(answer, wire.Refused)
        assert answer.code == "bad_placement", answer
        await control.send(stand.attach()[0], tuple(stand.attach()[1].values()))
        answer = (await receive(control)).message
        assert isinstance(answer, wire.StageFailed), "not enlisted, so nothing is attached"
        await stand.enlisted(control)

    with_stand(body)


def test_a_ticket_of_the_driver_for_another_key_opens_nothing():
    async def body(stand: Stand) -> None:
        await stand.running()
        ticket = stand.pool.ticket(INSERTED, driver=True)
        for stream in ("control", "state", "tensors"):
            _, answer = await stand.open(stream, as_peer=INSERTED, ticket=ticket)
            assert isinstance(answer, wire.Refused)
            assert answer.code == "not_authorised"

    with_stand(body)


def test_the_owner_needs_no_placement():
    async def body(stand: Stand) -> None:
        await stand.attached()
        _, answer = await stand.open("tensors", as_peer=OWNER, placement=b"")
        assert isinstance(answer, wire.Done)

    with_stand(body)
