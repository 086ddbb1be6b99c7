"""Kills against a pool without processes: when they strike, what is measured, who comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from fusionai.client.pool.local_pool import LocalPool
from fusionai.client.training import kills
from fusionai.client.training.kills import Kill, Killed, PeerReturned, Striker, check_kills, parse_kill, usual_kills
from fusionai.client.training.train import Planned
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import Certificate, Plan, StagePlacement
from fusionai.storage.commits import CommitJournal
from fusionai.training import progress
from fusionai.wire.messages import CommitRecord, Fence
from harness.patience import CEILING_S

TOWER, LAPTOP, ATTIC = "a" * 52, "b" * 52, "c" * 52


@pytest.mark.parametrize(
    ("text", "kill"), [("7:2", Kill(7, 2)), (" 12 : 0 ", Kill(12, 0)), ("3:broker", Kill(3, "broker"))]
)
def test_a_kill_is_read(text: str, kill: Kill) -> None:
    assert parse_kill(text) == kill


@pytest.mark.parametrize("text", ["", "7", "7:", ":2", "7:-1", "-7:1", "7:2:1", "7:Broker2", "x:1", "7:1.5", "٣:١x"])
def test_what_is_no_kill(text: str) -> None:
    with pytest.raises(UsageError, match="expected STEP:STAGE"):
        parse_kill(text)


@pytest.mark.parametrize(
    ("killed", "said"),
    [
        ((Kill(0, 1),), "steps are numbered from 1 to 10"),
        ((Kill(11, 1),), "steps are numbered from 1 to 10"),
        ((Kill(11, "broker"),), "--kill 11:broker"),
        ((Kill(5, 4),), "stages are numbered from 0 to 3"),
        ((Kill(5, 3), Kill(5, 3)), "given twice"),
    ],
)
def test_kills_that_can_not_happen(killed: tuple[Kill, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_kills(killed, steps=10, peers=4)


def test_usual_kills_can_always_happen() -> None:
    for steps in range(1, 60):
        for peers in range(1, 9):
            for spares in range(3):
                found = usual_kills(steps=steps, peers=peers, spares=spares)
                check_kills(found, steps=steps, peers=peers)
                assert bool(found) == (steps >= 8)
    assert usual_kills(steps=50, peers=4, spares=2) == (Kill(12, 2), Kill(25, 0), Kill(37, "broker"))
    assert usual_kills(steps=50, peers=4, spares=0) == (Kill(37, "broker"),)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0


class Pool:
    """Processes by name, without any."""

    def __init__(self) -> None:
        self.names = {TOWER: "tower", LAPTOP: "laptop", ATTIC: "attic"}
        self.living = {"tower", "laptop", "attic", "broker"}
        self.done: list[str] = []

    def lives(self, name: str) -> bool:
        return name in self.living

    async def kill(self, name: str) -> None:
        if name not in self.living:
            raise FusionError(f"{name} can't be killed: it has ended already.")
        self.living.discard(name)
        self.done.append(f"kill {name}")

    async def start_again(self, name: str) -> None:
        assert name not in self.living
        self.living.add(name)
        self.done.append(f"start {name}")


def plan(*peers: str) -> Plan:
    return Plan(
        graph_hash="g",
        stages=tuple(StagePlacement(stage=i, peer=p, blocks=(i, i + 1), fingerprint="x") for i, p in enumerate(peers)),
        feed="o" * 52,
        microbatches=4,
        step_time_s=0.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="m", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )


def record(step: int, loss: float = 2.0) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=1e-3,
        total_norm=1.0,
        norms_hash="h",
        fence=Fence(1, 1, 1),
        loss=loss,
    )


class Run:
    """A striker, what it said, and the job's journal."""

    def __init__(self, directory: Path, *killed: Kill) -> None:
        self.clock, self.pool = Clock(), Pool()
        self.said: list[object] = []
        directory.mkdir(exist_ok=True)
        self.journal = CommitJournal(directory / "journal.sqlite")
        self.striker = Striker(
            killed, cast(LocalPool, self.pool), directory, on_event=self.said.append, now_s=lambda: self.clock.now_s
        )
        self.see(Planned(JobId("job"), plan(TOWER, LAPTOP), (), cast(Any, None)))

    def see(self, event: Any) -> None:
        self.striker.see(event)

    def commit(self, step: int, *, replayed: bool = False) -> None:
        if not replayed:
            self.journal.append(record(step))
        self.see(progress.StepDone(record(step), (2.0,), 1e-3, 1.0, replayed, {}))

    async def until(self, said: type) -> None:
        async with asyncio.timeout(CEILING_S):
            while not any(isinstance(one, said) for one in self.said):  # noqa: ASYNC110 (threads are under way)
                await asyncio.sleep(0)

    async def until_journal_read(self) -> None:
        async with asyncio.timeout(CEILING_S):
            while not self.striker.outcomes[-1].journal:  # noqa: ASYNC110
                await asyncio.sleep(0)


def lost(peer: str, stage: int, step: int) -> progress.FaultSeen:
    return progress.FaultSeen("peer", peer, (stage,), step, "connection closed")


def test_a_stage_is_killed_in_its_step_and_comes_back_after_the_commit(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(3, 1))
        run.see(progress.JobReady(0))
        run.commit(0)
        await asyncio.sleep(0)
        assert run.said == []
        run.clock.now_s = 10.0
        run.commit(1)
        await run.until(Killed)
        await run.until_journal_read()
        assert run.said == [Killed(Kill(3, 1), "laptop", LAPTOP)]
        run.clock.now_s = 10.5
        run.see(lost(LAPTOP, 1, 2))
        run.see(progress.PlanChanged(plan(TOWER, ATTIC), "lost"))
        run.commit(1, replayed=True)
        run.clock.now_s = 12.0
        run.commit(2)
        await run.until(PeerReturned)
        await run.striker.close()
        assert run.pool.done == ["kill laptop", "start laptop"]
        (outcome,) = run.striker.outcomes
        assert (outcome.detected_s, outcome.recovered_s) == (0.5, 2.0)
        assert (outcome.takeover, outcome.exact) == ("attic", True)
        assert [one.step for one in outcome.journal] == [0, 1]
        assert run.striker.lost_steps() == 0
        run.journal.close()

    asyncio.run(story())


def test_a_commit_before_the_kill_is_noticed_is_not_its_recovery(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(2, 0))
        run.commit(0)
        await run.until(Killed)
        run.clock.now_s = 0.25
        run.commit(1)  # all were prepared: this commit needed nobody any more
        run.clock.now_s = 1.0
        run.see(lost(TOWER, 0, 2))
        run.clock.now_s = 3.0
        run.commit(2)
        await run.striker.close()
        assert (run.striker.outcomes[0].detected_s, run.striker.outcomes[0].recovered_s) == (1.0, 3.0)
        run.journal.close()

    asyncio.run(story())


def test_a_kill_nobody_noticed_counts_to_the_next_commit(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(2, 0))
        run.commit(0)
        await run.until(Killed)
        run.clock.now_s = 0.25
        run.commit(1)
        await run.striker.close()
        assert (run.striker.outcomes[0].detected_s, run.striker.outcomes[0].recovered_s) == (None, 0.25)
        run.journal.close()

    asyncio.run(story())


def test_who_is_waited_for_comes_back_before_the_commit(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(2, 1))
        run.commit(0)
        await run.until(Killed)
        run.see(progress.JobWaiting("no peer stands by"))
        await run.until(PeerReturned)
        assert run.pool.done == ["kill laptop", "start laptop"]
        await run.striker.close()
        assert run.striker.outcomes[0].recovered_s is None
        run.journal.close()

    asyncio.run(story())


def test_two_stages_of_one_peer_are_one_kill(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(2, 0), Kill(2, 1))
        run.see(progress.PlanChanged(plan(TOWER, TOWER), "both"))
        run.commit(0)
        await run.until(Killed)
        run.see(lost(TOWER, 0, 1))
        run.commit(1)
        await run.striker.close()
        assert run.pool.done == ["kill tower", "start tower"]
        assert len(run.striker.outcomes) == 2
        run.journal.close()

    asyncio.run(story())


def test_one_that_comes_back_before_its_second_stage_is_struck_is_not_killed_again(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(2, 0), Kill(2, 1))
        run.see(progress.PlanChanged(plan(TOWER, TOWER), "both"))
        first, second = Kill(2, 0), Kill(2, 1)
        striking = asyncio.create_task(run.striker._strike(first, 0.0))
        await run.until(Killed)
        run.see(lost(TOWER, 0, 1))
        run.commit(0)
        await striking
        await run.striker._strike(second, 0.0)
        await run.striker.drop()
        assert run.pool.done == ["kill tower", "start tower"]
        run.journal.close()

    asyncio.run(story())


def test_a_peer_that_is_gone_already_is_said_not_counted_as_recovered(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(2, 1))
        run.pool.living.discard("laptop")
        run.commit(0)
        await run.until(progress.Warned)
        await run.striker.close()
        assert run.striker.outcomes[0].recovered_s is None
        run.journal.close()

    asyncio.run(story())


def test_a_kill_of_the_first_step_waits_for_the_job_to_be_ready(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(1, 0))
        await asyncio.sleep(0)
        assert run.said == []
        run.see(progress.JobReady(0))
        await run.until(Killed)
        await run.striker.drop()
        run.journal.close()

    asyncio.run(story())


def test_the_broker_is_back_when_it_shows_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{TOWER}, {TOWER, ATTIC}, {TOWER, LAPTOP, ATTIC}]

    class Session:
        def __init__(self, _membership: object, *, trust: None) -> None:
            del trust

        async def __aenter__(self) -> Session:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def pool(self) -> list[object]:
            run.clock.now_s += 1.0
            shown = answers.pop(0)
            return [cast(Any, _Member(peer)) for peer in shown]

    class _Member:
        def __init__(self, peer: str) -> None:
            self.view = self
            self.peer, self.is_present = peer, True

    monkeypatch.setattr(kills, "PoolSession", Session)
    monkeypatch.setattr(kills, "load_membership", lambda _home: None)
    monkeypatch.setattr(kills, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(Pool, "broker_home", tmp_path, raising=False)
    run = Run(tmp_path / "job", Kill(2, "broker"))

    async def story() -> None:
        run.commit(0)
        await run.until(Killed)
        run.see(progress.BrokerAway("connection refused"))
        await run.until(PeerReturned)
        await run.striker.close()
        (outcome,) = run.striker.outcomes
        assert (outcome.detected_s, outcome.recovered_s, answers) == (0.0, 3.0, [])
        assert run.pool.done == ["kill broker", "start broker"]
        run.journal.close()

    asyncio.run(story())


def test_lost_steps_are_those_missing_or_different(tmp_path: Path) -> None:
    async def story() -> None:
        run = Run(tmp_path / "job", Kill(4, 0))
        for step in range(3):
            run.commit(step)
        await run.until(Killed)
        await run.until_journal_read()
        run.journal.close()
        assert run.striker.lost_steps() == 0
        for file in (tmp_path / "job").glob("journal.sqlite*"):
            file.unlink()
        with CommitJournal(tmp_path / "job" / "journal.sqlite") as other:
            other.append(record(0))
            other.append(record(1, loss=2.5))
            assert run.striker.lost_steps() == 2
        await run.striker.drop()

    asyncio.run(story())
