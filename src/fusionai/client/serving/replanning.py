"""Gets a new plan for a serving job. A peer that has returned becomes a warm standby at once if a stage has none.

In serving, streams wait while a stage has neither a holder nor a standby, and the next loss may come before the pool is
checked again. A standby that fails costs no recovery round. `client.pool.replanning` finds the plan,
`client.serving.serve` uses it."""

from __future__ import annotations

from fusionai.client.pool.replanning import PoolReplanner
from fusionai.client.pool.session import Member
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.standby.takeover import Waiting, reinforced


class ServingReplanner(PoolReplanner):
    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[Member, ...]) -> Plan | Waiting:
        found = super()._replaced(plan, lost, members)
        returned = [one.profile for one in self.usable(members) if one.view.peer in lost and self.is_there(one)]
        if isinstance(found, Waiting) or not returned:
            return found
        return reinforced(found, self.problem, returned) or found
