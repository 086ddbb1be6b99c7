"""A broker's home: what is kept, for whom it is locked, and whose home it must not take."""

from __future__ import annotations

import stat
from contextlib import closing
from pathlib import Path

import pytest

from fusionai.broker.home import DEFAULT_POOL, BrokerHome
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.transport.enrolment import load_membership
from fusionai.transport.security.certificates import load_authority, read_certificate

NOW_S = 1.75e9


def opened(path: Path, pool: str | None = None) -> BrokerHome:
    return BrokerHome.open(path, pool, now_wall_s=NOW_S)


def test_a_new_home_is_private_and_keeps_its_name_key_and_authority(tmp_path: Path):
    home = tmp_path / "home"
    with closing(opened(home, "friends")) as first:
        certified = read_certificate(first.credentials.certificate)
        assert (certified.peer, certified.role, certified.pool) == (first.identity.peer, "broker", "friends")
    for file in home.rglob("*"):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    with closing(opened(home)) as second:
        assert second.authority.pool == "friends"
        assert second.authority.certificate == first.authority.certificate
        assert second.identity.peer == first.identity.peer


def test_without_a_name_there_is_a_default_one(tmp_path: Path):
    with closing(opened(tmp_path)) as home:
        assert home.authority.pool == DEFAULT_POOL


def test_the_machine_of_the_broker_is_a_member_with_its_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.transport.enrolment.time.time", lambda: NOW_S)
    with closing(opened(tmp_path)) as home:
        home.keep_own_membership(("tcp://127.0.0.1:1",))
    membership = load_membership(tmp_path)
    assert (membership.pool, membership.broker.known) == (DEFAULT_POOL, ("tcp://127.0.0.1:1",))
    assert membership.credentials.role == "broker"
    opened(tmp_path).close()


def test_a_running_broker_locks_its_home(tmp_path: Path):
    with closing(opened(tmp_path)), pytest.raises(UsageError, match="another broker is running"):
        opened(tmp_path)
    opened(tmp_path).close()


@pytest.mark.parametrize("name", ["x" * 65, "two\nlines"])
def test_bad_names_are_refused_before_anything_is_written(tmp_path: Path, name: str):
    with pytest.raises(UsageError, match="pool name"):
        opened(tmp_path / "home", name)
    assert not (tmp_path / "home" / "broker" / "journal.sqlite").exists()


def test_another_pools_home_is_left_alone(tmp_path: Path):
    opened(tmp_path, "friends").close()
    with pytest.raises(UsageError, match=r"'strangers'.*'friends'"):
        opened(tmp_path, "strangers")


def test_a_machine_in_another_pool_does_not_lose_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.transport.enrolment.time.time", lambda: NOW_S)
    with closing(opened(tmp_path / "one")) as home:
        home.keep_own_membership(("tcp://127.0.0.1:1",))
    load_authority(tmp_path / "two" / "broker", "other", now_wall_s=NOW_S)
    for name in ("identity.pem", "membership.json"):
        (tmp_path / "two" / name).write_bytes((tmp_path / "one" / name).read_bytes())
        (tmp_path / "two" / name).chmod(0o600)
    before = (tmp_path / "two" / "membership.json").read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError, match="a member of another pool, 'pool'"):
            opened(tmp_path / "two")
    assert (tmp_path / "two" / "membership.json").read_bytes() == before


def test_a_key_others_can_read_is_not_used(tmp_path: Path):
    opened(tmp_path).close()
    (tmp_path / "broker" / "authority.pem").chmod(0o644)
    with pytest.raises(TrustError, match="readable by its owner only"):
        opened(tmp_path)
