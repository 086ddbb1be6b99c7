"""Crowds of connections keep to their caps, and a flood displaces itself."""

from __future__ import annotations

import random

import pytest

from fusionai.coordination.doorkeeping import EARLY, Caller, Crowd, CrowdCaps, prefix_of

CAPS = CrowdCaps(total=40, prefix=16, key=4)
FLOOD, HOME = prefix_of("203.0.113.9"), prefix_of("198.51.100.7")


def crowd(seed: int = 0) -> Crowd[int]:
    return Crowd(CAPS, random.Random(seed).random)


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("192.168.1.7", "192.168.1.0/24"),
        ("::ffff:192.168.1.7", "192.168.1.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("", ""),
        ("relay to x", "relay to x"),
    ],
)
def test_one_site_is_one_prefix(host: str, prefix: str):
    assert prefix_of(host) == prefix


def test_below_three_quarters_of_every_cap_none_is_dropped():
    few = crowd()
    assert [few.enter(number, Caller(HOME)) for number in range(int(EARLY * CAPS.prefix))] == [None] * 12


def test_a_flood_of_one_prefix_never_displaces_another():
    many = crowd()
    many.enter(-1, Caller(HOME, "honest"))
    dropped = [many.enter(number, Caller(FLOOD)) for number in range(1000)]
    assert -1 not in dropped
    assert len(many) <= CAPS.prefix + 1


def test_a_flood_of_many_prefixes_displaces_the_largest_first():
    many = crowd()
    for number in range(500):
        many.enter(number, Caller(prefix_of(f"10.0.{number % 5}.1")))
        assert len(many) <= CAPS.total
    many.enter(-1, Caller(HOME))
    for number in range(500, 540):
        assert many.enter(number, Caller(prefix_of(f"10.0.{number % 5}.1"))) != -1


def test_a_flood_of_prefixes_with_one_connection_each_stays_within_the_total():
    many = crowd()
    for number in range(500):
        many.enter(number, Caller(f"{number}"))
        assert len(many) <= CAPS.total


def test_within_a_flooded_prefix_an_honest_handshake_survives_about_as_long_as_a_slot_on_average():
    """The oldest-first rule would have dropped it after exactly `prefix` arrivals, however often it tries again."""
    survived = 0
    for seed in range(400):
        many = crowd(seed)
        for number in range(100):
            many.enter(number, Caller(FLOOD))
        many.enter(-1, Caller(FLOOD))
        survived += -1 not in [many.enter(number, Caller(FLOOD)) for number in range(100, 100 + 2 * CAPS.prefix)]
    assert 0.05 < survived / 400 < 0.3, "exp(-2) is 0.135"


def test_a_key_displaces_only_its_own_connections():
    many = crowd()
    many.enter(-1, Caller(HOME, "honest"))
    for number in range(100):
        dropped = many.enter(number, Caller(HOME, "greedy"))
        assert dropped is None or dropped >= 0
        assert len(many) <= CAPS.key + 1


def test_who_left_counts_no_more():
    few = crowd()
    for number in range(1000):
        assert few.enter(number, Caller(HOME, "key")) is None
        few.leave(number)
        few.leave(number)
    assert len(few) == 0
