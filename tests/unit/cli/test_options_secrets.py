"""Secrets reach a command without its list of arguments, and files that hold one are their owner's alone."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.options import secret_text, write_json
from fusionai.primitives.errors import UsageError


def test_a_secret_comes_from_standard_input_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("fusion1-abc \nrest\n"))
    assert secret_text("-") == "fusion1-abc"
    file = tmp_path / "invitation"
    file.write_text("fusion1-def\nrest\n")
    assert secret_text(f"@{file}") == "fusion1-def"
    assert secret_text("fusion1-ghi") == "fusion1-ghi"
    file.write_bytes(b"\xff\xfe")
    for wrong in (f"@{file}", f"@{tmp_path / 'nowhere'}"):
        with pytest.raises(UsageError, match="expected a secret on its first line, as text"):
            secret_text(wrong)


@pytest.mark.parametrize(
    "command", [("join",), ("join", "--owner"), ("train", "recipe.toml", "--invite"), ("serve", "model", "--invite")]
)
def test_commands_say_which_file_has_no_invitation(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"@{tmp_path / 'nowhere'}", "--home", str(tmp_path / "home")]) == 2
    assert "nowhere: expected a secret on its first line" in capsys.readouterr().err


@pytest.mark.parametrize("owner", [True, False])
def test_the_environment_may_have_the_invitation(
    owner: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nowhere() -> tuple[()]:
        return ()

    monkeypatch.setattr("fusionai.transport.discovery.nearby_pools", nowhere)
    command = ["join", *(["--owner"] if owner else []), "--home", str(tmp_path / "home")]
    assert main(command) == 2
    assert "has not joined a pool" in capsys.readouterr().err
    monkeypatch.setenv("FUSION_INVITE", "no invitation")
    assert main(command) == 2
    assert "expected an invitation starting with 'fusion1-'" in capsys.readouterr().err


def test_files_with_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    for place, is_secret, mode in (("a/secret.json", True, 0o600), ("open.json", False, None)):
        path = tmp_path / place
        write_json(path, "invite", {"invitation": "x"}, is_secret=is_secret)
        assert '"invitation": "x"' in path.read_text()
        if mode is not None:
            assert stat.S_IMODE(path.stat().st_mode) == mode
