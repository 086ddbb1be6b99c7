"""A broker that inserts, swaps and replays, against a job for trusted peers: it is refused, and the error says why.

It is the pool's authority, too: certificates, tickets and registrations are its own to make. What it can't make is an
endorsement by a key that the owner trusts, or a placement signed by the owner
(`tests/unit/peer/test_acceptor_placements`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.client.pool import replanning
from fusionai.client.pool.beginning import first_deployment
from fusionai.client.pool.job_trust import parts
from fusionai.client.pool.replanning import MachineHistory, PoolReplanner
from fusionai.client.pool.session import PoolMember
from fusionai.client.serving.watch import ServingReplanner
from fusionai.execution.connections import Deployment
from fusionai.execution.links import open_job
from fusionai.primitives.errors import FusionError, PlanError, RefusedError, TransportError, TrustError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan, Problem, RolePlacement, ServingNeeds, Standby
from fusionai.transport.security.trust import Revoked, load_trust_list, save_trust_list
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Message
from harness.in_a_loop import in_a_loop
from harness.malicious_pool import Lender, Lie, MaliciousPool
from harness.told_pool import OWNER
from harness.told_pool import problem as rounded_problem

pytestmark = pytest.mark.slow

JOB = JobId("private-00c0ffee")
Task = Literal["train", "serve"]
TASKS = pytest.mark.parametrize("task", ["train", "serve"])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "LOOK_S", 0.0)
    monkeypatch.setattr("fusionai.client.pool.beginning.PLAN_PAUSE_S", 0.0)


def problem_of(pool: MaliciousPool, task: Task, members: tuple[PoolMember, ...]) -> Problem:
    made = msgspec.structs.replace(
        rounded_problem(*(one.profile for one in members)), owner=msgspec.structs.replace(OWNER, peer=pool.trust.me)
    )
    if task == "train":
        return made
    return msgspec.structs.replace(
        made,
        task="serve",
        microbatches=1,
        microbatch_tokens=1,
        takeover="tolerant",
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss")),
        serving=ServingNeeds(context_tokens=64, sessions=2, cache_tokens=64),
    )


def replanner_of(pool: MaliciousPool, task: Task) -> PoolReplanner:
    kind = PoolReplanner if task == "train" else ServingReplanner
    return kind(
        pool=pool.session,
        job=JOB,
        title="private",
        steps=1,
        problem=problem_of(pool, task, ()),
        policy="tolerant",
        excluded=lambda _members: frozenset(),
        barred=lambda: pool.trust.barred,
        machines=MachineHistory(pool.clock),
    )


async def begun(pool: MaliciousPool, replanner: PoolReplanner, task: Task) -> Deployment:
    async def plan_with(usable: tuple[PoolMember, ...]) -> Plan:
        return planned(problem_of(pool, task, usable))

    return await first_deployment(replanner, plan_with, pool_name="pool", note=lambda _text: None)


def others(pool: MaliciousPool, plan: Plan) -> set[str]:
    """Names of who has a part in it, but the owner."""
    names = {lender.peer: name for name, lender in pool.lenders.items()}
    return {names[peer] for peer in parts(plan) - {pool.trust.me}}


async def friends(pool: MaliciousPool) -> tuple[Lender, Lender]:
    return (
        await pool.lend("ada", pool.endorsement("ada")),
        await pool.lend("bob", pool.endorsement("bob")),
    )


BROKERS_KEY = Ed25519PrivateKey.from_private_bytes(b"a signing key of the broker's...")


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


SLIPPED_IN: dict[str, tuple[Callable[[MaliciousPool, str], tuple[bytes, ...]], str]] = {
    "unsigned": (lambda _pool, _name: (), "no key that this machine trusts"),
    "with another's endorsement": (
        lambda pool, _name: (pool.endorsement("ada"),),
        "endorsement it shows is for another key",
    ),
    "signed by the broker": (lambda pool, name: (pool.endorsement(name, key=BROKERS_KEY),), "not a key trusted here"),
    "signed by the pool's authority": (
        lambda pool, name: (pool.endorsement(name, key=pool.authority.key),),
        "not a key trusted here",
    ),
    "with the signature of another statement": (
        lambda pool, name: (pool.endorsement("ada")[:64] + pool.endorsement(name, key=BROKERS_KEY)[64:],),
        "not a key trusted here",
    ),
    "with a changed one": (lambda pool, name: (_flipped(pool.endorsement(name)),), "signed by"),
    "with one that has expired": (
        lambda pool, name: (pool.endorsement(name, at_s=pool.clock.wall_s() - 7200),),
        "expired",
    ),
}


@TASKS
@in_a_loop
async def test_peers_that_the_broker_slips_in_are_not_planned_with(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        await friends(pool)
        reasons: dict[str, str] = {}
        for number, (show, reason) in enumerate(SLIPPED_IN.values()):
            name = "eve" if number == 0 else f"eve{number}"
            eve = await pool.lend(name, *show(pool, name))
            reasons[eve.peer] = reason
        deployment = await begun(pool, replanner_of(pool, task), task)
        assert others(pool, deployment.plan) == {"ada", "bob"}
        assert {one.peer for one in deployment.plan.excluded} == reasons.keys()
        for one in deployment.plan.excluded:
            assert reasons[one.peer] in one.reason


@TASKS
@in_a_loop
async def test_one_that_was_revoked_is_not_brought_back_by_its_old_endorsement(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        await friends(pool)
        cyd = await pool.lend("cyd", pool.endorsement("cyd"))
        trust_list = load_trust_list(pool.trust_list.path)
        save_trust_list(pool.trust_list.path, msgspec.structs.replace(trust_list, revoked=(Revoked(cyd.peer, 0),)))
        deployment = await begun(pool, replanner_of(pool, task), task)
        assert others(pool, deployment.plan) == {"ada", "bob"}
        assert "revoked" in deployment.plan.excluded[0].reason


def shown_as(pool: MaliciousPool, victim: Lender, impostor: Lender) -> Lie:
    """The pool with the victim's key over the impostor's profile and addresses."""

    def lie(_question: Message, answer: Message) -> Message:
        if not isinstance(answer, wire.PoolView):
            return answer
        twisted = pool.view(impostor, peer=victim.peer)
        members = tuple(twisted if one.peer == victim.peer else one for one in answer.members)
        return msgspec.structs.replace(answer, members=members)

    return lie


@TASKS
@in_a_loop
async def test_a_profile_swapped_under_a_trusted_key_is_not_planned_with(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        ada, _ = await friends(pool)
        await pool.lend("cyd", pool.endorsement("cyd"))
        pool.service.lie = shown_as(pool, ada, await pool.lend("eve"))
        deployment = await begun(pool, replanner_of(pool, task), task)
        assert others(pool, deployment.plan) == {"bob", "cyd"}
        assert any("profile of another key" in one.reason for one in deployment.plan.excluded)


def granting(change: Callable[[Plan], Plan]) -> Lie:
    def lie(_question: Message, answer: Message) -> Message:
        if not isinstance(answer, wire.JobGranted):
            return answer
        plan = change(msgspec.msgpack.decode(answer.plan, type=Plan))
        return msgspec.structs.replace(answer, plan=msgspec.Raw(msgspec.msgpack.encode(plan)))

    return lie


def _swapped(plan: Plan, old: PeerId, new: PeerId) -> Plan:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan).replace(old.encode(), new.encode()), type=Plan)


@pytest.mark.parametrize(("task", "level"), [("train", "trusted"), ("serve", "open")])
@in_a_loop
async def test_a_plan_that_the_broker_changes_is_not_obeyed_at_any_level(
    tmp_path: Path, task: Task, level: PrivacyLevel
):
    async with MaliciousPool(tmp_path, level=level) as pool:
        ada, _ = await friends(pool)
        eve = await pool.lend("eve", memory_bytes=1)
        standby = Standby(stage=0, peer=eve.peer)
        for change in (
            lambda plan: _swapped(plan, ada.peer, eve.peer),
            lambda plan: msgspec.structs.replace(plan, standbys=(standby,), snapshot_every=1),
            lambda plan: msgspec.structs.replace(plan, feed=eve.peer),
            lambda plan: msgspec.structs.replace(plan, stages=plan.stages[::-1]),
        ):
            pool.service.lie = granting(change)
            with pytest.raises(TrustError, match="granted a different plan than"):
                await begun(pool, replanner_of(pool, task), task)


@TASKS
@in_a_loop
async def test_an_old_grant_is_not_taken_for_a_new_one(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        ada, _ = await friends(pool)
        replanner = replanner_of(pool, task)
        replanner.problem = problem_of(pool, task, await pool.session.pool())
        first = await begun(pool, replanner, task)
        await pool.lend("cyd", pool.endorsement("cyd"))
        second = await replanner.replacement(first, frozenset({ada.peer}), lambda _why: None)
        assert second.plan.version > first.plan.version
        pool.service.lie = granting(lambda plan: msgspec.structs.replace(plan, version=first.plan.version))
        with pytest.raises(TrustError, match="can't be its next"):
            await replanner.renewed(second)
        with pytest.raises(TrustError, match="not above version"):
            await replanner.make_real(msgspec.structs.replace(second.plan, version=0))


@in_a_loop
async def test_addresses_swapped_by_the_broker_lead_to_nobody_else(tmp_path: Path):
    async with MaliciousPool(tmp_path) as pool:
        ada, bob = await friends(pool)
        eve = await pool.lend("eve")
        await pool.session.pool()
        opening = wire.OpenJob(job=JOB, fence=Fence(1, 1, 0), ticket=b"")
        for impostor in (eve, bob):
            with pytest.raises((TrustError, TransportError), match=f"expected peer {short(ada.peer)}"):
                await open_job(pool.session.transport, impostor.listener.addresses, ada.peer, "tensors", opening)
        channel = await open_job(pool.session.transport, ada.listener.addresses, ada.peer, "tensors", opening)
        await channel.close()
        assert set(ada.heard) == {pool.trust.me}


@in_a_loop
async def test_a_plan_that_names_a_stranger_reaches_nobody(tmp_path: Path):
    """Whatever is wrong before: the last gate is at the connection."""
    async with MaliciousPool(tmp_path) as pool:
        eve = await pool.lend("eve")
        opening = wire.OpenJob(job=JOB, fence=Fence(1, 1, 0), ticket=b"")
        with pytest.raises(TrustError, match="may not work for this job"):
            await open_job(pool.session.transport, eve.listener.addresses, eve.peer, "control", opening)
        assert eve.heard == []


@TASKS
@in_a_loop
async def test_a_lost_peer_is_not_replaced_by_a_stranger(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        ada, bob = await friends(pool)
        replanner = replanner_of(pool, task)
        replanner.problem = problem_of(pool, task, await pool.session.pool())
        deployment = await begun(pool, replanner, task)
        await pool.lend("eve")
        await pool.lend("mal", pool.endorsement("mal", key=BROKERS_KEY))
        asked: list[wire.JobRequest] = []
        pool.service.lie = lambda question, answer: (
            (asked.append(question) if isinstance(question, wire.JobRequest) else None) or answer
        )
        waits: list[str] = []
        waited = asyncio.Event()

        def waiting(why: str) -> None:
            waits.append(why)
            if len(waits) > 3:
                waited.set()

        replaced = asyncio.create_task(replanner.replacement(deployment, frozenset({ada.peer}), waiting))
        await waited.wait()
        assert not replaced.done()
        assert asked == [], "the job waits"
        await pool.lend("cyd", pool.endorsement("cyd"))
        assert others(pool, (await replaced).plan) == {bob.name, "cyd"}


BROKEN: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "open to others": lambda path: path.chmod(0o644),
    "of a later version": lambda path: path.write_bytes(path.read_bytes().replace(b"trust/1", b"trust/2")),
    "without keys": lambda path: path.write_bytes(b'{"schema": "fusionai.trust/1"}'),
}


@TASKS
@in_a_loop
async def test_without_a_trust_file_that_can_be_read_nobody_is_asked(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        ada, _ = await friends(pool)
        replanner = replanner_of(pool, task)
        deployment = await begun(pool, replanner, task)
        whole = load_trust_list(pool.trust_list.path)
        opening = wire.OpenJob(job=JOB, fence=Fence(1, 1, 0), ticket=b"")
        for harm in BROKEN.values():
            harm(pool.trust_list.path)
            with pytest.raises(PlanError, match="no trusted peer is free"):
                await begun(pool, replanner_of(pool, task), task)
            with pytest.raises(RefusedError, match="may not work for this job"):
                await replanner.renewed(deployment)
            with pytest.raises(TrustError):
                await open_job(pool.session.transport, ada.listener.addresses, ada.peer, "control", opening)
            save_trust_list(pool.trust_list.path, whole)
        assert ada.heard == []
        await replanner.renewed(deployment)


@TASKS
@in_a_loop
async def test_too_few_trusted_peers_are_no_reason_to_take_others(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        await pool.lend("ada", pool.endorsement("ada"))
        for name in ("eve", "mal", "sam"):
            await pool.lend(name)
        with pytest.raises(FusionError) as refused:
            await begun(pool, replanner_of(pool, task), task)
        assert isinstance(refused.value, PlanError)


@TASKS
@in_a_loop
async def test_without_any_trusted_peer_the_job_says_who_is_not(tmp_path: Path, task: Task):
    async with MaliciousPool(tmp_path) as pool:
        await pool.lend("eve")
        with pytest.raises(PlanError, match="is not trusted: no key that this machine trusts has endorsed it"):
            await begun(pool, replanner_of(pool, task), task)


@in_a_loop
async def test_at_other_levels_everybody_may_work_and_the_count_is_said(tmp_path: Path):
    async with MaliciousPool(tmp_path, level="open") as pool:
        await pool.lend("ada", pool.endorsement("ada"))
        await pool.lend("eve")
        deployment = await begun(pool, replanner_of(pool, "train"), "train")
        assert others(pool, deployment.plan) == {"ada", "eve"}
        assert pool.trust.sentence(deployment.plan) == "trusted peers: 1 of 2"
