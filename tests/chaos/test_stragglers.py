"""A machine that has become slow loses its stage to one that stands by; the results stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from harness.besieged_job import besieged, check, peers
from harness.drag import Drag
from harness.live_pool import LivePool
from harness.patience import CEILING_S

pytestmark = pytest.mark.long

FACTOR: Final = 6.0
PATIENCE_S: Final = CEILING_S


@pytest.mark.timeout(1200)
def test_a_stage_moves_away_from_a_machine_that_has_become_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    with LivePool(tmp_path) as pool:
        for name in peers(3):
            pool.start(name, pool.invite())
        for name in peers(3):
            pool.members[name].wait_for("In pool")
        with besieged(pool, 2) as siege:
            siege.wait_for_steps(5)
            slow = siege.holder(1)
            with Drag(pool.members[slow].process.pid, FACTOR):

                def moved() -> str | None:
                    return next((line for line in siege.job.lines if "slower than planned" in line), None)

                line = siege.job.wait_until(moved, PATIENCE_S)
                assert line is not None, siege.job.text[-2000:]
                assert slow in line
                siege.wait_for_steps(siege.steps_of_this_start() + 3)
            assert slow not in {siege.holder(stage) for stage in (0, 1)}
            assert pool.members[slow].lives, "slow is not lost: it goes on as a spare"
            siege.finish()
            check(siege)
