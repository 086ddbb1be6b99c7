"""Who may work for a job: everybody, or the owner's circle alone; a confidential job is refused at any other level."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.client.pool import watch
from fusionai.client.pool.job_trust import JobTrust, job_trust
from fusionai.client.pool.watch import watch_trust
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.privacy import LEVELS, PrivacyLevel
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.signed import Seal
from fusionai.transport.security.trust import (
    Revoked,
    Signer,
    TrustList,
    TrustListFile,
    endorse,
    key_text,
    save_trust_list,
)
from harness.in_a_loop import in_a_loop
from harness.told_pool import problem, profile

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
ME, ADA, EVE = (
    peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(letter * 32).public_key()))
    for letter in (b"m", b"a", b"e")
)
CIRCLE = TrustList(
    signers=(Signer(key_text(public_bytes(KEY.public_key()))),),
    endorsements=(endorse(KEY, ADA, name="", now_wall_s=1000.0, lifetime_s=100, serial=bytes(16)),),
)


def trust_of(path: Path, level: PrivacyLevel = "trusted", now_s: float = 1000.0) -> JobTrust:
    save_trust_list(path / "trust.json", CIRCLE)
    return JobTrust(
        level=level, me=ME, seal=Seal(KEY, level), trust_list=TrustListFile(path / "trust.json", lambda: now_s)
    )


def membership() -> Any:
    return SimpleNamespace(peer=ME, credentials=SimpleNamespace(identity=SimpleNamespace(key=KEY)))


@pytest.mark.parametrize("level", LEVELS)
def test_a_confidential_job_is_refused_at_every_level_but_trusted(tmp_path: Path, level: PrivacyLevel):
    if level == "trusted":
        assert job_trust(tmp_path, membership(), level, confidential=True).required
        return
    with pytest.raises(UsageError, match="runs on trusted peers alone"):
        job_trust(tmp_path, membership(), level, confidential=True)
    assert not job_trust(tmp_path, membership(), level, confidential=False).required


def test_without_a_trust_file_a_trusted_job_reaches_nobody_but_its_owner(tmp_path: Path):
    trust = job_trust(tmp_path, membership(), "trusted", confidential=True)
    trust.check(ME)
    with pytest.raises(TrustError, match="has no trust list yet"):
        trust.check(ADA)


def test_who_is_not_in_the_circle_is_named_with_the_reason(tmp_path: Path):
    trust = trust_of(tmp_path)
    trust.check(ADA)
    with pytest.raises(TrustError, match=r"may not work for this job.*no key that this machine trusts"):
        trust.check(EVE)
    trust.own = frozenset({EVE})
    trust.check(EVE)
    trust_of(tmp_path, "encrypted").check(PeerId("x" * 52))


def test_an_endorsement_that_expires_meanwhile_counts_no_more(tmp_path: Path):
    trust_of(tmp_path, now_s=1099.0).check(ADA)
    with pytest.raises(TrustError, match="expired"):
        trust_of(tmp_path, now_s=1100.0).check(ADA)


class Driver:
    def __init__(self, *peers: str) -> None:
        plan = SimpleNamespace(stages=[SimpleNamespace(peer=peer) for peer in peers], standbys=(), feed=ME)
        self.deployment = cast("Any", SimpleNamespace(plan=plan))
        self.out: list[tuple[PeerId, str]] = []
        self.notes = asyncio.Event()

    def shut_out(self, peer: PeerId, reason: str) -> None:
        self.out.append((peer, reason))
        self.notes.set()


@in_a_loop
async def test_who_is_revoked_while_the_job_runs_is_shut_out(tmp_path: Path):
    look_s, watch.TRUST_LOOK_S = watch.TRUST_LOOK_S, 0.0
    try:
        trust, driver = trust_of(tmp_path), Driver(ADA, ME)
        watching = asyncio.create_task(watch_trust(trust, driver))
        for _ in range(20):
            await asyncio.sleep(0)
        assert driver.out == []
        save_trust_list(
            tmp_path / "trust.json",
            TrustList(signers=CIRCLE.signers, endorsements=CIRCLE.endorsements, revoked=(Revoked(ADA, 0),)),
        )
        await asyncio.wait_for(driver.notes.wait(), 5.0)
        watching.cancel()
        assert driver.out[0] == (ADA, "it is not trusted (any more): its key is revoked in this machine's trust file.")
    finally:
        watch.TRUST_LOOK_S = look_s


@in_a_loop
async def test_at_other_levels_nobody_is_watched(tmp_path: Path):
    await asyncio.wait_for(watch_trust(trust_of(tmp_path, "split"), Driver(EVE)), 5.0)


def test_the_count_is_said_where_there_is_a_circle(tmp_path: Path):
    from fusionai.scheduling.planner import plan as planned

    plan = planned(problem(profile("a"), profile("b")))
    open_job = job_trust(tmp_path, membership(), "open", confidential=False)
    assert open_job.sentence(plan) is None
    assert trust_of(tmp_path, "open").sentence(plan) == "trusted peers: 0 of 3"
