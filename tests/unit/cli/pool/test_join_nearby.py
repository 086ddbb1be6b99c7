"""`fusion join` without an invitation: which pool is meant, which code, and what is said when there is none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.pool.join import invitation_from_nearby, join_code
from fusionai.primitives.errors import UsageError
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.enrolment import InvitationContent, parse_invitation

HOME = NearbyPool("home", bytes(range(32)), ("tcp://192.168.1.7:4711",), 3)
TWIN = NearbyPool("home", bytes(range(1, 33)), ("tcp://192.168.1.66:4711",))
CLUB = NearbyPool("club", bytes(range(2, 34)), ("tcp://192.168.1.8:4711",), 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NearbyPool, str]]:
    """The pools and codes with which brokers were asked; each gives an invitation."""
    seen: list[tuple[NearbyPool, str]] = []

    async def ask(pool: NearbyPool, code: str) -> InvitationContent:
        seen.append((pool, code))
        return InvitationContent(pool.name, pool.addresses, pool.authority_key, bytes(16))

    monkeypatch.setattr("fusionai.transport.enrolment.invitation_by_code", ask)
    return seen


def around(monkeypatch: pytest.MonkeyPatch, *pools: NearbyPool) -> None:
    async def find() -> tuple[NearbyPool, ...]:
        return pools

    monkeypatch.setattr("fusionai.transport.discovery.nearby_pools", find)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_only_pool_is_chosen_by_itself(
    monkeypatch: pytest.MonkeyPatch, asked: list, capsys: pytest.CaptureFixture[str]
):
    around(monkeypatch, HOME)
    invitation = parse_invitation(invitation_from_nearby(None, "123456"))
    assert (invitation.pool, invitation.authority_key) == ("home", HOME.authority_key)
    assert asked == [(HOME, "123456")]
    shown = capsys.readouterr().out
    for text in ("home", "3", HOME.fingerprint, "tcp://192.168.1.7:4711"):
        assert text in shown


@pytest.mark.parametrize(("name", "meant"), [("club", CLUB), (TWIN.fingerprint, TWIN), (HOME.fingerprint, HOME)])
def test_one_of_several_is_chosen_by_name_or_key(
    name: str, meant: NearbyPool, monkeypatch: pytest.MonkeyPatch, asked: list
):
    around(monkeypatch, CLUB, HOME, TWIN)
    invitation_from_nearby(name, "123456")
    assert asked == [(meant, "123456")]


def test_a_person_is_asked_for_pool_and_code(monkeypatch: pytest.MonkeyPatch, asked: list):
    around(monkeypatch, CLUB, HOME)
    monkeypatch.setattr("sys.stdin", Terminal())
    answers = ["club", "123 456"]
    monkeypatch.setattr("click.prompt", lambda text, **_: answers.pop(0))
    invitation_from_nearby(None, None)
    assert asked == [(CLUB, "123456")]


@pytest.mark.parametrize(
    ("pools", "name", "code", "said"),
    [
        ((), None, "123456", "none was found in the local network"),
        ((HOME, CLUB), None, "123456", "2 pools were found"),
        ((HOME, CLUB), "attic", "123456", "no pool named 'attic'"),
        ((HOME, TWIN), "home", "123456", "2 pools named 'home'"),
        ((HOME,), None, None, "a code is needed"),
    ],
)
def test_what_is_missing_is_said(
    pools: tuple[NearbyPool, ...],
    name: str | None,
    code: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    asked: list,
):
    around(monkeypatch, *pools)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError, match=said) as error:
        invitation_from_nearby(name, code)
    assert error.value.hint
    assert not asked


def test_a_code_has_six_digits_however_they_are_grouped():
    assert {join_code(text) for text in ("123456", "123 456", " 123-456\n")} == {"123456"}
    for wrong in ("", "12345", "1234567", "12345a", "fusion1-abc"):
        with pytest.raises(UsageError, match="six digits"):
            join_code(wrong)


@pytest.mark.parametrize("more", [(), ("--owner",)])
def test_join_without_an_invitation_looks_around(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    around(monkeypatch)
    assert main(["join", "--home", str(tmp_path), *more]) == 2
    assert "has not joined a pool, and none was found in the local network" in capsys.readouterr().err


def test_an_invitation_and_a_code_are_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["join", "fusion1-abc", "--code", "123456", "--home", str(tmp_path)]) == 2
    assert "leave either them or INVITE out" in capsys.readouterr().err
    assert main(["join", "--code", "12345", "--home", str(tmp_path)]) == 2
    assert "six digits" in capsys.readouterr().err


def test_an_invitation_pasted_with_its_command_comes_as_several_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It is understood as far as its checksum, which is wrong here."""
    assert main(["join", "--owner", "fusion", "join", "fusion1-abcd", "efgh", "--home", str(tmp_path)]) == 2
    assert "its checksum" in capsys.readouterr().err
