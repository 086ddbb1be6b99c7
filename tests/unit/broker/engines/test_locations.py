"""Where a journal is, as an operator writes it: what is taken, what is refused, and that no password is shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fusionai.broker.engines.etcd import EtcdEngine
from fusionai.broker.engines.locations import engine_at
from fusionai.primitives.errors import UsageError


def etcd(url: str) -> Any:
    engine = engine_at(url)
    assert isinstance(engine, EtcdEngine)
    return engine._client._address


def postgres(url: str) -> str:
    engine: Any = engine_at(url)
    return engine._url


def test_etcd_has_members_a_prefix_and_a_user(tmp_path: Path):
    url = "etcd://root:p%40ss@one,two:2380,[::1]:9/pools/home"
    address = etcd(url)
    assert address.members == ("one:2379", "two:2380", "[::1]:9")
    assert (address.user, address.password) == ("root", "p@ss")
    assert engine_at(url).name == "etcd://one:2379,two:2380,[::1]:9/pools/home"
    assert engine_at("etcd://127.0.0.1").name == "etcd://127.0.0.1:2379/fusionai"
    file = tmp_path / "password"
    file.write_text("from a file\nsecond line\n")
    assert etcd(f"etcd://root@one?password_file={file}").password == "from a file"
    assert "p@ss" not in repr(address)


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("etcd://127.0.0.1", False),
        ("etcd://localhost:9,[::1]:9", False),
        ("etcd://127.0.0.1?ca=/ca.pem", True),
        ("etcd://127.0.0.1?tls=on", True),
        ("etcd://pool.example", True),
        ("etcd://127.0.0.1,pool.example", True),
        ("etcd://pool.example?tls=off", False),
    ],
)
def test_beyond_this_machine_etcd_speaks_tls(url: str, tls: bool):
    assert etcd(url).tls is tls


@pytest.mark.parametrize(
    ("url", "verifies"),
    [
        ("postgresql://broker@127.0.0.1/pools", False),
        ("postgresql:///pools", False),
        ("postgresql:///pools?host=/run/postgresql", False),
        ("postgresql://db.example/pools", True),
        ("postgres://localhost,db.example:5433/pools", True),
        ("postgresql:///pools?host=db.example", True),
        ("postgresql://db.example/pools?sslmode=require", False),
    ],
)
def test_beyond_this_machine_postgresql_checks_the_certificate(url: str, verifies: bool):
    assert ("sslmode=verify-full" in postgres(url)) is verifies


def test_libpqs_parameters_are_passed_on_as_they_are():
    given = "postgresql://127.0.0.1/pools?options=-c%20search_path%3Dx&application_name=a+b"
    assert postgres(given) == given.replace("+", "%2B")


def test_of_several_postgresql_servers_the_one_that_takes_writes_is_used():
    assert "target_session_attrs=read-write" in postgres("postgresql://one,two/pools?sslmode=disable")
    assert "target_session_attrs" not in postgres("postgresql://127.0.0.1/pools")


def test_names_have_no_password():
    name = engine_at("postgresql://broker:secret@db.example:5433/pools?schema=home&sslmode=disable").name
    assert name == "postgresql://db.example:5433/pools (schema home)"
    assert "schema" not in postgres("postgresql://db.example/pools?schema=home")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("mysql://secret@host", "expected sqlite, postgresql"),
        ("nonsense", "got 'nonsense'"),
        ("etcd://", "hosts in the URL"),
        ("etcd://a,,b", "hosts in the URL"),
        ("etcd://root:secret/x@host", "hosts in the URL"),
        ("etcd://host?schema=x", "unknown option 'schema'"),
        ("etcd://host?tls=maybe", "expected tls=on"),
        ("etcd://host?tls=off&ca=/x", "expected tls=on"),
        ("etcd://host?password_file=/nowhere/secret", "password file"),
        ("postgresql://broker:secret/x@host/pools", "hosts in the URL"),
        ("postgresql://host/pools?schema=My-Pool", "expected a schema"),
        ("postgresql://host/pools?unknown=1", "libpq can't read"),
    ],
)
def test_what_can_not_be_read_is_the_users_mistake(url: str, match: str):
    with pytest.raises(UsageError, match=match) as refused:
        engine_at(url)
    assert "secret" not in str(refused.value).replace("/nowhere/secret", "")


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "fusionai.broker.engines.postgresql", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'fusionai\[postgresql\]'"):
        engine_at("postgresql://127.0.0.1/pools")
