"""Ten thousand seeded attempts to be believed: endorsements, placements and tickets flipped, cut, mixed and replayed.

Every attempt goes through the shipped checks: `TrustList.endorsement_of` for an owner, `Roster.check` and
`Roster.adopt` for a peer, `verify_ticket` at a door. The attacker has every statement that was ever signed, a signing
key of its own, and the pool's authority (it is the broker), but neither the owner's key nor one that the owner trusts.
What it makes must not be accepted, once. Neighbour: `tests/integration/test_middle_man` does the same to TLS."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.execution.member import Roster
from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.signed import Seal, Ticket, sign_ticket, verify_ticket
from fusionai.transport.security.trust import Revoked, Signer, TrustList, endorse, key_text
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

pytestmark = pytest.mark.slow

LEAST: int = 10_000
SIGNATURE_BYTES = 64
NOW_S = 2_000_000_000.0
JOB, OTHER_JOB = "private-00c0ffee", "private-decaf000"
DOMAINS = (b"", b"fusionai endorsement 1\x00", b"fusionai placement 1\x00", b"fusionai ticket 1\x00")


def key(seed: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed.encode().ljust(32, b"."))


def peer(seed: str) -> PeerId:
    return peer_of(public_bytes(key(seed).public_key()))


SIGNER, FORMER, OWNER_KEY, AUTHORITY, ATTACKER = (
    key(seed) for seed in ("signer", "former", "owner", "authority", "attacker")
)
OWNER, ADA, BOB, CYD, EVE, DAN = (peer(seed) for seed in ("owner", "ada", "bob", "cyd", "eve", "dan"))
EARLIER, PRESENT, LATER = Fence(3, 1, 0), Fence(4, 1, 2), Fence(5, 1, 0)


@dataclass
class Tally:
    """Attempts and successes by kind."""

    tried: Counter[str] = field(default_factory=Counter[str])
    accepted: Counter[str] = field(default_factory=Counter[str])

    def attempt(self, kind: str, accepts: Callable[[], bool]) -> None:
        self.tried[kind] += 1
        self.accepted[kind] += accepts()


def endorsed(who: PeerId, signer: Ed25519PrivateKey = SIGNER, *, at_s: float = NOW_S, serial: int = 0) -> bytes:
    return endorse(signer, who, name="a machine", now_wall_s=at_s, lifetime_s=1000, serial=serial.to_bytes(16))


def placed(
    *stages: PeerId,
    standby: PeerId = CYD,
    fence: Fence = PRESENT,
    job: str = JOB,
    signer: Ed25519PrivateKey = OWNER_KEY,
) -> bytes:
    return Seal(signer, "trusted").placement(job, fence, stages=enumerate((*stages, OWNER)), standbys=[(0, standby)])


def ticket(who: PeerId, *, job: str = JOB, version: int = 4, signer: Ed25519PrivateKey = AUTHORITY) -> bytes:
    return sign_ticket(Ticket(job, who, 0, version, "stage", NOW_S + 600, ()), signer)


# --------------------------------------------------------------------------------------------- what is attacked

CIRCLE = TrustList(
    signers=(Signer(key_text(public_bytes(SIGNER.public_key()))),),
    endorsements=(endorsed(ADA),),
    revoked=(Revoked(DAN, 0),),
)


def owner_accepts(who: PeerId, *shown: bytes) -> bool:
    try:
        CIRCLE.endorsement_of(who, shown, NOW_S)
    except TrustError:
        return False
    return True


def enlist(placement: bytes, *stages: PeerId, fence: Fence = PRESENT, standbys: tuple[int, ...] = ()) -> wire.Enlist:
    neighbours = tuple(wire.Neighbour(stage=number, peer=who) for number, who in enumerate((*stages, OWNER)))
    return wire.Enlist(fence=fence, job=JOB, neighbours=neighbours, standbys=standbys, ticket=b"", placement=placement)


def roster() -> Roster:
    """Bob's, in the present round of the job."""
    made = Roster(JOB, OWNER, BOB)
    made.adopt(enlist(placed(ADA, BOB), ADA, BOB))
    return made


ROSTER = roster()


def peer_accepts(who: PeerId, placement: bytes, fence: Fence) -> bool:
    """At the door of somebody in the job, for a round as the caller says it is."""
    try:
        ROSTER.check(who, wire.OpenJob(job=JOB, fence=fence, ticket=b"", placement=placement))
    except TrustError:
        return False
    return True


def member_accepts(placement: bytes, *stages: PeerId, fence: Fence, standbys: tuple[int, ...] = ()) -> bool:
    """At the beginning of a round, in a message that would be the driver's."""
    try:
        roster().adopt(enlist(placement, *stages, fence=fence, standbys=standbys))
    except TrustError:
        return False
    return True


def door_accepts(data: bytes, *, who: PeerId = ADA, job: str = JOB) -> bool:
    try:
        found = verify_ticket(data, public_bytes(AUTHORITY.public_key()), now_wall_s=NOW_S, job=JobId(job), peer=who)
    except TrustError:
        return False
    return found.plan_version == PRESENT.plan_version


# ------------------------------------------------------------------------------------------------- the attacks


def flipped(data: bytes) -> Iterator[bytes]:
    """Every bit, one at a time."""
    for index, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[index] ^= 1 << bit
        yield bytes(changed)


def mangled(data: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """Cut, lengthened, overwritten, with bytes moved."""
    for _ in range(count):
        changed = bytearray(data)
        match draw.randrange(5):
            case 0:
                del changed[draw.randrange(len(changed)) :]
            case 1:
                changed += draw.randbytes(draw.randint(1, 40))
            case 2:
                at, length = draw.randrange(len(changed)), draw.randint(1, 16)
                changed[at : at + length] = draw.randbytes(length)
            case 3:
                at, other = draw.sample(range(len(changed)), 2)
                changed[at : at + 4], changed[other : other + 4] = changed[other : other + 4], changed[at : at + 4]
            case _:
                at = draw.randrange(len(changed))
                changed.insert(at, draw.randrange(256))
        if bytes(changed) != data:
            yield bytes(changed)


def mixed(statements: list[bytes]) -> Iterator[bytes]:
    """The signature of one over the content of another."""
    for one, other in itertools.permutations(statements, 2):
        if one[:SIGNATURE_BYTES] != other[:SIGNATURE_BYTES] and one[SIGNATURE_BYTES:] != other[SIGNATURE_BYTES:]:
            yield one[:SIGNATURE_BYTES] + other[SIGNATURE_BYTES:]


def rewritten(data: bytes, values: list[object], signers: list[Ed25519PrivateKey]) -> Iterator[bytes]:
    """Each field replaced by each value, under the old signature and signed by keys that the attacker has, in every
    domain."""
    fields = list(msgspec.msgpack.decode(data[SIGNATURE_BYTES:]))
    for index, value in itertools.product(range(len(fields)), values):
        changed = [*fields[:index], value, *fields[index + 1 :]]
        if changed == fields:
            continue
        content = msgspec.msgpack.encode(changed)
        yield data[:SIGNATURE_BYTES] + content
        for signer, domain in itertools.product(signers, DOMAINS):
            yield signer.sign(domain + content) + content


def test_of_ten_thousand_attempts_none_is_believed():
    draw, tally = random.Random(20261122), Tally()
    endorsements = [endorsed(who, serial=number) for number, who in enumerate((ADA, BOB, CYD, DAN))]
    endorsements += [endorsed(EVE, ATTACKER), endorsed(EVE, AUTHORITY), endorsed(EVE, FORMER)]
    endorsements += [endorsed(EVE, at_s=NOW_S - 5000), endorsed(EVE, at_s=NOW_S + 200_000)]
    placements = [placed(ADA, BOB), placed(ADA, EVE, fence=EARLIER), placed(EVE, BOB, job=OTHER_JOB)]
    placements += [placed(EVE, BOB, signer=ATTACKER, fence=LATER), placed(EVE, BOB, signer=AUTHORITY, fence=LATER)]
    placements += [placed(ADA, BOB, fence=LATER)]
    tickets = [ticket(ADA), ticket(EVE), ticket(ADA, job=OTHER_JOB), ticket(ADA, version=3)]
    tickets += [ticket(ADA, signer=ATTACKER), ticket(ADA, signer=OWNER_KEY)]

    # What is true is believed: otherwise nothing below would mean anything.
    assert owner_accepts(ADA)
    assert owner_accepts(BOB, endorsements[1])
    assert peer_accepts(ADA, b"", PRESENT)
    assert peer_accepts(CYD, b"", PRESENT)
    assert peer_accepts(ADA, placed(ADA, BOB, fence=LATER), LATER)
    assert member_accepts(placed(ADA, BOB, fence=LATER), ADA, BOB, fence=LATER)
    assert door_accepts(tickets[0])

    good_later = placed(ADA, BOB, standby=DAN, fence=LATER)
    for data in flipped(endorsements[1]):
        tally.attempt("endorsement, a bit flipped", lambda data=data: owner_accepts(BOB, data))
    for data in flipped(good_later):
        tally.attempt("placement shown, a bit flipped", lambda data=data: peer_accepts(DAN, data, LATER))
    for data in flipped(tickets[0]):
        tally.attempt("ticket, a bit flipped", lambda data=data: door_accepts(data))
    for data in mangled(endorsements[1], draw, 600):
        tally.attempt("endorsement, mangled", lambda data=data: owner_accepts(BOB, data))
    for data in mangled(good_later, draw, 600):
        tally.attempt("placement shown, mangled", lambda data=data: peer_accepts(DAN, data, LATER))
    for data in mangled(placed(ADA, BOB, fence=LATER), draw, 300):
        accepts = lambda data=data: member_accepts(data, ADA, BOB, fence=LATER)  # noqa: E731
        tally.attempt("placement told, mangled", accepts)
    for data in mangled(tickets[0], draw, 300):
        tally.attempt("ticket, mangled", lambda data=data: door_accepts(data))

    everything = [*endorsements, *placements, *tickets]
    for data in mixed(everything):
        tally.attempt("endorsement, mixed", lambda data=data: owner_accepts(EVE, data))
        tally.attempt("placement shown, mixed", lambda data=data: peer_accepts(EVE, data, LATER))
        tally.attempt("ticket, mixed", lambda data=data: door_accepts(data))

    values: list[object] = [EVE, OWNER, ADA, 1, 2, 0, LATER, PRESENT, "", b"", "lend", [[0, EVE], [1, BOB], [2, OWNER]]]
    values += [public_bytes(ATTACKER.public_key()), int(NOW_S), JOB, None, [], -1, 2**63, "trusted"]
    held = [ATTACKER, AUTHORITY]
    for data in rewritten(endorsed(EVE, ATTACKER), values, held):
        tally.attempt("endorsement, rewritten", lambda data=data: owner_accepts(EVE, data))
    for data in rewritten(endorsements[0], [EVE], held):
        tally.attempt("endorsement, rewritten", lambda data=data: owner_accepts(EVE, data))
    for data in rewritten(placements[5], values, held):
        tally.attempt("placement shown, rewritten", lambda data=data: peer_accepts(EVE, data, LATER))
        accepts = lambda data=data: member_accepts(data, EVE, BOB, fence=LATER)  # noqa: E731
        tally.attempt("placement told, rewritten", accepts)
    for data in rewritten(tickets[2], values, [ATTACKER, OWNER_KEY]):
        tally.attempt("ticket, rewritten by others than the authority", lambda data=data: door_accepts(data))

    # Everything that was ever signed, whole, at the wrong time, place or by the wrong one.
    for data in everything:
        tally.attempt("replayed for a stranger", lambda data=data: owner_accepts(EVE, data))
        tally.attempt("replayed for one revoked", lambda data=data: owner_accepts(DAN, data))
        for fence in (EARLIER, PRESENT, LATER, Fence(2**60, 0, 0)):
            tally.attempt("replayed at a door", lambda data=data, fence=fence: peer_accepts(EVE, data, fence))
            accepts = lambda data=data, fence=fence: member_accepts(data, EVE, BOB, fence=fence)  # noqa: E731
            tally.attempt("replayed as a round", accepts)
            accepts = lambda data=data, fence=fence: member_accepts(  # noqa: E731
                data, ADA, BOB, fence=fence, standbys=(0,)
            )
            tally.attempt("replayed as a round, a standby slipped in", accepts)
        tally.attempt("replayed as a stranger's ticket", lambda data=data: door_accepts(data, who=CYD))

    tried = sum(tally.tried.values())
    assert tried >= LEAST, tally.tried
    assert not +tally.accepted, tally.accepted
    assert min(tally.tried.values()) > 10, "every kind was tried"
