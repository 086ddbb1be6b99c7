"""Somebody joins while streams run: it becomes a standby, fetches its weights from the others, and disturbs no stream.

Beside it, as a control, the same process starts and joins another pool on the same machine: what that costs is the
machine's, not the pool's. FUSION_CHAOS_ROUNDS sets how often both are done.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from harness.besieged_job import peers, seed_of
from harness.live_pool import LivePool
from harness.serving_siege import ServingSiege, besieging
from harness.serving_siege_streams import Reference, write_model

pytestmark = pytest.mark.long

STREAMS: Final = 8
STAGES: Final = 3
WINDOW_S: Final = 12.0
REST_S: Final = 2.0
ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class Arm:
    """`joins`: the served pool. `invitations`: one for each round, fetched before anything is measured."""

    joins: bool
    pool: LivePool
    invitations: list[str]
    gaps_s: list[list[float]] = field(default_factory=list[list[float]])
    """Between tokens, by round."""

    @property
    def p99_s(self) -> float:
        return float(np.quantile([gap_s for gaps_s in self.gaps_s for gap_s in gaps_s], 0.99))

    @property
    def p99s_s(self) -> list[float]:
        return [round(float(np.quantile(gaps_s, 0.99)), 4) for gaps_s in self.gaps_s]


async def window(siege: ServingSiege, arm: Arm) -> None:
    """From the start of a `fusion join` on, until some time after it is through."""
    name = f"late{len(arm.gaps_s)}"
    since_s = time.monotonic()
    process = arm.pool.start(name, arm.invitations.pop())
    await asyncio.to_thread(process.wait_for, "In pool")
    if arm.joins:
        await siege.guarded()
    joined_s = time.monotonic() - since_s
    assert joined_s < WINDOW_S, f"it took {joined_s:.1f} s: the window of {WINDOW_S:g} s does not show it"
    await asyncio.sleep(WINDOW_S - joined_s)
    until_s = time.monotonic()
    arm.gaps_s.append([gap_s for answer in siege.answers for gap_s in answer.gaps_s(since_s, until_s)])
    arm.pool.kill(name)
    if arm.joins:
        await siege.until(lambda: not any(one.spare for one in siege.stages()), "the standby is missed")
    await asyncio.sleep(REST_S)


async def measure(siege: ServingSiege, arms: Sequence[Arm], rounds: int, seed: int) -> None:
    order = random.Random(seed)
    async with siege.streams(STREAMS):
        await asyncio.sleep(REST_S)
        for _ in range(rounds):
            for arm in order.sample(arms, len(arms)):
                await window(siege, arm)


@pytest.mark.timeout(1800)
def test_somebody_who_joins_disturbs_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    seed, rounds = seed_of(4), int(os.environ.get("FUSION_CHAOS_ROUNDS", ROUNDS))
    model = write_model(tmp_path / "tiny")
    rested = ("--rest-after", "0")
    with (
        LivePool(tmp_path / "other", broker_options=rested) as other,
        LivePool(tmp_path / "served", peers(STAGES), broker_options=rested) as pool,
    ):
        arms = [Arm(joins, one, [one.invite() for _ in range(rounds)]) for joins, one in ((True, pool), (False, other))]

        async def story() -> ServingSiege:
            async with besieging(pool, model, seed, stages=STAGES) as siege:
                await measure(siege, arms, rounds, seed)
                return siege

        siege = asyncio.run(story())
    joining, control = arms
    compared = Reference(model).compare([(answer.ask, answer.tokens) for answer in siege.answers])
    figures = {
        "seed": seed,
        "rounds": rounds,
        "gaps": [sum(map(len, arm.gaps_s)) for arm in arms],
        "p99_joining_s": round(joining.p99_s, 4),
        "p99_control_s": round(control.p99_s, 4),
        "ratio": round(joining.p99_s / control.p99_s, 3),
        "p99_by_round_s": {"joining": joining.p99s_s, "control": control.p99s_s},
    }
    with capsys.disabled():
        print(f"\n{json.dumps(figures)}\n{compared}")  # noqa: T201
    assert not any(answer.held for answer in siege.answers), "somebody was held up"
    assert all(answer.end is not None and answer.end.reason == "length" for answer in siege.answers)
