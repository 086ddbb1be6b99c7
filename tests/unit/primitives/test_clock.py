"""The broker's time of day on a machine whose own clock is off."""

from __future__ import annotations

import sys
import time

import pytest

from fusionai.primitives.clock import PoolClock, elapsed_s
from harness.virtual_clock import VirtualClock


def test_a_pool_clock_shows_the_brokers_time_whatever_the_machines_own_says():
    own = VirtualClock(wall_offset_s=1_700_003_600.0)  # an hour ahead of a broker at 1_700_000_000
    clock = PoolClock(own)
    assert clock.wall_s() == own.wall_s()
    clock.set_by(1_700_000_000.0)
    own.advance(5.0)
    assert (clock.ahead_s, clock.wall_s(), clock.now_s()) == (3600.0, 1_700_000_005.0, 5.0)
    clock.set_by(0.0)  # an answer without a time changes nothing
    assert clock.ahead_s == 3600.0
    clock.set_by(1_700_010_000.0)
    assert clock.wall_s() == 1_700_010_000.0


@pytest.mark.skipif(sys.platform != "linux", reason="another clock goes on during sleep there")
def test_the_clock_of_leases_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch):
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before_s <= elapsed_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 50.0, time.CLOCK_MONOTONIC: 20.0}.__getitem__)
    assert elapsed_s() == 50.0
