"""What people get wrong before a command starts to work: exit code 2, a sentence that names it, a next step, no
traceback."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from fusionai.cli.main import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "sentences"),
    [
        ("chat --api-key-file binary", ("binary: the API key can't be read", "on the first line")),
        ("chat --url http://127.0.0.1:99999", ("'http://127.0.0.1:99999' is not an address", "such as http://")),
        ("chat --url http://[::1", ("'http://[::1' is not an address", "such as http://")),
        ("serve model --api-key-file binary", ("the file of API keys can't be read", "one key per line")),
        ("invite --lifetime 0s", ("expected a time above 0", "'0s'")),
        ("broker --lifetime 0h", ("expected a time above 0", "'0h'")),
        ("broker --host no.such.host.invalid", ("expected an address of this machine", "'no.such.host.invalid'")),
        ("data folder", ("folder: can't be read (Is a directory)", "a TOML file")),
        ("simulate folder", ("folder: can't be read (Is a directory)", "a scenario file in TOML")),
        ("plan model --pool folder", ("folder: can't be read (Is a directory)", "a pool file in TOML")),
    ],
)
def test_wrong_use_names_what_came_and_the_next_step(
    place: Path, command: str, sentences: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    assert main(command.split()) == 2
    told = capsys.readouterr().err
    for sentence in sentences:
        assert sentence in told, told
    assert "internal error" not in told
    assert "Errno" not in told


@pytest.mark.parametrize("model", ["", "file.txt"])
def test_a_name_that_is_no_model_is_not_looked_up_on_the_hub(
    place: Path, model: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["check", model]) == 2
    assert f"{model!r} is not a model: expected a configuration file" in capsys.readouterr().err


def test_a_full_disk_for_this_machines_key_has_a_next_step(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fusionai.transport.security.identity.os.fsync", full)
    assert main(["trust", "key"]) == 1
    told = capsys.readouterr().err
    assert "could not write" in told
    assert "Free some space, or choose another directory with --home" in told


def test_a_full_disk_for_the_results_has_a_next_step(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fusionai.storage.atomic.os.fsync", full)
    assert main(["privacy", "--json", "figures.json"]) == 1
    assert "Free some space and run the command again" in capsys.readouterr().err
    assert not (place / "figures.json").exists()
