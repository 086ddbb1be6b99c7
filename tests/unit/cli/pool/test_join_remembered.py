"""A second `fusion join` without flags lends the machine as the first one did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from fusionai.cli.main import main
from fusionai.cli.pool.join import LENDING_FILE, added_flags, join, remember


def called(home: Path, *arguments: str) -> tuple[click.Context, dict[str, Any]]:
    """Read a command line and keep its flags, as a call does that joins."""
    context = join.make_context("join", [*arguments, "--home", str(home)])
    remember(context, home)
    return context, context.params


def test_flags_hold_until_they_are_given_anew(tmp_path: Path) -> None:
    called(tmp_path, "--max-memory", "2GB", "--name", "den", "--pause-when-busy", "--no-relay", "--schedule", "sat,sun")
    context, given = called(tmp_path, "--name", "attic")
    assert (given["memory_limit_bytes"], given["name"], given["schedule"]) == (2_000_000_000, "attic", ("sat,sun",))
    assert (given["pause_when_busy"], given["relay"]) == (True, False)
    assert "--name" not in added_flags(context)
    _, given = called(tmp_path, "--schedule", "22:00-07:00")
    assert (given["name"], given["schedule"]) == ("attic", ("22:00-07:00",))


def test_what_concerns_one_call_is_not_remembered(tmp_path: Path) -> None:
    called(tmp_path, "--measure", "--json", str(tmp_path / "out.json"), "an-invitation")
    _, given = called(tmp_path)
    assert (given["measure"], given["json_file"], given["invitation"]) == (False, None, ())


def test_fresh_forgets(tmp_path: Path) -> None:
    called(tmp_path, "--max-memory", "2GB", "--name", "den")
    _, given = called(tmp_path, "--fresh", "--name", "attic")
    assert (given["memory_limit_bytes"], given["name"]) == (None, "attic")
    _, given = called(tmp_path)
    assert (given["memory_limit_bytes"], given["name"]) == (None, "attic")


@pytest.mark.parametrize("content", ["{", '{"no_such_flag": "1"}', '{"name": 3}'])
def test_a_file_that_cannot_be_used_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LENDING_FILE).write_text(content)
    assert main(["join", "--home", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / LENDING_FILE}: the settings of earlier calls can't be used" in said
    assert "--fresh" in said
