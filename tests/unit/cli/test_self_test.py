"""`fusion doctor --self-test`: what it prints, its exit code and its file, and how its process ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from fusionai.backends.self_test import Begun, DeviceCheck, SelfTest
from fusionai.cli import self_test
from fusionai.cli.doctor import doctor
from fusionai.primitives.errors import UsageError

RIGHT = DeviceCheck(name="gradients", verdict="right", found="they agree", figures={"off": 1e-4})
SLOW = DeviceCheck(name="decoding rate, int4", verdict="slow", found="20% of the memory's")
WRONG = DeviceCheck(name="products, int8", verdict="wrong", found="0.3 off")


def report(*checks: DeviceCheck) -> SelfTest:
    return SelfTest(
        backend="torch",
        device="cuda:0",
        device_name="a card",
        threads=1,
        versions=("torch 2.13.0",),
        bits_promised=True,
        memory_bytes=8 * 10**9,
        memory_bandwidth_bytes_per_s=9e11,
        matrix_flops_per_s={"fp32": 6e13, "bf16": 1.2e14},
        checks=checks,
        took_s=61.0,
    )


def scripted(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The process runs `script` instead of the checks."""
    real = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "fusionai.backends.self_test"]
        return real([sys.executable, "-c", script], **options)

    monkeypatch.setattr(self_test.subprocess, "Popen", started)


def printing(*events: Any) -> str:
    lines = "\n".join(msgspec.json.encode(event).decode() for event in events)
    return f"import sys; sys.stdout.write({lines!r} + '\\n')"


@pytest.mark.parametrize(
    ("checks", "code", "said"),
    [
        ((RIGHT,), 0, "Nothing is wrong or slow."),
        ((RIGHT, SLOW), 0, "Slow: decoding rate, int4. Nothing is wrong."),
        ((RIGHT, SLOW, WRONG), 1, "Wrong: products, int8. Slow: decoding rate, int4."),
    ],
)
def test_the_report_is_printed_written_and_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checks: tuple[DeviceCheck, ...], code: int, said: str
) -> None:
    scripted(monkeypatch, printing(Begun("gradients"), report(*checks)))
    file = tmp_path / "report.json"
    result = CliRunner().invoke(doctor, ["--self-test", "--json", str(file)], standalone_mode=False)
    assert result.return_value == code
    assert "Testing: gradients ..." in result.stderr
    assert said in result.stdout
    assert "Memory is copied at 900 GB/s, and matrix products reach 60 in fp32, 120 in bf16 TFLOP/s." in result.stdout
    assert ("Don't lend this device" in result.stdout) == bool(code)
    written = json.loads(file.read_text())
    assert written["schema"] == "fusionai.self_test/1"
    assert [one["verdict"] for one in written["checks"]] == [one.verdict for one in checks]
    assert written["checks"][0]["figures"] == {"off": 1e-4}


def test_a_process_that_dies_makes_its_check_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    died = (
        "; import os; sys.stdout.flush(); sys.stderr.write('CUDA error'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    )
    scripted(monkeypatch, printing(Begun("gradients"), Begun("products, int8")) + died)
    found = self_test.tested("cuda", 1, lambda name: None)
    (check,) = found.checks
    assert (check.name, check.verdict) == ("products, int8", "wrong")
    assert "killed by signal 9: CUDA error" in check.found


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_TIMEOUT_S", 0.5)
    scripted(
        monkeypatch, printing(Begun("gradients")) + "; sys.stdout.flush(); import threading; threading.Event().wait()"
    )
    assert self_test.tested("cuda", 1, lambda name: None).checks[0].verdict == "wrong"


def test_a_device_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "import sys; sys.stderr.write('torch sees no cuda device here, but cpu.'); sys.exit(1)")
    with pytest.raises(UsageError, match="could not begin: torch sees no cuda device here"):
        self_test.tested("cuda", None, lambda name: None)


def test_an_interruption_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    scripted(
        monkeypatch, printing(Begun("gradients")) + "; sys.stdout.flush(); import threading; threading.Event().wait()"
    )
    scripted_start = self_test.subprocess.Popen
    monkeypatch.setattr(
        self_test.subprocess,
        "Popen",
        lambda *given, **options: started.append(scripted_start(*given, **options)) or started[0],
    )

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        self_test.tested("cuda", 1, interrupted)
    assert started[0].poll() is not None


@pytest.mark.long
def test_this_processor_passes_its_own_test(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    fusion = str(Path(sys.executable).with_name("fusion"))
    command = [fusion, "doctor", "--self-test", "--device", "cpu", "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stdout
    written = json.loads(file.read_text())
    assert written["took_s"] < 120
    assert len(written["checks"]) == 17
