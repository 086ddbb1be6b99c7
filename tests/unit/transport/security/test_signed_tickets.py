"""Tickets: verified offline, bound to job, peer and date, not forgeable from anything else the authority signs."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.transport.security.identity import public_bytes
from fusionai.transport.security.signed import ExpiredTicket, Ticket, sign_ticket, verify_ticket

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
AUTHORITY = public_bytes(KEY.public_key())
PEER = PeerId("a" * 52)
JOB = JobId("tiny-00c0ffee")
TICKET = Ticket(JOB, PEER, 3, 7, "stage", 1000.0, ("tcp://192.0.2.7:4711",))


def test_a_ticket_holds_until_it_expires():
    data = sign_ticket(TICKET, KEY)
    assert verify_ticket(data, AUTHORITY, now_wall_s=999.9, job=JOB, peer=PEER) == TICKET
    with pytest.raises(ExpiredTicket, match="expired 5 s ago"):
        verify_ticket(data, AUTHORITY, now_wall_s=1005.0)
    with pytest.raises(ExpiredTicket):
        verify_ticket(data, AUTHORITY, now_wall_s=1000.0)


def test_a_ticket_is_for_one_peer_and_one_job():
    data = sign_ticket(TICKET, KEY)
    with pytest.raises(TrustError, match="for peer bbbbbbbb, got one for aaaaaaaa"):
        verify_ticket(data, AUTHORITY, now_wall_s=0.0, peer=PeerId("b" * 52))
    with pytest.raises(TrustError, match="for job other-1, got one for tiny-00c0ffee"):
        verify_ticket(data, AUTHORITY, now_wall_s=0.0, job=JobId("other-1"))


def test_no_changed_byte_goes_unnoticed():
    data = sign_ticket(TICKET, KEY)
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 1
        with pytest.raises(TrustError, match="signed by this pool's authority"):
            verify_ticket(bytes(changed), AUTHORITY, now_wall_s=0.0)


def test_another_authoritys_ticket_does_not_hold():
    with pytest.raises(TrustError, match="signed by this pool's authority"):
        verify_ticket(sign_ticket(TICKET, Ed25519PrivateKey.generate()), AUTHORITY, now_wall_s=0.0)


def test_a_signature_over_the_bare_content_does_not_hold():
    content = msgspec.msgpack.encode(TICKET)
    with pytest.raises(TrustError, match="signed by"):
        verify_ticket(KEY.sign(content) + content, AUTHORITY, now_wall_s=0.0)


@pytest.mark.parametrize("size", [0, 1, 64, 16_385, 2**20])
def test_a_ticket_has_a_size(size: int):
    with pytest.raises(TrustError, match="65 to 16384 bytes"):
        verify_ticket(bytes(size), AUTHORITY, now_wall_s=0.0)


@pytest.mark.parametrize(
    "content",
    [
        "text",
        [1],
        [JOB, PEER, 3, 7, "admin", 1.0, []],
        [JOB, PEER, -2, 7, "stage", 1.0, []],
        [JOB, "a", 3, 7, "stage", 1.0, []],
    ],
)
def test_signed_content_must_still_be_a_ticket(content: object):
    data = msgspec.msgpack.encode(content)
    signed = KEY.sign(b"fusionai ticket 2\x00" + data) + data
    with pytest.raises(TrustError, match="of this version"):
        verify_ticket(signed, AUTHORITY, now_wall_s=0.0)


@pytest.mark.parametrize(("stage", "role"), [(-1, "stage"), (0, "driver")])
def test_stage_minus_one_is_the_driver_and_nobody_else(stage: int, role: str):
    wrong = Ticket(JOB, PEER, stage, 7, role, 1000.0, ())
    with pytest.raises(TrustError, match="stage -1 exactly for a driver"):
        sign_ticket(wrong, KEY)
    content = msgspec.msgpack.encode(wrong)
    with pytest.raises(TrustError, match="stage -1 exactly for a driver"):
        verify_ticket(KEY.sign(b"fusionai ticket 2\x00" + content) + content, AUTHORITY, now_wall_s=0.0)


def test_a_driver_has_a_ticket_too():
    ticket = Ticket(JOB, PEER, -1, 7, "driver", 1000.0, ())
    assert verify_ticket(sign_ticket(ticket, KEY), AUTHORITY, now_wall_s=0.0, peer=PEER) == ticket
