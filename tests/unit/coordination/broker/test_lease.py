"""Leases: silence of the whole duration expires one, a late sign of life does not shorten it, expiry is final."""

from __future__ import annotations

import pytest

from fusionai.coordination.broker.lease import LEASE, Elapsed, Heard, grant
from fusionai.coordination.machine import ForbiddenTransition


def test_a_granted_lease_ends_exactly_at_its_deadline():
    lease = grant("lease of member a", now_s=100.0, duration_s=12.0)
    assert lease.expires_at_s == 112.0
    assert LEASE.advance(lease, Elapsed(111.999))[0].phase == "granted"
    assert LEASE.advance(lease, Elapsed(112.0))[0].phase == "expired"


def test_a_sign_of_life_renews():
    lease, _ = LEASE.advance(grant("l", 100.0, 12.0), Heard(103.0))
    assert (lease.phase, lease.expires_at_s) == ("renewed", 115.0)
    assert LEASE.advance(lease, Elapsed(114.0))[0].phase == "renewed"
    assert LEASE.advance(lease, Elapsed(115.0))[0].phase == "expired"


def test_a_delayed_sign_of_life_never_shortens_a_lease():
    lease, _ = LEASE.advance(grant("l", 100.0, 12.0), Heard(105.0))
    assert LEASE.advance(lease, Heard(101.0))[0].expires_at_s == 117.0


@pytest.mark.parametrize("event", [Heard(113.0), Elapsed(113.0)])
def test_an_expired_lease_stays_expired(event: object):
    expired, _ = LEASE.advance(grant("l", 100.0, 12.0), Elapsed(112.0))
    with pytest.raises(ForbiddenTransition, match="l is expired"):
        LEASE.advance(expired, event)
