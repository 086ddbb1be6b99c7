"""`fusion invite`: codes and pictures of invitations."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.pool import broker
from fusionai.primitives.errors import UsageError
from fusionai.wire.messages import CodeMade

INVITATION = "fusion1-" + "Ab3_" * 60


@pytest.mark.parametrize("announced", [True, False])
def test_a_code_is_printed_and_kept_private(
    announced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made = CodeMade(code="012345", lifetime_s=600.0, announced=announced)
    monkeypatch.setattr("fusionai.cli.pool.session.in_pool", lambda home, ask: made)
    file = tmp_path / "code.json"
    assert main(["invite", "--code", "--home", str(tmp_path), "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert "code 012 345" in printed.out
    assert ("does not announce itself" in printed.err) is not announced
    assert json.loads(file.read_text())["code"] == "012345"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_qr_code_is_drawn_where_the_terminal_has_its_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fusionai.cli.pool.session.in_pool", lambda home, ask: INVITATION)
    assert main(["invite", "--qr", "--home", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert INVITATION in printed
    assert len([line for line in printed.splitlines() if set(line) <= set("█▀▄ ") and line.strip()]) > 20
    monkeypatch.setattr(broker.sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(UsageError, match="block characters"):
        broker._as_qr(INVITATION)


@pytest.mark.parametrize("two", [("--code", "--qr"), ("--list", "--code"), ("--revoke", "ab", "--qr")])
def test_one_thing_at_a_time(two: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["invite", *two, "--home", str(tmp_path)]) == 2
    assert "give one of these flags" in capsys.readouterr().err
