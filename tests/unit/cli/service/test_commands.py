"""`fusion service` as its users see it, with a service manager that only remembers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.service import commands
from fusionai.cli.service.supervisor import ServiceFiles, ServiceState
from fusionai.primitives import environment
from fusionai.transport.security.identity import write_private_json


class RememberingManager:
    title = "systemd"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commands: dict[str, Sequence[str]] = {}
        self.running: set[str] = set()

    def register(self, name: str, command: Sequence[str]) -> Path:
        self.commands[name] = command
        return self.directory / f"{name}.service"

    def start(self, name: str) -> None:
        """Start as the supervisor does: a line in the log, and the state."""
        self.running.add(name)
        files = ServiceFiles(name)
        files.log.write_text("2026-01-01 00:00:00 [started: process 7]\n", encoding="utf-8")
        write_private_json(files.state, ServiceState(phase="running", since_s=0.0, process=7))

    def stop(self, name: str) -> None:
        self.running.discard(name)

    def remove(self, name: str) -> None:
        self.stop(name)
        self.commands.pop(name, None)

    def runs(self, name: str) -> bool:
        return name in self.running

    def advice(self) -> str | None:
        return "To start it with the machine, before you log in: loginctl enable-linger"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RememberingManager:
    monkeypatch.setattr(environment, "services_directory", lambda: tmp_path / "services")
    monkeypatch.setattr(commands, "_WATCHED_S", 0.0)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    made = RememberingManager(tmp_path)
    monkeypatch.setattr(commands, "manager_here", lambda: made)
    return made


def test_a_service_from_installation_to_removal(
    manager: RememberingManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "install", "join", "--max-memory", "2GB", "--schedule", "22:00-07:00"]) == 0
    said = capsys.readouterr().out
    assert "Installed the service join: fusion join --max-memory 2GB --schedule 22:00-07:00" in said
    assert "loginctl enable-linger" in said
    assert list(manager.commands["join"][1:]) == ["-m", "fusionai", "service", "run", "join"]
    kept = ServiceFiles("join").read()
    assert kept.arguments == ("join", "--max-memory", "2GB", "--schedule", "22:00-07:00")
    assert kept.variables["FUSION_HOME"] == str(tmp_path / "home")

    assert main(["service", "install", "join", "--max-memory", "3GB"]) == 0
    assert "Replaced the service join" in capsys.readouterr().out

    file = tmp_path / "services.json"
    assert main(["service", "status", "--json", str(file)]) == 0
    assert "fusion join --max-memory 3GB  running" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["schema"] == "fusionai.service/1"
    assert [(each["name"], each["process"]) for each in figures["services"]] == [("join", 7)]

    assert main(["service", "stop", "join"]) == 0
    assert main(["service", "status"]) == 0
    assert "stopped" in capsys.readouterr().out
    assert main(["service", "start", "join"]) == 0
    assert main(["service", "logs", "join"]) == 0
    assert "[started: process 7]" in capsys.readouterr().out
    assert main(["service", "remove", "join"]) == 0
    assert not manager.commands
    assert list((tmp_path / "services").iterdir()) == []
    assert main(["service", "status"]) == 0
    assert "No service is installed." in capsys.readouterr().out


def test_an_invitation_is_never_an_argument_of_a_process(
    manager: RememberingManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "invitation"
    secret.write_text("fusion1-secret\n")
    for written in (["fusion1-secret"], [f"@{secret}"]):
        assert main(["service", "install", "join", "--name", "x", *written, "--threads", "1"]) == 0
        kept = ServiceFiles("join").read()
        assert kept.arguments == ("join", "--name", "x", "--threads", "1")
        assert kept.variables["FUSION_INVITE"] == "fusion1-secret"
        assert ServiceFiles("join").definition.stat().st_mode & 0o077 == 0
        assert "fusion1-secret" not in " ".join(manager.commands["join"])
    assert "fusion1-secret" not in capsys.readouterr().out
    assert main(["service", "install", "serve", "./model", "--invite", "fusion1-secret"]) == 2
    assert "fusion join --owner" in capsys.readouterr().err


def test_a_code_is_exchanged_at_once_and_not_kept(
    manager: RememberingManager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fusionai.cli.pool.join.invitation_from_nearby", lambda pool, code: f"for {pool} {code}")
    assert main(["service", "install", "join", "--code=123456", "--pause-when-busy", "--pool", "den"]) == 0
    kept = ServiceFiles("join").read()
    assert kept.arguments == ("join", "--pause-when-busy")
    assert kept.variables["FUSION_INVITE"] == "for den 123456"
    assert "123456" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["install", "join", "--max-memry", "2GB"], "--max-memory"),
        (["install", "join", "--max-memory", "two"], "--max-memory"),
        (["install", "join", "--owner", "fusion1-x"], "ends by itself"),
        (["install", "pool"], "'join', 'broker', 'serve'"),
        (["install", "join", "--help"], "fusion join --help"),
        (["install", "--name", "../x", "join"], "expected up to 32 of the characters"),
        (["stop", "jion"], "no service 'jion'"),
        (["remove", "jion"], "no service 'jion'"),
        (["logs", "jion"], "no service 'jion'"),
    ],
)
def test_what_would_not_work_is_refused_before_anything_is_installed(
    arguments: list[str], problem: str, manager: RememberingManager, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert not manager.commands
    assert not environment.services_directory().exists()


def test_a_command_that_fails_at_once_is_shown(
    manager: RememberingManager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_WATCHED_S", 60.0)

    def fails(name: str) -> None:
        files = ServiceFiles(name)
        files.log.write_text("2026-01-01 00:00:00 error: this machine has not joined a pool.\n", encoding="utf-8")
        write_private_json(files.state, ServiceState(phase="waiting", since_s=0.0, last_exit=2))

    monkeypatch.setattr(manager, "start", fails)
    assert main(["service", "install", "join"]) == 0
    captured = capsys.readouterr()
    assert "error: this machine has not joined a pool." in captured.out
    assert "ended with exit code 2" in captured.err
