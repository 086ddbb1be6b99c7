"""Who is introduced to whom, and what each of the two gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.broker.reachability import Introducer
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.requests import Refusal
from fusionai.coordination.broker.state import BrokerRules, BrokerState
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Remote
from fusionai.transport.security.certificates import Authority, load_authority
from fusionai.transport.security.identity import peer_of
from fusionai.transport.security.signed import LIFETIME_S, PairingToken, verify_pairing
from fusionai.wire.messages import Meet

NOW_S = 1_000_000.0
ASKING, THERE, OLD, GONE, NOBODY = (peer_of(bytes([number]) * 32) for number in range(1, 6))
CALLER = Remote(ASKING, "member", "192.0.2.7", 5555)
RELAYED = ("tcp://10.0.0.2:1", "relay://198.51.100.1:4711")


def member(peer: PeerId, addresses: tuple[str, ...], phase: str = "idle") -> Member:
    return Member(entity="member", phase=phase, peer=peer, addresses=addresses)


def desk() -> BrokerState:
    members = [member(ASKING, ()), member(THERE, RELAYED), member(OLD, RELAYED[:1]), member(GONE, RELAYED)]
    return BrokerState(
        rules=BrokerRules(pool="home", broker=peer_of(bytes(32))),
        pool=Pool(members={one.peer: one for one in members}),
        links={ASKING: 1, THERE: 2, OLD: 3},
    )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return load_authority(tmp_path, "home", now_wall_s=NOW_S)


def test_each_side_gets_a_token_of_its_own_for_the_same_meeting(authority: Authority):
    introducer = Introducer(authority, relays=True, draw=lambda: b"m" * 16)
    mine = (f"quic://{ASKING}@192.0.2.7:9",)
    answer, connection, notice = introducer.introduce(
        desk(), CALLER, Meet(peer=THERE, addresses=mine), now_wall_s=NOW_S
    )
    assert connection == 2
    assert (answer.addresses, notice.peer, notice.addresses) == (RELAYED, ASKING, mine)
    until_s = NOW_S + LIFETIME_S
    tokens = [
        verify_pairing(data, authority.public_key, now_wall_s=until_s - 1) for data in (answer.token, notice.token)
    ]
    assert tokens == [
        PairingToken(b"m" * 16, ASKING, THERE, "dials", until_s),
        PairingToken(b"m" * 16, THERE, ASKING, "answers", until_s),
    ]


def test_meetings_are_drawn_anew(authority: Authority):
    introducer = Introducer(authority, relays=True)
    meetings = {
        verify_pairing(
            introducer.introduce(desk(), CALLER, Meet(peer=THERE), now_wall_s=NOW_S)[0].token,
            authority.public_key,
            now_wall_s=NOW_S,
        ).meeting
        for _ in range(20)
    }
    assert len(meetings) == 20


def test_a_broker_without_a_relay_gives_no_tokens(authority: Authority):
    answer, _, notice = Introducer(authority).introduce(desk(), CALLER, Meet(peer=THERE), now_wall_s=NOW_S)
    assert (answer.token, notice.token) == (b"", b"")


@pytest.mark.parametrize(
    ("whom", "code"),
    [(ASKING, "unknown_peer"), (NOBODY, "unknown_peer"), (GONE, "unknown_peer"), (OLD, "not_authorised")],
)
def test_nobody_else_is_introduced(authority: Authority, whom: PeerId, code: str):
    with pytest.raises(Refusal) as refused:
        Introducer(authority, relays=True).introduce(desk(), CALLER, Meet(peer=whom), now_wall_s=NOW_S)
    assert refused.value.message.code == code


def test_nobody_is_made_to_send_to_a_third(authority: Authority):
    elsewhere = (f"quic://{ASKING}@198.51.100.9:9", "tcp://198.51.100.9:9", "192.0.2.7", f"quic://{ASKING}@192.0.2.7:9")
    _, _, notice = Introducer(authority).introduce(
        desk(), CALLER, Meet(peer=THERE, addresses=elsewhere), now_wall_s=NOW_S
    )
    assert notice.addresses == elsewhere[-1:]


def test_a_stranger_is_not_introduced(authority: Authority):
    with pytest.raises(Refusal):
        Introducer(authority).introduce(desk(), Remote(None, "stranger"), Meet(peer=THERE), now_wall_s=NOW_S)
