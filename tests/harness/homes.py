"""Homes behind routers, as network namespaces: machines on one network, a router per home, a public place for all.

    with Homes({"a": "preserving", "b": "symmetric"}, {"a": 2, "b": 1}) as homes:
        homes.run("a1", ...)          # a program on the first machine of home a
        homes.run("public", ...)      # one at 203.0.113.1

Machines of home number n have addresses 192.168.n.2, .3, ...; its router is 203.0.113.1n outside. Everything made is
removed at the end. Neighbours: `harness.router` translates addresses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

PUBLIC: Final = "203.0.113.1"
HERE: Final = Path(__file__).parent


def why_not() -> str:
    """Why no namespaces can be made here; empty when they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if shutil.which("ip") is None:
        return "the program `ip` (iproute2) is missing"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun can't be opened"
    name = f"fusion-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"a network namespace can't be made ({made.stderr.strip()})"
    try:
        for link in (["link", "add", "b0", "type", "bridge"], ["tuntap", "add", "dev", "t0", "mode", "tun"]):
            tried = subprocess.run(["ip", "-n", name, *link], capture_output=True, text=True, check=False)
            if tried.returncode != 0:
                return f"`ip {' '.join(link)}` fails ({tried.stderr.strip()})"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class Homes:
    """`kinds`: what each home's router is; `machines`: how many each home has. `watermark`: bandwidth in bit/s and
    delay in seconds of every home's line, each way."""

    def __init__(
        self, kinds: Mapping[str, str], machines: Mapping[str, int], *, line: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._line = line
        self._kinds = kinds
        self._machines = machines
        self._mark = f"f{os.getpid() % 100_000}"
        self._spaces: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._routers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Homes:
        try:
            self._space("public")
            self._ip("public", "addr", "add", f"{PUBLIC}/32", "dev", "lo")
            self._forward("public")
            for number, (home, kind) in enumerate(self._kinds.items(), 1):
                self._home(number, home, kind)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for process in reversed(self._processes):
                process.kill()
                process.communicate()
        finally:
            for space in self._spaces:
                subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def run(self, machine: str, *command: object, told: bool = False) -> subprocess.Popen[str]:
        """A program on a machine (`a1`: the first of home a) or in the `public` place; killed at the end.
        `told`: it is written to."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._name(machine), *(str(part) for part in command)],
            stdin=subprocess.PIPE if told else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def rewire(self, home: str, kind: str, address: str) -> None:
        """Another router in the place of the one there, with another address outside: as after a line came back."""
        process = self._routers.pop(home)
        self._processes.remove(process)
        process.kill()
        process.communicate()
        self._router(address, home, kind)

    def readdress(self, machine: str, address: str) -> None:
        """Give a machine another address in its home, as a router may do when it assigns addresses anew."""
        self._ip(machine, "addr", "flush", "dev", "eth0")
        self._ip(machine, "addr", "add", f"{address}/24", "dev", "eth0")
        gateway = address.rpartition(".")[0] + ".1"
        self._ip(machine, "route", "replace", "default", "via", gateway)

    def _home(self, number: int, home: str, kind: str) -> None:
        self._space(home)
        self._ip(home, "link", "add", "br0", "type", "bridge")
        self._ip(home, "addr", "add", f"192.168.{number}.1/24", "dev", "br0")
        self._ip(home, "link", "set", "br0", "up")
        self._forward(home)
        for machine in range(1, self._machines[home] + 1):
            name = f"{home}{machine}"
            self._space(name)
            made = ["link", "add", f"m{machine}", "type", "veth", "peer", "name", "eth0"]
            self._ip(home, *made, "netns", self._name(name))
            self._ip(home, "link", "set", f"m{machine}", "master", "br0", "up")
            self._ip(name, "addr", "add", f"192.168.{number}.{machine + 1}/24", "dev", "eth0")
            self._ip(name, "link", "set", "eth0", "up")
            self._ip(name, "route", "add", "default", "via", f"192.168.{number}.1")
        self._router(f"203.0.113.1{number}", home, kind)

    def _router(self, address: str, home: str, kind: str) -> None:
        command = [sys.executable, HERE / "router.py", self._name(home), self._name("public"), address]
        process = subprocess.Popen(
            [*command, kind, *(str(part) for part in self._line)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        self._routers[home] = process
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "ready\n", said + process.stdout.read()

    def _space(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name(name)], check=True)
        self._spaces.append(self._name(name))
        self._ip(name, "link", "set", "lo", "up")

    def _forward(self, name: str) -> None:
        command = ["ip", "netns", "exec", self._name(name), "sysctl", "-qw", "net.ipv4.ip_forward=1"]
        subprocess.run(command, check=True)

    def _ip(self, name: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._name(name), *arguments], check=True)

    def _name(self, name: str) -> str:
        return f"{self._mark}-{name}"
