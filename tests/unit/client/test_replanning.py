"""Another plan for a running job: who may stand in, what is waited for, what is on the disk before anybody acts."""

from __future__ import annotations

import asyncio
import dataclasses
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusionai.client import replanning
from fusionai.client.deployments import kept_deployment
from fusionai.client.distrusted import distrusted
from fusionai.client.pool_session import Member
from fusionai.client.replanning import Replanner
from fusionai.execution.deployment import Deployment
from fusionai.primitives.errors import (
    ExecutionError,
    FusionError,
    PlanError,
    RefusedError,
    StorageError,
    TransportError,
)
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.types import Plan
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory
from harness.told_pool import JOB, FakeClock, FakePool, member, problem, profile, working


@dataclass
class Bench:
    replanner: Replanner
    pool: FakePool
    clock: FakeClock
    present: Deployment
    waited: list[str] = field(default_factory=list)

    def replaced(self, *lost: str) -> Deployment:
        async def body() -> Deployment:
            async with asyncio.timeout(5):
                return await self.replanner.replacement(self.present, frozenset(lost), self.waited.append)

        return asyncio.run(body())


Make = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A job of two stages on `a` and `b`; `c` guards both unless `guarded` says otherwise."""
    monkeypatch.setattr(replanning, "LOOK_S", 0.0)
    with CommitJournal(tmp_path / "journal.sqlite") as journal:

        def make(
            *looks: tuple[Member, ...] | FusionError, policy: str = "exact", guarded: bool = True, **pool: Any
        ) -> Bench:
            peers = [profile("a"), profile("b"), *([profile("c")] if guarded else [])]
            takeover = "tolerant" if policy == "tolerant" else "exact"
            base = problem(*peers, takeover=takeover)
            made = msgspec.structs.replace(base, required=("a", "b"))
            present = msgspec.structs.replace(planned(made), version=1)
            journal.adopt_plan(1, msgspec.json.encode(present))
            clock, fake = FakeClock(), FakePool(list(looks), **pool)
            replanner = Replanner(
                pool=fake,
                job=JOB,
                title="job",
                steps=10,
                problem=base,
                policy=policy,  # pyright: ignore[reportArgumentType]
                excluded=lambda members: frozenset({"kept out"}),
                journal=journal,
                directory=RunDirectory(tmp_path),
                clock=clock,
            )
            return Bench(replanner, fake, clock, Deployment(plan=present))

        yield make


def stages(deployment: Deployment) -> list[str]:
    return [stage.peer for stage in deployment.plan.stages]


ALL = (working("a"), working("b"), working("c"))


def test_the_guard_takes_over_and_the_plan_is_on_the_disk_before(bench: Make):
    one = bench(ALL)
    lost = one.present.plan.stages[0].peer
    found = one.replaced(lost)
    assert found.plan.version == 2
    assert stages(found)[0] == "c"
    assert stages(found)[1:] == stages(one.present)[1:]
    journalled = one.replanner.journal.plan
    assert journalled is not None
    assert msgspec.json.decode(journalled.plan, type=Plan) == found.plan
    directory = one.replanner.directory
    assert kept_deployment(directory) == found
    assert stat.S_IMODE(directory.deployment.stat().st_mode) == 0o600


def test_a_deployment_of_another_version_of_the_program_is_none(bench: Make):
    one = bench(ALL)
    one.replaced("a")
    one.replanner.directory.deployment.write_bytes(b"\x91\x01")
    assert kept_deployment(one.replanner.directory) is None


def test_it_waits_for_a_machine_that_fits_and_says_for_which(bench: Make):
    there = (working("a"), working("b"))
    one = bench(there, there, (*there, member("d")), guarded=False)
    assert stages(one.replaced("b")).count("d") == 1
    assert len(one.waited) == 2
    assert one.waited[0].startswith("waiting for a peer that lends")
    assert "computes the same bits as b did" in one.waited[0]


def test_an_exact_job_takes_no_machine_of_other_numerics(bench: Make):
    there = (working("a"), working("b"), member("e", fingerprint="other"))
    one = bench(there, (*there, member("d")), guarded=False)
    assert "d" in stages(one.replaced("b"))
    assert len(one.waited) == 1


def test_a_tolerant_job_takes_it(bench: Make):
    one = bench((working("a"), working("b"), member("e", fingerprint="other")), policy="tolerant", guarded=False)
    assert "e" in stages(one.replaced("b"))
    assert not one.waited


def test_a_refusing_job_ends_where_there_are_only_others(bench: Make):
    one = bench((working("a"), working("b"), member("e", fingerprint="other")), policy="refuse", guarded=False)
    with pytest.raises(ExecutionError, match="compute other bits, and the recipe refuses them"):
        one.replaced("b")


def test_a_refusing_job_waits_where_there_is_nobody(bench: Make):
    there = (working("a"), working("b"))
    one = bench(there, (*there, member("d")), policy="refuse", guarded=False)
    assert "d" in stages(one.replaced("b"))


def test_who_is_kept_out_rests_or_works_for_others_is_not_asked(bench: Make):
    there = (working("a"), working("b"))
    others = (member("kept out"), member("r", rests_s=5.0), member("w", state="active", job="another"))
    one = bench((*there, *others), (*there, *others, member("d")), guarded=False)
    assert "d" in stages(one.replaced("b"))
    assert len(one.waited) == 1


def test_a_lost_machine_serves_again_only_when_it_was_heard_since(bench: Make):
    silent, heard = working("b", last_heard_s=3.0), working("b", last_heard_s=0.5)
    one = bench((working("a"), silent), (working("a"), heard), guarded=False)
    look = one.pool.pool

    async def later() -> tuple[Member, ...]:
        one.clock.seconds += 2.0
        return await look()

    one.pool.pool = later
    assert stages(one.replaced("b")) == stages(one.present)
    assert len(one.waited) == 1


def test_a_machine_lost_again_and_again_is_trusted_less(bench: Make):
    one = bench(ALL)
    known = working("b")
    needed: list[int] = []
    for _ in range(3):
        one.replanner.note_lost("b")
        needed.append(0)
        while not one.replanner.is_back(known):
            one.clock.seconds += 1.0
            needed[-1] += 1
    assert needed == [1, 2, 4]


def test_who_was_lost_long_ago_is_not_lost_anew_when_others_are(bench: Make):
    there = (working("b"), member("c"))
    one = bench(ALL, there)
    assert "c" not in stages(one.replaced("c"))
    one.clock.seconds += 10.0
    assert "c" in stages(one.replaced("a", "c"))
    assert not one.waited


def test_who_was_in_a_plan_since_and_is_named_again_was_lost_again(bench: Make):
    one = bench((working("a"), working("b"), member("c")))
    one.replanner.note_lost("c")
    one.clock.seconds += 2.0
    assert one.replanner.is_back(member("c"))
    assert "c" in stages(one.replaced("a"))
    one.replaced("c")
    assert not one.replanner.is_back(member("c"))


def test_who_waits_for_nobody_else_does_not_ask_how_often_it_was_lost(bench: Make):
    one = bench((working("a"), working("b")), guarded=False)
    look, looks = one.pool.pool, [0]

    async def later() -> tuple[Member, ...]:
        one.clock.seconds += 1.0
        looks[0] += 1
        return await look()

    one.pool.pool = later
    needed: list[int] = []
    for _ in range(3):
        looks[0] = 0
        one.replaced("b")
        needed.append(looks[0])
    assert needed == [1, 1, 1]


def test_a_broker_that_is_away_is_asked_again(bench: Make):
    one = bench(TransportError("gone."), TransportError("gone."), ALL)
    assert "c" in stages(one.replaced("a"))
    assert all("the broker is needed" in text for text in one.waited)
    assert len(one.waited) == 2


def test_a_peer_taken_meanwhile_is_looked_for_again(bench: Make):
    one = bench(ALL, grants=[RefusedError("taken.", code="busy"), None])
    assert "c" in stages(one.replaced("a"))
    assert len(one.waited) == 1


def test_a_refusal_for_good_ends_the_job(bench: Make):
    one = bench(ALL, grants=[RefusedError("no.", code="not_authorised")])
    with pytest.raises(RefusedError):
        one.replaced("a")


def test_who_the_broker_has_lost_besides_is_not_planned_with(bench: Make):
    one = bench((working("a"), member("b", state="lost", job=JOB), working("c"), member("d")))
    found = one.replaced("a")
    assert not {"a", "b"} & set(stages(found))


def test_a_broker_that_moves_the_models_ends_is_refused(bench: Make, monkeypatch: pytest.MonkeyPatch):
    """Its answer is held against what stays with the owner before anybody acts on it."""
    one = bench(ALL)
    one.replanner.problem = msgspec.structs.replace(one.replanner.problem, kept_first=1, kept_last=2, stages=None)
    asked = planned(one.replanner.problem)
    request = one.pool.request

    async def moving(job: Any, title: str, plan: Plan, steps: int) -> Deployment:
        granted = await request(job, title, plan, steps)
        first, *rest = granted.plan.stages
        moved = msgspec.structs.replace(granted.plan, stages=(msgspec.structs.replace(first, peer="c"), *rest))
        return dataclasses.replace(granted, plan=moved)

    asyncio.run(one.replanner.make_real(asked))
    monkeypatch.setattr(one.pool, "request", moving)
    with pytest.raises(PlanError, match="stay with the job owner"):
        asyncio.run(one.replanner.make_real(asked))
    journalled = one.replanner.journal.plan
    assert journalled is not None
    assert msgspec.json.decode(journalled.plan, type=Plan).stages[0].peer != "c"


def test_a_liar_is_asked_for_nothing_again_not_even_by_a_later_start(bench: Make):
    one = bench((working("a"), working("b"), working("c"), member("d")))
    lost = one.present.plan.stages[0].peer
    one.replanner.distrust(lost, "it scaled its activations")
    assert lost not in {member.view.peer for member in one.replanner.usable(ALL)}
    assert lost not in stages(one.replaced(lost))
    (known,) = distrusted(one.replanner.directory)
    assert (known.peer, known.reason) == (lost, "it scaled its activations")


def test_a_file_of_liars_that_is_none_is_named(bench: Make):
    directory = bench(ALL).replanner.directory
    directory.distrusted.write_bytes(b"[{]")
    with pytest.raises(StorageError, match=r"distrusted\.json"):
        distrusted(directory)
