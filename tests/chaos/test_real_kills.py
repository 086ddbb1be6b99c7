"""Real processes killed at random while `fusion train` runs: no official step is lost, no bit of the result changes.

A run is replayed by its seed: FUSION_CHAOS_SEED=... pytest ...; FUSION_CHAOS_KILLS sets the length of long ones.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Final

import pytest

from harness.besieged_job import besieged, check, kills_of, peers, seed_of
from harness.killer import Habits, Killer, Role
from harness.live_pool import LivePool
from harness.outcomes import Outcome, as_json, summary

pytestmark = pytest.mark.slow

STAGES: Final = 3
WEIGHTS: Final = {Role.STAGE: 10.0, Role.SPARE: 3.0, Role.BROKER: 1.0, Role.DRIVER: 1.0}
HURRY: Final = 0.15
"""Part of the strikes that do not wait until the job is past the one before."""


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    monkeypatch.setenv("FUSION_LOG", "info")


def killed_pids(killer: Killer) -> set[int]:
    return {blow.target.pid for blow in killer.blows}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_everybody_is_killed_once_and_nobody_can_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    choose = random.Random(seed := seed_of(1))
    with LivePool(tmp_path, peers(5)) as pool, besieged(pool, STAGES) as siege:
        siege.wait_for_steps(3)
        with Killer(seed, Habits(together=0.0, freezing=0.0), log=tmp_path / "strikes.jsonl") as killer:
            script = [
                (Role.STAGE,),
                (Role.STAGE, Role.STAGE),
                (Role.SPARE,),
                (Role.BROKER,),
                (Role.STAGE,),
                (Role.DRIVER,),
            ]
            for roles in script:
                siege.wait_for_spares(1)  # who was killed before may still be on its way back
                time.sleep(choose.uniform(0.0, 0.5))  # a moment within a step
                census = siege.census()
                outcomes: list[Outcome] = []
                for role in roles:
                    targets = [one for one in census if one.role is role and one.pid not in killed_pids(killer)]
                    outcomes += siege.strike(killer, targets)
                assert len(outcomes) == len(roles), (roles, census)
                siege.recover(outcomes)
        siege.finish()
        check(siege)
        with capsys.disabled():
            print(f"\nseed {seed}: {json.dumps(summary(siege.outcomes))}")  # noqa: T201


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hundreds_of_random_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seed, kills = seed_of(20261), kills_of(200)
    habits = Habits(weights=WEIGHTS, pause_s=(0.0, 3.0), together=0.15, freezing=0.0)
    with (
        LivePool(tmp_path, peers(8), broker_options=("--rest-after", "0")) as pool,
        besieged(pool, STAGES) as siege,
    ):
        siege.wait_for_steps(3)

        def tell(text: str) -> None:
            with capsys.disabled():
                print(text, flush=True)  # noqa: T201 - a long run shows where it is

        with Killer(seed, habits, log=tmp_path / "strikes.jsonl", say=tell) as killer:
            choose = random.Random(seed)
            pending = []
            while len(siege.outcomes) < kills:
                time.sleep(killer.pause_s())
                pending += siege.strike(killer, siege.census())
                if choose.random() >= HURRY:
                    siege.recover(pending)
                    pending = []
                    siege.wait_for_spares(2)
            siege.recover(pending)
        siege.finish()
        check(siege)
        told = {"seed": seed, "kills": len(siege.outcomes), "steps": len(siege.official), **summary(siege.outcomes)}
        report = tmp_path / "kills.json"
        report.write_text(json.dumps({**told, "outcomes": [as_json(one) for one in siege.outcomes]}, indent=1))
        tell(f"{json.dumps(told, indent=1)}\n{report}")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_machines_of_replicas_killed_at_random_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two replicas of two stages that sum their gradients at every step."""
    seed, kills = seed_of(628), kills_of(40)
    habits = Habits(weights=WEIGHTS, pause_s=(0.0, 3.0), together=0.15, freezing=0.0)
    with (
        LivePool(tmp_path, peers(8), broker_options=("--rest-after", "0")) as pool,
        besieged(pool, 2, replicas=2) as siege,
    ):
        siege.wait_for_steps(3)
        assert siege.plan().replicas == 2
        with Killer(seed, habits, log=tmp_path / "strikes.jsonl") as killer:
            while len(siege.outcomes) < kills:
                time.sleep(killer.pause_s())
                siege.recover(siege.strike(killer, siege.census()))
                siege.wait_for_spares(2)
        siege.finish()
        check(siege)
        with capsys.disabled():
            print(f"\nseed {seed}: {json.dumps(summary(siege.outcomes))}")  # noqa: T201


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_driver_killed_at_random_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also while it starts, which takes it most of the time."""
    seed, kills = seed_of(20), kills_of(20)
    choose = random.Random(seed)
    with LivePool(tmp_path, peers(4)) as pool, besieged(pool, STAGES) as siege:
        with Killer(seed, Habits(together=0.0, freezing=0.0), log=tmp_path / "strikes.jsonl") as killer:
            siege.wait_for_steps(2)
            for _ in range(kills):
                time.sleep(choose.uniform(0.0, 2.0))
                (outcome,) = siege.strike(killer, siege.census(Role.DRIVER))
                siege.restart_driver()
                if choose.random() < 0.7:
                    siege.recover([outcome])
            siege.wait_for_steps(2)
        siege.finish()
        check(siege)
        with capsys.disabled():
            print(f"\nseed {seed}: {json.dumps(summary(siege.outcomes))}")  # noqa: T201
