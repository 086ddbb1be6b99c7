"""The system's own service managers: systemd on Linux, launchd on macOS, the Task Scheduler on Windows.

Each starts `fusion service run NAME` when the user logs in. What a service runs, its log and its restarts are the
supervisor's (`cli.service.supervisor`), so a manager's file contains only paths and a name, and no secret.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol
from xml.etree import ElementTree

from fusionai.primitives import environment
from fusionai.primitives.errors import FusionError, UsageError

_CALL_LIMIT_S: Final = 90.0
"""Stopping a service waits for its end, which takes up to `supervisor.END_S`."""


class ServiceManager(Protocol):
    """Starts services of this user at login. `title`: its name for people."""

    title: str

    def register(self, name: str, command: Sequence[str]) -> Path:
        """Make `command` start at each login, replacing an earlier registration, and return the file that says so."""
        ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None:
        """End the service until `start` or the next login."""
        ...

    def remove(self, name: str) -> None:
        """End the service, and forget it. Does nothing if it is not registered."""
        ...

    def runs(self, name: str) -> bool: ...

    def advice(self) -> str | None:
        """Return a line for the user after an installation."""
        ...


Call = Callable[..., str]
"""Runs a program with arguments and returns its output. Raises `FusionError` with what the program said."""


def call_program(*words: str) -> str:
    """Run a program and return what it printed. Raises `FusionError` if it fails or does not end."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_CALL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise FusionError(f"`{' '.join(words)}` could not be run: {problem}.") from problem
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or "no message"
        raise FusionError(f"`{' '.join(words)}` failed with exit code {done.returncode}: {said}.")
    return done.stdout


def manager_here(call: Call = call_program) -> ServiceManager:
    """Return this system's manager. Raises `UsageError` if it has none that this program knows."""
    if sys.platform == "win32":
        return TaskScheduler(call)
    if sys.platform == "darwin":
        return Launchd(call)
    if shutil.which("systemctl") is None:
        raise UsageError("this machine has no systemd, which starts services on Linux.", hint=_BY_HAND)
    try:
        call("systemctl", "--user", "show-environment")
    except FusionError as problem:
        raise UsageError(f"this user has no systemd manager: {problem.message}", hint=_NO_USER_MANAGER) from problem
    return Systemd(call)


_BY_HAND: Final = (
    "Start the command from another program that starts at login or boot, e.g. with `@reboot fusion join` in `crontab "
    "-e`."
)
_NO_USER_MANAGER: Final = (
    "Log in as this user directly or by ssh, not with su or sudo. Otherwise run `loginctl enable-linger` as this user "
    "and `export XDG_RUNTIME_DIR=/run/user/$(id -u)` first. " + _BY_HAND
)


class Systemd:
    """Units of the user's own systemd, in ~/.config/systemd/user."""

    title = "systemd"

    def __init__(self, call: Call, units: Path | None = None) -> None:
        self._call = call
        self._units = units or environment.user_configuration() / "systemd" / "user"

    def register(self, name: str, command: Sequence[str]) -> Path:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(systemd_unit(name, command), encoding="utf-8")
        self._call("systemctl", "--user", "daemon-reload")
        self._call("systemctl", "--user", "enable", path.name)
        return path

    def start(self, name: str) -> None:
        self._call("systemctl", "--user", "restart", self._path(name).name)

    def stop(self, name: str) -> None:
        self._call("systemctl", "--user", "stop", self._path(name).name)

    def remove(self, name: str) -> None:
        path = self._path(name)
        if path.exists():
            self._call("systemctl", "--user", "disable", "--now", path.name)
            path.unlink()
            self._call("systemctl", "--user", "daemon-reload")

    def runs(self, name: str) -> bool:
        shown = self._call("systemctl", "--user", "show", "--property=ActiveState", self._path(name).name)
        return shown.strip() in ("ActiveState=active", "ActiveState=activating", "ActiveState=deactivating")

    def advice(self) -> str | None:
        try:
            lingers = "Linger=yes" in self._call("loginctl", "show-user", str(_user()), "--property=Linger")
        except FusionError:
            lingers = False  # the user is not logged in, or has no session that logind knows
        return None if lingers else "To start it with the machine, before you log in: loginctl enable-linger"

    def _path(self, name: str) -> Path:
        return self._units / f"fusionai-{name}.service"


def systemd_unit(name: str, command: Sequence[str]) -> str:
    """Return a unit (systemd.service(5)). Only the supervisor is asked to end; it ends its command itself."""
    return f"""\
[Unit]
Description=FusionAI: {name}

[Service]
Type=exec
ExecStart={" ".join(map(_systemd_word, command))}
Restart=on-failure
RestartSec=30
KillMode=mixed
TimeoutStopSec=80

[Install]
WantedBy=default.target
"""


def _systemd_word(word: str) -> str:
    """Quote a word of a command line as systemd.syntax(7) reads it: `%` and `$` would be expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _user() -> int:
    return os.getuid() if sys.platform != "win32" else 0


class Launchd:
    """Agents of the user's launchd, in ~/Library/LaunchAgents."""

    title = "launchd"

    def __init__(self, call: Call, agents: Path | None = None, user: int | None = None) -> None:
        self._call = call
        self._agents = agents or Path.home() / "Library" / "LaunchAgents"
        self._domain = f"gui/{_user() if user is None else user}"

    def register(self, name: str, command: Sequence[str]) -> Path:
        self._unload(name)
        path = self._agents / f"{_label(name)}.plist"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(launchd_agent(name, command))
        return path

    def start(self, name: str) -> None:
        self._unload(name)
        self._call("launchctl", "bootstrap", self._domain, str(self._agents / f"{_label(name)}.plist"))

    def stop(self, name: str) -> None:
        self._unload(name)

    def remove(self, name: str) -> None:
        self._unload(name)
        (self._agents / f"{_label(name)}.plist").unlink(missing_ok=True)

    def runs(self, name: str) -> bool:
        return "state = running" in self._shown(name)

    def advice(self) -> str | None:
        return None

    def _unload(self, name: str) -> None:
        if self._shown(name):
            self._call("launchctl", "bootout", f"{self._domain}/{_label(name)}")

    def _shown(self, name: str) -> str:
        try:
            return self._call("launchctl", "print", f"{self._domain}/{_label(name)}")
        except FusionError:
            return ""  # launchd does not know it


def _label(name: str) -> str:
    return f"ai.fusion.{name}"


def launchd_agent(name: str, command: Sequence[str]) -> bytes:
    """Return an agent's property list (launchd.plist(5)). The process type keeps macOS from slowing the agent down as
    background work."""
    return plistlib.dumps(
        {
            "Label": _label(name),
            "ProgramArguments": list(command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ExitTimeOut": 80,
            "ProcessType": "Standard",
        }
    )


class TaskScheduler:
    """Tasks of this user in the folder FusionAI of the Windows Task Scheduler."""

    title = "Task Scheduler"

    def __init__(self, call: Call, files: Path | None = None, user: str | None = None) -> None:
        self._call = call
        self._files = files or environment.services_directory()
        self._user = environment.windows_user() if user is None else user

    def register(self, name: str, command: Sequence[str]) -> Path:
        path = self._files / f"{name}.task.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(scheduled_task(name, command, self._user))
        self._call("schtasks", "/Create", "/F", "/TN", _task(name), "/XML", str(path))
        return path

    def start(self, name: str) -> None:
        if self.runs(name):
            self.stop(name)
        self._call("schtasks", "/Run", "/TN", _task(name))

    def stop(self, name: str) -> None:
        self._call("schtasks", "/End", "/TN", _task(name))

    def remove(self, name: str) -> None:
        path = self._files / f"{name}.task.xml"
        if path.exists():
            if self.runs(name):
                self.stop(name)
            self._call("schtasks", "/Delete", "/F", "/TN", _task(name))
            path.unlink()

    def runs(self, name: str) -> bool:
        # The words of this table are translated, the number is not: 267009 is SCHED_S_TASK_RUNNING.
        return '"267009"' in self._call("schtasks", "/Query", "/V", "/FO", "CSV", "/NH", "/TN", _task(name))

    def advice(self) -> str | None:
        return None


def _task(name: str) -> str:
    return f"\\FusionAI\\{name}"


_TASK_SCHEMA: Final = "http://schemas.microsoft.com/windows/2004/02/mit/task"


def scheduled_task(name: str, command: Sequence[str], user: str) -> bytes:
    """Return a task's XML (Task Scheduler schema 1.2), which must be UTF-16. `user`: DOMAIN\\NAME. Without these
    settings Windows would stop the task on battery power and after three days."""
    program, *arguments = command
    settings = {
        "MultipleInstancesPolicy": "IgnoreNew",
        "DisallowStartIfOnBatteries": "false",
        "StopIfGoingOnBatteries": "false",
        "ExecutionTimeLimit": "PT0S",
        "Hidden": "true",
        "Priority": "7",
    }
    task = ElementTree.Element("Task", {"version": "1.2", "xmlns": _TASK_SCHEMA})
    _leaf(ElementTree.SubElement(task, "RegistrationInfo"), "Description", f"FusionAI: {name}")
    trigger = ElementTree.SubElement(ElementTree.SubElement(task, "Triggers"), "LogonTrigger")
    _leaf(trigger, "UserId", user)
    principal = ElementTree.SubElement(ElementTree.SubElement(task, "Principals"), "Principal", {"id": "Author"})
    for tag, text in (("UserId", user), ("LogonType", "InteractiveToken"), ("RunLevel", "LeastPrivilege")):
        _leaf(principal, tag, text)
    within = ElementTree.SubElement(task, "Settings")
    for tag, text in settings.items():
        _leaf(within, tag, text)
    again = ElementTree.SubElement(within, "RestartOnFailure")
    _leaf(again, "Interval", "PT1M")
    _leaf(again, "Count", "255")
    action = ElementTree.SubElement(ElementTree.SubElement(task, "Actions", {"Context": "Author"}), "Exec")
    _leaf(action, "Command", program)
    _leaf(action, "Arguments", subprocess.list2cmdline(arguments))
    return ElementTree.tostring(task, encoding="utf-16", xml_declaration=True)


def _leaf(parent: ElementTree.Element, tag: str, text: str) -> None:
    ElementTree.SubElement(parent, tag).text = text
