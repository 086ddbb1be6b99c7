"""`fusion doctor`: examines this machine area by area, rates each finding as good, a note or bad, and says what to fix.

Every framework is examined in a separate process (`backends.survey`), so that a broken driver gives a finding and not
a crash. The only address contacted is that of the pool's broker, if the machine has joined a pool (`cli.reach`). Exits
with 0 if the machine can take part in a pool, with 1 if something must be fixed first.
"""

from __future__ import annotations

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

import click
import msgspec
import psutil

from fusionai import __version__
from fusionai.backends.interface import DeviceReport
from fusionai.backends.registry import BACKENDS, REQUIREMENTS, TRAINING
from fusionai.backends.survey import Survey
from fusionai.backends.worker.confinement import measures
from fusionai.cli import console
from fusionai.cli.options import device_option, home_option, json_option, port_option, threads_option, write_json
from fusionai.cli.reach import Reach, look
from fusionai.cli.running import run
from fusionai.cli.self_test import SELF_TEST_HELP, self_test
from fusionai.client.pool.session import OWNER_DIRECTORY, any_membership
from fusionai.primitives import environment
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import short
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.transport.channels.uplink import bulk_is_available
from fusionai.transport.enrolment import MEMBERSHIP_FILE
from fusionai.transport.routes import quic as quic_binding
from fusionai.wire.messages import LinkView

_SURVEY_TIMEOUT_S: Final = 180.0
_COMMAND_TIMEOUT_S: Final = 10.0
_DISK_WANTED_BYTES: Final = 10 * 10**9
_OPEN_FILES_WANTED: Final = 1024
_LIBRARIES: Final = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "cryptography", "uvloop")
_REINSTALL: Final = "Reinstall it if you want to use it: `%s`."
_MARKS: Final = {"good": "ok", "note": "note", "bad": "FIX"}
_BY_UDP: Final = {
    True: "through the routers by QUIC if those allow it, else over the broker's relay at the relay's speed.",
    False: "over the broker's relay at its speed; with `pip install 'fusionai[quic]'` many pass the routers directly.",
}


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `area`: what was examined; `what`: the finding; `remedy`: what to do, or empty."""

    area: str
    state: Literal["good", "note", "bad"]
    what: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings. `device`: measured figures of the first framework that could be measured; `backends`: those of
    every installed framework that could."""

    version: str
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    device: DeviceReport | None
    backends: dict[str, DeviceReport]
    addresses: tuple[str, ...]


@click.command()
@device_option("Measure this device")
@threads_option("Measure with this many threads")
@port_option(
    "If this machine has joined a pool, test whether its broker can connect to this TCP port; 0: any free one.",
    shown="0",
)
@click.option("--self-test", "test_device", is_flag=True, help=SELF_TEST_HELP)
@home_option
@json_option
def doctor(device: str, threads: int | None, port: int, test_device: bool, home: Path, json_file: Path | None) -> int:
    """Check this machine: devices, speed, memory, network and versions, with a remedy for each problem."""
    if test_device:
        return self_test(device, threads, json_file)
    found = everything(device=device, threads=threads, home=home, port=port)
    console.table(("", "area", "found"), [(_MARKS[one.state], one.area, one.what) for one in found.findings])
    remedies = [one for one in found.findings if one.remedy]
    if remedies:
        console.line()
        console.line("What to do:")
        for one in remedies:
            console.line(f"- {one.area}: {console.printable(one.remedy)}")
    write_json(json_file, "doctor", msgspec.to_builtins(found))
    return 1 if any(one.state == "bad" for one in found.findings) else 0


def everything(*, device: str, threads: int | None, home: Path, port: int = 0) -> Report:
    """Examine all areas and return the report. Takes some seconds, mostly to measure the speed. The broker tries to
    dial `port` of this machine; 0: any free one."""
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
        *_of_isolation(),
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
        "software",
        "good",
        f"fusionai {__version__}, Python {platform.python_version()} on {platform.platform(terse=True)}; {known}",
    )


def _look_at(backend: str, device: str, threads: int | None) -> Survey | str:
    """Examine the devices of a framework in a separate process. Returns what it found, or why it failed."""
    command = [sys.executable, "-m", "fusionai.backends.survey", "--backend", backend, "--device", device]
    if threads is not None:
        command += ["--threads", str(threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_SURVEY_TIMEOUT_S, env=environment.inherited(), check=False
        )
    except subprocess.TimeoutExpired:
        return f"examining the devices of {backend} took more than {format_seconds(_SURVEY_TIMEOUT_S)}"
    if done.returncode != 0:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        last = complaint[-1] if complaint else "it printed no error"
        how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"exited with {done.returncode}"
        return f"the process that imported {backend} {how}: {last}"
    return msgspec.json.decode(done.stdout, type=Survey)


def _of_torch(looked: Survey | str, *, alone: bool) -> Iterator[Finding]:
    """Yield findings about PyTorch and its devices. `alone`: no other installed framework can train."""
    if isinstance(looked, str):
        yield Finding(
            "PyTorch",
            "bad" if alone else "note",
            looked,
            "Install the build of PyTorch for this machine: `python -m pip install --force-reinstall torch`.",
        )
        return
    yield Finding("devices", "good", "; ".join(looked.seen.devices))
    yield from _of_graphics_cards(looked)
    if looked.report is None:
        yield Finding(
            "speed",
            "bad",
            f"the device could not be measured: {looked.problem}",
            "Try `fusion doctor --device cpu`. If that works, repair the graphics driver.",
        )
        return
    yield from _speed("speed", looked.report)


def _of_another(name: str, looked: Survey | str | None) -> Iterator[Finding]:
    """Yield the finding about a framework other than PyTorch. All of these are optional."""
    purpose = "train and serve" if name in TRAINING else "serve"
    install = f"pip install {REQUIREMENTS[name]}"
    match looked:
        case None:
            yield Finding(
                name,
                "note",
                f"not installed; with it this machine could {purpose} with --backend {name}",
                f"Optional: `{install}`.",
            )
        case Survey(report=DeviceReport() as report):
            yield from _speed(name, report)
        case Survey(problem=problem):
            yield Finding(name, "note", f"the device could not be measured: {problem}", _REINSTALL % install)
        case _:
            yield Finding(name, "note", looked, _REINSTALL % install)


def _speed(area: str, report: DeviceReport) -> Iterator[Finding]:
    copied, launch_s = report.host_copy_bytes_per_s, report.launch_s
    beside = f"; copies to and from the machine's memory at {format_bytes(copied)}/s" if copied > 0 else ""
    beside += f"; {format_seconds(launch_s)} to start a kernel" if launch_s > 0 else ""
    yield Finding(
        area,
        "good",
        f"{report.device} ({report.device_name}), {report.threads} thread{'s' if report.threads != 1 else ''}: "
        f"{report.flops_per_s / 1e9:.3g} GFLOP/s in float32, memory at "
        f"{format_bytes(report.memory_bandwidth_bytes_per_s)}/s, {format_bytes(report.memory_bytes)} to lend{beside}",
    )
    if (pace := report.pace) is not None:
        moved = f", {format_bytes(1 / pace.byte_s)}/s read and written" if pace.byte_s > 0 else ""
        half = f", in bfloat16 {pace.half_flops_per_s / 1e9:.3g} GFLOP/s" if pace.half_flops_per_s > 0 else ""
        found = f"{pace.flops_per_s / 1e9:.3g} GFLOP/s{half}, {format_seconds(pace.call_s)} per operator{moved}"
        yield Finding(f"{area}, training", "good", found)
    if report.serving:
        formats = "; ".join(
            f"{pace.form} {pace.flops_per_s / 1e9:.3g} GFLOP/s, {format_bytes(pace.bytes_per_s)}/s"
            for pace in report.serving
        )
        attention = report.attention_flops_per_s
        attended = f"; attention {attention / 1e9:.3g} GFLOP/s" if attention > 0 else ""
        yield Finding(f"{area}, serving", "good", f"prompts, and weights read per token: {formats}{attended}")


def _of_graphics_cards(looked: Survey) -> Iterator[Finding]:
    """Yield findings about GPUs of this machine that PyTorch can't use."""
    build, devices = looked.seen, looked.seen.devices
    seen = any(device.startswith("cuda") for device in devices)
    card = _nvidia_card()
    if card and not seen:
        if build.cuda_build is None:
            what = f"the machine has {card}, but torch {build.version} is a build without CUDA"
            remedy = (
                'Install a build of torch with CUDA into this environment (PyTorch\'s page "Get Started" gives the '
                "command for your driver), then run `fusion doctor` again."
            )
        else:
            what = f"the machine has {card}, but torch (built for CUDA {build.cuda_build}) can't use it"
            remedy = (
                f"Update the NVIDIA driver to one for CUDA {build.cuda_build} or newer, or install a build of torch "
                "for the installed driver. In a container, start the container with access to the GPU."
            )
        yield Finding("NVIDIA card", "bad", what, remedy)
    if Path("/dev/kfd").exists() and not seen and build.hip_build is None:
        yield Finding(
            "AMD card",
            "bad",
            f"the machine has an AMD compute device, but torch {build.version} is a build without ROCm",
            'Install a build of torch with ROCm (PyTorch\'s page "Get Started" gives the command).',
        )
    if sys.platform == "darwin" and platform.machine() == "arm64" and "mps" not in devices:
        yield Finding(
            "Apple GPU",
            "bad",
            "the machine has Apple silicon, but torch does not offer its GPU (mps)",
            "Use a native arm64 Python, not one under Rosetta, and a current macOS.",
        )


def _nvidia_card() -> str:
    """Return name and driver version of the first NVIDIA card; empty without card or driver."""
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
        "memory",
        "note" if scarce else "good",
        what,
        "Close programs, or lend less with `fusion join --max-memory`." if scarce else "",
    )


def _container_limit_bytes() -> int | None:
    """Return the memory limit of this process's control group, None if it has none."""
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
        "disk",
        "note" if scarce else "good",
        f"{format_bytes(free_bytes)} free for {home}",
        "Checkpoints need space: free some, or point FUSION_HOME at a larger disk." if scarce else "",
    )


def _addresses() -> Iterator[str]:
    """Yield the addresses at which other machines may reach this one: those of interfaces that are up, without loopback
    and link-local addresses."""
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
            "network",
            "good",
            f"addresses: {', '.join(addresses)}; {public[0]} is reachable from everywhere if no firewall forbids",
        )
    elif addresses:
        yield Finding(
            "network",
            "note",
            f"addresses: {', '.join(addresses)}; all of them private",
            "This is enough to join any pool. To run a broker for machines elsewhere, forward a port of the "
            "router to this machine and announce it: `fusion broker --address HOST:PORT`.",
        )
    else:
        yield Finding(
            "network",
            "note",
            "no network but loopback",
            "`fusion demo` works without a network; to join a pool, connect this machine to one.",
        )
    try:
        with socket.socket() as probe:
            probe.bind(("", 0))
            probe.listen(1)
    except OSError as failure:
        yield Finding(
            "listening",
            "bad",
            f"no TCP port can be opened: {failure.strerror}",
            "Allow Python to accept connections in this machine's firewall or sandbox.",
        )


def _of_bulk(available: bool) -> Iterator[Finding]:
    """Yield the finding about congestion control for tensors and weights on long links that lose packets. Only on Linux
    can a program choose it."""
    if available:
        yield Finding("congestion", "good", "BBR is available: long links that lose packets are used in full")
    elif sys.platform == "linux":
        yield Finding(
            "congestion",
            "note",
            "this kernel offers no BBR to programs: long links that lose packets will be very slow",
            "`sudo modprobe tcp_bbr`, then `sudo sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'`.",
        )


def _of_clock() -> Iterator[Finding]:
    """Yield the finding about the clock. A clock that is far off makes certificates and tickets invalid."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    synchronised = _output(["timedatectl", "show", "--property=NTPSynchronized", "--value"]).strip()
    if synchronised == "no":
        yield Finding(
            "clock",
            "note",
            f"{shown}, not synchronised",
            "Switch on network time (`timedatectl set-ntp true`), as certificates depend on the date.",
        )
    else:
        yield Finding("clock", "good", f"{shown}{', synchronised' if synchronised == 'yes' else ''}")


def _of_limits() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES_WANTED:
        yield Finding(
            "open files",
            "note",
            f"at most {soft} at a time",
            f"For the broker of a large pool raise the limit: `ulimit -n {_OPEN_FILES_WANTED * 4}`.",
        )


def _of_isolation() -> Iterator[Finding]:
    if lacking := "; ".join(f"{name}: {reason}" for name, reason in measures().items() if reason):
        remedy = "Until then, lend this machine only to job owners whom you trust."
        yield Finding("isolation", "note", f"processes that compute for jobs are not kept from all. {lacking}", remedy)
    else:
        yield Finding("isolation", "good", "jobs compute without keys, network, foreign files and other programs")


def _of_membership(home: Path, port: int) -> Iterator[Finding]:
    """Yield findings about this machine's pool: which it is, whether its broker answers, how other machines connect."""
    if not any((place / MEMBERSHIP_FILE).exists() for place in (home, home / OWNER_DIRECTORY)):
        yield Finding(
            "pool",
            "note",
            "this machine has joined no pool",
            "To join a pool: `fusion join INVITE`; to open one: `fusion broker`. `fusion demo` needs none.",
        )
        return
    try:
        membership = any_membership(home)
    except FusionError as wrong:
        yield Finding("pool", "bad", wrong.message, wrong.hint or "Join the pool again.")
        return
    who = f"{membership.pool}, as {membership.purpose} {short(membership.peer)}"
    try:
        reach = run(look(membership, port, timeout_s=_COMMAND_TIMEOUT_S))
    except FusionError as wrong:
        yield Finding("pool", "note", f"{who}; its broker can't be reached: {wrong.message}", wrong.hint or "")
        return
    yield Finding("pool", "good", f"{who}; its broker answered in {format_seconds(reach.answered_s)}")
    yield from _of_reach(reach)


def _of_reach(reach: Reach) -> Iterator[Finding]:
    """Yield findings about whether others can dial this machine, and about the routes of its links."""
    seen = reach.observed
    if seen is None or not seen.host:
        yield Finding("inbound", "note", "the broker did not report how it sees this machine")
    elif seen.reachable:
        yield Finding("inbound", "good", f"the broker reaches this machine at {seen.host}, port {reach.port}")
    else:
        own = seen.host in _addresses()
        where = f"{seen.host}, port {reach.port}"
        yield Finding(
            "inbound",
            "note",
            f"the broker can't dial this machine ({where}): "
            + ("a firewall blocks it" if own else "it is behind a router, and the broker sees the router's address"),
            f"It can take part as it is: its links go {_BY_UDP[quic_binding.available()]} For direct links "
            + (
                "allow connections to Python in this machine's firewall."
                if own
                else "forward a TCP port of the router to this machine, try it with `fusion doctor --port PORT`, "
                "and lend with `fusion join --port PORT`."
            ),
        )
    if reach.links:
        links = ", ".join(f"{short(peer)} {_of_link(link)}" for peer, link in sorted(reach.links.items()))
        yield Finding("links", "good", f"now: {links}")


def _of_link(link: LinkView) -> str:
    """Return a link's route with its known figures."""
    known = (
        f"round trip {format_seconds(link.round_trip_s)}" if link.round_trip_s else "",
        f"probed at {format_bytes(link.probed_bytes_per_s)}/s" if link.probed_bytes_per_s else "",
        f"up to {format_bytes(link.bandwidth_bytes_per_s)}/s so far" if link.bandwidth_bytes_per_s else "",
        f"{link.loss:.2%} retransmitted" if link.loss else "",
    )
    figures = "; ".join(part for part in known if part)
    return f"{link.route} ({figures})" if figures else link.route


def _output(command: list[str]) -> str:
    """Run a program and return its output; empty if it is missing or fails."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    command = [path, *command[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
