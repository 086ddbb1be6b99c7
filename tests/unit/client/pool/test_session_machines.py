"""Which devices are of one machine is the broker's word, whatever a device says of itself."""

from __future__ import annotations

import msgspec

from fusionai.client.pool.session import members_of
from fusionai.wire.messages import PoolView
from harness.told_pool import member


def test_a_device_can_not_say_that_it_is_of_another_machine() -> None:
    card = member("b")
    liar = msgspec.structs.replace(card.profile, machine="c")
    shown = msgspec.Raw(msgspec.msgpack.encode(liar))
    views = (
        msgspec.structs.replace(member("a").view, profile=shown),
        msgspec.structs.replace(card.view, profile=shown, machine="a"),
    )
    assert [one.profile.machine for one in members_of(PoolView(members=views))] == ["", "a"]
