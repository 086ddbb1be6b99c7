"""Brokers and members of their engine struck at random while a training and a serving job run: nothing acknowledged is
lost, another broker decides soon, and no bit of the jobs changes.

A run is replayed by its seed: FUSION_CHAOS_SEED=... pytest ...; FUSION_CHAOS_KILLS sets the number of faults.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from fusionai.transport.enrolment import parse_invitation
from harness.besieged_job import besieged, check, kills_of, peers, seed_of
from harness.engine_servers import EtcdServer, etcd_cluster, why_not
from harness.fault_proxy import free_port
from harness.live_pool import PATIENCE_S, LivePool, Process, fusion
from harness.serving_siege_streams import write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STAGES = 2
MACHINES = 4
NAMES = ("broker", "second")
FROZEN_S = 9.0
"""Longer than a lease, so that the other broker takes over meanwhile."""
SLOW_S = 4.0
TAKEOVER_S = 10.0
READY = "Press Ctrl-C"


@dataclass
class Brokers:
    """Two brokers on one engine, and what they have acknowledged."""

    pool: LivePool
    options: Sequence[str]
    ports: Sequence[int]
    processes: dict[str, Process] = field(default_factory=dict[str, Process])
    acknowledged: set[str] = field(default_factory=set[str])
    waits_s: list[float] = field(default_factory=list[float])
    said: list[str] = field(default_factory=list[str])
    """Lines of the processes that have ended."""

    def home(self, name: str) -> Path:
        return self.pool.directory / name

    def start(self, name: str) -> None:
        port = self.ports[NAMES.index(name)]
        self.processes[name] = Process(
            *("broker", "--home", self.home(name), "--host", "127.0.0.1", "--port", port), *self.options
        )

    @property
    def deciding(self) -> str | None:
        return next((name for name, one in self.processes.items() if one.lives and READY in one.text), None)

    def invite(self, since_s: float) -> None:
        """Have a broker acknowledge something, as soon as one does."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            for name in [one for one in NAMES if self.processes[one].lives]:
                said = fusion("invite", "--home", self.home(name))
                assert "Traceback" not in said.err, said.err
                if said.code == 0:
                    self.waits_s.append(time.monotonic() - since_s)
                    token = parse_invitation(re.findall(r"fusion1-\S+", said.out)[0]).token
                    self.acknowledged.add(hashlib.sha256(token).hexdigest()[:8])
                    return
            assert time.monotonic() < deadline_s, [one.text[-1000:] for one in self.processes.values()]
            if not any(one.lives for one in self.processes.values()):
                self.restart_ended()  # one was killed, and the other has found that it was replaced

    def restart_ended(self) -> None:
        """As a supervisor does. A broker that has been replaced ends by itself."""
        for name, one in list(self.processes.items()):
            if not one.lives:
                self.said += one.lines
                self.start(name)

    def wait_for_free(self, count: int) -> None:
        """Wait until so many machines are connected and have nothing to do."""
        began_s = time.monotonic()
        views = self.pool.directory / "pool.json"
        while time.monotonic() < began_s + PATIENCE_S:
            if fusion("pool", "--home", self.pool.owner, "--json", views).code == 0:
                states = [one["state"] for one in json.loads(views.read_text())["members"]]
                if states.count("idle") == count:
                    return
        raise AssertionError(f"machines do not come back: {views.read_text()}")

    def check(self) -> None:
        """Everything acknowledged is there."""
        said = fusion("invite", "--list", "--home", self.home("broker"), "--json", self.pool.directory / "list.json")
        assert said.code == 0, said.err
        listed = (self.pool.directory / "list.json").read_text()
        missing = [one for one in self.acknowledged if one not in listed]
        assert not missing, f"{missing} were acknowledged and are gone: {listed}"


@dataclass
class Answers:
    """A client that asks the same again and again; every answer must be the first one."""

    url: str
    count: int = 0
    first: str = ""
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    wrong: list[str] = field(default_factory=list[str])

    def _ask(self) -> str:
        body = {"model": "tiny", "prompt": list(range(20)), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                text = self._ask()
            except httpx.HTTPError as problem:
                text = repr(problem)
            if text != self.first:
                self.wrong.append(text)
            self.count += 1

    @contextmanager
    def asked(self) -> Iterator[None]:
        self.first = self._ask()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


def strike(
    dice: random.Random, brokers: Brokers, servers: Sequence[EtcdServer]
) -> tuple[str, float, Callable[[], None]]:
    """Do something bad. Returns what, when, and what ends it."""
    name = brokers.deciding if dice.random() < 0.8 else dice.choice(NAMES)
    process = brokers.processes[name or NAMES[0]]
    server = dice.choice(servers)
    since_s = time.monotonic()
    match dice.randrange(5):
        case 0:
            process.end()
            return f"kill {name}", since_s, lambda: None
        case 1:
            process.process.send_signal(signal.SIGSTOP)
            wake = threading.Timer(FROZEN_S, lambda: process.process.send_signal(signal.SIGCONT))
            wake.start()
            return f"freeze {name}", since_s, wake.join
        case 2:
            server.kill()
            return "kill a member of the engine", since_s, server.start
        case 3:
            server.suspend()
            wake = threading.Timer(SLOW_S, server.resume)
            wake.start()
            return "freeze a member of the engine", since_s, wake.join
        case _:
            process.end()
            server.kill()
            return f"kill {name} and a member of the engine", since_s, server.start


def test_random_faults_of_brokers_and_engine_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if reason := why_not(EtcdServer):
        pytest.skip(reason)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    seed, faults = seed_of(33), kills_of(200)
    dice, ports = random.Random(seed), (free_port(), free_port())
    model = write_model(tmp_path / "model" / "tiny")

    def tell(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)  # noqa: T201 - a long run shows where it is

    tell(f"\nreplay with FUSION_CHAOS_SEED={seed}")
    with etcd_cluster(3) as servers:
        url = f"etcd://{','.join(f'127.0.0.1:{server.port}' for server in servers)}/pool"
        named = [flag for port in ports for flag in ("--address", f"tcp://127.0.0.1:{port}")]
        options = ("--journal", url, "--rest-after", "0", "--no-announce", *named)
        with LivePool(tmp_path, peers(MACHINES), port=str(ports[0]), broker_options=options) as pool:
            keys = tmp_path / "second" / "broker"
            keys.mkdir(parents=True, mode=0o700)
            for name in ("authority.pem", "authority.der"):
                shutil.copy(tmp_path / "broker" / "broker" / name, keys / name)
            brokers = Brokers(pool, options, ports, {"broker": pool.broker})
            brokers.start("second")
            brokers.processes["second"].wait_for("waits to take over")
            port = free_port()
            server = Process("serve", model, "--stages", 1, "--port", port, "--threads", 1, "--home", pool.owner)
            server.wait_for("curl ")
            with besieged(pool, STAGES) as siege:
                siege.wait_for_steps(3)
                answers = Answers(f"http://127.0.0.1:{port}")
                with answers.asked():
                    for number in range(faults):
                        time.sleep(dice.random() * 2)
                        what, since_s, end = strike(dice, brokers, servers)
                        brokers.invite(since_s)
                        end()
                        brokers.restart_ended()
                        brokers.check()
                        siege.remember()
                        tell(f"{number + 1}: {what}; acknowledged again after {brokers.waits_s[-1]:.1f} s")
                assert answers.wrong == []
                server.interrupt()
                assert server.ended() == 0, server.text
                siege.finish()
                brokers.wait_for_free(MACHINES)
                check(siege)
            said = [*brokers.said, *(line for one in brokers.processes.values() for line in one.lines)]
            assert not [line for line in said if "Traceback" in line or " is lost (" in line]
    waits = sorted(brokers.waits_s)
    tell(
        f"{faults} faults, {len(brokers.acknowledged)} invitations, {len(siege.official)} steps, {answers.count} texts "
        f"and a broker decides after {statistics.median(waits):.1f} s in the median, at most {waits[-1]:.1f} s"
    )
