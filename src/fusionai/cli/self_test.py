"""`fusion doctor --self-test`: starts the self-test of a device, shows its progress, and prints what is right or wrong.

The checks run in a process of their own (`backends.self_test`): a driver that crashes it gives a report and not a
crash, and Ctrl-C ends it whatever a kernel does.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from fusionai.backends.self_test import DeviceCheck, SelfTest, SelfTestEvent, Verdict
from fusionai.cli import console
from fusionai.cli.options import write_json
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_bytes, format_seconds

SELF_TEST_HELP: Final = (
    "Instead, run real kernels on the device for up to two minutes: equal bits, right numbers, memory, rates."
)
_TIMEOUT_S: Final = 180.0
"""Longest run of the process, in seconds. A check begins within 100 seconds, so a longer one hangs."""
_END_S: Final = 3.0
_MARKS: Final[dict[Verdict, str]] = {"right": "right", "wrong": "WRONG", "slow": "slow", "skipped": "-"}
_REMEDIES: Final[dict[Verdict, str]] = {
    "wrong": "Don't lend this device for jobs yet: results would be wrong, or jobs would accuse this machine. Update "
    "the driver and PyTorch, then test again. If it stays wrong, send in the file that --json FILE writes.",
    "slow": "Close other programs that use the device, and test again. If it stays slow, jobs run correctly but slowly "
    "here: send in the file that --json FILE writes.",
}


def self_test(device: str, threads: int | None, json_file: Path | None) -> int:
    """Test a device and print the report. Returns the exit code: 1 if anything is wrong, else 0."""
    report = tested(device, threads, lambda name: console.note(f"Testing: {name} ..."))
    shown = [(_MARKS[one.verdict], one.name, one.found) for one in report.checks]
    console.table(("", "check", "found"), shown)
    console.line()
    console.line(summary(report))
    found = {one.verdict for one in report.checks}
    for verdict, remedy in _REMEDIES.items():
        if verdict in found:
            console.line(remedy)
    write_json(json_file, "self_test", {**msgspec.to_builtins(report)})
    return 1 if "wrong" in found else 0


def summary(report: SelfTest) -> str:
    """Return the result in a few sentences."""

    def names(verdict: Verdict) -> str:
        return ", ".join(one.name for one in report.checks if one.verdict == verdict)

    peaks = ", ".join(f"{speed / 1e12:.3g} in {name}" for name, speed in report.matrix_flops_per_s.items())
    text = (
        f"{report.device} ({report.device_name}), tested in {format_seconds(report.took_s)}. Memory is copied at "
        f"{format_bytes(report.memory_bandwidth_bytes_per_s)}/s, and matrix products reach {peaks} TFLOP/s."
    )
    wrong, slow = names("wrong"), names("slow")
    text += "".join(f" {said}: {found}." for said, found in (("Wrong", wrong), ("Slow", slow)) if found)
    if not wrong:
        text += " Nothing is wrong." if slow else " Nothing is wrong or slow."
    return text


def tested(device: str, threads: int | None, begun: Callable[[str], None]) -> SelfTest:
    """Run the self-test in a process of its own. A process that dies or hangs makes its present check wrong. Raises
    `UsageError` if the device can't be opened."""
    command = [sys.executable, "-m", "fusionai.backends.self_test", "--device", device]
    if threads is not None:
        command += ["--threads", str(threads)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment.inherited(), bufsize=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    alarm = threading.Timer(_TIMEOUT_S, process.kill)
    reader.start()
    alarm.start()
    name = ""
    try:
        for line in process.stdout:
            event = msgspec.json.decode(line, type=SelfTestEvent)
            if isinstance(event, SelfTest):
                return event
            name = event.name
            begun(name)
        code = process.wait()
    finally:
        alarm.cancel()
        _end(process)
        reader.join(_END_S)
        process.stdout.close()
        process.stderr.close()
    said = b"".join(errors).decode(errors="replace").strip().splitlines()
    last = said[-1] if said else "it printed no error"
    if not name:
        raise UsageError(
            f"the self-test of device {device!r} could not begin: {last}", hint="`fusion doctor` lists the devices."
        )
    return _broken(device, name, code, last)


def _broken(device: str, name: str, code: int, last: str) -> SelfTest:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    found = f"the process that tests the device {how}: {last}"
    return SelfTest(
        backend="torch",
        device=device,
        device_name="unknown",
        threads=0,
        versions=(),
        bits_promised=False,
        memory_bytes=0,
        memory_bandwidth_bytes_per_s=0.0,
        matrix_flops_per_s={},
        checks=(DeviceCheck(name=name, verdict="wrong", found=found),),
        took_s=0.0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process: after Ctrl-C it may be within a kernel that does not notice."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()
