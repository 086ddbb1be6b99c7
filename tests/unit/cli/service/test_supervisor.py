"""A service's command is started again after errors, asked to end when the service is stopped, and its output is kept
in a log that can't grow without limit."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.cli.service import supervisor
from fusionai.cli.service.supervisor import (
    FIRST_DELAY_S,
    HEALTHY_S,
    LONGEST_DELAY_S,
    LeaveEnded,
    Service,
    ServiceFiles,
    ServiceLog,
    StartAgain,
    after_exit,
    supervise,
)
from fusionai.primitives import environment
from fusionai.primitives.errors import StorageError, TrustError, UsageError
from fusionai.storage.atomic import InUse


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceFiles:
    monkeypatch.setattr(environment, "services_directory", lambda: tmp_path / "services")
    return ServiceFiles("join")


def _runs(files: ServiceFiles, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the service run a Python program in place of a `fusion` command."""
    files.write(Service(name="join", arguments=("join",), directory=str(files.directory)))

    async def start(_service: Service) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )

    monkeypatch.setattr(supervisor, "start_command", start)


def _stopped_after(
    files: ServiceFiles, text: str, check: Callable[[asyncio.Event], Awaitable[None]] | None = None
) -> int:
    """Run the service until its log has `text`, then `check`, stop it, and return its exit code."""

    async def run() -> int:
        stop, seen = asyncio.Event(), asyncio.Event()
        plain = ServiceLog.line

        def line(log: ServiceLog, written: str) -> None:
            plain(log, written)
            if text in written:
                seen.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServiceLog, "line", line)
            service = asyncio.ensure_future(supervise(files, stop))
            await seen.wait()
            if check is not None:
                await check(stop)
            stop.set()
            return await service

    return asyncio.run(run())


def test_delays_grow_up_to_five_minutes() -> None:
    delays, failures = [], 0
    for _ in range(9):
        after = after_exit(1, 1.0, failures)
        assert isinstance(after, StartAgain)
        delays.append(after.delay_s)
        failures = after.failures
    assert delays == [5, 10, 20, 40, 80, 160, 300, 300, 300]


@given(st.integers(-64, 255), st.floats(0, 1e9), st.integers(0, 10**6))
def test_every_failure_is_tried_again_and_a_long_run_forgets_earlier_ones(
    code: int, ran_s: float, failures: int
) -> None:
    after = after_exit(code, ran_s, failures)
    if code == 0:
        assert isinstance(after, LeaveEnded)
        return
    assert isinstance(after, StartAgain)
    assert FIRST_DELAY_S <= after.delay_s <= LONGEST_DELAY_S
    if code == supervisor.WRONG_USE:
        assert after.delay_s == LONGEST_DELAY_S
    elif ran_s >= HEALTHY_S:
        assert after == StartAgain(FIRST_DELAY_S, 1)


def test_a_command_that_ends_is_not_started_again(files: ServiceFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(files, "print('in the pool'); print('left', end='')", monkeypatch)
    assert asyncio.run(supervise(files, asyncio.Event())) == 0
    texts = [line.split(" ", 2)[2] for line in files.lines()]
    assert texts[1:] == ["in the pool", "left", "[ended with exit code 0: the command ended by itself]"]
    state = files.read_state()
    assert state is not None
    assert (state.phase, state.last_exit, state.process) == ("ended", 0, 0)


def test_a_command_that_fails_is_started_again_until_the_service_is_stopped(
    files: ServiceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.0)
    mark = files.directory / "mark"
    _runs(
        files,
        f"import pathlib, time\np = pathlib.Path({str(mark)!r})\nn = len(p.read_text()) if p.exists() else 0\n"
        "p.write_text('x' * (n + 1))\nif n < 2: raise SystemExit(1)\nprint('well now', flush=True)\ntime.sleep(600)",
        monkeypatch,
    )

    async def check(stop: asyncio.Event) -> None:
        state = files.read_state()
        assert state is not None
        assert (state.phase, state.restarts) == ("running", 2)
        with pytest.raises(InUse):
            await supervise(files, stop)

    assert _stopped_after(files, "well now", check) == 0
    stopped = files.read_state()
    assert stopped is not None
    assert stopped.phase == "stopped"


def test_a_service_is_stopped_while_it_waits(files: ServiceFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(files, "raise SystemExit(1)", monkeypatch)
    assert _stopped_after(files, "it is started again in 5 s") == 0


def test_a_command_that_does_not_end_is_killed(files: ServiceFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_S", 0.05)
    _runs(
        files,
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "time.sleep(600)",
        monkeypatch,
    )
    assert _stopped_after(files, "deaf") == 0


def test_the_shipped_command_is_started_and_its_mistake_is_in_the_log(
    files: ServiceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is replaced here: `fusion broker --port x` ends with exit code 2."""
    files.write(
        Service(
            name="join",
            arguments=("broker", "--port", "x"),
            directory=str(files.directory / "gone"),
            variables={"FUSION_HOME": str(files.directory)},
        )
    )
    assert _stopped_after(files, "it is started again in 5 min 0 s") == 0
    assert any("'x' is not a valid integer" in line for line in files.lines())


def test_the_log_rotates_and_takes_away_what_moves_a_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1000)
    log = ServiceLog(tmp_path / "a.log")
    log.write(b"half ")
    log.write(b"and half\r\n\x1b[2Jgone\n" + b"y" * 400 + b"\n")
    first = (tmp_path / "a.log").read_text(encoding="utf-8")
    assert first.splitlines()[0].endswith(" half and half")
    assert "\x1b" not in first
    for number in range(100):
        log.line(f"line {number} {'x' * 80}")
    log.close()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * 1000


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "a.log")
    for _ in range(40):
        log.write(b"z" * 10_000)
    assert len(log._rest) <= 65_536 + 10_000
    log.close()


def test_what_is_wrong_with_a_services_file_is_named(files: ServiceFiles) -> None:
    with pytest.raises(UsageError, match=r"no service 'join'; known: none is installed"):
        files.read()
    files.write(Service(name="join", arguments=("join",), directory="/"))
    assert ServiceFiles("join").read().arguments == ("join",)
    assert supervisor.installed() == ["join"]
    files.definition.write_text('{"name": "join", "nmae": 1}', encoding="utf-8")
    with pytest.raises(StorageError, match=r"fusion service remove join"):
        files.read()
    if sys.platform != "win32":
        files.definition.chmod(0o644)
        with pytest.raises(TrustError, match="readable by its owner only"):
            files.read()
