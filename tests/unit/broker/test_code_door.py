"""The broker's side of joining with a code: what strangers get for which messages, and what its owner reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import pytest

from fusionai.broker.code_door import CodeDoor
from fusionai.coordination.broker.join_code import CODE_LIFETIME_S, MAX_EXCHANGES, MAX_TRIES
from fusionai.transport.security.code_exchange import CodeKey, NewcomerExchange
from fusionai.transport.security.identity import peer_of
from fusionai.wire.messages import CodeAccepted, CodeAnswer, CodeOffer, CodeProof, Message, Refused
from harness.virtual_clock import VirtualClock

KEY, BROKER = bytes(range(32)), peer_of(bytes([7]) * 32)


@dataclass
class Stand:
    """A door with the code 123456, and what came of it."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    notices: list[str] = field(default_factory=list)
    invited: int = 0

    @cached_property
    def door(self) -> CodeDoor:
        def invite() -> str:
            self.invited += 1
            return f"invitation {self.invited}"

        door = CodeDoor(KEY, BROKER, self.clock, invite, notice=self.notices.append, draw=lambda: "123456")
        door.make()
        return door

    def offer(self, connection: int, code: str = "123456") -> tuple[CodeKey | None, Message]:
        exchange = NewcomerExchange(code, KEY, BROKER)
        answer = self.door.answer(connection, CodeOffer(share=exchange.share))
        return exchange.key(answer.share) if isinstance(answer, CodeAnswer) else None, answer

    def join(self, connection: int, code: str = "123456") -> tuple[CodeKey | None, Message]:
        key, answer = self.offer(connection, code)
        return key, answer if key is None else self.door.answer(connection, CodeProof(proof=key.proof()))


def refused(message: Message) -> str:
    assert isinstance(message, Refused)
    assert message.code == "bad_code"
    return message.reason


def test_the_code_gives_one_invitation():
    stand = Stand()
    key, accepted = stand.join(1)
    assert isinstance(accepted, CodeAccepted)
    assert key is not None
    assert key.unseal(accepted.sealed) == b"invitation 1"
    assert "No join code is open" in refused(stand.join(2)[1])
    assert stand.invited == 1
    assert stand.notices == ["The join code was used: a machine got an invitation with it."]


def test_three_wrong_codes_are_the_end_and_are_said():
    stand = Stand()
    reasons = [refused(stand.join(number, "000000")[1]) for number in range(MAX_TRIES)]
    assert ["2 more" in reasons[0], "1 more" in reasons[1], "dead now" in reasons[2]] == [True] * 3
    assert "No join code is open" in refused(stand.join(9)[1])
    assert stand.invited == 0
    assert len(stand.notices) == 1
    assert "is dead" in stand.notices[0]


def test_many_connections_at_the_same_time_have_three_tries_together():
    stand = Stand()
    begun = [(number, stand.offer(number, "000000")[0]) for number in range(8)]
    answers = [stand.door.answer(number, CodeProof(proof=key.proof())) for number, key in begun if key is not None]
    assert len(answers) == 8
    assert sum("No join code is open" in refused(answer) for answer in answers) == 8 - MAX_TRIES


def test_a_code_expires_before_and_during_an_exchange():
    stand = Stand()
    key, _ = stand.offer(1)
    assert key is not None
    stand.clock.advance(CODE_LIFETIME_S)
    assert "expired" in refused(stand.door.answer(1, CodeProof(proof=key.proof())))
    stand.door.make()
    stand.clock.advance(CODE_LIFETIME_S)
    assert "expired" in refused(stand.offer(2)[1])
    assert stand.invited == 0


def test_a_new_code_ends_the_old_one_and_its_exchanges():
    stand = Stand()
    key, _ = stand.offer(1)
    stand.door.draw = lambda: "654321"
    assert stand.door.make() == "654321"
    assert key is not None
    answer = stand.door.answer(1, CodeProof(proof=key.proof()))
    assert isinstance(answer, Refused)
    assert answer.code == "bad_message"
    refused(stand.join(2)[1])
    assert isinstance(stand.join(3, "654321")[1], CodeAccepted)


def test_shares_without_proofs_run_out():
    stand = Stand()
    for number in range(MAX_EXCHANGES):
        assert isinstance(stand.offer(number)[1], CodeAnswer)
        stand.door.ended(number)
    assert "tried too often" in refused(stand.offer(99)[1])
    assert "is dead" in stand.notices[0]


@pytest.mark.parametrize("share", [b"A" + b"\xff" * 32, b"B" + bytes(32), b"A" + bytes(32)])
def test_a_share_that_is_none_costs_a_try(share: bytes):
    stand = Stand()
    assert isinstance(stand.door.answer(1, CodeOffer(share=share)), CodeAnswer)
    assert "2 more tries" in refused(stand.door.answer(1, CodeProof(proof=bytes(32))))


def test_a_proof_needs_a_share_and_a_connection_has_one_exchange():
    stand = Stand()
    answer = stand.door.answer(1, CodeProof(proof=bytes(32)))
    assert isinstance(answer, Refused)
    assert answer.code == "bad_message"
    stand.offer(1)
    assert "One exchange" in refused(stand.offer(1)[1])
    stand.door.ended(1)
    assert isinstance(stand.door.answer(1, CodeProof(proof=bytes(32))), Refused)


def test_without_a_code_nothing_is_computed():
    door = CodeDoor(KEY, BROKER, VirtualClock(), lambda: "", draw=lambda: "123456")
    assert "No join code is open" in refused(door.answer(1, CodeOffer(share=b"A" + bytes(32))))
