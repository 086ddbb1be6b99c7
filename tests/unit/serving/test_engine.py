"""Machines count one each, processes of this computer as many as it has cores."""

from __future__ import annotations

import pytest

from fusionai.primitives.ids import PeerId
from fusionai.serving.engine import stations

OWNER, ADA, BOB, CYD = (PeerId(name) for name in ("owner", "ada", "bob", "cyd"))
HERE = {
    "ada": ("tcp://127.0.0.1:4000",),
    "bob": ("tcp://[::1]:4001", "tcp://localhost:4001"),
    "cyd": ("tcp://127.1.1.1:1",),
}
THERE = {"ada": ("tcp://10.0.0.2:4000",), "bob": ("tcp://home.example:1", "tcp://127.0.0.1:1"), "cyd": ()}


@pytest.mark.parametrize(
    ("addresses", "cores", "expected"),
    [(HERE, 1, 1), (HERE, 2, 2), (HERE, 16, 4), (THERE, 1, 4), (THERE, 16, 4), (THERE | {"ada": HERE["ada"]}, 1, 3)],
)
def test_processes_of_one_computer_share_its_cores(
    addresses: dict[str, tuple[str, ...]], cores: int, expected: int
) -> None:
    assert stations({OWNER, ADA, BOB, CYD}, OWNER, addresses, cores) == expected


def test_there_is_always_one() -> None:
    assert stations((), OWNER, {}, 4) == 1


def test_an_address_of_another_transport_is_elsewhere() -> None:
    assert stations({ADA}, OWNER, {"ada": ("quic://127.0.0.1:4000",)}, 1) == 1
    assert stations({ADA, BOB}, OWNER, {"ada": ("quic://127.0.0.1:1",), "bob": ("quic://127.0.0.1:2",)}, 1) == 2
