"""The owner's part in an exchange between machines: what still comes from a replica that was left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fusionai.coordination.training.joint_rounds import ExchangingReplica, JointRound
from fusionai.training.joint_exchange import Decided, JointExchange, JointFiles


def test_reports_of_a_replica_that_was_left_behind_change_nothing(tmp_path: Path) -> None:
    members = (ExchangingReplica(job="a", weight=1.0), ExchangingReplica(job="b", weight=1.0))
    decided = Decided(last=1, last_step=4, whole=1, rounds=(JointRound(number=1, step=4, members=members),))
    JointFiles(tmp_path).save(decided)

    async def reported() -> JointExchange:
        exchange = JointExchange(JointFiles(tmp_path))
        exchange.seat("a")
        exchange.seat("b")
        exchange.leave_behind("b", "its machine is lost")
        exchange.agrees("b", 0, 1)
        exchange.applied("b", 0, 5, restored=True)
        exchange.wants_state("b", 0)
        await exchange.close()
        return exchange

    exchange = asyncio.run(reported())
    assert exchange.behind == {"b": "its machine is lost"}
    assert exchange.round == 1
