"""What a peer announces: what its provider named, or what was found, and the relay."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fusionai.peer.device import candidates

BROKERS = ("tcp://203.0.113.1:4711", "tcp://10.0.0.1:4711")
OWN, SEEN, NAMED, RELAY = (
    "tcp://192.168.1.2:9",
    "tcp://203.0.113.7:9",
    "tcp://home.example:9",
    "relay://203.0.113.1:4711",
)


class Found:
    """Both the transport and its listener, as far as they are asked."""

    async def seen_at(self, listener: object) -> tuple[str, ...]:
        return (SEEN,)

    def candidates_now(self) -> tuple[str, ...]:
        return (OWN,)


@pytest.mark.parametrize(
    ("advertise", "relay", "announced"),
    [
        ((), None, (OWN, SEEN, RELAY)),
        ((), False, (OWN, SEEN)),
        ((NAMED,), None, (NAMED,)),
        ((NAMED,), True, (NAMED, RELAY)),
    ],
)
def test_what_is_announced(advertise: tuple[str, ...], relay: bool | None, announced: tuple[str, ...]):
    found = cast("Any", Found())
    assert asyncio.run(candidates(found, found, BROKERS, advertise=advertise, relay=relay)) == announced
