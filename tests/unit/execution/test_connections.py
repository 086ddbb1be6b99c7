"""Which words of a member prove that both directions to it work."""

from __future__ import annotations

import asyncio

from fusionai.execution.connections import (
    LocalChannel,
    _MemberConnection,  # pyright: ignore[reportPrivateUsage]
)
from fusionai.execution.links import Outbox
from fusionai.primitives.ids import PeerId

PEER = PeerId("peer")


def test_only_answers_and_states_are_signs_of_life():
    async def story() -> list[bool]:
        control, _ = LocalChannel.pair(PEER, "control")
        state, _ = LocalChannel.pair(PEER, "state")
        line = _MemberConnection(PEER, Outbox(control, lambda reason: None), state)
        seen = [line.sign_of_life()]
        control.stats.arrived_bytes += 100  # it tells of a lost link: that says nothing of the way there
        seen.append(line.sign_of_life())
        line.answers += 1
        seen.append(line.sign_of_life())
        state.stats.arrived_bytes += 100
        seen += [line.sign_of_life(), line.sign_of_life()]
        await line.control.close()
        return seen

    assert asyncio.run(story()) == [False, False, True, True, False]
