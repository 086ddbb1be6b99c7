"""Signed placements: the job owner's word, for one round of one job."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PeerId
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.signed import Seal, SignedPlacement, sign_placement, verify_placement
from fusionai.wire.base import MAX_PLACEMENT_BYTES, Fence

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OWNER = peer_of(public_bytes(KEY.public_key()))
A, B, C = (PeerId(letter * 52) for letter in "abc")
FENCE = Fence(3, 2, 1)
DATA = Seal(KEY, "trusted").placement("job-1", FENCE, stages=[(1, B), (0, A)], standbys=[(0, C)])


def test_a_placement_says_who_holds_what_at_which_level():
    placement = verify_placement(DATA, OWNER, job="job-1", fence=FENCE)
    assert placement.stages == ((0, A), (1, B))
    assert placement.peers == {A, B, C, OWNER}
    assert placement.level == "trusted"


def test_it_is_for_one_round_of_one_job_of_one_owner():
    for fence in (Fence(2, 2, 1), Fence(3, 1, 1), Fence(3, 2, 0), Fence(4, 2, 1)):
        with pytest.raises(TrustError, match="expected the placement of Fence"):
            verify_placement(DATA, OWNER, job="job-1", fence=fence)
    with pytest.raises(TrustError, match="of job job-2, got one of job-1"):
        verify_placement(DATA, OWNER, job="job-2", fence=FENCE)
    broker = Ed25519PrivateKey.from_private_bytes(b"b" * 32)
    with pytest.raises(TrustError, match="signed by the job's owner"):
        verify_placement(
            Seal(broker, "open").placement("job-1", FENCE, stages=[(0, A)], standbys=()),
            OWNER,
            job="job-1",
            fence=FENCE,
        )


def test_the_owner_it_names_is_who_signed_it():
    another = SignedPlacement(1, "job-1", A, "open", FENCE, ((0, B),), ())
    with pytest.raises(TrustError, match="expected a placement of"):
        verify_placement(sign_placement(another, KEY), OWNER, job="job-1", fence=FENCE)


def test_a_signature_over_something_else_is_no_placement():
    content = DATA[64:]
    for domain in (b"", b"fusionai ticket 1\x00", b"fusionai endorsement 1\x00"):
        with pytest.raises(TrustError, match="signed by the job's owner"):
            verify_placement(KEY.sign(domain + content) + content, OWNER, job="job-1", fence=FENCE)


@pytest.mark.parametrize("change", [{0: 2}, {3: "public"}, {5: [[0, "tower"]]}, {5: [[-1, A]]}, {6: [[0, A], [1]]}])
def test_signed_content_must_still_be_a_placement_of_this_version(change: dict[int, object]):
    fields: list[object] = list(msgspec.msgpack.decode(DATA[64:]))
    for index, value in change.items():
        fields[index] = value
    content = msgspec.msgpack.encode(fields)
    signature = KEY.sign(b"fusionai placement 1\x00" + content)
    with pytest.raises(TrustError, match="of this version"):
        verify_placement(signature + content, OWNER, job="job-1", fence=FENCE)


def test_a_placement_has_one_spelling():
    content = DATA[64:]
    longer = b"\xdc\x00\x07" + content[1:]
    assert content[0] == 0x97
    signature = KEY.sign(b"fusionai placement 1\x00" + longer)
    with pytest.raises(TrustError, match="canonical encoding"):
        verify_placement(signature + longer, OWNER, job="job-1", fence=FENCE)


@pytest.mark.parametrize("size", [0, 64, MAX_PLACEMENT_BYTES + 1])
def test_a_placement_has_a_size(size: int):
    with pytest.raises(TrustError, match="expected a placement of 65 to"):
        verify_placement(bytes(size), OWNER, job="job-1", fence=FENCE)


def test_the_largest_plan_fits():
    data = Seal(KEY, "open").placement(
        "j" * 128, FENCE, stages=[(stage, A) for stage in range(4096)], standbys=[(stage, B) for stage in range(4096)]
    )
    assert len(verify_placement(data, OWNER, job="j" * 128, fence=FENCE).stages) == 4096
    with pytest.raises(TrustError, match="expected a placement of at most"):
        Seal(KEY, "open").placement("j", FENCE, stages=[(0, A)] * 20_000, standbys=())
