"""Each system's service manager gets what it needs to start a service at login, in the system's own words."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.cli.service import managers
from fusionai.cli.service.managers import (
    Launchd,
    ServiceManager,
    Systemd,
    TaskScheduler,
    call_program,
    launchd_agent,
    manager_here,
    scheduled_task,
    systemd_unit,
)
from fusionai.primitives.errors import FusionError, UsageError

COMMAND = ("/home/a b/python", "-m", "fusionai", "service", "run", "join")


class FakeSystem:
    """Answers as systemctl, launchctl and schtasks do: a set of registered services, and a set of running ones."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.running: set[str] = set()
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> str:
        self.calls.append(words)
        match words:
            case ("systemctl", "--user", *rest):
                return self._systemctl(*rest)
            case ("loginctl", *_):
                return "Linger=no\n"
            case ("launchctl", verb, *rest):
                return self._launchctl(verb, *rest)
            case ("schtasks", *rest):
                return self._schtasks(*rest)
            case _:
                raise FusionError(f"unknown program {words[0]}")

    def _systemctl(self, verb: str, *rest: str) -> str:
        name = rest[-1] if rest else ""
        match verb:
            case "enable":
                self.registered.add(name)
            case "restart":
                self._known(name)
                self.running.add(name)
            case "stop":
                self.running.discard(name)
            case "disable":
                self._known(name)
                self.registered.discard(name)
                self.running.discard(name)
            case "show":
                return f"ActiveState={'active' if name in self.running else 'inactive'}\n"
            case _:
                pass
        return ""

    def _launchctl(self, verb: str, *rest: str) -> str:
        match verb:
            case "bootstrap":
                name = Path(rest[1]).stem
                if name in self.running:
                    raise FusionError("Bootstrap failed: 5: Input/output error")
                self.running.add(name)
            case "bootout":
                self.running.remove(rest[0].rpartition("/")[2])
            case _:
                if rest[0].rpartition("/")[2] not in self.running:
                    raise FusionError("Could not find service")
                return "\tstate = running\n"
        return ""

    def _schtasks(self, verb: str, *rest: str) -> str:
        name = rest[rest.index("/TN") + 1]
        match verb:
            case "/Create":
                self.registered.add(name)
            case "/Run":
                self._known(name)
                self.running.add(name)
            case "/End":
                self.running.remove(name)
            case "/Delete":
                self._known(name)
                self.registered.remove(name)
            case _:
                self._known(name)
                return f'"VM","{name}","{267009 if name in self.running else 0}"\n'
        return ""

    def _known(self, name: str) -> None:
        if name not in self.registered:
            raise FusionError(f"unknown service {name}")


Made = Callable[[FakeSystem, Path], ServiceManager]


@pytest.mark.parametrize(
    "make",
    [
        lambda system, path: Systemd(system, path),
        lambda system, path: Launchd(system, path, user=501),
        lambda system, path: TaskScheduler(system, path, user=r"PC\ann"),
    ],
    ids=["systemd", "launchd", "windows"],
)
def test_a_service_lives_from_registration_to_removal(make: Made, tmp_path: Path) -> None:
    system = FakeSystem()
    manager = make(system, tmp_path / "files")
    path = manager.register("join", COMMAND)
    assert path.exists()
    manager.start("join")
    assert manager.runs("join")
    manager.start("join")  # anew
    assert manager.runs("join")
    manager.register("join", (*COMMAND, "--more"))  # replaces the first
    manager.start("join")
    manager.stop("join")
    assert not manager.runs("join")
    manager.start("join")
    manager.remove("join")
    assert not path.exists()
    assert not system.running
    assert not system.registered
    manager.remove("join")  # nothing is left to remove


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1), min_size=1))
def test_words_of_a_command_arrive_as_they_are(words: list[str]) -> None:
    line = next(line for line in systemd_unit("join", words).split("\n") if line.startswith("ExecStart="))
    assert _read_by_systemd(line.removeprefix("ExecStart=")) == words
    printable = [word for word in words if word.isprintable()]
    if printable:
        assert plistlib.loads(launchd_agent("join", printable))["ProgramArguments"] == printable


def _read_by_systemd(line: str) -> list[str]:
    """Read a command line by the rules of systemd.syntax(7) and systemd.service(5), for words in double quotes."""
    words: list[str] = []
    place = 0
    while place < len(line):
        assert line[place] == '"'
        place += 1
        word = ""
        while line[place] != '"':
            if line[place] in "\\%$":
                place += 1
                assert line[place] in '\\"%$'
            word += line[place]
            place += 1
        words.append(word)
        place += 2
    return words


def test_a_task_of_windows_has_no_limit_of_time_and_runs_on_battery() -> None:
    task = ElementTree.fromstring(scheduled_task("join", COMMAND, r"PC\ann"))
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    found = {leaf.tag.rpartition("}")[2]: leaf.text for leaf in task.iter()}
    assert found["Command"] == COMMAND[0]
    assert found["Arguments"] == "-m fusionai service run join"
    assert found["ExecutionTimeLimit"] == "PT0S"
    assert found["StopIfGoingOnBatteries"] == "false"
    assert [leaf.text for leaf in task.findall(".//t:LogonTrigger/t:UserId", space)] == [r"PC\ann"]


def test_a_machine_without_a_manager_gets_another_way_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(managers.shutil, "which", lambda _program: None)
    with pytest.raises(UsageError, match=r"no systemd") as problem:
        manager_here(FakeSystem())
    assert "crontab" in str(problem.value)

    def refuses(*_words: str) -> str:
        raise FusionError("Failed to connect to bus")

    monkeypatch.setattr(managers.shutil, "which", lambda program: f"/bin/{program}")
    with pytest.raises(UsageError, match="enable-linger"):
        manager_here(refuses)
    for platform, kind in (("linux", Systemd), ("darwin", Launchd), ("win32", TaskScheduler)):
        monkeypatch.setattr(sys, "platform", platform)
        assert isinstance(manager_here(FakeSystem()), kind)


def test_what_a_program_says_is_in_the_error() -> None:
    assert call_program(sys.executable, "-c", "print(1)").strip() == "1"
    with pytest.raises(FusionError, match=r"exit code 3: no bus\."):
        call_program(sys.executable, "-c", "import sys; sys.stderr.write('no bus'); sys.exit(3)")
    with pytest.raises(FusionError, match="could not be run"):
        call_program("/nothing/here")
