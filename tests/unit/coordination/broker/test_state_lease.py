"""Leases: they end exactly at their deadline, and a late sign of life does not shorten one."""

from __future__ import annotations

from fusionai.coordination.broker.state import Lease


def test_a_sign_of_life_renews_a_lease_for_its_whole_duration():
    lease = Lease(12.0, 100.0)
    assert lease.expires_at_s == 112.0
    assert lease.renewed(103.0).expires_at_s == 115.0


def test_a_delayed_sign_of_life_never_shortens_a_lease():
    assert Lease(12.0, 100.0).renewed(105.0).renewed(101.0).expires_at_s == 117.0
