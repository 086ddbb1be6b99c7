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

from fusionai.client.pool import replanning
from fusionai.client.pool.replanning import MachineHistory, TrainingReplanner, distrusted, kept_deployment
from fusionai.client.pool.session import PoolMember
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import (
    ExecutionError,
    FusionError,
    PlanError,
    RefusedError,
    StorageError,
    TransportError,
)
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.standby.continuation import numerics
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory
from fusionai.wire.messages import CommitRecord, Fence
from harness.patience import CEILING_S
from harness.told_pool import JOB, FakeClock, FakePool, member, problem, profile, working


@dataclass
class Bench:
    replanner: TrainingReplanner
    pool: FakePool
    clock: FakeClock
    present: Deployment
    waited: list[str] = field(default_factory=list)

    def replaced(self, *lost: str) -> Deployment:
        async def body() -> Deployment:
            async with asyncio.timeout(CEILING_S):
                return await self.replanner.replacement(self.present, frozenset(lost), self.waited.append)

        return asyncio.run(body())


Make = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A job of two stages on `a` and `b`; `c` standbys both unless `from_standby` says otherwise."""
    monkeypatch.setattr(replanning, "LOOK_S", 0.0)
    with CommitJournal(tmp_path / "journal.sqlite") as journal:

        def make(
            *looks: tuple[PoolMember, ...] | FusionError, policy: str = "exact", from_standby: bool = True, **pool: Any
        ) -> Bench:
            peers = [profile("a"), profile("b"), *([profile("c")] if from_standby else [])]
            base = problem(*peers, takeover=numerics(policy))  # pyright: ignore[reportArgumentType]
            made = msgspec.structs.replace(base, required=("a", "b"))
            present = msgspec.structs.replace(planned(made), version=1)
            journal.adopt_plan(1, msgspec.json.encode(present))
            clock, fake = FakeClock(), FakePool(list(looks), **pool)
            replanner = TrainingReplanner(
                pool=fake,
                job=JOB,
                title="job",
                steps=10,
                problem=base,
                policy=policy,  # pyright: ignore[reportArgumentType]
                excluded=lambda members: frozenset({"kept out"}),
                journal=journal,
                directory=RunDirectory(tmp_path),
                machines=MachineHistory(clock),
            )
            return Bench(replanner, fake, clock, Deployment(plan=present))

        yield make


def stages(deployment: Deployment) -> list[str]:
    return [stage.peer for stage in deployment.plan.stages]


ALL = (working("a"), working("b"), working("c"))


def test_the_standby_takes_over_and_the_plan_is_on_the_disk_before(bench: Make):
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
    one = bench(there, there, (*there, member("d")), from_standby=False)
    assert stages(one.replaced("b")).count("d") == 1
    assert len(one.waited) == 2
    assert one.waited[0].startswith("waiting for a peer that lends")
    assert "computes the same bits as b did" in one.waited[0]


def test_an_exact_job_takes_no_machine_of_other_numerics(bench: Make):
    there = (working("a"), working("b"), member("e", fingerprint="other"))
    one = bench(there, (*there, member("d")), from_standby=False)
    assert "d" in stages(one.replaced("b"))
    assert len(one.waited) == 1


def test_a_tolerant_job_takes_it(bench: Make):
    one = bench((working("a"), working("b"), member("e", fingerprint="other")), policy="tolerant", from_standby=False)
    assert "e" in stages(one.replaced("b"))
    assert not one.waited


def test_a_refusing_job_ends_where_there_are_only_others(bench: Make):
    one = bench((working("a"), working("b"), member("e", fingerprint="other")), policy="refuse", from_standby=False)
    heavy(one)
    with pytest.raises(ExecutionError, match="compute other bits, and the recipe refuses them"):
        one.replaced("b")


def test_a_refusing_job_waits_where_there_is_nobody(bench: Make):
    there = (working("a"), working("b"))
    one = bench(there, (*there, member("d")), policy="refuse", from_standby=False)
    assert "d" in stages(one.replaced("b"))


def test_who_is_kept_out_rests_or_works_for_others_is_not_asked(bench: Make):
    there = (working("a"), working("b"))
    others = (member("kept out"), member("r", rests_s=5.0), member("w", state="active", job="another"))
    one = bench((*there, *others), (*there, *others, member("d")), from_standby=False)
    assert "d" in stages(one.replaced("b"))
    assert len(one.waited) == 1


def test_a_lost_machine_serves_again_only_when_it_was_heard_since(bench: Make):
    silent, heard = working("b", last_heard_s=3.0), working("b", last_heard_s=0.5)
    one = bench((working("a"), silent), (working("a"), heard), from_standby=False)
    look = one.pool.pool

    async def later() -> tuple[PoolMember, ...]:
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
        one.replanner.machines.note_lost("b")
        needed.append(0)
        while not one.replanner.machines.is_back(known):
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
    one.replanner.machines.note_lost("c")
    one.clock.seconds += 2.0
    assert one.replanner.machines.is_back(member("c"))
    assert "c" in stages(one.replaced("a"))
    one.replaced("c")
    assert not one.replanner.machines.is_back(member("c"))


def test_who_waits_for_nobody_else_does_not_ask_how_often_it_was_lost(bench: Make):
    one = bench((working("a"), working("b")), from_standby=False)
    look, looks = one.pool.pool, [0]

    async def later() -> tuple[PoolMember, ...]:
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


def test_a_faulty_peer_is_asked_for_nothing_again_not_even_by_a_later_start(bench: Make):
    one = bench((working("a"), working("b"), working("c"), member("d")))
    lost = one.present.plan.stages[0].peer
    one.replanner.distrust(lost, "it scaled its activations")
    assert lost not in {member.view.peer for member in one.replanner.usable(ALL)}
    assert lost not in stages(one.replaced(lost))
    (known,) = distrusted(one.replanner.directory)
    assert (known.peer, known.reason) == (lost, "it scaled its activations")


def test_a_file_of_faulty_peers_that_is_none_is_named(bench: Make):
    directory = bench(ALL).replanner.directory
    directory.distrusted.write_bytes(b"[{]")
    with pytest.raises(StorageError, match=r"distrusted\.json"):
        distrusted(directory)


# ---------------------------------------------------------------------------------------------------- going on


def commit(one: Bench, steps: int = 3) -> None:
    for step in range(steps):
        record = CommitRecord(
            step=step,
            scale=1.0,
            learning_rate=1.0,
            total_norm=1.0,
            norms_hash="",
            fence=Fence(1, 1, 0),
            loss=1.0,
        )
        one.replanner.journal.append(record)


def ticking(one: Bench, seconds: float = 1.0) -> None:
    """Each look at the pool takes so long."""
    look = one.pool.pool

    async def later() -> tuple[PoolMember, ...]:
        one.clock.seconds += seconds
        return await look()

    one.pool.pool = later


def heavy(one: Bench) -> None:
    """One machine alone can't hold the model."""
    blocks = tuple(
        msgspec.structs.replace(block, parameter_bytes=10**8, trainable_bytes=10**8)
        for block in one.replanner.problem.blocks
    )
    one.replanner.problem = msgspec.structs.replace(one.replanner.problem, blocks=blocks)
    there = (profile("a"), profile("b"))
    made = planned(msgspec.structs.replace(one.replanner.problem, peers=there))
    one.present = Deployment(plan=msgspec.structs.replace(made, version=1))


def pool_stages(deployment: Deployment) -> set[str]:
    return {stage.peer for stage in deployment.plan.stages} - {"owner"}


def test_after_the_grace_period_the_model_is_cut_anew_over_those_that_remain(bench: Make):
    one = bench((working("a"), working("c")), policy="any", from_standby=False)
    commit(one)
    there = (profile("a"), profile("b"), profile("c"))
    one.replanner.problem = msgspec.structs.replace(one.replanner.problem, peers=there)
    present = planned(msgspec.structs.replace(one.replanner.problem, stages=3, required=("a", "b", "c")))
    one.present = Deployment(plan=msgspec.structs.replace(present, version=1))
    ticking(one)
    found = one.replaced("b")
    assert pool_stages(found) <= {"a", "c"}
    assert len(found.plan.stages) < len(present.stages)
    assert found.plan.tolerant_takeovers == ()  # all are alike
    assert one.clock.seconds >= 100.0 + 30.0
    assert "computes the same bits as b did" in one.waited[0]
    assert "cutting the model anew over" in one.waited[0]
    marks = [text.rpartition(" in ")[2] for text in dict.fromkeys(one.waited)]
    assert marks == ["30 s", "20 s", "10 s", "5 s", "4 s", "3 s", "2 s", "1 s"]


def test_two_stages_on_one_machine_that_remains(bench: Make):
    one = bench((working("a"),), policy="any", from_standby=False)
    ticking(one, 40.0)
    assert pool_stages(one.replaced("b")) == {"a"}


def test_an_unlike_machine_stands_in_after_the_grace_period_and_it_is_recorded(bench: Make):
    one = bench((working("a"), member("e", fingerprint="other")), policy="any", from_standby=False)
    heavy(one)
    commit(one)
    one.replanner.tolerance = 1e-5
    ticking(one)
    lost = one.present.plan.stages[1].peer
    found = one.replaced(lost)
    assert stages(found)[1] == "e"
    (took,) = found.plan.tolerant_takeovers
    assert (took.step, took.stages, took.peers, took.recut, took.tolerance) == (3, (1,), ("e",), False, 1e-5)
    assert one.waited[0].endswith("; going on with e, of other numerics (tolerant, not bit-exact) in 30 s")
    journalled = one.replanner.journal.plan
    assert journalled is not None
    assert msgspec.json.decode(journalled.plan, type=Plan).tolerant_takeovers == (took,)


def test_before_the_first_step_there_are_no_bits_to_differ_from(bench: Make):
    one = bench((working("a"), member("e", fingerprint="other")), policy="any", from_standby=False)
    ticking(one, 40.0)
    assert one.replaced("b").plan.tolerant_takeovers == ()


def test_an_equal_machine_that_joins_within_the_grace_period_keeps_the_bits(bench: Make):
    there = (working("a"), member("e", fingerprint="other"))
    one = bench(there, there, (*there, member("d")), policy="any", from_standby=False)
    commit(one)
    ticking(one)
    found = one.replaced("b")
    assert "d" in stages(found)
    assert found.plan.tolerant_takeovers == ()


def test_a_further_loss_does_not_begin_the_grace_period_anew(bench: Make):
    one = bench((working("a"), member("e", fingerprint="other")), policy="any", from_standby=False)
    ticking(one, 20.0)
    one.replaced("b")
    assert len(one.waited) == 2
    one.replanner._short_since_s = one.clock.seconds - 25.0
    one.waited.clear()
    one.replaced("b", "x")
    assert len(one.waited) == 0


def test_a_job_that_demands_bits_waits_and_says_what_would_help(bench: Make):
    there = (working("a"), member("e", fingerprint="other"))
    one = bench(*[there] * 50, (*there, member("d")), policy="exact", from_standby=False)
    heavy(one)
    ticking(one)
    assert "d" in stages(one.replaced("b"))
    assert len(one.waited) == 50
    (said,) = set(one.waited)
    assert "computes the same bits as b did" in said
    assert 'takeover = "exact" demands the same bits' in said
    assert 'takeover = "any" in [faults], which would mean' in said


def test_machines_that_are_all_alike_go_on_with_another_cut_where_bits_are_demanded(bench: Make):
    one = bench((working("a"),), policy="exact", from_standby=False)
    commit(one)
    ticking(one)
    found = one.replaced("b")
    assert pool_stages(found) == {"a"}
    assert found.plan.tolerant_takeovers == ()


def test_what_was_tolerated_stays_on_record_in_later_plans(bench: Make):
    one = bench((working("a"), member("e", fingerprint="other")), policy="any", from_standby=False)
    heavy(one)
    commit(one)
    ticking(one, 40.0)
    found = one.replaced(one.present.plan.stages[1].peer)
    later = asyncio.run(one.replanner.make_real(msgspec.structs.replace(found.plan, version=0, tolerant_takeovers=())))
    assert later.plan.tolerant_takeovers == found.plan.tolerant_takeovers != ()
    assert one.replanner.is_tolerant
