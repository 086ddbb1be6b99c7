"""What members cost a broker, and how soon they are back when another broker takes over.

    python benchmarks/heartbeats.py --members 100,1000 --seconds 15 --json FILE
    PYTHONPATH=tests python benchmarks/heartbeats.py --members 2000 --brokers 3
    python benchmarks/heartbeats.py --decided 20000

The broker is a real process with mutual TLS on loopback. The members are in this process, without a device: each
registers and sends heartbeats by the code of a real one (`peer.registration`). The first figure is the broker's
processor time, as a fraction of one core and per heartbeat, joins not counted.

`--brokers`: so many brokers keep the pool in an etcd cluster of three members. The deciding one is killed, and the time
until each member has an answer of another one is measured. A member that has none within its lease is lost.

`--decided`: no processes; the time that a broker's decisions take with so many members, over two leases of heartbeats,
and when a tenth of the members is lost at once. Connections are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from fusionai.cli.running import run
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.requests import Beat, DeadlinePassed
from fusionai.coordination.broker.state import BrokerRules, Lease, recovered
from fusionai.peer.registration import Registration
from fusionai.primitives.environment import inherited
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.enrolment import Membership, enrol
from fusionai.transport.routes.tcp import TcpTransport

HEARTBEAT_S: Final = 3.0
LEASE_S: Final = 12.0
AT_ONCE: Final = 16
"""Members that join at the same time."""
PATIENCE_S: Final = 120.0
BROKER: Final = """
import asyncio, signal, sys
from pathlib import Path
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import run_broker
from fusionai.cli.running import run

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    home, port, journal, *addresses = sys.argv[1:]
    options = BrokerOptions(
        home=Path(home), pool="home", host="127.0.0.1", port=int(port), journal=journal or None,
        advertise=tuple(addresses), invitation_uses=5000, invites=True,
    )
    await run_broker(options, announce=lambda a: print(a.invitation, flush=True), stop=stop)

run(main())
"""


@dataclass
class Members:
    """Members of the pool. `answers`: of all of them so far. `answered_s`: when each had its newest answer."""

    answers: int = 0
    lost: int = 0
    answered_s: dict[str, float] = field(default_factory=dict[str, float])
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    async def join(self, invitation: str, folder: Path, count: int) -> None:
        """Join and register one member after the other, `AT_ONCE` at a time."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                member = await enrol(invitation, folder / f"member{number}", "provider")
                registered = asyncio.Event()
                self.tasks.append(asyncio.create_task(self._registration(member, registered).run()))
                await registered.wait()

        await asyncio.gather(*(one(number) for number in range(count)))

    def _registration(self, member: Membership, registered: asyncio.Event) -> Registration:
        def heard(_: object) -> None:
            self.answers += 1
            self.answered_s[member.peer] = time.perf_counter()

        def lost() -> None:
            self.lost += 1

        return Registration(
            TcpTransport(member.credentials),
            member.broker,
            boot=1,
            profile=PeerProfile(peer=member.peer, flops_per_s=1e9, memory_bytes=10**9),
            addresses=(),
            jobs=tuple,
            on_registered=lambda _: registered.set(),
            on_leave=lambda _: None,
            on_lost=lost,
            on_meet=lambda *_: None,
            on_answer=heard,
            membership=member,
        )

    async def back_since(self, moment_s: float) -> list[float]:
        """Return after how many seconds each member had its first answer of another broker, in order."""
        back: dict[str, float] = {}
        while len(back) < len(self.answered_s) and time.perf_counter() < moment_s + PATIENCE_S:
            for peer, answered_s in self.answered_s.items():
                if answered_s > moment_s:
                    back.setdefault(peer, answered_s - moment_s)
            await asyncio.sleep(0.02)
        return sorted(back.values())

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def cost(broker: Process, members: Members, seconds: float) -> dict[str, float]:
    """Return the processor time of a broker that only answers heartbeats."""
    process = psutil.Process(broker.pid)
    before, answers = process.cpu_times(), members.answers
    await asyncio.sleep(seconds)
    after, answers = process.cpu_times(), members.answers - answers
    used_s = after.user + after.system - before.user - before.system
    return {"core": used_s / seconds, "ms_per_heartbeat": 1000 * used_s / answers}


async def started(home: Path, port: int, journal: str, addresses: Sequence[str]) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BROKER, home, str(port), journal, *addresses),
        stdout=asyncio.subprocess.PIPE,
        env=inherited(),
        limit=2**20,
    )


async def line(broker: Process) -> str:
    assert broker.stdout is not None
    return (await broker.stdout.readline()).decode().strip()


async def measured(count: int, brokers: int, journal: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        ports = [0] if brokers == 1 else free_ports(brokers)
        addresses = () if brokers == 1 else tuple(f"tcp://127.0.0.1:{port}" for port in ports)
        members = Members()
        running = [await started(folder / "broker0", ports[0], journal, addresses)]
        try:
            invitation = await line(running[0])
            for number, port in enumerate(ports[1:], start=1):
                home = folder / f"broker{number}" / "broker"
                home.mkdir(parents=True)
                for name in ("authority.pem", "authority.der"):
                    shutil.copy(folder / "broker0" / "broker" / name, home)
                running.append(await started(home.parent, port, journal, addresses))
            began_s = time.perf_counter()
            await members.join(invitation, folder, count)
            joined_s = time.perf_counter() - began_s
            await asyncio.sleep(2 * HEARTBEAT_S)
            figures = {
                "members": count,
                "brokers": brokers,
                "joins_per_s": count / joined_s,
                **await cost(running[0], members, seconds),
            }
            if brokers > 1:
                figures["takeover"] = await takeover(running, members, seconds)
            return figures
        finally:
            await members.end()
            for broker in running:
                if broker.returncode is None:
                    broker.terminate()
                await broker.wait()


async def takeover(running: Sequence[Process], members: Members, seconds: float) -> dict[str, Any]:
    """Kill the deciding broker, the first one, and measure until all members have an answer of another one."""
    killed_s = time.perf_counter()
    running[0].kill()
    await running[0].wait()
    waiting = [asyncio.create_task(line(one)) for one in running[1:]]
    back_s = asyncio.create_task(members.back_since(killed_s))
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    decides_s = time.perf_counter() - killed_s
    heir = next(one for one, said in zip(running[1:], waiting, strict=True) if said.done())
    took_s = await back_s
    for one in waiting:
        one.cancel()
    await asyncio.sleep(LEASE_S)  # until the leases of members that are not back have ended
    return {
        "decides_s": decides_s,
        "back": len(took_s),
        "median_s": statistics.median(took_s),
        "p99_s": took_s[int(0.99 * (len(took_s) - 1))],
        "slowest_s": took_s[-1],
        "lost": members.lost,
        **await cost(heir, members, seconds),
    }


def decided(count: int) -> dict[str, float]:
    """Return the times of the decisions of a broker with `count` members."""
    rules = BrokerRules(pool="home", broker=PeerId("broker"))
    peers = [PeerId(f"member {number}") for number in range(count)]
    members = {peer: Member(entity=f"member {peer}", phase="idle", peer=peer, boot=1) for peer in peers}
    desk, took_s, now_s = recovered(rules, replace(Pool(), members=members), 0.0), list[float](), 0.0
    for beat in range(int(2 * rules.lease_s / rules.heartbeat_s) * count):
        now_s = beat * rules.heartbeat_s / count
        began_s = time.perf_counter()
        request = Beat(peers[beat % count], beat % count, 1)
        desk = handle(desk, request, now_s=now_s, wall_s=now_s).desk
        took_s.append(time.perf_counter() - began_s)
    late = {peer: Lease(rules.lease_s, now_s - rules.lease_s) for peer in peers[: count // 10]}
    desk = replace(desk, leases={**desk.leases, **late}).with_deadline()
    began_s = time.perf_counter()
    facts = handle(desk, DeadlinePassed(), now_s=now_s, wall_s=now_s).facts
    assert len(facts) == len(late)
    return {
        "members": count,
        "ms_per_heartbeat": 1000 * statistics.fmean(took_s),
        "slowest_ms": 1000 * max(took_s),
        "tenth_lost_s": time.perf_counter() - began_s,
    }


def free_ports(count: int) -> list[int]:
    from harness.fault_proxy import free_port

    return [free_port() for _ in range(count)]


@contextlib.contextmanager
def engine(brokers: int) -> Generator[str]:
    """The URL of a journal: in the files of the broker's home (empty) if there is one broker."""
    if brokers == 1:
        yield ""
        return
    from harness.engine_servers import etcd_cluster

    with etcd_cluster(3) as servers:
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in servers)
        yield f"etcd://{hosts}/fusionai"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="100,1000", help="numbers of members, one run each (default 100,1000)")
    parser.add_argument("--brokers", type=int, default=1, help="brokers of the pool, one of which decides (default 1)")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds measured in each run (default 15)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--decided", type=int, metavar="MEMBERS", help="measure decisions only, without processes")
    arguments = parser.parse_args()
    if arguments.decided:
        row = decided(arguments.decided)
        print(
            f"{row['members']:.0f} members: {row['ms_per_heartbeat']:.3f} ms a heartbeat, "
            f"at most {row['slowest_ms']:.1f} ms; a tenth of them lost at once: {row['tenth_lost_s']:.1f} s"
        )
        return
    logging.disable(logging.WARNING)  # each member of thousands says that it has lost its broker
    rows: list[dict[str, Any]] = []
    for members in map(int, arguments.members.split(",")):
        with engine(arguments.brokers) as journal:
            row = run(measured(members, arguments.brokers, journal, arguments.seconds))
        rows.append(row)
        print(f"{members:5d} members: {row['core']:6.1%} of a core, {row['ms_per_heartbeat']:.3f} ms a heartbeat")
        if took := row.get("takeover"):
            print(
                f"      deciding broker killed: another decides after {took['decides_s']:.1f} s; "
                f"{took['back']} members have its answer, half of them after {took['median_s']:.1f} s, 99 % after "
                f"{took['p99_s']:.1f} s, all after {took['slowest_s']:.1f} s; {took['lost']} were lost; "
                f"then {took['core']:.1%} of a core"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "fusionai.benchmark.heartbeats/2", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
