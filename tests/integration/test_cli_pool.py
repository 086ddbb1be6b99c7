"""The pool's commands as people use them: processes of their own, real keys and connections on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

import pytest

from harness.patience import CEILING_S

pytestmark = pytest.mark.slow

PATIENCE_S = CEILING_S


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


class Running:
    """A `fusion` command that goes on; its lines as they come."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "fusionai", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        self.lines: list[str] = []
        self._queue: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._queue.put(line)

    def wait_for(self, words: str) -> str:
        while True:
            try:
                line = self._queue.get(timeout=PATIENCE_S)
            except Empty:
                raise AssertionError(f"{words!r} never came; said: {self.lines}") from None
            self.lines.append(line)
            if words in line:
                return line

    def interrupt(self) -> int:
        """Ctrl-C once; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=PATIENCE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@contextmanager
def running(*arguments: str) -> Iterator[Running]:
    command = Running(*arguments)
    try:
        yield command
    finally:
        command.end()


def fusion(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusionai", *arguments]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE_S, check=False
    )


@contextmanager
def open_pool(home: Path) -> Iterator[tuple[Running, str]]:
    """A broker and its invitation."""
    with running("broker", "--home", str(home), "--host", "127.0.0.1", "--port", "0") as broker:
        line = broker.wait_for("fusion join ")
        yield broker, line.split("fusion join ")[1].strip()


def test_a_pool_is_opened_entered_looked_at_and_left(tmp_path: Path):
    homes = {name: str(tmp_path / name) for name in ("broker", "provider", "owner", "stranger")}
    with open_pool(tmp_path / "broker") as (broker, invitation):
        join = ("join", invitation, "--home", homes["provider"], "--host", "127.0.0.1", "--threads", "1")
        with running(*join, "--max-memory", "1GB", "--share", "50%", "--name", "one") as provider:
            assert "lending cpu" in provider.wait_for("In pool pool as one")
            entered = fusion("join", "-", "--owner", "--home", homes["owner"], given=f"{invitation}\n")
            assert entered.returncode == 0, entered.stderr
            figures = tmp_path / "pool.json"
            shown = fusion("pool", "--home", homes["owner"], "--json", str(figures))
            assert "standing by" in shown.stdout
            (member,) = json.loads(figures.read_text())["members"]
            assert (member["name"], member["memory_bytes"], member["share"]) == ("one", 10**9, 0.5)

            assert fusion("jobs", "--home", homes["owner"]).stdout.startswith("No jobs yet")
            refused = fusion("invite", "--home", homes["owner"])
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "may not do that" in refused.stderr
            assert "fusion join fusion1-" in fusion("invite", "--home", homes["broker"]).stdout
            second = fusion("join", "--home", homes["provider"], "--host", "127.0.0.1")
            assert (second.returncode, "this machine is lent already" in second.stderr) == (2, True), second.stderr
            nothing_lent = fusion("leave", "--home", homes["owner"])
            assert nothing_lent.returncode == 2
            assert "not lending itself" in nothing_lent.stderr
            unknown = fusion("logs", "nobody", "--home", homes["owner"])
            assert (unknown.returncode, "no job 'nobody'" in unknown.stderr) == (2, True)
            outside = fusion("pool", "--home", homes["stranger"])
            assert (outside.returncode, "has not joined a pool" in outside.stderr) == (2, True)

            assert fusion("leave", "--home", homes["provider"]).returncode == 0
            provider.wait_for("Left the pool.")
            assert provider.process.wait(timeout=PATIENCE_S) == 0
        assert "has no members yet" in fusion("pool", "--home", homes["owner"]).stdout
        with running("join", "--home", homes["provider"]) as provider:
            assert "1 GB, 50% of the time" in provider.wait_for("In pool pool as one")
            assert any("As in earlier calls" in line and "--max-memory 1GB" in line for line in provider.lines)
            assert provider.interrupt() == 0
        assert broker.interrupt() == 0
    gone = fusion("pool", "--home", homes["owner"])
    assert gone.returncode == 1
    assert "no answer from" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_one_interrupt_ends_a_provider_cleanly(tmp_path: Path):
    with open_pool(tmp_path / "broker") as (_, invitation):
        join = ("join", invitation, "--home", str(tmp_path / "provider"), "--host", "127.0.0.1", "--threads", "1")
        with running(*join) as provider:
            provider.wait_for("In pool")
            assert provider.interrupt() == 0
            provider.wait_for("Left the pool.")
            assert not any("Traceback" in line for line in provider.lines)


def test_a_machine_outside_its_hours_waits_and_enters_nothing(tmp_path: Path):
    later = [(time.localtime().tm_hour + hours) % 24 for hours in (6, 12)]
    with open_pool(tmp_path / "broker") as (_, invitation):
        join = ("join", invitation, "--home", str(tmp_path / "provider"), "--host", "127.0.0.1", "--threads", "1")
        with running(*join, "--schedule", f"{later[0]:02}:00-{later[1]:02}:00") as provider:
            assert f"{later[0]:02}:00" in provider.wait_for("Not lent now: its schedule keeps it until")
            assert provider.interrupt() == 0
            assert not any("In pool" in line or "Traceback" in line for line in provider.lines)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("join", "fusion1-nonsense"), 2, "invitation"),
        (("join", "--max-memory", "8"), 2, "expected a size such as 8GB"),
        (("join", "--max-memory", "8parsecs"), 2, "expected a size such as 8GB"),
        (("join", "--upload-limit", "20"), 2, "expected a bandwidth such as 20Mbit"),
        (("join", "--download-limit", "0Mbit"), 2, "expected a limit above 0"),
        (("join", "--schedule", "always"), 2, "expected days such as mon"),
        (("join",), 2, "has not joined a pool"),
        (("broker", "--host", "no.such.host.invalid"), 2, "no.such.host.invalid"),
        (("broker", "--address", "nowhere"), 2, "expected an address"),
        (("broker", "--pool", "x" * 65), 2, "expected a pool name"),
    ],
)
def test_wrong_use_gets_a_sentence(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path):
    done = fusion(*arguments, "--home", str(tmp_path / "home"))
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_and_a_second_broker_are_wrong_use(tmp_path: Path):
    with running("broker", "--home", str(tmp_path / "a"), "--host", "127.0.0.1", "--port", "0") as first:
        port = first.wait_for("Reachable at").strip().rpartition(":")[2]
        first.wait_for("fusion join")
        taken = fusion("broker", "--home", str(tmp_path / "b"), "--host", "127.0.0.1", "--port", port)
        assert (taken.returncode, "Traceback" in taken.stderr) == (2, False)
        assert port in taken.stderr
        same = fusion("broker", "--home", str(tmp_path / "a"), "--host", "127.0.0.1", "--port", "0")
        assert (same.returncode, "Traceback" in same.stderr) == (2, False), same.stderr
