"""The deployment of a served model as it is now: places of today, everything else as granted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from fusionai.coordination.serving.interface import ServingRoles
from fusionai.execution.connections import Deployment
from fusionai.scheduling.planner import plan as planned
from fusionai.serving.rounds import ServingRound
from fusionai.wire.messages import Fence
from harness.told_pool import problem, profile


def test_standbys_that_took_over_change_the_places_and_nothing_else() -> None:
    plan = msgspec.structs.replace(planned(problem(profile("a"), profile("b"))), version=3)
    granted = Deployment(plan=plan, members={"a": ("tcp://a:1",)}, tickets={"a": b"t"}, clock_ahead_s=7.0)
    nothing = cast(Any, SimpleNamespace())
    present = ServingRound(
        nothing, nothing, granted, nothing, Fence(3, 1, 0), nothing, nothing, secret_of=lambda _stage, _peer: b""
    )
    places = {stage.stage: "c" if stage.peer == "a" else stage.peer for stage in plan.stages}
    roles = ServingRoles(version=3, owner="owner", places=places, caching=frozenset())
    found = present.deployment_of(roles)
    assert {stage.stage: stage.peer for stage in found.plan.stages} == places
    assert (found.members, found.tickets, found.clock_ahead_s) == (granted.members, granted.tickets, 7.0)
