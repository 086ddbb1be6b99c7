"""Looking at this machine, area by area. Decides what is good, worth a note or in need of mending; changes nothing.

Every framework is looked at from a process of its own (`backends.survey`), so a broken driver is a finding and not a
crash. The only address contacted is that of the pool's broker, where there is one. Neighbours: `cli.doctor` shows
these.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import ipaddress
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from fusionai import __version__
from fusionai.backends.interface import DeviceReport
from fusionai.backends.registry import BACKENDS, REQUIREMENTS, TRAINING
from fusionai.backends.survey import Survey
from fusionai.cli.reach import Reach, look
from fusionai.client.owner import OWNER_DIRECTORY, any_membership
from fusionai.primitives import environment
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import short
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.transport import quic_binding
from fusionai.transport.congestion import bulk_is_available
from fusionai.transport.enrolment import MEMBERSHIP_FILE
from fusionai.wire.messages import LinkView

_SURVEY_TIMEOUT_S: Final = 180.0
_COMMAND_TIMEOUT_S: Final = 10.0
_DISK_WANTED_BYTES: Final = 10 * 10**9
_OPEN_FILES_WANTED: Final = 1024
_LIBRARIES: Final = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "cryptography", "uvloop")


_BY_UDP: Final = {
    True: "through the routers by QUIC where these allow it, else over the broker's relay, at its pace.",
    False: "over the broker's relay, at its pace; with `pip install 'fusionai[quic]'` many go through the routers.",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report: what was looked at, how it stands, and what to do (empty: nothing)."""

    area: str
    state: Literal["good", "note", "bad"]
    what: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found; `device` holds the measured figures where measuring worked, `backends` those of every framework
    that is installed."""

    version: str
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    device: DeviceReport | None
    backends: dict[str, DeviceReport]
    addresses: tuple[str, ...]


def everything(*, device: str, threads: int | None, home: Path, port: int = 0) -> Report:
    """Look at all areas; a few seconds, most of them for the speed. The broker tries `port`; 0: any."""
    versions = {name: version for name in _LIBRARIES if (version := _installed(name)) is not None}
    looked = {name: _look_at(name, device, threads) for name in BACKENDS if _installed(name) is not None}
    reports = {name: one.report for name, one in looked.items() if isinstance(one, Survey) and one.report is not None}
    addresses = tuple(_addresses())
    found = [
        *_of_software(versions),
        *_of_torch(looked.get("torch", "torch is not installed"), alone=not {*reports} & {*TRAINING} - {"torch"}),
        *(finding for name in BACKENDS if name != "torch" for finding in _of_another(name, looked.get(name))),
        *_of_memory(),
        *_of_disk(home),
        *_of_network(addresses),
        *_of_bulk(bulk_is_available()),
        *_of_clock(),
        *_of_limits(),
        *_of_membership(home, port),
    ]
    return Report(
        version=__version__,
        findings=tuple(found),
        versions=versions,
        device=next(iter(reports.values()), None),
        backends=reports,
        addresses=addresses,
    )


def _of_software(versions: dict[str, str]) -> Iterator[Finding]:
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding(
        area="software",
        state="good",
        what=f"fusionai {__version__}, Python {platform.python_version()} on {platform.platform(terse=True)}; {known}",
    )


def _look_at(backend: str, device: str, threads: int | None) -> Survey | str:
    """What it sees, or why it could not be looked at."""
    command = [sys.executable, "-m", "fusionai.backends.survey", "--backend", backend, "--device", device]
    if threads is not None:
        command += ["--threads", str(threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_SURVEY_TIMEOUT_S, env=environment.inherited(), check=False
        )
    except subprocess.TimeoutExpired:
        return f"looking at the devices of {backend} took more than {format_seconds(_SURVEY_TIMEOUT_S)}"
    if done.returncode != 0:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        last = complaint[-1] if complaint else "it said nothing"
        how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
        return f"the process that imported {backend} {how}: {last}"
    return msgspec.json.decode(done.stdout, type=Survey)


def _of_torch(looked: Survey | str, *, alone: bool) -> Iterator[Finding]:
    """`alone`: no other framework here can train."""
    if isinstance(looked, str):
        yield Finding(
            area="PyTorch",
            state="bad" if alone else "note",
            what=looked,
            remedy="Install the build of PyTorch for this machine: `python -m pip install --force-reinstall torch`.",
        )
        return
    yield Finding(area="devices", state="good", what="; ".join(looked.seen.devices))
    yield from _of_graphics_cards(looked)
    if looked.report is None:
        yield Finding(
            area="speed",
            state="bad",
            what=f"the device could not be measured: {looked.problem}",
            remedy="Try `fusion doctor --device cpu`; if that works, the graphics driver is at fault.",
        )
        return
    yield _speed("speed", looked.report)


def _of_another(name: str, looked: Survey | str | None) -> Iterator[Finding]:
    """Of a framework besides PyTorch: nobody needs it."""
    purpose = "train and serve" if name in TRAINING else "serve"
    install = f"pip install {REQUIREMENTS[name]}"
    match looked:
        case None:
            yield Finding(
                area=name,
                state="note",
                what=f"not installed; with it this machine could {purpose} by --backend {name}",
                remedy=f"Nothing, unless you prefer it: `{install}`.",
            )
        case Survey(report=DeviceReport() as report):
            yield _speed(name, report)
        case Survey(problem=problem):
            yield Finding(
                area=name,
                state="note",
                what=f"the device could not be measured: {problem}",
                remedy=_REINSTALL % install,
            )
        case _:
            yield Finding(area=name, state="note", what=looked, remedy=_REINSTALL % install)


_REINSTALL: Final = "Install it anew, or leave it: `%s`."


def _speed(area: str, report: DeviceReport) -> Finding:
    return Finding(
        area=area,
        state="good",
        what=f"{report.device} ({report.device_name}): {report.flops_per_s / 1e9:.3g} GFLOP/s in float32 with "
        f"{report.threads} thread{'s' if report.threads != 1 else ''}{_pace(report)}, memory at "
        f"{format_bytes(report.memory_bandwidth_bytes_per_s)}/s, {format_bytes(report.memory_bytes)} to lend"
        f"{_serving(report)}",
    )


def _serving(report: DeviceReport) -> str:
    if not report.serving:
        return ""
    formats = ", ".join(
        f"{pace.form} {pace.flops_per_s / 1e9:.3g} GFLOP/s of prompts and {format_bytes(pace.bytes_per_s)}/s of weights"
        for pace in report.serving
    )
    attention = report.attention_flops_per_s
    attended = f"; attention {attention / 1e9:.3g} GFLOP/s" if attention > 0 else ""
    return f"; in serving {formats} a token{attended}"


def _pace(report: DeviceReport) -> str:
    pace = report.pace
    if pace is None:
        return ""
    moved = f", {format_bytes(1 / pace.byte_s)}/s read and written" if pace.byte_s > 0 else ""
    return f" (in training {pace.flops_per_s / 1e9:.3g} GFLOP/s, {format_seconds(pace.call_s)} an operator{moved})"


def _of_graphics_cards(looked: Survey) -> Iterator[Finding]:
    """Cards that are in the machine and not in PyTorch's list."""
    build, devices = looked.seen, looked.seen.devices
    seen = any(device.startswith("cuda") for device in devices)
    card = _nvidia_card()
    if card and not seen:
        if build.cuda_build is None:
            what = f"{card} is here, but torch {build.version} is a build without CUDA"
            remedy = (
                'Install a build of torch with CUDA into this environment (PyTorch\'s page "Get Started" gives the '
                "command for your driver), then run `fusion doctor` again."
            )
        else:
            what = f"{card} is here, but torch (built for CUDA {build.cuda_build}) can't use it"
            remedy = (
                f"Update the NVIDIA driver to one for CUDA {build.cuda_build} or newer, or install a build of torch "
                "for the driver that is here; in a container, start it with access to the GPU."
            )
        yield Finding(area="NVIDIA card", state="bad", what=what, remedy=remedy)
    if Path("/dev/kfd").exists() and not seen and build.hip_build is None:
        yield Finding(
            area="AMD card",
            state="bad",
            what=f"an AMD compute device is here, but torch {build.version} is a build without ROCm",
            remedy='Install a build of torch with ROCm (PyTorch\'s page "Get Started" gives the command).',
        )
    if sys.platform == "darwin" and platform.machine() == "arm64" and "mps" not in devices:
        yield Finding(
            area="Apple GPU",
            state="bad",
            what="this is Apple silicon, but torch does not offer its GPU (mps)",
            remedy="Use a native arm64 Python, not one under Rosetta, and a current macOS.",
        )


def _nvidia_card() -> str:
    """Name of the first NVIDIA card as its driver tells it; empty without card or driver."""
    answer = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    first = answer.strip().splitlines()[0] if answer.strip() else ""
    name, _, driver = first.partition(",")
    return f"{name.strip()} (driver {driver.strip()})" if driver else ""


def _of_memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    limit_bytes = _container_limit_bytes()
    what = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if limit_bytes is not None and limit_bytes < memory.total:
        what += f"; this container may use {format_bytes(limit_bytes)}"
    scarce = memory.available < memory.total // 10
    yield Finding(
        area="memory",
        state="note" if scarce else "good",
        what=what,
        remedy="Little is free: close programs, or lend less with `fusion join --max-memory`." if scarce else "",
    )


def _container_limit_bytes() -> int | None:
    """Memory limit of the control group this process runs in, where there is one."""
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(place).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _of_disk(home: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    scarce = free_bytes < _DISK_WANTED_BYTES
    yield Finding(
        area="disk",
        state="note" if scarce else "good",
        what=f"{format_bytes(free_bytes)} free for {home}",
        remedy="Checkpoints need room: free some, or point FUSION_HOME at a larger disk." if scarce else "",
    )


def _addresses() -> Iterator[str]:
    """Every address other machines might reach this one at: those of interfaces that are up, loopback left out."""
    states = psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if name in states and not states[name].isup:
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                yield str(address)


def _of_network(addresses: tuple[str, ...]) -> Iterator[Finding]:
    public = [address for address in addresses if ipaddress.ip_address(address).is_global]
    if public:
        yield Finding(
            area="network",
            state="good",
            what=f"addresses: {', '.join(addresses)}; {public[0]} can be reached from anywhere if no firewall forbids",
        )
    elif addresses:
        yield Finding(
            area="network",
            state="note",
            what=f"addresses: {', '.join(addresses)}; all of them private",
            remedy="It can join any pool as it is. To keep one for machines elsewhere, forward a port of the router to "
            "it and name it: `fusion broker --address HOST:PORT`.",
        )
    else:
        yield Finding(
            area="network",
            state="note",
            what="no network but loopback",
            remedy="`fusion demo` works; to join machines, connect this one to a network.",
        )
    try:
        with socket.socket() as probe:
            probe.bind(("", 0))
            probe.listen(1)
    except OSError as failure:
        yield Finding(
            area="listening",
            state="bad",
            what=f"no TCP port can be opened: {failure.strerror}",
            remedy="Allow Python to accept connections in this machine's firewall or sandbox.",
        )


def _of_bulk(available: bool) -> Iterator[Finding]:
    """How tensors and weights go over long lines that lose packets. Elsewhere than on Linux a program can't choose."""
    if available:
        yield Finding(
            area="bulk", state="good", what="there is BBR: tensors and weights fill long lines that lose packets, too"
        )
    elif sys.platform == "linux":
        yield Finding(
            area="bulk",
            state="note",
            what="this kernel has no BBR for programs: long lines that lose packets carry next to nothing",
            remedy="`sudo modprobe tcp_bbr`, then "
            "`sudo sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'`.",
        )


def _of_clock() -> Iterator[Finding]:
    """Certificates and tickets carry dates: a clock that is far off makes them invalid."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    synchronised = _output(["timedatectl", "show", "--property=NTPSynchronized", "--value"]).strip()
    if synchronised == "no":
        yield Finding(
            area="clock",
            state="note",
            what=f"{shown}, not synchronised",
            remedy="Switch on network time (`timedatectl set-ntp true`): certificates depend on the date.",
        )
    else:
        yield Finding(area="clock", state="good", what=f"{shown}{', synchronised' if synchronised == 'yes' else ''}")


def _of_limits() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES_WANTED:
        yield Finding(
            area="open files",
            state="note",
            what=f"at most {soft} at a time",
            remedy=f"A broker of a large pool needs more: `ulimit -n {_OPEN_FILES_WANTED * 4}`.",
        )


def _of_membership(home: Path, port: int) -> Iterator[Finding]:
    """Which pool this machine is in, whether its broker answers, and how others reach it."""
    if not any((place / MEMBERSHIP_FILE).exists() for place in (home, home / OWNER_DIRECTORY)):
        yield Finding(
            area="pool",
            state="note",
            what="this machine has joined none",
            remedy="`fusion demo` needs none. To join one: `fusion join INVITE`; to keep one: `fusion broker`.",
        )
        return
    try:
        membership = any_membership(home)
    except FusionError as wrong:
        yield Finding(area="pool", state="bad", what=wrong.message, remedy=wrong.hint or "Join again.")
        return
    who = f"{membership.pool}, as {membership.purpose} {short(membership.peer)}"
    try:
        reach = asyncio.run(look(membership, port, timeout_s=_COMMAND_TIMEOUT_S))
    except FusionError as wrong:
        yield Finding(
            area="pool",
            state="note",
            what=f"{who}; its broker can't be reached: {wrong.message}",
            remedy=wrong.hint or "",
        )
        return
    yield Finding(area="pool", state="good", what=f"{who}; its broker answered in {format_seconds(reach.answered_s)}")
    yield from _of_reach(reach)


def _of_reach(reach: Reach) -> Iterator[Finding]:
    """Whether others can dial this machine, and which way its links go."""
    seen = reach.observed
    if seen is None or not seen.host:
        yield Finding(area="way in", state="note", what="the broker can't say how it sees this machine")
    elif seen.reachable:
        yield Finding(
            area="way in", state="good", what=f"the broker reaches this machine at {seen.host}, port {reach.port}"
        )
    else:
        own = seen.host in _addresses()
        where = f"{seen.host}, port {reach.port}"
        yield Finding(
            area="way in",
            state="note",
            what=f"the broker can't dial this machine ({where}): "
            + ("a firewall is in the way" if own else "it is behind a router, which the broker sees instead"),
            remedy=(
                f"It can take part: such links go {_BY_UDP[quic_binding.available()]} For direct ones "
                + (
                    "allow connections to Python in this machine's firewall."
                    if own
                    else "forward a TCP port of the router to this machine, try it with `fusion doctor --port PORT`, "
                    "and lend with `fusion join --port PORT`."
                )
            ),
        )
    if reach.links:
        links = ", ".join(f"{short(peer)} {_of_link(link)}" for peer, link in sorted(reach.links.items()))
        yield Finding(area="links", state="good", what=f"now: {links}")


def _of_link(link: LinkView) -> str:
    """Which way it goes, and what is known of it."""
    known = (
        f"round trip {format_seconds(link.round_trip_s)}" if link.round_trip_s else "",
        f"{format_bytes(link.probed_bytes_per_s)}/s as probed" if link.probed_bytes_per_s else "",
        f"up to {format_bytes(link.bandwidth_bytes_per_s)}/s so far" if link.bandwidth_bytes_per_s else "",
        f"{link.loss:.2%} sent again" if link.loss else "",
    )
    figures = "; ".join(part for part in known if part)
    return f"{link.way} ({figures})" if figures else link.way


def _output(command: list[str]) -> str:
    """What a program of this machine prints; empty where it is missing or fails."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
